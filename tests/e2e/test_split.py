"""Prefill in one engine, decode in another, over LMCache: the same reply as one engine gives, and nothing computed twice.

Real parts: vLLM, LMCache, SmolLM2-135M, all in float32. In bfloat16 22 of these 24 replies were equal as well. The other two
parted where the first two tokens were a bit or two of a logit apart: 0.06 at the 18th token after 32, 0.25 at the first after
1,500. Two engines add up in another order than one, because decode computes only the tail that does not fill a chunk; and with
words in no order the model is so unsure that one bfloat16 engine has a tie of exactly 0 in half of the replies.
"""

import re

import msgspec
import pytest

from tests.e2e.conftest import Engines
from tests.e2e.engines import Reply, Split
from tests.e2e.prompts import CHUNK, PROMPTS, REPLY_TOKENS, SPLIT_PROMPTS, loadable

pytestmark = pytest.mark.timeout(600)  # a fixture's start of real engines counts to the first test that uses it


@pytest.fixture(scope="module")
def split(engines: Engines, stack: object, model_path: str) -> Split:
    return msgspec.json.decode(engines("split", model_path, str(stack), timeout_s=400), type=Split)


def test_prompts_have_the_lengths_they_claim(split: Split) -> None:
    assert [len(reply.prompt) for reply in split.replies] == [prompt.tokens for prompt in SPLIT_PROMPTS]


def test_two_engines_reply_as_one(split: Split, reference_replies: list[Reply]) -> None:
    apart = [(reply.token_ids, reply.text) for reply in split.replies]
    one = [(reply.token_ids, reply.text) for reply in reference_replies[:: len(PROMPTS) // len(SPLIT_PROMPTS)]]
    assert apart == one


def test_replies_are_whole(split: Split) -> None:
    assert {(len(reply.token_ids), reply.finish_reason) for reply in split.replies} == {(REPLY_TOKENS, "length")}


def test_decode_loads_every_full_chunk_and_computes_only_the_tail(split: Split) -> None:
    loaded = {len(reply.prompt): reply.cached_tokens for reply in split.replies}
    assert loaded == {prompt.tokens: loadable(prompt.tokens) for prompt in SPLIT_PROMPTS}


def test_prefill_makes_one_token_and_finds_nothing_the_first_time(split: Split) -> None:
    assert {(done.generated_tokens, done.cached_tokens) for done in split.prefilled} == {(1, 0)}


def test_prefill_finds_a_prompt_it_has_seen(split: Split) -> None:
    assert split.prefilled_again.cached_tokens == loadable(SPLIT_PROMPTS[-1].tokens)


def test_prefill_makes_the_first_token_of_the_reply(split: Split) -> None:
    assert [done.first_id for done in split.begun] == [reply.token_ids[0] for reply in split.replies]
    assert all(reply.text.startswith(done.first_text) for done, reply in zip(split.begun, split.replies, strict=True))
    assert any(done.first_text for done in split.begun)
    assert all(done.first_id is None for done in split.prefilled), "it is made for who asks for it"


def test_a_first_token_that_ends_the_reply_says_nothing_and_decode_says_the_end(split: Split) -> None:
    first = split.replies[0].token_ids[0]
    assert (split.begun_to_stop.first_id, split.begun_to_stop.first_text) == (first, "")
    assert split.continued_from_stop == ([first], "", split.replies[0].text[0])
    assert split.continued_from_stop_token == ([first], "", first)


def test_both_engines_may_exchange_kv(split: Split) -> None:
    assert split.prefill.fingerprint == split.decode.fingerprint
    assert re.fullmatch(r"[0-9a-f]{32}", split.prefill.fingerprint)


def test_an_engine_says_what_it_holds(split: Split) -> None:
    bytes_per_token = 30 * 2 * 3 * 64 * 4  # layers × (K, V) × heads × head size × float32
    assert split.decode.kv_blocks == 512 * 1024 * 1024 // (bytes_per_token * CHUNK) - 1
    assert (split.decode.block_size, split.decode.chunk_size) == (CHUNK, CHUNK)


def test_a_stop_string_is_not_in_the_reply(split: Split) -> None:
    whole = split.replies[0].text
    assert split.stopped.finish_reason == "stop"
    assert split.stopped.text == whole[: whole.index(whole[8:14])]


def test_a_reply_taken_up_after_any_token_is_the_reply_that_was_begun(split: Split) -> None:
    whole = (split.replies[0].token_ids, split.replies[0].text, None)
    assert set(map(str, split.continued.values())) == {str(whole)}
    assert split.continued_after_all == whole, "nothing was left to generate"


def test_a_stop_string_ends_a_reply_that_was_taken_up(split: Split) -> None:
    ended_by = split.replies[0].text[8:14]
    assert split.continued_to_stop == (split.stopped.token_ids, split.stopped.text, ended_by)


def test_idle_engines_hold_nothing(split: Split) -> None:
    assert {(usage.running, usage.waiting, usage.kv_usage_ratio) for usage in split.usage} == {(0, 0, 0.0)}


def test_a_closed_engine_leaves_no_process_and_no_socket(split: Split) -> None:
    assert split.children == []
    assert split.sockets == []
