"""What a warm cache is worth, and where from: first-token times cold, from LMCache and from the engine's own cache.

    headrace up --prefill 2        and beside it        python -m tests.benchmarks.warmth [--creators 8] [--json]

Of each creator, one after the other and with nothing else to do:

    cold      its first request: the persona is computed
    hbm       another one, at the same worker: the persona is in that engine's own cache
    lmcache   one that a route sends to a worker that has never seen it: the persona is loaded from LMCache
"""

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Annotated, Any, Final, Literal, cast

import anyio
import msgspec
import typer

from pipeline.bus.connection import Bus
from pipeline.bus.kv import Bucket
from pipeline.bus.puller import EXPIRES_S
from pipeline.cli import client, http
from pipeline.cli.options import ConfigOption, configuration
from pipeline.cli.tables import table
from pipeline.limits import PRESENCE_SILENT_MAX_S
from pipeline.protocol import placement, subjects
from pipeline.protocol.routes import Route
from pipeline.protocol.subjects import Shard
from tests.percentiles import percentile_ms
from tests.words import WORDS

Source = Literal["cold", "hbm", "lmcache"]
SOURCES: Final[tuple[Source, ...]] = ("cold", "lmcache", "hbm")

REPLY_TOKENS: Final = 4
SERVING_S: Final = 240.0
"""For a worker that has just been killed to serve again: a real engine starts in 20 s, on a machine that is not busy."""

FOLLOWED_S: Final = 10.0
"""For the gateway to follow a route that was written: milliseconds, on a machine that is not busy."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `worker` prefilled it; of its prompt `cached_tokens` were not computed there."""

    source: Source
    creator: str
    worker: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One source, over all creators."""

    source: Source
    requests: int
    cached_ratio: float
    ttft_p50_ms: float
    ttft_p90_ms: float


class Elsewhere(AssertionError):
    """Another worker than it should has served a request: the one that owns it was taken for dead, or was."""


class Stand:
    """A running stack with two prefill workers or more."""

    def __init__(self, gateway: str, bus: Bus, shards: int, persona_tokens: int) -> None:
        self._gateway, self._bus, self._shards, self._words = gateway, bus, shards, persona_tokens

    async def settle(self) -> None:
        """Return when two workers serve, and pulls of the ranks of before, when fewer lived, have ended."""
        with anyio.fail_after(SERVING_S):
            while not await self._two_serve():
                await anyio.sleep(0.2)
        await anyio.sleep(PRESENCE_SILENT_MAX_S + 2 * EXPIRES_S)

    async def _two_serve(self) -> bool:
        _, body = await http.get(f"{self._gateway}/ready", 5.0)
        return int(msgspec.json.decode(body)["prefill"]) >= 2

    async def measure(self, creator: str) -> list[Sample]:
        """The three requests of one creator. Raises `Elsewhere` where one of them was not served where it should."""
        owner, other = await self.owners(creator)
        samples = [await self._ask("cold", creator, owner), await self._ask("hbm", creator, owner)]
        bucket, token = Bucket(self._bus, "routes"), subjects.token(creator)
        route = Route(variants=(self._variant_of(token, other, (owner, other)),), reason="moved")
        revision = await bucket.write(token, msgspec.json.encode(route))
        try:
            with anyio.fail_after(FOLLOWED_S):
                while (await self.owners(creator))[0] != other:
                    await anyio.sleep(0.01)
            samples.append(await self._ask("lmcache", creator, other))
        finally:
            await bucket.delete(token, revision)
        return samples

    async def owners(self, creator: str) -> tuple[str, str]:
        """The worker that a creator's requests go to now, and the next in rank."""
        status, body = await http.get(f"{self._gateway}/v1/routes/{creator}", 5.0)
        assert status == 200, body
        first, second, *_ = msgspec.json.decode(body)["ways"][0]["workers"]
        return first["worker"], second["worker"]

    def _variant_of(self, token: str, worker: str, workers: Sequence[str]) -> int:
        """The first variant of a creator that this worker owns, where all have the same slots."""
        weights = dict.fromkeys(workers, 1.0)
        return next(
            number for number in range(1000) if placement.order(self._shard(f"{token}~{number}"), weights)[0] == worker
        )

    def _shard(self, affinity: str) -> Shard:
        return Shard("interactive", subjects.partition(affinity, self._shards))

    async def _ask(self, source: Source, creator: str, worker: str) -> Sample:
        persona = " ".join(random.Random(creator).choices(WORDS, k=self._words))
        body = client.chat_body(f"Say {source} twice.", system=persona, max_tokens=REPLY_TOKENS, temperature=0)
        reply = await client.chat(client.Gateway(self._gateway), body, creator, lambda _: None)
        assert reply.error is None, reply.error
        assert reply.usage.headrace is not None
        if reply.usage.headrace.prefill != worker:
            raise Elsewhere(f"{source} of {creator}: by {reply.usage.headrace.prefill}, and not by {worker}")
        assert reply.ttft_s is not None
        return Sample(
            source=source,
            creator=creator,
            worker=worker,
            prompt_tokens=reply.usage.prompt_tokens,
            cached_tokens=reply.usage.cached_tokens,
            ttft_s=reply.ttft_s,
        )


def figures(samples: Sequence[Sample]) -> list[Figures]:
    """By source, the slowest first."""
    return [_figures(source, [sample for sample in samples if sample.source == source]) for source in SOURCES]


def _figures(source: Source, samples: Sequence[Sample]) -> Figures:
    ttfts_s = [sample.ttft_s for sample in samples]
    return Figures(
        source=source,
        requests=len(samples),
        cached_ratio=round(median(sample.cached_tokens / sample.prompt_tokens for sample in samples), 4),
        ttft_p50_ms=cast("float", percentile_ms(ttfts_s, 50)),
        ttft_p90_ms=cast("float", percentile_ms(ttfts_s, 90)),
    )


def main(
    *,
    creators: Annotated[int, typer.Option("--creators", min=1, max=200, help="How many.")] = 8,
    persona_tokens: Annotated[int, typer.Option("--persona-tokens", min=64, help="Of each persona, about.")] = 1200,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
    config: ConfigOption = None,
) -> None:
    """Measure the running stack, which needs two prefill workers."""
    report = asyncio.run(_main(creators, persona_tokens, config))
    if as_json:
        print(msgspec.json.encode({"sources": report}).decode())
        return
    head = ("SOURCE", "REQUESTS", "CACHED", "TTFT P50", "P90")
    rows = [
        (row.source, row.requests, f"{row.cached_ratio:.1%}", f"{row.ttft_p50_ms:.0f} ms", f"{row.ttft_p90_ms:.0f} ms")
        for row in report
    ]
    print(table(head, rows))


async def _main(creators: int, persona_tokens: int, config: Any) -> list[Figures]:
    chosen, samples, run = configuration(config), list[Sample](), f"{time.time_ns():x}"
    async with await Bus.connect(chosen.nats.url, "bench-warmth") as bus:
        stand = Stand(client.gateway(None, None, chosen).url, bus, chosen.requests.shards, persona_tokens)
        await stand.settle()
        for number in range(creators):
            samples += await stand.measure(f"warmth-{run}-{number}")
            print(f"{number + 1} of {creators}", file=sys.stderr, flush=True)
    return figures(samples)


if __name__ == "__main__":
    typer.run(main)
