"""Load on a real socket: what is sent when, and what becomes of it."""

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.bench.arrivals import constant
from pipeline.bench.connection import Connections
from pipeline.bench.loops import Bounds, Loop
from pipeline.bench.orders import Order
from pipeline.bench.tally import Report, Tally
from pipeline.cli.client import Gateway
from tests.bench.server import KEPT, Script, Served, refusal, reply, serving
from tests.cli.double import FINISH, chunked, event, text

TWO_WORDS = reply("Pa", "ris")


def orders() -> Iterator[Order]:
    return (Order(f"c{number}", b'{"number":%d}' % number, f"v{number}") for number in itertools.count())


def bounds(**given: Any) -> Bounds:
    return Bounds(**{"requests": None, "duration_s": None, "warm_up_s": 0.0, "in_flight": 4, **given})


def loaded(script: Script, limits: Bounds, rate: float | None = None, **given: Any) -> tuple[Report, Served]:
    """The report of a load, and what the server saw of it."""

    async def main() -> tuple[Report, Served]:
        async with serving(script) as served:
            tally = Tally()
            connections = Connections(Gateway(served.url), {"authorization": "Bearer k"}, given.get("timeout_s", 10.0))
            loop = Loop(connections, tally, limits)
            if "act" in given:
                asyncio.get_running_loop().call_later(0.2, given["act"], loop)
            await (loop.closed(orders()) if rate is None else loop.open(orders(), constant(rate)))
            connections.close()
            return tally.report("loop"), served

    return asyncio.run(main())


def test_a_closed_loop_sends_every_request_once_over_few_connections() -> None:
    report, served = loaded(lambda _: TWO_WORDS, bounds(requests=20, in_flight=3))
    assert (report.requests, report.completed, served.connections) == (20, 20, 3)
    assert sorted(body["number"] for body in served.bodies) == list(range(20))
    assert served.at_once_most == 3
    assert (report.prompt_tokens, report.output_tokens) == (1400, 40)


def test_a_request_says_whose_it_is() -> None:
    _, served = loaded(lambda _: TWO_WORDS, bounds(requests=1))
    lines = served.heads[0].splitlines()
    assert lines[0] == b"POST /v1/chat/completions HTTP/1.1"
    for line in (b"authorization: Bearer k", b"x-creator-id: c0", b"x-conversation-id: v0"):
        assert line in lines


def test_an_open_loop_keeps_its_rate_however_slow_the_server_is() -> None:
    report, served = loaded(lambda _: [0.3, *TWO_WORDS], bounds(requests=20, in_flight=100), rate=100.0)
    assert (report.completed, report.errors) == (20, 0)
    assert served.at_once_most > 10, "it does not wait for replies"
    assert report.ttft_p50_ms is not None
    assert report.ttft_p50_ms >= 300


def test_an_open_loop_that_is_held_up_counts_from_when_requests_were_due() -> None:
    report, _ = loaded(lambda _: [0.1, *TWO_WORDS], bounds(requests=6, in_flight=1), rate=1000.0)
    assert report.e2e.max_ms is not None
    assert report.e2e.max_ms >= 590, "the sixth waits for the five before it, and that is in its latency"
    assert report.send_lag.max_ms is not None
    assert report.send_lag.max_ms >= 490


def test_a_warm_up_is_sent_and_not_measured() -> None:
    report, served = loaded(lambda _: TWO_WORDS, bounds(requests=5, warm_up_s=0.2), rate=50.0)
    assert report.requests == 5
    assert len(served.heads) == 15


def test_a_load_ends_after_its_time() -> None:
    report, _ = loaded(lambda _: TWO_WORDS, bounds(duration_s=0.4), rate=50.0)
    assert report.requests == 20
    report, _ = loaded(lambda _: [0.05, *TWO_WORDS], bounds(duration_s=0.4, in_flight=1))
    assert 1 <= report.requests <= 8


def test_gaps_between_pieces_are_measured() -> None:
    report, _ = loaded(lambda _: reply("a", "b", "c", gap_s=0.05), bounds(requests=2))
    assert report.itl.count == 4
    assert report.itl.mean_ms is not None
    assert report.itl.mean_ms >= 49


def test_a_refusal_with_a_time_to_wait_is_no_error() -> None:
    body = '{"error":{"message":"Full.","code":"overloaded"}}'
    answers = [
        [refusal("503 Service Unavailable", body, "Retry-After: 2")],
        [refusal("500 Internal Server Error", '{"error":{"message":"Oh.","code":"internal"}}')],
        [refusal("502 Bad Gateway", "<html>}")],
    ]
    report, served = loaded(lambda number: answers[number], bounds(requests=3, in_flight=1))
    assert (report.refused, report.errors, served.connections) == (1, 2, 1)
    assert report.errors_by == {"503 overloaded": 1, "500 internal": 1, "502 http_502": 1}
    assert "HTTP 503: Full." in report.error_messages


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ([KEPT, chunked(text("Pa"))], "broken_off"),
        ([KEPT, chunked(FINISH), b"0\r\n\r\n"], "stopped"),
        ([KEPT, chunked(event('{"error":{"message":"Died.","code":"engine_dead"}}')), b"0\r\n\r\n"], "engine_dead"),
        ([KEPT, chunked(event("{"))], "not_understood"),
        ([b"SSH-2.0\r\n\r\n"], "not_understood"),
        ([], "broken_off"),
    ],
)
def test_what_is_no_whole_reply_is_an_error_with_a_code(answer: list[bytes | float], code: str) -> None:
    report, _ = loaded(lambda _: answer, bounds(requests=1))
    assert report.errors_by == {code: 1}


def test_a_reply_that_takes_too_long_is_given_up() -> None:
    report, _ = loaded(lambda number: [] if number else [KEPT, 30.0], bounds(requests=1), timeout_s=0.2)
    assert report.errors_by == {"timeout": 1}


def test_nobody_there_is_an_error_of_each_request() -> None:
    async def main() -> Report:
        async with serving(lambda _: []) as served:
            url = served.url
        tally = Tally()
        await Loop(Connections(Gateway(url), {}, 5.0), tally, bounds(requests=3)).closed(orders())
        return tally.report("loop")

    assert asyncio.run(main()).errors_by == {"unreachable": 3}


@pytest.mark.parametrize("rate", [None, 100.0])
def test_a_loop_that_is_stopped_lets_end_what_runs(rate: float | None) -> None:
    report, served = loaded(lambda _: [0.1, *TWO_WORDS], bounds(), rate=rate, act=Loop.stop)
    assert report.requests == report.completed == len(served.heads) > 0


@pytest.mark.parametrize("rate", [None, 100.0])
def test_a_loop_that_is_left_counts_what_ran(rate: float | None) -> None:
    report, _ = loaded(lambda number: [0.0 if number < 3 else 60.0, *TWO_WORDS], bounds(), rate=rate, act=Loop.leave)
    assert (report.completed, report.errors) == (3, 0)
    assert report.left > 0


def test_a_connection_that_lay_idle_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.bench.connection.IDLE_MAX_S", 0.05)
    _, served = loaded(lambda _: TWO_WORDS, bounds(requests=2), rate=4.0)
    assert served.connections == 2
