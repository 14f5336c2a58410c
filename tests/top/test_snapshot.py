"""What becomes of presences and answers."""

from pipeline.protocol.messages import Presence
from pipeline.protocol.presence import Presences
from pipeline.protocol.recent import WantRecent, recent
from pipeline.top.snapshot import POOLS, RECENT_S, SILENT_TOLD_S, delays, fare, processes, silent
from tests.top.sample import NOW_S, record


def says(presences: Presences, name: str, at_s: float, pool: str = "prefill", **fields: object) -> None:
    known = {"epoch": "0000000999000-a", "ready": True, **fields}
    presences.heard(Presence(role=pool, id=name, **known), at_s)  # type: ignore[arg-type]


def test_who_lives_is_told_by_pool_with_its_state_and_its_age() -> None:
    presences = Presences()
    says(presences, "d", 10.0, "decode", paused=True)
    says(presences, "b", 10.0, ready=False)
    says(presences, "a", 10.0, epoch="odd", draining=True, serves_as="both")
    says(presences, "g", 10.0, "gateway")
    found = processes(presences, 10.5, 1_000.0)
    assert [(one.pool, one.id, one.state, one.up_s) for one in found] == [
        ("gateway", "g", "serving", 1.0),
        ("prefill", "a", "draining", None),
        ("prefill", "b", "starting", 1.0),
        ("decode", "d", "paused", 1.0),
    ]
    assert found[1].serves_as == "both"
    assert {one.pool for one in found} == set(POOLS)


def test_who_fell_silent_is_told_unless_it_took_its_leave() -> None:
    presences = Presences()
    says(presences, "died", 10.0)
    says(presences, "died-later", 12.0, "decode")
    says(presences, "drained", 10.0, draining=True)
    says(presences, "turned", 10.0, paused=True)
    says(presences, "turned", 15.0, "decode")
    found = silent(presences, 15.0)
    assert [(one.pool, one.id, one.silent_s) for one in found] == [
        ("decode", "died-later", 3.0),
        ("prefill", "died", 5.0),
    ]
    assert silent(presences, 13.0 + SILENT_TOLD_S)[0].id != "died"


def test_gateways_are_told_as_one() -> None:
    asked = WantRecent(since_s=60)
    first = recent("a", asked, [record("1", 1.0), record("2", 3.0, "failed")], 2, [record("3", 9.0, "")], NOW_S, 10.0)
    second = recent("b", asked, [record("4", 2.0)], 1, [], NOW_S, 40.0)
    known = fare([first, second], ["a", "b", "c"])
    assert (known.outcomes, known.under_way, known.missing) == ({"whole": 2, "failed": 1}, 3, ["c"])
    assert (known.over_s, known.per_s) == (10.0, 2 / 10 + 1 / 40)
    assert [one.request for one in known.requests] == ["3", "2", "4", "1"]
    assert known.took is not None
    assert known.took.count == known.stages["decode"].count == 2
    assert list(known.stages) == ["accept", "queued", "decode"]


def test_without_answers_nothing_is_known() -> None:
    known = fare([], [])
    assert (known.took, known.ttft, known.stages, known.over_s, known.per_s) == (None, None, {}, RECENT_S, 0.0)
    assert delays([]) is None
