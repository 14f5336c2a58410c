"""What people see of a snapshot, in terminals of all sizes."""

import io

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from pipeline.top.frames import ALERTS_MAX, alerts, frame, lines_of, page
from pipeline.top.keys import State
from pipeline.top.sheets import VIEWS
from pipeline.top.snapshot import Ledger, Snapshot, fare
from tests.top.sample import account, process, record, snapshot

WIDTHS = (60, 80, 160)
NAMES = [view.name for view in VIEWS]


def drawn(what: RenderableType, width: int, height: int = 24) -> list[str]:
    """The lines, without colours."""
    out = io.StringIO()
    Console(file=out, width=width, height=height, _environ={}).print(what)
    lines = out.getvalue().splitlines()
    assert all(cell_len(line) <= width for line in lines)
    return [line.rstrip() for line in lines]


def shown(view: str, width: int, height: int = 24, now: Snapshot | None = None, **state: object) -> list[str]:
    """A frame of a view."""
    known = State(interval_s=2.0, view=NAMES.index(view), **state)  # type: ignore[arg-type]
    lines = drawn(frame(now or snapshot(), known, width, height), width, height)
    assert len(lines) == height, "a frame fills the terminal, and no more"
    return lines


def line_of(lines: list[str], beginning: str) -> str:
    """The only line that begins so."""
    [found] = [line for line in lines if line.strip().startswith(beginning)]
    return found


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("view", NAMES)
def test_every_view_says_where_it_is_and_how_to_leave_it(view: str, width: int) -> None:
    lines = shown(view, width)
    assert lines[0].startswith("headrace top  127.0.0.1:4222")
    assert f"{NAMES.index(view) + 1}" in lines[1]
    assert view in lines[1]
    assert lines[-1].startswith("? help  q quit")


@pytest.mark.parametrize("width", WIDTHS)
def test_the_fleet_is_one_screen(width: int) -> None:
    text = "\n".join(shown("fleet", width, 30))
    for said in (
        "2, 7.2 requests/s",
        "3, 3 of 12 slots busy",
        "2, 924 of 1,024 blocks free, 3 wait",
        "7 wait, 2 in work",
        "1 under way; 40 whole, 1 failed in 60 s, 0.7/s",
        "Where the time goes",
    ):
        assert said in text
    assert "failed" in line_of(text.splitlines(), "9.50 s")
    assert "under way" in line_of(text.splitlines(), "5.00 s")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_low_terminal_still_shows_the_first_lines_and_the_foot(width: int) -> None:
    lines = shown("fleet", width, 8)
    assert "headrace top" in lines[0]
    assert lines[-1].startswith("? help")
    assert drawn(frame(snapshot(), State(interval_s=2.0, view=5), 20, 3), 20, 3)


@pytest.mark.parametrize("width", WIDTHS)
def test_pools_show_who_lives_and_who_fell_silent(width: int) -> None:
    lines = shown("pools", width)
    assert "draining" in line_of(lines, "gateway  gateway-2")
    assert "starting" in line_of(lines, "prefill  prefill-2")
    assert "25 %" in line_of(lines, "prefill  prefill-1")
    assert "silent 4.20 s" in line_of(lines, "decode   decode-3")
    assert ("3 of 4 slots busy" in line_of(lines, "prefill  prefill-1")) == (width >= 80)
    assert ("smollm2" in "\n".join(lines)) == (width == 160)


@pytest.mark.parametrize("width", WIDTHS)
def test_shards_that_have_had_nothing_are_left_out(width: int) -> None:
    lines = shown("shards", width)
    busy = line_of(lines, "interactive 0").split()
    assert busy[2:4] == ["7", "2"]
    assert ("10 %" in line_of(lines, "interactive 0")) == (width >= 80), "from LMCache"
    assert ("60 %" in line_of(lines, "interactive 0")) == (width == 160), "computed"
    assert "nobody" in line_of(lines, "interactive 2")
    assert not [line for line in lines if line.startswith("interactive 1")]


@pytest.mark.parametrize("width", WIDTHS)
def test_credits_say_whether_the_books_balance_and_who_does_not_open_them(width: int) -> None:
    lines = shown("credits", width)
    assert line_of(lines, "decode-1").endswith("✓")
    assert line_of(lines, "decode-2").endswith("no answer")
    assert "✗" in line_of(lines, "decode-4")


@pytest.mark.parametrize("width", WIDTHS)
def test_latencies_are_those_that_clients_see_and_then_every_stage(width: int) -> None:
    lines = shown("latencies", width)
    first = [line.split()[0] for line in lines[5:11]]
    assert first == ["STAGE", "whole", "first", "accept", "queued", "decode"], lines
    assert "75 %" in line_of(lines, "decode")
    assert ("From the first token to the last" in line_of(lines, "decode")) == (width == 160)


@pytest.mark.parametrize("width", WIDTHS)
def test_requests_are_named_whole_so_that_they_can_be_traced(width: int) -> None:
    lines = shown("slowest", width)
    assert "failed" in line_of(lines, "9.50 s")
    assert "e" * 32 in line_of(lines, "5.00 s")
    assert ("decode 75 %" in line_of(lines, "5.00 s")) == (width >= 80)


def test_lines_are_ordered_by_a_column_scrolled_and_counted() -> None:
    by_name = shown("pools", 80, order_of := 24, column=1)
    assert [line.split()[1] for line in by_name[6:9]] == ["decode-1", "decode-2", "decode-3"]
    assert "s order: by NAME" in by_name[-1]
    turned = shown("pools", 80, order_of, column=1, reverse=True)
    assert turned[6].split()[1] == "prefill-3"
    assert "turned round" in turned[-1]
    low = shown("pools", 80, 11, offset=2)
    assert low[6].split()[1] == "prefill-1"
    assert "↑ 2 above  ↓ 3 below" in low[-1]


def test_what_is_unknown_comes_last_in_either_order() -> None:
    for reverse in (False, True):
        lines = shown("pools", 80, column=3, reverse=reverse)
        assert lines[13].split()[1] == "decode-3", "who is silent has no load"


def test_help_names_every_key_and_a_pause_shows() -> None:
    lines = shown("fleet", 60, help=True, paused=True)
    assert "paused" in lines[0]
    assert [line for line in lines if "leave" in line and "Ctrl-C" in line]


def test_before_the_first_look_it_listens() -> None:
    lines = drawn(frame(None, State(interval_s=2.0), 80, 24), 80)
    assert "Listening…" in "\n".join(lines)
    assert lines_of(None, State(interval_s=2.0)) == 0


@pytest.mark.parametrize("view", [name for name in NAMES if name not in ("fleet", "pools")])
def test_what_has_not_been_asked_for_yet_is_no_zero(view: str) -> None:
    lines = shown(view, 80, now=snapshot(queues=None, ledgers=None, fare=None))
    assert "Asking…" in "\n".join(lines)


def test_what_is_wrong_stands_above_everything_and_leaves_room() -> None:
    told = alerts(snapshot(errors=["JetStream does not answer.\nDeclare streams."]))
    assert told == [
        "decode decode-3 has been silent for 4.20 s.",
        "The ledger of decode-4 does not add up.",
        "decode-2 does not open its ledger.",
        "gateway-2 does not say how requests fare.",
        "JetStream does not answer.\nDeclare streams.",
    ]
    lines = shown("fleet", 80)
    assert lines[2].startswith("! decode decode-3")
    assert lines[1 + ALERTS_MAX].startswith("! … and 2 more")


def test_nobody_alive_is_a_sentence_with_a_remedy() -> None:
    empty = snapshot(processes=[], silent=[], queues=[], ledgers=[], fare=fare([], []))
    assert alerts(empty) == ["Nobody lives at 127.0.0.1:4222: start a fleet with `headrace up`, or correct nats.url."]
    text = "\n".join(drawn(page(empty, 160), 160))
    for sentence in (
        "No gateway lives, and it is gateways that know",
        "Nobody lives.",
        "No shard has had a request",
        "No decode worker lives.",
    ):
        assert sentence in text


def test_a_pool_that_takes_no_work_is_told_with_what_that_means() -> None:
    alone = snapshot(processes=[process("prefill", "prefill-1", state="draining")], silent=[], ledgers=[], fare=None)
    assert alerts(alone) == [
        "No decode worker takes work: nothing can be handed over.",
        "No prefill worker takes work: requests wait in the queue.",
    ]


def test_a_lost_connection_says_that_what_is_shown_is_old() -> None:
    lines = shown("pools", 80, now=snapshot(connected=False))
    assert lines[2] == "! No connection to NATS at 127.0.0.1:4222: below is what was seen last."
    assert line_of(lines, "prefill  prefill-1")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_has_everything(width: int) -> None:
    text = "\n".join(drawn(page(snapshot(), width), width))
    for title in ("Pools", "Shards", "Credits", "Latencies", "Slowest requests"):
        assert f"\n{title}\n" in text


def test_names_from_outside_cannot_take_over_the_terminal() -> None:
    evil = "\x1b]0;mine\x07\x1b[2J[red]x\n"
    now = snapshot(
        processes=[process("gateway", evil)],
        ledgers=[],
        fare=fare([], []),
        errors=[evil],
    )
    now.fare.requests.append(record(evil, 1.0, "failed"))  # type: ignore[union-attr]
    text = "\n".join(drawn(page(now, 160), 160) + shown("slowest", 80, now=now))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "·]0;mine··[2J[red]x·" in text


def test_a_gateway_that_answers_nothing_is_not_an_idle_one() -> None:
    alone = [process("gateway", "g")]
    assert "No gateway answers." in "\n".join(
        shown("latencies", 80, now=snapshot(processes=alone, fare=fare([], ["g"])))
    )
    text = "\n".join(shown("fleet", 80, now=snapshot(processes=alone, fare=fare([], []))))
    assert "nobody" in text
    assert "No request in the last" in text


def test_long_texts_are_cut_before_anything_that_counts_is() -> None:
    long = "decode-" + "x" * 80
    now = snapshot(ledgers=[Ledger(decode=long, account=account(long, free=1), problems=["y" * 200])])
    for width in WIDTHS:
        line = line_of(shown("credits", width, now=now), "decode-x")
        assert "✗ y" in line
        assert "100 %" in line
        assert line.endswith("…")


def test_a_wide_terminal_has_room_for_who_served_a_request() -> None:
    wide = line_of(shown("slowest", 160), "4.00 s")
    assert [wide.split()[at] for at in (-4, -3, -2, -1)] == ["interactive", "prefill-1", "decode-1", "d0bf3e6ee1d6"]
