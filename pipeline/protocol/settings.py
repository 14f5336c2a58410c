"""What an operator may change while the fleet runs, and within which bounds; and what lies over what:

    default ◄── file ◄── environment ◄── live

A live setting is an entry of the bucket `settings`, under the name that it has in the configuration. It holds for every process
that has the setting at all, survives restarts, and goes when it is unset. Only what is listed here can be changed so: all else is
built into something when a process starts, and whoever asks for it is told.
"""

from collections.abc import Iterable, Mapping
from typing import Final, Literal

import msgspec

from pipeline.errors import InvalidField

BUCKET: Final = "settings"

Number = int | float
Source = Literal["default", "file", "environment", "live"]


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One that can be changed: its bounds, both included. `started_at_most`: what a process started with is its upper bound."""

    low: Number
    high: Number
    whole: bool = True
    started_at_most: bool = False


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the bucket. `by` and `at_s` (Unix) say who set it, and when."""

    value: Number
    by: str = ""
    at_s: float = 0.0


SETTINGS: Final[Mapping[str, Setting]] = {
    "prefill.slots": Setting(low=1, high=1024),
    "decode.slots": Setting(low=1, high=1_000_000, started_at_most=True),
    "both.slots": Setting(low=1, high=1_000_000, started_at_most=True),
    "both.prefill_slots": Setting(low=1, high=1024, started_at_most=True),
    "placement.spill_load": Setting(low=0.05, high=1.0, whole=False),
    "placement.spill_back_load": Setting(low=0.0, high=1.0, whole=False),
    "classes.interactive_weight": Setting(low=1, high=1000),
    "classes.batch_weight": Setting(low=1, high=1000),
    "classes.prefill_room": Setting(low=0.0, high=0.9, whole=False),
    "classes.decode_room": Setting(low=0.0, high=0.9, whole=False),
    "credits.reserve_ratio": Setting(low=0.0, high=0.9, whole=False),
    "requests.direct_tokens_max": Setting(low=0, high=1_000_000),
    "requests.first_token_s": Setting(low=0.0, high=600.0, whole=False),
    "requests.starts_max": Setting(low=1, high=1000),
    "gateway.in_flight_max": Setting(low=1, high=1_000_000),
    "gateway.in_flight_bytes_max": Setting(low=1_000_000, high=1 << 40),
    "gateway.queued_tokens_max": Setting(low=1000, high=1 << 40),
    "gateway.creator_queued_tokens_max": Setting(low=1000, high=1 << 40),
    "gateway.creator_in_flight_max": Setting(low=1, high=1_000_000),
    "gateway.creator_in_flight_bytes_max": Setting(low=1_000_000, high=1 << 40),
}

ORDERED: Final = (("placement.spill_back_load", "placement.spill_load"),)
"""Of each pair, the first must be less than the second."""

BUILT_IN: Final[Mapping[str, str]] = {
    "engine": "the engine is built when a worker starts",
    "nats": "the connection is made when a process starts",
    "gateway": "the gateway listens, and knows its rules, from its start on",
    "requests": "it is part of the contract that all processes agree on when they start",
    "conversations": "two workers that differ in it would render different prompts for the same conversation",
    "model": "the model is loaded when a worker starts",
    "prefill": "the engine is built with it when a worker starts",
    "decode": "the engine is built with it when a worker starts",
    "both": "the engine is built with it when a worker starts",
    "metrics": "a process begins to serve them when it starts",
    "telemetry": "traces and logs are set up when a process starts",
    "balancer": "the gateway that decides reads it at its start",
    "lmcache": "server and engines are connected with it when they start",
    "simulated": "the engine is built with it when a worker starts",
    "up": "`headrace up` reads it when it starts",
}
"""Why the other settings of a table cannot be changed while processes run."""


def parse(key: str, text: str, started: Mapping[str, object], effective: Mapping[str, object]) -> Number:
    """The value that `text` sets `key` to. `started` has what processes start with, by name, `effective` what holds now.

    Raises `InvalidField`, which says what is wrong: there is no such setting, it needs a restart, or it is out of bounds.
    """
    setting = _setting(key, effective)
    try:
        value: Number = int(text) if setting.whole else float(text)
    except ValueError:
        raise InvalidField(f"{key} is {'a whole' if setting.whole else 'a'} number, and {text!r} is none.") from None
    check(key, value)
    if setting.started_at_most and value > _number(started[key]):
        raise InvalidField(
            f"{key} is at most {started[key]}, which engines start with. Raise it in the file, and restart them."
        )
    for less, more in ORDERED:
        values = {name: effective[name] if name != key else value for name in (less, more)}
        if key in values and not values[less] < values[more]:  # type: ignore[operator]
            raise InvalidField(
                f"{less} must be less than {more}; that would make them {values[less]} and {values[more]}."
            )
    return value


def check(key: str, value: Number) -> None:
    """Raise `InvalidField` where a live setting cannot have this value, whatever the others are."""
    setting = SETTINGS[key]
    if not setting.low <= value <= setting.high or (setting.whole and value != int(value)):
        raise InvalidField(f"{key} is from {setting.low:,} to {setting.high:,}, and {value:,} is not.")


def _setting(key: str, effective: Mapping[str, object]) -> Setting:
    if (setting := SETTINGS.get(key)) is not None:
        return setting
    if key in effective:
        why = BUILT_IN[key.partition(".")[0]]
        raise InvalidField(f"{key} cannot change while processes run: {why}. Set it in the file, and restart them.")
    raise InvalidField(f"There is no setting {key!r}. These can be changed: {', '.join(SETTINGS)}.")


def usable(started: Mapping[str, object], live: Mapping[str, Live]) -> tuple[dict[str, Number], list[str]]:
    """`live` as a process may use it that has `started` with these values, and what is wrong with the rest of it.

    It uses no more than it was built for. Two that contradict each other are both left as they were started, also where only one
    of them is set: the other may have been unset since, or be otherwise in the file of whoever has set it.
    """
    chosen = {
        key: min(entry.value, _number(started[key])) if SETTINGS[key].started_at_most else entry.value
        for key, entry in live.items()
    }
    wrong = []
    for less, more in ORDERED:
        low, high = (chosen.get(name, _number(started[name])) for name in (less, more))
        if not low < high:
            wrong.append(f"{less} ({low}) is not less than {more} ({high})")
            chosen = {key: value for key, value in chosen.items() if key not in (less, more)}
    return chosen, wrong


def readable(entries: Iterable[tuple[str, bytes]]) -> tuple[dict[str, Live], list[str]]:
    """Of a bucket's entries those that make sense here, by name, and what is wrong with the others.

    Another version may know settings that we do not, or other bounds: what we cannot follow, we leave as it was started.
    """
    found: dict[str, Live] = {}
    wrong: list[str] = []
    for key, value in entries:
        try:
            entry = msgspec.json.decode(value, type=Live)
            if key not in SETTINGS:
                raise InvalidField(f"there is no live setting {key!r}")
            check(key, entry.value)
        except (msgspec.MsgspecError, InvalidField) as error:
            wrong.append(f"{key}: {error}")
            continue
        # Who writes past the command may say 8.0, and slots are counted.
        found[key] = msgspec.structs.replace(entry, value=int(entry.value)) if SETTINGS[key].whole else entry
    return found, wrong


def _number(value: object) -> Number:
    assert isinstance(value, int | float), value
    return value
