"""`headrace calibrate`: what a running stack's engines do, seen through its HTTP door, for `headrace plan --measured`.

About forty requests, most of them of 4 tokens; `pipeline/planning/calibration.py` says what is made of them.
"""

import asyncio
import random
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from pipeline.bench.words import WORDS
from pipeline.cli import client
from pipeline.cli.options import CaOption, ConfigOption, UrlOption, configuration
from pipeline.errors import OperatorError
from pipeline.planning import calibration
from pipeline.planning.calibration import Sample, Saturated
from pipeline.planning.rates import Measured

REPLY_TOKENS: Final = 4
FILLERS: Final = 8
"""Prompts sent to push a prefix out of prefill's own cache: with 3,000 tokens each, what `local.toml` gives it. Then twice as
many, and so on, …"""
FILLERS_MAX: Final = 32
"""… up to this."""

SATURATED_ROUNDS: Final = 2
"""Cold prompts per slot in the saturated part."""

TIMEOUT_S: Final = 600.0
"""For everything. Then the machine is too slow, or too busy, to be measured."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is sent."""

    prompt_tokens: int
    rounds: int
    batches: tuple[int, ...]
    reply_tokens: int
    slots: int
    filler_tokens: int


class Bench:
    """The requests. `run` makes their prompts unlike those of any other run."""

    def __init__(self, gateway: client.Gateway, plan: Plan) -> None:
        self._gateway, self._plan = gateway, plan
        self._run = f"{time.time_ns():x}"
        self._tokens_per_word = 1.0
        self.model = "unknown"

    async def measure(self) -> Measured:
        """Everything, one thing after the other."""
        plan, samples = self._plan, list[Sample]()
        _told("first requests, which are not counted")
        for number in range(2):
            first = await self._ask(f"first-{number}", plan.prompt_tokens // 4)
            self._tokens_per_word *= first.usage.prompt_tokens / (plan.prompt_tokens // 4)
        lengths = (plan.prompt_tokens // 4, plan.prompt_tokens)
        for number in range(plan.rounds):
            _told(f"prefill, cold and from its own cache: round {number + 1} of {plan.rounds}")
            for tokens in lengths:
                creator = f"{tokens}-{number}"
                samples += [await self._sample(creator, tokens), await self._sample(creator, tokens)]
        samples += await self._from_lmcache(lengths[1])
        saturated = [await self._saturated(tokens) for tokens in lengths]
        steps_s = {batch: await self._step_s(batch) for batch in plan.batches}
        return calibration.rates(samples, saturated, steps_s, self.model)

    async def _from_lmcache(self, tokens: int) -> list[Sample]:
        """Ask again for what was asked first, once other prompts have pushed it out of prefill's own cache.

        A probe that is still there comes to the front by being asked for; so the next probe is another prefix.
        """
        sent, samples = 0, list[Sample]()
        for number in range(self._plan.rounds):
            while sent < FILLERS << number and not samples:
                _told(f"pushing prefixes out of prefill's own cache: prompt {sent + 1}")
                await self._ask(f"filler-{sent}", self._plan.filler_tokens)
                sent += 1
            probe = await self._sample(f"{tokens}-{number}", tokens)
            samples += [probe] if probe.kind == "lmcache" else []
            if sent >= FILLERS_MAX:
                break
        return samples

    async def _saturated(self, tokens: int) -> Saturated:
        count = self._plan.slots * SATURATED_ROUNDS
        _told(f"prefill, saturated: {count} prompts of {tokens} tokens, {self._plan.slots} at a time")
        numbers, computed = iter(range(count)), 0

        async def keep_asking() -> None:
            nonlocal computed
            for number in numbers:
                usage = (await self._ask(f"saturated-{tokens}-{number}", tokens, reply_tokens=1)).usage
                computed += usage.prompt_tokens - usage.cached_tokens

        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(self._plan.slots):
                group.create_task(keep_asking())
        return Saturated(requests=count, computed=computed, duration_s=time.perf_counter() - began_s)

    async def _step_s(self, batch: int) -> float:
        _told(f"decode, {batch} at a time")
        streams: list[list[float]] = [[] for _ in range(batch)]
        async with asyncio.TaskGroup() as group:
            for number, times in enumerate(streams):
                group.create_task(
                    self._ask(
                        f"decode-{number}", 16, reply_tokens=self._plan.reply_tokens, times=times, ignore_eos=True
                    )
                )
        return calibration.step_s(streams)

    async def _sample(self, creator: str, tokens: int) -> Sample:
        times: list[float] = []
        reply = await self._ask(creator, tokens, times=times)
        split, usage = reply.usage.headrace, reply.usage
        if split is None or reply.ttft_s is None or len(times) < 2:
            raise OperatorError(
                "The reply names no workers: this is no gateway of headrace.", "Give its address as --url."
            )
        return Sample(
            prompt=usage.prompt_tokens,
            cached=usage.cached_tokens,
            hbm=split.hbm_tokens,
            ttft_s=reply.ttft_s,
            gap_s=times[1] - times[0],
        )

    async def _ask(
        self,
        creator: str,
        tokens: int,
        *,
        reply_tokens: int = REPLY_TOKENS,
        times: list[float] | None = None,
        **fields: Any,
    ) -> client.Reply:
        persona = " ".join(
            random.Random(f"{self._run}/{creator}").choices(WORDS, k=max(1, round(tokens / self._tokens_per_word)))
        )
        fields = {"temperature": 0, "ignore_eos": True, **fields}
        body = client.chat_body("Go on.", system=persona, max_tokens=reply_tokens, **fields)

        def came(_: str) -> None:
            if times is not None:
                times.append(time.perf_counter())

        reply = await client.chat(self._gateway, body, f"calibrate-{self._run}-{creator}", came)
        if reply.error is not None:
            raise OperatorError(
                f"A request failed: {reply.error}", "Calibrate a stack that is up and otherwise at rest."
            )
        return reply


def calibrate(
    *,
    out: Annotated[Path, typer.Option("--out", help="Where to write the rates.")] = Path("measured.json"),
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=128, help="Of the long prompts, about.")] = 1024,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=20, help="Of each kind of prompt.")] = 3,
    batches: Annotated[str, typer.Option("--batches", help="Streams at a time.")] = "1,2,4,8",
    reply_tokens: Annotated[int, typer.Option("--reply-tokens", min=8, max=1024, help="Of each stream.")] = 48,
    slots: Annotated[
        int | None,
        typer.Option("--slots", min=1, max=64, show_default=False, help="Prompts at a time. Default: prefill.slots."),
    ] = None,
    url: UrlOption = None,
    ca: CaOption = None,
    config: ConfigOption = None,
) -> None:
    """Measure a running stack of one prefill and one decode worker, for `headrace plan --measured`.

    Prefill cold, from LMCache, and from its own cache; a decode step by the number of sequences. About forty requests.

    Example: headrace calibrate --out measured.json, and then headrace plan --measured measured.json
    """
    chosen = configuration(config)
    plan = Plan(
        prompt_tokens=prompt_tokens,
        rounds=rounds,
        batches=_numbers(batches),
        reply_tokens=reply_tokens,
        slots=slots or chosen.prefill.slots,
        filler_tokens=min(3000, chosen.model.max_model_len * 3 // 4),
    )
    measured = asyncio.run(run(client.gateway(url, ca, chosen), chosen.model.served_name, plan))
    out.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=2) + b"\n")
    print(text(measured, out))


async def run(gateway: client.Gateway, model: str, plan: Plan) -> Measured:
    """Measure. Raises `OperatorError` where a request fails, or it all takes too long."""
    bench = Bench(gateway, plan)
    bench.model = model
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await bench.measure()
    except* OperatorError as failed:
        raise failed.exceptions[0] from None
    except* TimeoutError:
        raise OperatorError(
            f"This has taken {TIMEOUT_S:.0f} s.", "Give fewer --rounds or shorter --prompt-tokens."
        ) from None


def text(measured: Measured, out: Path) -> str:
    """What was found, for people."""
    rates = measured.rates
    lines = [
        f"prefill   {rates.prefill_tokens_per_s:,.0f} tokens/s computed, and {rates.prefill_overhead_s * 1e3:.1f} ms a request",
        f"LMCache   {rates.load_tokens_per_s:,.0f} tokens/s into prefill, {rates.handover_tokens_per_s:,.0f} into decode",
        f"handover  {rates.handover_s * 1e3:.1f} ms, and a first token {rates.way_s * 1e3:.1f} ms on its way",
        f"decode    {rates.step_s * 1e3:.2f} ms a step, and {rates.step_per_sequence_s * 1e3:.2f} for each sequence",
        "first token, ms:   " + ", ".join(f"{what} tokens {ms:g}" for what, ms in measured.ttft_ms.items()),
        "decode step, ms:   "
        + ", ".join(f"{batch} at a time {ms:g}" for batch, ms in measured.step_ms_by_batch.items()),
        *measured.notes,
        f"Written to {out}. Next: headrace plan --measured {out}",
    ]
    return "\n".join(lines)


def _numbers(batches: str) -> tuple[int, ...]:
    try:
        numbers = tuple(sorted({int(number) for number in batches.split(",")}))
    except ValueError:
        numbers = ()
    if not numbers or numbers[0] < 1 or numbers[-1] > 256:
        raise OperatorError(f"--batches is {batches!r}.", "Give numbers from 1 to 256, as 1,2,4,8.")
    return numbers


def _told(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
