"""What the simulated engine reads and says: prompts as token ids, replies token by token."""

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import InvalidField
from workers.engines.port import FinishReason
from workers.engines.simulated.reply import EOS, REPLY_FIRST, REPLY_LAST, Reply, sampling_of
from workers.engines.simulated.words import END, NEWLINE, ROLES, START, prompt_of, tokenise

ENGLISH = (
    "You are Mira, a cheerful marine biologist who answers fans in two or three warm sentences. You never give medical "
    "advice, you love bad puns about fish, and you remember what people told you earlier in the conversation. "
) * 20


@pytest.mark.parametrize(
    ("chat", "param"),
    [
        ({"n": 0}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"tools": [{}]}, "tools"),
    ],
)
def test_what_needs_a_model_is_refused(chat: dict[str, object], param: str) -> None:
    sampling_of({"n": 1, "logprobs": False, "response_format": {"type": "text"}, "tools": None})
    with pytest.raises(InvalidField) as info:
        sampling_of(chat)
    assert info.value.param == param


# --------------------------------------------------------------------------------------------------------------
# Words


def test_english_comes_out_at_about_four_characters_a_token() -> None:
    assert 3.5 < len(ENGLISH) / len(tokenise(ENGLISH)) < 4.7


def test_a_chat_becomes_the_template_in_special_ids() -> None:
    ids = prompt_of({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]})
    brief, hi = tokenise("Be brief.").tolist(), tokenise("Hi").tolist()
    assert ids == [
        *(START, ROLES["system"], NEWLINE, *brief, END, NEWLINE),
        *(START, ROLES["user"], NEWLINE, *hi, END, NEWLINE),
        *(START, ROLES["assistant"], NEWLINE),
    ]


def test_prompts_that_begin_alike_have_ids_that_begin_alike() -> None:
    system = {"role": "system", "content": ENGLISH}
    one = prompt_of({"messages": [system, {"role": "user", "content": "Tell me of whales"}]})
    two = prompt_of({"messages": [system, {"role": "user", "content": "And of corals?"}]})
    shared = len(tokenise(ENGLISH)) + 8
    assert one[:shared] == two[:shared]
    assert one != two


def test_text_in_parts_and_turns_without_content_are_rendered() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert prompt_of({"messages": [{"role": "user", "content": parts}]}) == prompt_of(
        {"messages": [{"role": "user", "content": "one\ntwo"}]}
    )
    assert len(prompt_of({"messages": [{"role": "assistant"}]})) == 8


@pytest.mark.parametrize("messages", [None, [], "hello", [{"content": "x"}], [{"role": "cat", "content": "x"}]])
def test_messages_that_do_not_fit_the_template_are_the_callers_fault(messages: object) -> None:
    with pytest.raises(InvalidField) as info:
        prompt_of({"messages": messages})
    assert info.value.param == "messages"


@given(st.text())
@settings(deadline=None)
def test_all_of_a_text_is_tokenised_and_never_into_reply_ids(text: str) -> None:
    ids = tokenise(text)
    assert not any(REPLY_FIRST <= token_id <= REPLY_LAST for token_id in ids)
    assert (len(ids) == 0) == (text == "")
    assert len(ids) <= len(text.encode("utf-8", "surrogatepass"))


# --------------------------------------------------------------------------------------------------------------
# Replies

Said = tuple[list[int], list[str], FinishReason | None]


def whole(prompt: bytes, chat: Mapping[str, object], max_tokens: int, delivered: Sequence[int] = ()) -> Said:
    """Ids, texts and finish reason of a reply read to its end."""
    reply = Reply(1, prompt, delivered, sampling_of(chat), max_tokens)
    ids, texts = [], []
    while reply.over is None:
        token_id, text, _ = reply.next()
        ids.append(token_id)
        texts.append(text)
    return ids, texts, reply.over


prompts = st.binary(min_size=1, max_size=16)


@given(prompts)
@settings(deadline=None)
def test_a_reply_ends_by_itself_after_eight_to_sixty_four_tokens(prompt: bytes) -> None:
    ids, texts, reason = whole(prompt, {}, 1000)
    assert reason == "stop"
    assert 8 <= len(ids) <= 64
    assert (ids[-1], ids.count(EOS)) == (EOS, 1)
    assert "\ufffd" not in "".join(texts)


@given(prompts, st.integers(1, 200))
@settings(deadline=None)
def test_a_reply_that_ignores_its_end_goes_to_max_tokens(prompt: bytes, max_tokens: int) -> None:
    ids, _, reason = whole(prompt, {"ignore_eos": True}, max_tokens)
    assert (len(ids), reason) == (max_tokens, "length")
    assert EOS not in ids


@given(prompts, st.integers(1, 200))
@settings(deadline=None)
def test_a_reply_has_at_least_min_tokens_before_it_ends(prompt: bytes, min_tokens: int) -> None:
    ids, _, reason = whole(prompt, {"min_tokens": min_tokens, "stop": [" the", " to"]}, 1000)
    assert reason == "stop"
    assert len(ids) > min_tokens


@given(prompts)
@settings(deadline=None)
def test_the_parameters_change_only_where_a_reply_ends(prompt: bytes) -> None:
    longest, _, _ = whole(prompt, {"ignore_eos": True}, 100)
    for chat in ({}, {"stop": " the"}, {"min_tokens": 3, "stop": ["e", "a "]}):
        ids, _, _ = whole(prompt, chat, 100)
        assert [token_id for token_id in ids if token_id != EOS] == longest[: len(ids) - ids.count(EOS)]


def test_another_prompt_or_another_seed_has_another_reply() -> None:
    replies = [whole(prompt, chat, 20)[0] for prompt, chat in ((b"a", {}), (b"b", {}), (b"a", {"seed": 7}))]
    assert replies[0] != replies[1] != replies[2] != replies[0]


def test_a_character_in_two_tokens_is_said_with_the_second() -> None:
    ids, texts, _ = whole(b"picture", {"ignore_eos": True}, 400)
    silent = [at for at, text in enumerate(texts) if text == ""]
    assert silent
    assert all(at % 2 == 0 and len(texts[at + 1].encode()) == 4 for at in silent if at + 1 < len(ids))


@given(prompts, st.integers(1, 60))
@settings(deadline=None)
def test_half_a_character_is_never_said_even_at_the_end(prompt: bytes, max_tokens: int) -> None:
    _, texts, _ = whole(prompt, {"ignore_eos": True}, max_tokens)
    assert "\ufffd" not in "".join(texts)


STOPS = st.lists(st.sampled_from([" the", "e t", ",", "🌊", " of and", "not in any reply", " a"]), max_size=3)


@given(prompts, STOPS, st.booleans())
@settings(deadline=None)
def test_a_stop_string_ends_a_reply_and_is_said_only_on_request(prompt: bytes, stops: list[str], include: bool) -> None:
    full = "".join(whole(prompt, {"ignore_eos": True}, 60)[1])
    chat = {"ignore_eos": True, "stop": stops, "include_stop_str_in_output": include}
    _, texts, reason = whole(prompt, chat, 60)
    said = "".join(texts)
    found = {stop: full.find(stop) for stop in stops if stop in full}
    assert full.startswith(said)
    assert reason == ("stop" if found else "length")
    if not found:
        assert said == full
    elif include:
        assert any(said.endswith(stop) for stop in found)
    else:
        assert not any(stop in said for stop in found)
        assert len(said) in found.values()


def test_a_stop_token_ends_a_reply() -> None:
    longest, _, _ = whole(b"x", {"ignore_eos": True}, 50)
    ids, _, reason = whole(b"x", {"ignore_eos": True, "stop_token_ids": [longest[5]]}, 50)
    assert reason == "stop"
    assert ids == longest[: longest.index(longest[5]) + 1]


@given(prompts, st.data(), STOPS, st.integers(0, 30), st.booleans())
@settings(max_examples=300, deadline=None)
def test_a_reply_continued_after_any_token_equals_the_uninterrupted_one(
    prompt: bytes, data: st.DataObject, stops: list[str], min_tokens: int, ignore_eos: bool
) -> None:
    chat = {"stop": stops, "min_tokens": min_tokens, "ignore_eos": ignore_eos}
    ids, texts, reason = whole(prompt, chat, 70)
    at = data.draw(st.integers(0, len(ids) - 1))
    rest = whole(prompt, chat, 70, delivered=ids[:at])
    assert rest == (ids[at:], texts[at:], reason)
    assert Reply(1, prompt, ids[:at], sampling_of(chat), 70).before == "".join(texts[:at])


def test_a_reply_with_nothing_left_to_generate_is_over_at_once() -> None:
    ids, _, _ = whole(b"x", {}, 100)
    assert Reply(1, b"x", ids, sampling_of({}), 50).over == "stop"
    assert Reply(1, b"x", ids[:3], sampling_of({}), 3).over == "length"


@pytest.mark.parametrize(
    ("chat", "param"),
    [({"stop": 5}, "stop"), ({"min_tokens": -1}, "min_tokens"), ({"ignore_eos": "yes"}, "ignore_eos")],
)
def test_a_parameter_of_the_wrong_type_is_named(chat: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidField) as info:
        sampling_of(chat)
    assert info.value.param == param


def test_an_explicit_null_is_the_default() -> None:
    assert sampling_of({"stop": None, "min_tokens": None, "ignore_eos": None}) == sampling_of({})
