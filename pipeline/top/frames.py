"""A snapshot as people see it: a frame that fills a terminal, or a page of everything. Pure, in colours that all have."""

import time
from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.layout import Layout
from rich.table import Table
from rich.text import Text

from pipeline.protocol.subjects import CLASSES
from pipeline.top import cells
from pipeline.top.keys import HELP, State
from pipeline.top.sheets import FIRST, GAP, LOUD, QUIET, VIEWS, WHOLE, Line, Sheet, fitting, ordered, slowest, unserved
from pipeline.top.snapshot import Fare, Pool, Snapshot

ALERTS_MAX: Final = 3
"""Lines of what is wrong, above everything: more would push out what one came for."""

AROUND: Final = 2
"""Lines around those of a table: its head, and the note under it."""

PAGE_LINES: Final = 26
"""Of the summary on a page, which has no height."""

SUMMARY_STAGES: Final = 6

WIDE: Final = 80
"""From here on there is room for words beside the figures."""


def frame(now: Snapshot | None, state: State, width: int, height: int) -> RenderableType:
    """What fills the terminal. None: nothing has been heard yet."""
    told = [] if now is None else alerts(now)
    layout = Layout()
    top = [_title(now, state, width), _tabs(state, width), *(_alert(one, width) for one in _few(told))]
    within = max(3, height - len(top) - 1)
    layout.split_column(
        Layout(Group(*top), size=len(top)),
        Layout(_body(now, state, width, within)),
        Layout(_foot(state, width, lines_of(now, state) - state.offset - (within - AROUND)), size=1),
    )
    return layout


def lines_of(now: Snapshot | None, state: State) -> int:
    """Lines of the table that is shown: how far one can scroll."""
    build = VIEWS[state.view].sheet
    return 0 if now is None or build is None else len(build(now).lines)


def page(now: Snapshot, width: int) -> RenderableType:
    """Everything, once."""
    parts: list[RenderableType] = [_title(now, None, width), *(_alert(one, width) for one in alerts(now)), Text()]
    parts += _summary(now, width, PAGE_LINES)
    for view in VIEWS:
        if view.sheet is not None:
            sheet = view.sheet(now)
            parts += [Text(), Text(sheet.title, "bold"), _table(sheet, sheet.lines, width), _note(sheet)]
    return Group(*parts)


def alerts(now: Snapshot) -> list[str]:
    """What is wrong, the worst first."""
    if not now.connected:
        return [f"No connection to NATS at {now.nats}: below is what was seen last."]
    if not now.processes and not now.silent:
        return [f"Nobody lives at {now.nats}: start a fleet with `headrace up`, or correct nats.url.", *now.errors]
    found = [f"{one.pool} {one.id} has been silent for {cells.duration(one.silent_s)}." for one in now.silent]
    for pool, lack in _LACKS.items():
        if not any(process.state == "serving" for process in now.pool(pool)):
            found.insert(0, f"No {pool} worker takes work: {lack}.")
    found += [f"The ledger of {one.decode} does not add up." for one in now.ledgers or [] if one.problems]
    found += [f"{one.decode} does not open its ledger." for one in now.ledgers or [] if one.account is None]
    found += [f"{one} does not say how requests fare." for one in (now.fare.missing if now.fare else [])]
    return found + now.errors


_LACKS: Final[dict[Pool, str]] = {"prefill": "requests wait in the queue", "decode": "nothing can be handed over"}


def _few(told: Sequence[str]) -> list[str]:
    if len(told) <= ALERTS_MAX:
        return list(told)
    return [*told[: ALERTS_MAX - 1], f"… and {len(told) - ALERTS_MAX + 1} more."]


# --------------------------------------------------------------------------------------------------------------
# Around


def _title(now: Snapshot | None, state: State | None, width: int) -> Text:
    line = Text("headrace top", "bold")
    if now is not None:
        line.append(f"  {cells.text(now.nats)}", "cyan")
        line.append(f"  {time.strftime('%H:%M:%S', time.localtime(now.unix_s))}", "" if now.connected else "bold red")
    if state is not None:
        line.append(
            "  paused" if state.paused else f"  every {state.interval_s:g} s", "yellow" if state.paused else "dim"
        )
    if now is not None and width >= WIDE:
        line.append(f"  {now.messages} messages a look", "dim")
    return _cut(line, width)


def _tabs(state: State, width: int) -> Text:
    room = " " if width >= WIDE else ""
    line = Text()
    for number, view in enumerate(VIEWS):
        line.append(f"{room}{number + 1} {view.name}{room}", "reverse" if number == state.view else "")
        line.append(" ")
    return _cut(line, width)


def _foot(state: State, width: int, below: int) -> Text:
    view = VIEWS[state.view]
    line = Text("? help  q quit", "dim")
    if view.columns:
        by = "as it comes" if state.column is None else f"by {view.columns[state.column].title}"
        line.append(f"  s order: {by}{', turned round' if state.reverse else ''}", "dim")
    if state.offset:
        line.append(f"  ↑ {state.offset} above", "yellow")
    if below > 0:
        line.append(f"  ↓ {below} below", "yellow")
    return _cut(line, width)


def _alert(sentence: str, width: int) -> Text:
    return _cut(Text(f"! {cells.text(' '.join(sentence.split()))}", "bold red"), width)


def _note(sheet: Sheet) -> Text:
    return Text(sheet.note, "dim")


def _cut(line: Text, width: int) -> Text:
    """One line, whatever stands in it."""
    line.no_wrap, line.overflow = True, "ellipsis"
    line.truncate(width, overflow="ellipsis")
    return line


# --------------------------------------------------------------------------------------------------------------
# Within


def _body(now: Snapshot | None, state: State, width: int, height: int) -> RenderableType:
    if state.help:
        return Group(Text(), *(Text.assemble((f"  {keys:<12}", "bold"), does) for keys, does in HELP))
    if now is None:
        return Text("Listening…", "dim")
    build = VIEWS[state.view].sheet
    if build is None:
        return Group(*_summary(now, width, height))
    sheet = build(now)
    lines = ordered(sheet, state.column, reverse=state.reverse)
    shown = lines[state.offset : state.offset + max(1, height - AROUND)]
    return Group(_table(sheet, shown, width, state.column), _cut(_note(sheet), width))


def _table(sheet: Sheet, lines: Sequence[Line], width: int, by: int | None = None) -> RenderableType:
    if not lines:
        return Text(sheet.empty)
    shown = fitting(sheet, lines, width)
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="dim")
    for at, wide in shown.items():
        column = sheet.columns[at]
        table.add_column(
            Text(column.title, "bold underline" if at == by else ""),
            justify="right" if column.right else "left",
            no_wrap=True,
            overflow="ellipsis",
            width=wide,
        )
    for line in lines:
        table.add_row(*(_cell(line[at], sheet.columns[at].form(line[at])) for at in shown))
    return table


def _cell(value: object, text: str) -> Text:
    if isinstance(value, str):
        loud = value in LOUD or value.startswith(("silent", "✗"))
        return Text(text, "bold red" if loud else "yellow" if value in QUIET else "green" if value == "✓" else "")
    return Text(text)


def _summary(now: Snapshot, width: int, height: int) -> Iterator[RenderableType]:
    """The whole pipeline within one screen: what is left of it beside figures and heads, stages and requests share."""
    left = max(4, height - 13)
    stages = min(SUMMARY_STAGES, left // 2, len(now.fare.stages) if now.fare else 0)
    grid = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
    grid.add_column(style="bold", no_wrap=True, min_width=11)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    for label, value in (*_pools(now, max(4, min(30, width - 58))), *_queues(now), *_fared(now, now.fare)):
        grid.add_row(label, value)
    yield grid
    if now.fare is not None and now.fare.took is not None:
        yield Text()
        yield Text("Where the time goes", "bold")
        yield from _stages(now.fare, width, stages)
    if now.fare is not None and now.fare.requests:
        sheet = slowest(now)
        yield Text()
        yield Text("Slowest, and longest under way", "bold")
        yield _table(sheet, sheet.lines[: left - stages], width)


def _pools(now: Snapshot, bar_width: int) -> Iterator[tuple[str, Text]]:
    gateways, prefill, decode = now.pool("gateway"), now.pool("prefill"), now.pool("decode")
    load = cells.of(sum(one.load for one in gateways), len(gateways))
    yield "gateways", _meter(load, bar_width, f"{len(gateways)}, {sum(one.rate for one in gateways):.1f} requests/s")
    slots, busy = sum(one.slots for one in prefill), sum(one.slots - one.slots_free for one in prefill)
    yield "prefill", _meter(cells.of(busy, slots), bar_width, f"{len(prefill)}, {busy} of {slots} slots busy")
    blocks, free = sum(one.blocks for one in decode), sum(one.blocks_free for one in decode)
    waiting = sum(one.asks_waiting for one in decode)
    asks = f", {waiting} wait" if waiting else ""
    load = cells.of(sum(one.load * one.blocks for one in decode), blocks)  # the reserve is neither free nor load
    yield "decode", _meter(load, bar_width, f"{len(decode)}, {free:,} of {blocks:,} blocks free{asks}")


def _meter(part: float | None, width: int, words: str) -> Text:
    if part is None:
        return Text("nobody", "bold red")
    colour = "red" if part >= 0.95 else "yellow" if part >= 0.8 else "green"
    return Text.assemble((cells.bar(part, width), colour), f" {cells.share(part):>5}  {words}")


def _queues(now: Snapshot) -> Iterator[tuple[str, Text]]:
    for klass in CLASSES:
        rows = [row for row in now.queues or [] if row.klass == klass]
        waiting, working = sum(row.depth for row in rows), sum(row.in_work for row in rows)
        said = "not known" if now.queues is None else f"{waiting:,} wait, {working:,} in work"
        yield klass, Text(said, "yellow" if waiting else "")


def _fared(now: Snapshot, known: Fare | None) -> Iterator[tuple[str, Text]]:
    if known is None or not (known.outcomes or known.under_way):
        yield "requests", Text(unserved(now))
        return
    ended = ", ".join(
        f"{count:,} {outcome}" for outcome, count in sorted(known.outcomes.items(), key=lambda item: -item[1])
    )
    over = f"{ended} in {cells.duration(known.over_s)}, {known.per_s:.1f}/s" if ended else "none has ended of late"
    yield "requests", Text(f"{known.under_way:,} under way; {over}")
    for label, delays in ((FIRST, known.ttft), (WHOLE, known.took)):
        if delays is not None:
            told = (("p50", delays.p50_s), ("p90", delays.p90_s), ("p99", delays.p99_s))
            yield label, Text("   ".join(f"{name} {cells.duration(s):>7}" for name, s in told))


def _stages(known: Fare, width: int, most: int) -> Iterator[Text]:
    """The longest, in order."""
    assert known.took is not None
    total_s = known.took.mean_s * known.took.count
    shares = {stage: one.mean_s * one.count / total_s for stage, one in known.stages.items()}
    longest = sorted(shares, key=lambda stage: -shares[stage])[:most]
    for stage, one in known.stages.items():
        if stage in longest:
            words = f"p50 {cells.duration(one.p50_s):>7}   p99 {cells.duration(one.p99_s):>7}"
            share = min(1.0, shares[stage])
            bar = cells.bar(share, max(6, min(30, width - 46)))
            yield _cut(Text.assemble((f"{stage:<13}", ""), (bar, "cyan"), f" {cells.share(share):>5}  {words}"), width)
