"""What processes remember of requests."""

from pipeline.protocol import records, subjects
from pipeline.protocol.messages import encode
from pipeline.protocol.records import ANSWERED_MAX, Record, Ring, creator_as, is_called


def record(request: str, request_id: str = "") -> Record:
    return Record(
        process="prefill-1",
        role="prefill",
        request=request,
        outcome="handed_off",
        began_unix_s=1.0,
        took_s=0.1,
        stages={"render": 0.1},
        request_id=request_id,
        facts={"delivery": 1},
    )


def test_a_ring_remembers_the_last_ones() -> None:
    ring = Ring(2)
    for request in ("a", "b", "c"):
        ring.add(record(request))
    assert len(ring) == 2
    assert ring.find("a") == []
    assert ring.find("c") == [record("c")]


def test_a_request_is_found_by_its_id_and_by_its_clients_name_for_it() -> None:
    ring = Ring(8)
    ring.add(record("a", "mine"))
    ring.add(record("b", "mine"))
    assert [one.request for one in ring.find("mine")] == ["a", "b"]
    assert [one.request for one in ring.find("b")] == ["b"]


def test_a_name_may_come_as_a_subject_token() -> None:
    assert is_called(subjects.token("my request/7"), "REQUESTS-1", "my request/7")
    assert not is_called("my=20request", "REQUESTS-1", "my request/7")
    assert not is_called("a=20b", "a", "")


def test_an_answer_holds_the_newest_where_there_are_too_many_for_a_message() -> None:
    ring = Ring(2 * ANSWERED_MAX)
    for number in range(ANSWERED_MAX + 5):
        ring.add(record(f"r{number}", "same"))
    found = ring.find("same")
    assert (len(found), found[-1].request) == (ANSWERED_MAX, f"r{ANSWERED_MAX + 4}")


def test_records_travel() -> None:
    said = [record("a", "mine")]
    assert records.records_decoder.decode(encode(said)) == said


def test_creators_are_named_as_configured() -> None:
    assert (creator_as("plain", "ada"), creator_as("none", "ada"), creator_as("hashed", "")) == ("ada", "", "")
    hashed = creator_as("hashed", "ada")
    assert (len(hashed), hashed == creator_as("hashed", "ada"), hashed == creator_as("hashed", "bob")) == (
        12,
        True,
        False,
    )
