"""The comparison with peers: its statistics, its engine, its command. The peers themselves are not run here."""

import asyncio
import itertools
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from pipeline.bench.outcome import Outcome, Slo
from pipeline.bench.tally import Tally
from pipeline.errors import OperatorError
from tests.benchmarks.peers import __main__ as command
from tests.benchmarks.peers import engine, figures, install, load, page, real, side, simulated, stages, workload
from tests.benchmarks.peers.figures import Cell, Spread
from tests.benchmarks.peers.side import Part, Running, Side, Unit
from tests.benchmarks.peers.site import Site
from tests.ports import free_port

FIGURES = ("added_ttft_p50_ms", "goodput_per_s")


def cell(name: str, repetition: int = 1, rate: float = 2.0, **fields: object) -> Cell:
    shot = load.Shot(
        report=Tally(Slo(ttft_ms=1000.0)).report("open"),
        cpu_ms={"front": 1.0, "beside": 2.0, "engine": 4.0},
        foreign_cores=0.0,
        load_average=0.5,
    )
    made = figures.cell(name, rate, repetition, shot, None, seconds=5.0)
    return msgspec.structs.replace(made, **fields)


# --------------------------------------------------------------------------------------------------------------
# Statistics


def test_goodput_counts_good_replies_for_each_second_of_the_window() -> None:
    tally = Tally(Slo(ttft_ms=1000.0, itl_ms=150.0))
    for ttft_s, gap_s in ((0.5, 0.1), (0.5, 0.2), (1.5, 0.1), (0.9, 0.14)):
        outcome = Outcome(due_s=0.0, sent_s=0.0, ended_s=9.0)
        outcome.text_came(ttft_s)
        outcome.text_came(ttft_s + gap_s)
        tally.add(outcome)
    shot = load.Shot(
        report=tally.report("open"), cpu_ms=dict.fromkeys(("front", "beside", "engine"), 0.0), foreign_cores=0.0,
        load_average=0.0,
    )  # fmt: skip
    assert figures.cell("vllm", 2.0, 1, shot, None, seconds=4.0).goodput_per_s == 0.5


def test_cpu_is_summed_from_the_front_to_everything() -> None:
    made = cell("headrace")
    assert (made.front_cpu_ms, made.beside_engines_cpu_ms, made.all_cpu_ms) == (1.0, 3.0, 7.0)


def test_what_a_side_adds_is_counted_from_the_floor_of_its_own_repetition_and_rate() -> None:
    cells = [
        cell("direct", 1, ttft_p50_ms=10.0, ttft_p99_ms=12.0),
        cell("direct", 2, ttft_p50_ms=11.0, ttft_p99_ms=15.0),
        cell("headrace", 1, ttft_p50_ms=14.0, ttft_p99_ms=20.0, beside_ttft_p50_ms=3.0, beside_ttft_p99_ms=5.0),
        cell("vllm-router", 2, ttft_p50_ms=11.5, ttft_p99_ms=None),
        cell("vllm-router", 2, rate=4.0, ttft_p50_ms=11.5),
    ]
    *_, ours, theirs, alone = figures.over("direct", cells)
    assert (ours.added_ttft_p50_ms, ours.added_ttft_p99_ms, ours.beside_ttft_p50_ms) == (4.0, 8.0, 3.0)
    assert (theirs.added_ttft_p50_ms, theirs.added_ttft_p99_ms, theirs.beside_ttft_p50_ms) == (0.5, None, 0.5)
    assert alone.added_ttft_p50_ms is None


def test_a_row_holds_the_median_the_least_and_the_most_and_counts_noisy_cells() -> None:
    values = ((1, 3.0, 0.0), (2, 9.0, 0.5), (3, 4.0, 0.0))
    cells = [cell("vllm", n, goodput_per_s=goodput, foreign_cores=others) for n, goodput, others in values]
    (row,) = figures.rows([*cells], FIGURES)
    assert (row.side, row.repetitions, row.noisy) == ("vllm", 3, 1)
    assert row.figures == {"goodput_per_s": Spread(4.0, 3.0, 9.0)}


def test_rows_come_by_rate_and_sides_in_their_order() -> None:
    cells = [cell("b", rate=4.0), cell("b"), cell("a"), cell("a", rate=4.0)]
    assert [(row.rate, row.side) for row in figures.rows(cells, FIGURES)] == [(2, "b"), (2, "a"), (4, "b"), (4, "a")]


def test_ratios_pair_repetitions_and_leave_out_what_has_no_pair_or_nothing_to_divide_by() -> None:
    cells = [
        cell("headrace", 1, goodput_per_s=4.0, added_ttft_p50_ms=2.0),
        cell("headrace", 2, goodput_per_s=3.0),
        cell("headrace", 3, goodput_per_s=8.0),
        cell("vllm", 1, goodput_per_s=2.0, added_ttft_p50_ms=0.0),
        cell("vllm", 2, goodput_per_s=3.0),
    ]
    (ratio,) = figures.ratios(cells, ("headrace",), FIGURES)
    assert (ratio.ours, ratio.theirs, ratio.figure, ratio.ratio) == (
        "headrace", "vllm", "goodput_per_s", Spread(1.5, 1.0, 2.0),
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------------
# What Headrace says of itself


def test_stages_are_read_from_whole_requests_in_a_gateways_log(tmp_path: Path) -> None:
    lines = [
        {"event": "request", "outcome": "whole", "ttft_ms": 40.0, "stages_ms": {"accept": 1.0, "prefill": 20.0}},
        {"event": "request", "outcome": "whole", "ttft_ms": 44.0, "stages_ms": {"accept": 3.0, "prefill": 20.0}},
        {"event": "request", "outcome": "cancelled", "ttft_ms": None, "stages_ms": {}},
        {"event": "started"},
    ]
    log = tmp_path / "gateway.log"
    log.write_text("no JSON\n" + "".join(json.dumps(line) + "\n" for line in lines))
    said = stages.summed_up(stages.whole(log))
    assert said is not None
    assert said.medians_ms == {"accept": 2.0, "prefill": 20.0}
    assert (said.beside_engines_p50_ms, said.beside_engines_p99_ms) == (20.0, 24.0)


def test_who_has_no_gateway_says_nothing_of_stages() -> None:
    assert stages.summed_up(stages.whole(None)) is None


# --------------------------------------------------------------------------------------------------------------
# What is asked


def test_every_side_is_asked_the_same_and_no_two_repetitions_are() -> None:
    for orders in (workload.hop, workload.small):
        first, again, other = (list(itertools.islice(orders(run), 20)) for run in ("1/2/0", "1/2/0", "2/2/0"))
        assert first == again
        assert not {order.body for order in first} & {order.body for order in other}


def test_a_small_prompt_is_a_persona_an_exchange_and_a_message() -> None:
    orders = list(itertools.islice(workload.small("1/2/0"), 200))
    bodies = [msgspec.json.decode(order.body) for order in orders]
    assert {len(body["messages"]) for body in bodies} == {4}
    words = [sum(len(message["content"].split()) for message in body["messages"]) for body in bodies]
    assert set(words) == {4 + 248 + 2 * 48 + 16}
    assert {body["max_tokens"] for body in bodies} == {24}
    personas = {order.creator: body["messages"][0]["content"] for order, body in zip(orders, bodies, strict=True)}
    assert all(
        personas[order.creator] == body["messages"][0]["content"] for order, body in zip(orders, bodies, strict=True)
    )


def test_the_warm_up_meets_every_creator() -> None:
    met = {order.creator for order in itertools.islice(workload.everybody(), workload.CREATORS)}
    assert len(met) == workload.CREATORS


# --------------------------------------------------------------------------------------------------------------
# The engine without a model


@asynccontextmanager
async def _engine(step_s: float) -> AsyncIterator[Side]:
    async with await engine.serve(0, step_s) as server:
        port = server.sockets[0].getsockname()[1]
        yield Side(stages=(), url=f"http://127.0.0.1:{port}")


@pytest.mark.parametrize("quick_ack", [False, True])
def test_the_engine_writes_each_token_apart_a_step_after_the_other(quick_ack: bool) -> None:
    async def ask() -> Outcome:
        async with _engine(0.01) as plain:
            asked = load.connections(msgspec.structs.replace(plain, quick_ack=quick_ack))
            order, outcome = next(workload.small("1")), Outcome(due_s=0.0)
            await asked.ask(asked.request(order.creator, None, order.body), outcome)
            asked.close()
            return outcome

    outcome = asyncio.run(ask())
    assert (outcome.code, outcome.usage.completion_tokens, len(outcome.gaps_s)) == ("", 24, 23)
    assert sum(outcome.gaps_s) > 0.2


def test_the_engine_answers_a_prefill_at_once_with_what_decode_needs() -> None:
    async def ask() -> bytes:
        async with _engine(10.0) as plain:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(plain.url.rpartition(":")[2]))
            body = b'{"max_tokens": 1, "messages": []}'
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            answer = await reader.readuntil(b"\r\n\r\n") + await reader.read(4096)
            writer.close()
            return answer

    answer = asyncio.run(ask())
    assert answer.startswith(b"HTTP/1.1 200")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["kv_transfer_params"]["do_remote_prefill"]


class Written:
    """A reply whose tokens are counted."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def step(self) -> bool:
        self.left -= 1
        return self.left > 0


def test_a_reply_that_comes_during_a_step_loads_before_it_joins() -> None:
    async def steps() -> list[int]:
        made = engine.Steps(0.02)
        first, second = Written(10), Written(10)
        made.join(first)  # type: ignore[arg-type]
        await asyncio.sleep(0.005)
        made.join(second)  # type: ignore[arg-type]
        while first.left > 6:
            await asyncio.sleep(0.001)
        return [first.left, second.left]

    assert asyncio.run(steps()) == [6, 8]


# --------------------------------------------------------------------------------------------------------------
# Sides


def test_a_side_serves_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async def live() -> dict[Part, float]:
        port, left = free_port(), tmp_path / "left"
        left.touch()
        unit = simulated.engine("engine", port, "front")
        made = Side(stages=((unit,),), url=f"http://127.0.0.1:{port}", leftovers=(left,))
        async with side.running(made, tmp_path) as serving:
            await load.first_reply(made, workload.small("1"))
            await load.warm_up(made, workload.small("2"), requests=4, in_flight=2)
            times_s = itertools.chain([0.0, 0.05])
            shot = await load.shoot(serving, workload.small("3"), times_s, None, warm_up_s=0.0, seconds=1.0)
        assert shot.report.completed == 2
        assert not left.exists()
        return shot.cpu_ms

    spent = asyncio.run(live())
    assert spent.keys() == {"front", "beside", "engine"}
    assert spent["beside"] == spent["engine"] == 0.0


def test_a_side_that_ends_at_once_says_what_it_said(tmp_path: Path) -> None:
    async def live() -> None:
        unit = Unit(
            name="broken", command=("sh", "-c", "echo no such model"), ready="http://127.0.0.1:1/", part="front"
        )
        async with side.running(Side(stages=((unit,),), url=""), tmp_path):
            pass

    with pytest.raises(OperatorError, match="no such model"):
        asyncio.run(live())


def test_the_processes_of_a_fleet_are_told_apart(tmp_path: Path) -> None:
    kept = [("nats", 1), ("gateway", 2), ("prefill-1", 3), ("lmcache", 4), ("keeper", 5)]
    said = {"processes": [{"name": name, "pid": pid, "log": f"/logs/{name}.log"} for name, pid in kept]}
    path = tmp_path / "last.json"
    path.write_text(json.dumps(said))
    parts = [side.part_of(member.name) for member in side.members(path)]
    assert parts == ["beside", "front", "engine", "engine", "beside"]
    unit = Unit(name="headrace", command=(), ready="", part="beside", members=path)
    assert Running(Side(stages=((unit,),), url=""), {}).gateway_log() == Path("/logs/gateway.log")
    assert Running(Side(stages=(), url=""), {}).gateway_log() is None


def test_every_side_can_be_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "python", lambda home, peer: home / peer)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)
    for name, recipe in {**simulated.SIDES, **real.SIDES}.items():
        folder = tmp_path / name
        folder.mkdir()
        made = recipe(Site(folder=folder, home=folder, model="model"))
        units = [unit for stage in made.stages for unit in stage]
        assert len({unit.name for unit in units}) == len(units)
        assert [unit.part for unit in units].count("front") == (0 if name.startswith("headrace") else 1)


# --------------------------------------------------------------------------------------------------------------
# The peers' environments


def test_the_locks_pin_every_package_to_one_version() -> None:
    assert install.versions(install.ROUTER, ("vllm-router",)) == {"vllm-router": "0.1.17"}
    assert install.versions(install.DYNAMO, ("ai-dynamo",)) == {"ai-dynamo": "1.6.1"}


def test_an_environment_of_other_versions_is_none(tmp_path: Path) -> None:
    place = tmp_path / install.ROUTER
    place.mkdir()
    (place / "installed.lock").write_text("vllm-router==0.1.16\n")
    with pytest.raises(OperatorError, match="not an environment"):
        install.python(tmp_path, install.ROUTER)
    (place / "installed.lock").write_text(install.LOCKS[install.ROUTER].read_text())
    assert install.python(tmp_path, install.ROUTER) == place / "bin" / "python"


# --------------------------------------------------------------------------------------------------------------
# The command


def test_each_repetition_begins_with_another_side() -> None:
    assert [command.turned("abc", by) for by in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]


@pytest.mark.parametrize("given", ["", "fast", "0", "1,-2"])
def test_rates_are_positive_numbers(given: str) -> None:
    with pytest.raises(typer.BadParameter):
        command.numbers(given)


def test_sides_are_chosen_by_name_and_keep_their_order() -> None:
    assert command.chosen("headrace, direct", simulated.SIDES) == ("direct", "headrace")
    assert command.chosen("", real.SIDES) == tuple(real.SIDES)
    with pytest.raises(typer.BadParameter, match="no faster; there are direct"):
        command.chosen("faster", simulated.SIDES)


@pytest.mark.parametrize(("failing", "starts", "measures"), [(1, 2, 1), (2, 2, 0)])
def test_a_side_that_does_not_start_is_started_once_more(
    failing: int, starts: int, measures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = list[Path]()

    async def at_all_rates(asked: command.Asked, site: Site, name: str, *_: object) -> list[Cell]:
        if name == "direct":
            began.append(site.folder)
            if len(began) <= failing:
                raise OperatorError("Its port was taken.", "Start it again.")
        return [cell(name)]

    monkeypatch.setattr(command, "_at_all_rates", at_all_rates)
    monkeypatch.setattr(command, "_model", lambda: "model")
    asked = command.Asked(
        engines="simulated", sides=("direct", "headrace"), rates=(2.0,), repetitions=1, seconds=1.0, home=tmp_path,
        keep=tmp_path / "kept",
    )  # fmt: skip
    cells, failures = command.measured(asked, lambda _: None)
    assert (len(set(began)), len(failures)) == (starts, 1 - measures)
    assert [one.side for one in cells] == ["direct", "headrace"][1 - measures :]


@pytest.mark.parametrize(("more", "kept"), [([], True), (["--only", "vllm"], False), (["--repeat", "1"], False)])
def test_only_a_whole_run_replaces_the_results_that_the_readme_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], kept: bool
) -> None:
    monkeypatch.setattr(command, "measured", lambda *_: ([cell("vllm-replicas", 1)], []))
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    program = typer.Typer()
    program.command()(command.main)
    assert CliRunner().invoke(program, ["--engines", "real", *more]).exit_code == 0
    assert (tmp_path / "peers_real.json").exists() is kept


def test_the_command_prints_and_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[command.Asked]()

    def measured(what: command.Asked, told: object) -> tuple[list[Cell], list[str]]:
        asked.append(what)
        cells = [
            cell("vllm-replicas", 1, ttft_p50_ms=100.0, goodput_per_s=2.0),
            cell("vllm-replicas", 2, ttft_p50_ms=110.0, goodput_per_s=2.0, foreign_cores=1.0),
            cell("headrace-split", 1, ttft_p50_ms=150.0, goodput_per_s=1.0),
            cell("headrace-split", 2, ttft_p50_ms=130.0, goodput_per_s=2.0),
        ]
        return cells, ["vllm, repetition 1: it has ended"]

    monkeypatch.setattr(command, "measured", measured)
    program = typer.Typer()
    program.command()(command.main)
    out = tmp_path / "results.json"
    result = CliRunner().invoke(program, ["--engines", "real", "--rates", "2,4", "--repeat", "2", "--out", str(out)])
    assert result.exit_code == 1
    assert (asked[0].rates, asked[0].repetitions, asked[0].seconds) == ((2.0, 4.0), 2, 15.0)
    kept = msgspec.json.decode(out.read_bytes(), type=page.Results)
    assert kept.command == "python -m tests.benchmarks.peers --engines real --rates 2,4 --repeat 2", (
        "no place of this machine"
    )
    assert (kept.versions["vllm-router"], kept.machine.cores > 0) == ("0.1.17", True)
    assert [row.side for row in kept.rows] == ["vllm-replicas", "headrace-split"]
    assert kept.rows[1].figures["added_ttft_p50_ms"] == Spread(35.0, 20.0, 50.0)
    assert "vllm-replicas*" in result.stdout
    assert "headrace-split ÷ vllm-replicas  0.75× (0.50–1.00)" in result.stdout
    assert result.stdout.rstrip().endswith("it has ended")
