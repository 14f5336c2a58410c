"""What the prompts of a creator share is learned from them."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.limits import PREFIX_TOKENS_MAX
from pipeline.protocol.messages import pack_ids
from pipeline.protocol.prefixes import Prefixes, shared
from pipeline.protocol.warm_messages import Prefix

PERSONA = list(range(100, 160))


def test_two_prompts_show_where_the_persona_ends() -> None:
    known = Prefixes()
    known.seen("ada", "s", pack_ids([*PERSONA, 1, 2, 3]))
    known.seen("ada", "s", pack_ids([*PERSONA, 1, 9]))
    assert known.of("ada") == Prefix("s", pack_ids([*PERSONA, 1]))
    known.seen("ada", "s", pack_ids([*PERSONA, 7]))
    assert known.of("ada") == Prefix("s", pack_ids(PERSONA))
    known.seen("ada", "s", pack_ids([*PERSONA, 8, 8]))
    assert known.of("ada") == Prefix("s", pack_ids(PERSONA))


def test_a_new_persona_or_another_salt_begins_anew() -> None:
    known = Prefixes()
    known.seen("ada", "s", pack_ids([1, *PERSONA]))
    known.seen("ada", "s", pack_ids([1, 2, 3]))
    assert known.of("ada") == Prefix("s", pack_ids([1, 2, 3]))
    known.seen("ada", "t", pack_ids([1, 2, 3, 4]))
    assert known.of("ada") == Prefix("t", pack_ids([1, 2, 3, 4]))


def test_only_the_creators_seen_last_are_remembered() -> None:
    known = Prefixes(limit=2)
    for creator in ("a", "b", "a", "c"):
        known.seen(creator, "s", pack_ids(PERSONA))
    assert known.of("b") == Prefix()
    assert known.of("a").ids


def test_long_prompts_are_remembered_of_fewer_creators_and_not_beyond_a_bound() -> None:
    known = Prefixes(bytes_max=4 * 250)
    for creator in ("a", "b", "c", "b"):
        known.seen(creator, "s", pack_ids(range(100)))
    assert [len(known.of(creator).ids) for creator in "abc"] == [0, 400, 400]
    known.seen("b", "s", pack_ids([0, 1]))
    known.seen("d", "s", pack_ids(range(100)))
    assert [len(known.of(creator).ids) for creator in "bcd"] == [8, 400, 400], "what has become shorter counts less"
    known.seen("long", "s", pack_ids(range(2 * PREFIX_TOKENS_MAX)))
    assert known.of("long").ids == pack_ids(range(PREFIX_TOKENS_MAX)), "the last one always stays"
    assert known.of("d") == Prefix()


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_what_is_known_of_two_prompts_begins_both_or_is_the_last(one: list[int], other: list[int]) -> None:
    known = Prefixes()
    known.seen("a", "s", pack_ids(one))
    known.seen("a", "s", pack_ids(other))
    ids = known.of("a").ids
    begins_both = pack_ids(one).startswith(ids) and pack_ids(other).startswith(ids)
    assert begins_both or ids == pack_ids(other)


def test_what_two_prompts_begin_with_is_whole_tokens() -> None:
    assert shared(pack_ids([1, 2, 256]), pack_ids([1, 2, 512])) == pack_ids([1, 2])
    assert shared(pack_ids([1, 2]), pack_ids([1, 2, 3])) == pack_ids([1, 2])
