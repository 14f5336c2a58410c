"""A bound for the first token: who is refused for it, when, and what that leaves behind."""

from typing import Any

import anyio
import msgspec
import pytest

from pipeline.config import Both, Config
from pipeline.protocol.messages import Done, Failed
from tests.nats_server import NatsServer
from tests.workers.fleet import Caller, Fleet, config_for, fleet, nothing_left, until

pytestmark = pytest.mark.anyio

LONG = [{"role": "user", "content": "word " * 400}]
"""More tokens than go directly to decode."""


def config(url: str, first_token_s: float, **simulated: Any) -> Config:
    made = config_for(url, **simulated)
    requests = msgspec.structs.replace(made.requests, first_token_s=first_token_s)
    model = msgspec.structs.replace(made.model, max_model_len=1024)
    return msgspec.structs.replace(made, requests=requests, model=model, both=Both(slots=16, prefill_slots=2))


async def published(made: Fleet, count: int, **fields: Any) -> list[Caller]:
    callers = [Caller(made.bus, f"r{number}") for number in range(count)]
    for number, caller in enumerate(callers):
        await caller.listen()
        await caller.publish(f"creator-{number}", ignore_eos=True, **fields)
    return callers


async def ends(callers: list[Caller]) -> list[Done | Failed]:
    with anyio.fail_after(20.0):
        return [(await caller.reply()).end for caller in callers]


def codes(ended: list[Done | Failed]) -> list[str]:
    return ["whole" if isinstance(end, Done) else end.error.code for end in ended]


async def test_under_more_than_it_can_do_a_fleet_serves_some_in_time_and_refuses_the_others(broker: NatsServer) -> None:
    """A queue that is served in order would have all of them late in the end."""
    slow = config(broker.url, 0.6, prefill_tokens_per_s=2_000.0, step_s=0.005)  # 65 ms for each prompt: 9 in 0.6 s
    async with fleet(slow, prefill=0, decode=0, both=1) as made:
        callers = await published(made, 40, max_tokens=4)
        ended = await ends(callers)
        said = codes(ended)
        assert set(said) == {"whole", "first_token_late"}
        assert 1 <= said.count("whole") < 40
        refused = next(end for end in ended if isinstance(end, Failed))
        assert (refused.error.status, refused.error.retryable) == (503, True)
        assert "requests.first_token_s" in refused.error.message
        assert not any(caller.frames for caller, end in zip(callers, ended, strict=True) if isinstance(end, Failed))
        await until(lambda: made.prefill("both-1").slots.busy == 0)
        await nothing_left(made.bus)


@pytest.mark.parametrize(("split", "both"), [(0, 1), (1, 0)], ids=["both", "split"])
async def test_a_reply_that_does_not_begin_in_time_is_given_up_in_the_engine(
    broker: NatsServer, split: int, both: int
) -> None:
    async with fleet(config(broker.url, 0.5), prefill=split, decode=split, both=both) as made:
        for running in made.workers.values():
            running.engine.pause()
        began_s = anyio.current_time()
        assert codes(await ends(await published(made, 1))) == ["first_token_late"]
        assert 0.4 < anyio.current_time() - began_s < 5.0
        for running in made.workers.values():
            running.engine.resume()
        await until(lambda: all(running.engine.usage().running == 0 for running in made.workers.values()))
        await nothing_left(made.bus)


async def test_a_reply_that_has_begun_may_take_its_time(broker: NatsServer) -> None:
    async with fleet(config(broker.url, 0.5, step_s=0.02)) as made:
        assert codes(await ends(await published(made, 1, max_tokens=60))) == ["whole"]


async def test_batch_has_no_such_bound(broker: NatsServer) -> None:
    slow = config(broker.url, 0.1, prefill_overhead_s=0.3)
    async with fleet(slow) as made:
        assert codes(await ends(await published(made, 1, klass="batch", max_tokens=4))) == ["whole"]


async def test_what_goes_on_elsewhere_after_its_first_tokens_is_not_late(broker: NatsServer) -> None:
    async with fleet(config(broker.url, 0.5, step_s=0.02), decode=2) as made:
        (caller,) = await published(made, 1, max_tokens=60)
        await until(lambda: caller.frames > 2)
        await anyio.sleep(0.5)
        made.kill(next(name for name in ("decode-1", "decode-2") if made.decode(name).under_way))
        assert codes(await ends([caller])) == ["whole"]


async def test_only_what_is_read_here_counts_as_before_others(broker: NatsServer) -> None:
    """Not a short prompt, which decode computes elsewhere, and not batch, which lets others go first."""
    slow = config(broker.url, 30.0, prefill_tokens_per_s=400.0)
    direct = msgspec.structs.replace(slow.requests, direct_tokens_max=256)
    async with fleet(msgspec.structs.replace(slow, requests=direct)) as made:
        prefill, engines = made.prefill(), [running.engine for running in made.workers.values()]

        async def asks(name: str, klass: str = "interactive", **fields: Any) -> Caller:
            caller = Caller(made.bus, name)
            await caller.listen()
            await caller.publish(name, klass, max_tokens=2, **fields)
            return caller

        def expected_s() -> float:
            return prefill.desk.promptness.expected_s(400, prefill.desk.clock())

        assert codes(await ends([await asks("first", messages=LONG)])) == ["whole"]
        alone_s = expected_s()
        assert alone_s > 0.0
        for engine in engines:
            engine.pause()
        callers = [await asks("short"), await asks("batch", "batch", messages=LONG)]
        await until(lambda: all(engine.usage().running for engine in engines))
        assert expected_s() == alone_s
        callers.append(await asks("long", messages=LONG))
        await until(lambda: expected_s() > alone_s)
        for engine in engines:
            engine.resume()
        assert codes(await ends(callers)) == ["whole"] * 3
