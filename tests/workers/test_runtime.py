"""What a worker process refuses to start with, because requests would be lost or starve."""

import anyio
import msgspec
import pytest

from pipeline.bus import streams
from pipeline.bus.connection import Bus
from pipeline.config import Config, Conversations, Nats, Requests
from pipeline.errors import OperatorError
from pipeline.paths import JETSTREAM
from pipeline.protocol.subjects import CLASSES
from tests.nats_server import NatsServer
from workers.runtime import AGE_SPARE_S, check_ages, check_shards, check_turns, run_worker

DECLARED = streams.declared(JETSTREAM)


def with_longest(klass: str, longest_s: float) -> Config:
    """The defaults, but for the longest time that requests of one class may take."""
    return Config(requests=Requests(timeout_max_s={**Requests().timeout_max_s, klass: longest_s}))


def test_the_defaults_fit_the_declared_streams() -> None:
    check_shards(Config(), DECLARED)
    check_ages(Config(), DECLARED)
    check_turns(Config(), DECLARED)


def test_a_window_beyond_what_is_kept_of_a_conversation_is_the_operators_error() -> None:
    check_turns(Config(conversations=Conversations(window_turns=32, step_turns=32)), DECLARED)
    with pytest.raises(OperatorError, match="are 65 together, but of a conversation 64 turns are kept"):
        check_turns(Config(conversations=Conversations(window_turns=33, step_turns=32)), DECLARED)


@pytest.mark.parametrize("klass", CLASSES)
def test_a_deadline_that_may_lie_beyond_the_life_of_its_message_is_the_operators_error(klass: str) -> None:
    longest_s = streams.max_age_s(DECLARED, klass) - AGE_SPARE_S
    check_ages(with_longest(klass, longest_s), DECLARED)
    with pytest.raises(OperatorError, match=rf"timeout_max_s of class {klass} .* Set it to {longest_s:g} s at most"):
        check_ages(with_longest(klass, longest_s + 1.0), DECLARED)


def test_a_stream_that_keeps_requests_for_ever_takes_any_deadline() -> None:
    items = tuple(
        msgspec.structs.replace(item, config={name: value for name, value in item.config.items() if name != "max_age"})
        for item in DECLARED.items
    )
    check_ages(with_longest("batch", 1e6), streams.Declared(items))


def test_shards_that_nobody_would_pull_are_the_operators_error() -> None:
    with pytest.raises(OperatorError, match="Make the two equal"):
        check_shards(Config(requests=Requests(shards=8)), DECLARED)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("requests", "said"),
    [
        (Requests(timeout_max_s={"interactive": 1000.0, "batch": 600.0}), "timeout_max_s of class interactive"),
        (Requests(shards=8), "requests.shards is 8"),
    ],
)
async def test_a_worker_does_not_start_with_either(broker: NatsServer, requests: Requests, said: str) -> None:
    async with await Bus.connect(broker.url, "test") as bus:
        await streams.apply(bus, DECLARED)
    config, refused = Config(engine="simulated", nats=Nats(url=broker.url), requests=requests), list[str]()
    try:
        with anyio.move_on_after(10.0):
            await run_worker(config, "prefill", "prefill-1", None)
    except* OperatorError as errors:
        refused = [str(error) for error in errors.exceptions]
    assert len(refused) == 1
    assert said in refused[0]
