"""Live settings: what may be changed, within which bounds, and what is said of all else."""

import msgspec
import pytest

from pipeline.config import Config, flat, with_live
from pipeline.errors import InvalidField
from pipeline.protocol import settings
from pipeline.protocol.settings import BUILT_IN, SETTINGS, Live, parse, readable, usable

STARTED = flat(Config())


def test_every_live_setting_is_an_entry_of_the_configuration_and_starts_within_its_bounds() -> None:
    for key in SETTINGS:
        value = STARTED[key]
        assert isinstance(value, int | float)
        settings.check(key, value)


def test_every_table_that_needs_a_restart_says_why() -> None:
    assert {key.partition(".")[0] for key in STARTED if key not in SETTINGS} <= BUILT_IN.keys()


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [("prefill.slots", "8", 8), ("decode.slots", "16", 16), ("credits.reserve_ratio", "0.25", 0.25)],
)
def test_what_is_within_bounds_is_taken(key: str, text: str, value: float) -> None:
    assert parse(key, text, STARTED, STARTED) == value


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("prefill.slots", "0", "from 1 to 1,024, and 0 is not"),
        ("prefill.slots", "2.5", "a whole number, and '2.5' is none"),
        ("classes.batch_weight", "0", "from 1 to 1,000, and 0 is not"),
        ("classes.decode_room", "1", "is from 0.0 to 0.9"),
        ("credits.reserve_ratio", "much", "a number, and 'much' is none"),
        ("credits.reserve_ratio", "nan", "is from 0.0 to 0.9"),
        ("decode.slots", "17", "at most 16, which engines start with. Raise it in the file"),
        ("placement.spill_load", "0.7", "spill_back_load must be less than placement.spill_load"),
        ("placement.spill_back_load", "0.9", "would make them 0.9 and 0.85"),
        ("model.source", "other", "cannot change while processes run: the model is loaded when a worker starts"),
        ("requests.shards", "8", "restart them"),
        ("engine", "simulated", "the engine is built when a worker starts"),
        ("prefill.slot", "8", "There is no setting 'prefill.slot'. These can be changed: prefill.slots"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(key: str, text: str, said: str) -> None:
    with pytest.raises(InvalidField) as error:
        parse(key, text, STARTED, STARTED)
    assert said in error.value.message


def entry(value: float) -> bytes:
    return msgspec.json.encode(Live(value=value))


def test_of_a_bucket_only_what_makes_sense_is_followed() -> None:
    found, wrong = readable(
        [
            ("prefill.slots", entry(8)),
            ("decode.slots", entry(0)),
            ("credits.reserve_ratio", b"{"),
            ("requests.starts_max", entry(2.5)),
            ("of.another.version", entry(1)),
        ]
    )
    assert {key: live.value for key, live in found.items()} == {"prefill.slots": 8}
    assert len(wrong) == 4


def live(**values: float) -> dict[str, Live]:
    """Of entries by name, with `_` for the dot."""
    return {key.replace("_", ".", 1): Live(value=value) for key, value in values.items()}


@pytest.mark.parametrize(
    ("back", "spill", "kept"),
    [(0.5, 0.6, 2), (0.6, 0.5, 0), (0.5, None, 1), (None, 0.6, 0), (None, 0.9, 1), (0.9, None, 0), (0.9, 0.95, 2)],
)
def test_two_that_contradict_each_other_are_both_left_as_they_were(
    back: float | None, spill: float | None, kept: int
) -> None:
    """Also where the other one is not set live, but 0.75 and 0.85 as by default."""
    pairs = {"placement_spill_back_load": back, "placement_spill_load": spill}
    found, wrong = usable(STARTED, live(**{key: value for key, value in pairs.items() if value is not None}))
    assert len(found) == kept
    assert bool(wrong) == (kept == 0)
    with_live(Config(), found)


def test_a_whole_number_stays_whole_however_it_is_written() -> None:
    found, _ = readable([("prefill.slots", b'{"value": 8.0}')])
    assert isinstance(found["prefill.slots"].value, int)


def test_an_engine_is_not_given_more_sequences_than_it_was_built_for() -> None:
    found, _ = usable(STARTED, live(decode_slots=64, prefill_slots=64))
    assert found == {"decode.slots": 16, "prefill.slots": 64}
