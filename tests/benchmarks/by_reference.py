"""What requests by reference save: `python -m tests.benchmarks.by_reference [--rounds 30] [--json]`.

A prefill and a decode worker and a real nats-server in one process, with nothing else to do. The engines are simulated, with the
timing of `configs/local.toml` (an 8B model on an H200): tokens, caches and the broker's bytes are real, first-token times are the
model's, with our own way through the broker added. The workload is the source's: a persona of 1,800 tokens, a history of 400 (10
exchanges of 10 and 30), a message of 10.

    bytes      of one request: what its producer sends, and all that goes in and out of the broker for it, idle talk taken off;
               sending everything, and by reference
    history    of one long conversation, once its window is full: the share of its history's tokens that prefill found in a cache,
               and the tokens that it computed, where the window moves by 1 exchange and where it moves by 5
    first      time to the first token of a creator's first request after `persona put`: warmed up by its owner, and not
"""

import asyncio
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Final, cast

import msgspec
import typer

from pipeline.bus.connection import Bus, Message
from pipeline.bus.kv import Bucket
from pipeline.cli.tables import table
from pipeline.config import Config, Conversations, Simulated
from pipeline.protocol import personas
from pipeline.protocol.messages import Done, encode
from pipeline.protocol.personas import Persona
from pipeline.protocol.turns import Turn
from pipeline.telemetry import logs
from tests.nats_server import NatsServer
from tests.percentiles import percentile_ms
from tests.words import WORDS
from tests.workers.fleet import Caller, Fleet, config_for, fleet, until
from workers.engines.simulated.words import tokenise

PERSONA_TOKENS: Final = 1800
EXCHANGES: Final = 10
MESSAGE_TOKENS: Final = 10
REPLY_TOKENS: Final = 30

TURNS_OF_A_CONVERSATION: Final = 60
ROUNDS_MAX: Final = 500


class Bytes(msgspec.Struct, frozen=True, kw_only=True):
    """Of one request, on average."""

    way: str
    prompt_tokens: float
    producer_bytes: float
    broker_in_bytes: float
    broker_out_bytes: float
    ttft_p50_ms: float
    """With all of the prompt but the message in a cache: the rest is what looking it up takes."""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Of one conversation whose window moves by `step_turns`."""

    step_turns: int
    requests: int
    exchanges_mean: float
    history_hit_ratio: float
    computed_tokens_mean: float


class First(msgspec.Struct, frozen=True, kw_only=True):
    """First requests of creators."""

    persona: str
    requests: int
    cached_ratio: float
    ttft_p50_ms: float
    ttft_p90_ms: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    engine: str
    bytes: list[Bytes]
    history: list[History]
    first: list[First]


class Timed(Caller):
    """A receiver that looks at the clock."""

    first_s: float | None = None

    def _framed(self, message: Message) -> None:
        self.first_s = self.first_s or time.perf_counter()
        super()._framed(message)


def words(tokens: int, seed: str) -> str:
    """Text of so many tokens for the simulated engine."""
    chosen = [word for word in WORDS if len(tokenise(f" {word}")) == 1]
    return " ".join(random.Random(seed).choices(chosen, k=tokens))


def config(url: str, step_turns: int = 5) -> Config:
    """The engines of `configs/local.toml`."""
    made = config_for(url, slots=4)
    return msgspec.structs.replace(
        made, simulated=Simulated(), conversations=Conversations(window_turns=EXCHANGES, step_turns=step_turns)
    )


def on_a_broker(measure: Callable[[NatsServer], Awaitable[Any]]) -> Any:
    """Measure on a broker of our own, and leave nothing running."""
    with tempfile.TemporaryDirectory(prefix="headrace-reference-") as folder:
        broker = NatsServer(Path(folder)).start()
        try:
            return asyncio.run(cast("Any", measure(broker)))
        finally:
            broker.kill9()


async def ask(made: Fleet, request: str, **fields: Any) -> tuple[Done, float]:
    """One request of `ada`; its end, and the seconds to its first token."""
    caller, creator = Timed(made.bus, request), fields.pop("of", "ada")
    await caller.listen()
    began_s = time.perf_counter()
    await caller.publish(creator, max_tokens=REPLY_TOKENS, ignore_eos=True, **fields)
    reply = await caller.reply()
    assert isinstance(reply.end, Done), reply.end
    assert caller.first_s is not None
    return reply.end, caller.first_s - began_s


async def put(bus: Bus, creator: str = "ada") -> str:
    """A persona; its text."""
    system = words(PERSONA_TOKENS, creator)
    await Bucket(bus, personas.BUCKET).write(creator, personas.write(Persona(creator=creator, system=system)))
    return system


# --------------------------------------------------------------------------------------------------------------
# Bytes


async def measure_bytes(broker: NatsServer, rounds: int) -> list[Bytes]:
    """Both ways, the same prompts."""
    async with fleet(config(broker.url)) as made:
        system = await put(made.bus)
        told = [_exchange(number) for number in range(1, EXCHANGES + 1)]
        for number in range(rounds):
            for turn in told:
                await made.bus.store(
                    f"turns.ada.c{number}", msgspec.json.encode(turn), f"{number}-{turn.number}", timeout_s=2.0
                )
        history = [part for turn in told for part in (turn.message, {"role": "assistant", "content": turn.reply})]

        def everything(number: int) -> dict[str, Any]:
            return {
                "messages": [{"role": "system", "content": system}, *history, _user(words(MESSAGE_TOKENS, str(number)))]
            }

        def referring(number: int) -> dict[str, Any]:
            return {"messages": None, "message": words(MESSAGE_TOKENS, str(number)), "conversation": f"c{number}"}

        await ask(made, "first", **everything(-1))  # what happens only once is not counted
        idle = await _idle(broker)
        return [
            await _bytes(made, broker, "everything", rounds, everything, idle),
            await _bytes(made, broker, "by reference", rounds, referring, idle),
        ]


def _exchange(number: int) -> Turn:
    return Turn(
        number=number,
        request=f"r{number}",
        origin=f"o{number}",
        message=_user(words(MESSAGE_TOKENS, f"m{number}")),
        reply=words(REPLY_TOKENS, f"r{number}"),
    )


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _read(broker: NatsServer) -> tuple[int, int, float]:
    with urllib.request.urlopen(f"{broker.monitor_url}/varz", timeout=5) as answer:
        told = msgspec.json.decode(answer.read())
    return told["in_bytes"], told["out_bytes"], time.perf_counter()


async def _idle(broker: NatsServer) -> tuple[float, float]:
    """Bytes a second, in and out, of a fleet with nothing to do."""
    before = _read(broker)
    await asyncio.sleep(2.0)
    after = _read(broker)
    return (after[0] - before[0]) / (after[2] - before[2]), (after[1] - before[1]) / (after[2] - before[2])


async def _bytes(
    made: Fleet,
    broker: NatsServer,
    way: str,
    rounds: int,
    body: Callable[[int], dict[str, Any]],
    idle: tuple[float, float],
) -> Bytes:
    ends, sizes, times_s, before = list[Done](), list[int](), list[float](), _read(broker)
    for number in range(rounds):
        fields = body(number)
        sizes.append(len(encode({name: value for name, value in fields.items() if value is not None})))
        end, ttft_s = await ask(made, f"{way}-{number}".replace(" ", "-"), **fields)
        ends.append(end)
        times_s.append(ttft_s)
    await until(lambda: made.prefill().slots.busy == 0)
    await asyncio.sleep(0.1)  # the last exchange is written down, and its message acked
    after = _read(broker)
    took_s = after[2] - before[2]
    return Bytes(
        way=way,
        prompt_tokens=round(mean(end.usage.prompt_tokens for end in ends), 1),
        producer_bytes=round(mean(sizes), 1),
        broker_in_bytes=round((after[0] - before[0] - idle[0] * took_s) / rounds),
        broker_out_bytes=round((after[1] - before[1] - idle[1] * took_s) / rounds),
        ttft_p50_ms=cast("float", percentile_ms(times_s, 50)),
    )


# --------------------------------------------------------------------------------------------------------------
# History


async def measure_history(broker: NatsServer, step_turns: int) -> History:
    """One conversation, turn after turn, from when its window is full."""
    async with fleet(config(broker.url, step_turns)) as made:
        shared = len(tokenise(await put(made.bus))) + 5  # its message in the template
        met, fresh, exchanges = list[float](), list[int](), list[int]()
        for number in range(TURNS_OF_A_CONVERSATION):
            message = words(MESSAGE_TOKENS, f"m{number}")
            end, _ = await ask(made, f"r{number}", messages=None, message=message, conversation="c")
            if number < EXCHANGES + 5:
                continue
            # Of the prompt, the persona and the new message with the head of the reply are no history.
            history = end.usage.prompt_tokens - shared - (MESSAGE_TOKENS + 8)
            met.append(min(1.0, max(0, end.usage.cached_tokens - shared) / history))
            fresh.append(end.usage.prompt_tokens - end.usage.cached_tokens)
            exchanges.append(number - (number - EXCHANGES) // step_turns * step_turns)
    return History(
        step_turns=step_turns,
        requests=len(met),
        exchanges_mean=round(mean(exchanges), 2),
        history_hit_ratio=round(mean(met), 4),
        computed_tokens_mean=round(mean(fresh), 1),
    )


# --------------------------------------------------------------------------------------------------------------
# First requests


async def measure_first(broker: NatsServer, rounds: int, *, warm: bool) -> First:
    """A creator after the other: put, and ask once."""
    async with fleet(config(broker.url)) as made:
        await until(lambda: made.prefill().owns("ada"))
        if not warm:
            made.prefill().personas.changed = lambda key: None
        times_s, cached = list[float](), list[float]()
        for number in range(rounds + 1):
            creator = f"ada-{number}"
            await put(made.bus, creator)
            if warm:
                await until(lambda creator=creator: len(made.prefill().warm_ups.prefixes.of(creator).ids) > 0)
            end, ttft_s = await ask(
                made, f"r{number}", of=creator, messages=None, message=words(MESSAGE_TOKENS, creator)
            )
            if number:  # what is slow only once is not counted
                times_s.append(ttft_s)
                cached.append(end.usage.cached_tokens / end.usage.prompt_tokens)
    return First(
        persona="warmed up" if warm else "not warmed up",
        requests=rounds,
        cached_ratio=round(mean(cached), 4),
        ttft_p50_ms=cast("float", percentile_ms(times_s, 50)),
        ttft_p90_ms=cast("float", percentile_ms(times_s, 90)),
    )


def run(rounds: int) -> Report:
    """All three."""
    return Report(
        engine="simulated: 100,000 prefill tokens/s, 4 ms a step",
        bytes=on_a_broker(lambda broker: measure_bytes(broker, rounds)),
        history=[
            on_a_broker(lambda broker, step=step: measure_history(broker, step))  # type: ignore[misc]
            for step in (1, 5)
        ],
        first=[
            on_a_broker(lambda broker, warm=warm: measure_first(broker, rounds, warm=warm))  # type: ignore[misc]
            for warm in (False, True)
        ],
    )


def text(report: Report) -> str:
    """The report for people."""
    return "\n\n".join(
        table(list(rows[0].__struct_fields__), [msgspec.structs.astuple(row) for row in rows])
        for rows in (report.bytes, report.history, report.first)
    )


def main(
    rounds: Annotated[int, typer.Option(help="Requests of each way, and creators.", min=1, max=ROUNDS_MAX)] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure what requests by reference save, on simulated engines."""
    logs.configure("benchmark")
    report = run(rounds)
    sys.stdout.write((msgspec.json.encode(report).decode() if as_json else text(report)) + "\n")


if __name__ == "__main__":
    typer.run(main)
