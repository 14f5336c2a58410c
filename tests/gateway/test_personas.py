"""Personas over HTTP: published and shown by a key that may, and by no other."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from pipeline.bus import streams
from pipeline.bus.connection import Bus
from pipeline.bus.kv import Bucket
from pipeline.limits import PERSONA_BYTES_MAX
from pipeline.paths import JETSTREAM
from pipeline.protocol.personas import BUCKET, key_of, read
from tests.bus.support import api
from tests.gateway.stack import Stack, stack
from tests.gateway.test_identity import bearer, key
from tests.nats_server import NatsServer

pytestmark = pytest.mark.anyio

ADA = {"system": "You are Ada.", "template": {"tone": "dry"}}


@pytest.fixture
async def served(broker: NatsServer, anyio_backend: Any) -> AsyncIterator[Stack]:
    """A gateway with keys, and the bucket as it is declared."""
    keys = (key("editor", personas=True, creators=["ada"], tenant="acme"), key("reader"))
    async with await Bus.connect(broker.url, "test") as bus:
        await api(bus, f"STREAM.CREATE.KV_{BUCKET}", **streams.declared(JETSTREAM).stream(f"KV_{BUCKET}"))
        async with stack(broker.url, keys=keys) as started:
            yield started


async def put(served: Stack, body: Any, who: str = "editor", creator: str = "ada") -> httpx.Response:
    return await served.client.put(f"/v1/personas/{creator}", json=body, headers=bearer(who))


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def test_what_is_put_is_a_version_and_the_same_again_is_none(served: Stack) -> None:
    first = await put(served, ADA)
    assert first.status_code == 200
    version = first.json()["version"]
    assert first.json() == {"creator": "ada", "version": version, "new": True, **ADA}
    assert (await put(served, ADA)).json() == {**first.json(), "new": False}
    assert (await put(served, {"system": "You are Ada, and shy."})).json()["version"] > version
    shown = await served.client.get("/v1/personas/ada", headers=bearer("editor"))
    assert shown.json()["system"] == "You are Ada, and shy."
    entry = await Bucket(served.gateway.bus, BUCKET).read(key_of("ada", "acme"))
    assert entry is not None, "it is the key's tenant's"
    assert read(entry.value).tenant == "acme"


async def test_only_a_key_that_may_puts_personas_of_creators_that_are_its_own(served: Stack) -> None:
    assert code(await put(served, ADA, who="reader")) == (403, "permission_denied")
    assert code(await put(served, ADA, creator="bob")) == (403, "permission_denied")
    assert (await put(served, ADA, who="nobody")).status_code == 401


async def test_what_is_no_persona_is_refused_and_what_is_not_there_is_not_found(served: Stack) -> None:
    assert (await put(served, {"system": ""})).status_code == 400
    assert (await put(served, {"system": "x", "more": 1})).status_code == 400
    assert (await put(served, {"system": "x" * PERSONA_BYTES_MAX})).status_code == 413
    missing = await served.client.get("/v1/personas/ada", headers=bearer("editor"))
    assert code(missing) == (404, "persona_not_found")


async def test_without_keys_nobody_puts_one_over_http(broker: NatsServer) -> None:
    async with stack(broker.url) as started:
        assert code(await started.client.put("/v1/personas/ada", json=ADA)) == (403, "permission_denied")


async def test_a_broker_without_the_bucket_is_a_503(broker: NatsServer) -> None:
    async with stack(broker.url, keys=(key("editor", personas=True),)) as started:
        response = await started.client.put("/v1/personas/ada", json=ADA, headers=bearer("editor"))
        assert code(response) == (503, "broker_unavailable")
