"""A malformed request whose copy could not be kept has not ended yet: it is neither answered nor acked."""

import anyio
import pytest

from pipeline.bus import streams
from pipeline.paths import JETSTREAM
from pipeline.protocol.messages import Failed
from tests.nats_server import NatsServer
from tests.workers.fleet import Caller, backlog, config_for, fleet, until
from workers import dead_letters

pytestmark = pytest.mark.anyio


async def test_a_malformed_request_is_answered_only_once_its_copy_is_kept(
    broker: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "LETTER_TIMEOUT_S", 0.2)
    async with fleet(config_for(broker.url)) as made:
        await made.bus.request("$JS.API.STREAM.DELETE.DLQ", b"", 2.0)
        caller = Caller(made.bus, "bad")
        await caller.listen()
        await caller.publish("alice", model="gpt-5")
        await until(lambda: len(caller.holders) > 1)
        assert not caller.ended
        await streams.apply(made.bus, streams.declared(JETSTREAM))
        with anyio.fail_after(5.0):
            end = (await caller.reply()).end
        assert isinstance(end, Failed)
        assert end.error.code == "model_not_found"
        assert await backlog(made.bus, "DLQ") == 1
