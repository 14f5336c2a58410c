"""Who shares cached prefixes: nobody learns from a first token's time, or from `cached_tokens`, what another tenant has asked."""

import msgspec
import pytest

from pipeline.protocol.messages import Done
from tests.nats_server import NatsServer
from tests.workers.fleet import Fleet, config_for, fleet

pytestmark = pytest.mark.anyio


async def cached(made: Fleet, creator: str, tenant: str) -> int:
    reply = await made.ask(creator=creator, tenant=tenant)
    assert isinstance(reply.end, Done)
    return reply.end.usage.cached_tokens


@pytest.mark.parametrize(
    ("scope", "another_creator", "another_tenant"),
    [("creator", False, False), ("tenant", True, False), ("none", True, True)],
)
async def test_a_prefix_is_found_by_those_of_its_scope_and_by_nobody_else(
    broker: NatsServer, scope: str, another_creator: bool, another_tenant: bool
) -> None:
    config = config_for(broker.url)
    config = msgspec.structs.replace(config, requests=msgspec.structs.replace(config.requests, salt_scope=scope))
    async with fleet(config) as made:
        assert await cached(made, "ada", "acme") == 0
        assert await cached(made, "ada", "acme") > 0
        assert bool(await cached(made, "bob", "acme")) is another_creator
        assert bool(await cached(made, "ada", "other")) is another_tenant
