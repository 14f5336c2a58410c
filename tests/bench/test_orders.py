"""What is sent: seeded, of known length, sharing what it should."""

import itertools

import msgspec

from pipeline.bench.orders import Load, Order, plain, prompt, seed
from pipeline.bench.words import WORDS, text, words
from pipeline.planning import source
from pipeline.planning.traffic import Workload
from workers.engines.simulated.words import prompt_of, tokenise

LOAD = Load(creators=2, prompt_words=100, max_tokens=4, run="a")
WORK = Workload(seed=1, per_s=5.0, creators=3, conversations=4)


def test_every_word_is_one_token_and_another_one() -> None:
    assert len(WORDS) == 256
    tokens = [tokenise(f" {word}").tolist() for word in WORDS]
    assert {len(ids) for ids in tokens} == {1}
    assert len({ids[0] for ids in tokens}) == 256


def test_words_depend_on_their_key_and_a_longer_draw_begins_with_the_shorter() -> None:
    assert words("a", 300)[:100] == words("a", 100) != words("b", 100)
    assert text("a", 3) == " ".join(words("a", 3))


def test_a_load_is_the_same_every_time_and_another_run_is_another_load() -> None:
    assert prompt(LOAD, 3) == prompt(LOAD, 3)
    assert prompt(LOAD, 3) != prompt(msgspec.structs.replace(LOAD, run="b"), 3)


def test_a_creators_requests_share_its_persona_and_nothing_else() -> None:
    (ada, first), (bob, second), (ada_again, third) = (prompt(LOAD, number) for number in range(3))
    assert ada == ada_again != bob
    assert first["messages"][0] == third["messages"][0] != second["messages"][0]
    assert first["messages"][1] != third["messages"][1]


def test_a_prompt_has_about_the_length_asked_for() -> None:
    assert abs(len(prompt_of(prompt(LOAD, 0)[1])) - 100) < 15


def test_plain_orders_are_those_prompts_for_ever() -> None:
    orders = list(itertools.islice(plain(LOAD), 3))
    assert [(order.creator, msgspec.json.decode(order.body)) for order in orders] == [prompt(LOAD, n) for n in range(3)]


def turns(count: int) -> list[Order]:
    return list(itertools.islice(seed(WORK, "run"), count))


def test_the_seed_workload_has_the_sources_lengths() -> None:
    for order in turns(50):
        body = msgspec.json.decode(order.body)
        persona, *history, message = body["messages"]
        assert len(persona["content"].split()) == source.PERSONA_TOKENS
        assert len(message["content"].split()) == source.MESSAGE_TOKENS
        assert [said["role"] for said in history] == ["user", "assistant"] * (len(history) // 2)
        assert source.TURNS_KEPT <= len(history) // 2 < source.TURNS_KEPT + source.TURNS_STEP
        assert sum(len(said["content"].split()) for said in history) == len(history) // 2 * source.TURN_TOKENS
        assert (body["max_tokens"], body["ignore_eos"]) == (source.REPLY_TOKENS, True)


def test_a_conversation_of_the_seed_workload_grows_at_its_end() -> None:
    grown = 0
    last: dict[str | None, list[dict[str, str]]] = {}
    for order in turns(200):
        said = msgspec.json.decode(order.body)["messages"]
        before = last.get(order.conversation)
        if before is not None and len(said) > len(before):
            assert said[: len(before)] == before, "message by message, and the last one was the message then"
            grown += 1
        last[order.conversation] = said
    assert grown > 100


def test_creators_of_the_seed_workload_have_a_persona_each() -> None:
    personas: dict[str, set[str]] = {}
    for order in turns(60):
        personas.setdefault(order.creator, set()).add(msgspec.json.decode(order.body)["messages"][0]["content"])
    assert len(personas) > 1
    assert all(len(texts) == 1 for texts in personas.values())
    assert len(set.union(*personas.values())) == len(personas)
