"""Who asks, and what a key may: over HTTP."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
import openai
import pytest

from pipeline import outside
from pipeline.protocol.keys import Key, hash_of
from pipeline.telemetry.metrics import REGISTRY
from tests.gateway.stack import CHAT, HELLO, Stack, config_for, connection, serving, stack
from tests.gateway.test_bad_input import answered, refused
from tests.gateway.worker_double import MODEL, saying
from tests.nats_server import NatsServer

pytestmark = pytest.mark.anyio


def key(name: str, **fields: Any) -> Key:
    """A key whose secret is its name."""
    return msgspec.convert({"name": name, "sha256": hash_of(name), **fields}, Key)


def bearer(name: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}", **more}


KEYS = (
    key("free"),
    key("proxy", tenant="*"),
    key("bound", creators=["ada", "team-*"], classes=["interactive"], tenant="acme", reply_tokens_max=64),
    key("elsewhere", models=["another-*"]),
    key("one", in_flight_max=1),
    key("rated", requests_per_s=2.0),
    key("rare", requests_per_s=0.01),
)


@pytest.fixture(scope="module")
async def guarded(nats_url: str, anyio_backend: Any) -> AsyncIterator[Stack]:
    """A gateway with keys."""
    async with stack(nats_url, keys=KEYS) as started:
        yield started


@pytest.fixture
async def served(guarded: Stack) -> Stack:
    """The same, for one test."""
    await guarded.double.forget_all()
    guarded.double.script = saying("yes")
    return guarded


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic ZnJlZTo="}])
async def test_without_a_good_key_it_is_a_401_before_anything_is_read(served: Stack, headers: dict[str, str]) -> None:
    response = await served.client.post(CHAT, content=b"no JSON", headers=headers)
    refused(response, 401, "invalid_api_key", None)
    assert response.headers["www-authenticate"] == "Bearer"
    assert served.double.seen == 0


async def test_with_a_good_key_it_is_served(served: Stack) -> None:
    assert (await served.ask(headers=bearer("free"))).status_code == 200


@pytest.mark.parametrize(
    ("who", "headers", "fields", "param"),
    [
        ("bound", {"x-creator-id": "grace"}, {}, "x-creator-id"),
        ("bound", {}, {"user": "grace"}, "x-creator-id"),
        ("bound", {}, {}, "x-creator-id"),
        ("bound", {}, {"user": "ada", "metadata": {"persona": "grace"}}, "x-creator-id"),
        ("bound", {"x-creator-id": "ada", "x-request-class": "batch"}, {}, "x-request-class"),
        ("bound", {"x-creator-id": "ada"}, {"max_tokens": 65}, "max_tokens"),
        ("bound", {"x-creator-id": "ada"}, {"max_completion_tokens": 65}, "max_tokens"),
        ("bound", {"x-creator-id": "ada", "x-tenant-id": "other"}, {}, "x-tenant-id"),
        ("free", {"x-tenant-id": "acme"}, {}, "x-tenant-id"),
        ("elsewhere", {}, {}, "model"),
        ("elsewhere", {}, {"model": MODEL}, "model"),
    ],
)
async def test_what_a_key_may_not_is_a_403_that_names_it(
    served: Stack, who: str, headers: dict[str, str], fields: dict[str, Any], param: str
) -> None:
    response = await served.ask(headers=bearer(who, **headers), **fields)
    assert who in refused(response, 403, "permission_denied", param)
    assert served.double.seen == 0
    assert served.gateway.guests.shares.bytes == 0


async def test_the_tenant_of_a_request_is_its_keys(served: Stack) -> None:
    job = await answered(served, headers=bearer("bound", **{"x-creator-id": "team-7"}), tenant="another")
    assert job.tree["tenant"] == "acme"
    job = await answered(served, headers=bearer("proxy", **{"x-tenant-id": "theirs"}))
    assert job.tree["tenant"] == "theirs"
    assert "tenant" not in (await answered(served, headers=bearer("free"))).tree


@pytest.mark.parametrize(("fields", "becomes"), [({}, 64), ({"max_tokens": 7}, 7), ({"max_tokens": 64}, 64)])
async def test_a_bound_on_replies_holds_where_none_is_asked_for(
    served: Stack, fields: dict[str, Any], becomes: int
) -> None:
    job = await answered(served, headers=bearer("bound", **{"x-creator-id": "ada"}), **fields)
    assert job.tree["max_tokens"] == becomes


async def test_a_key_with_one_request_in_flight_is_refused_a_second_and_others_are_not(served: Stack) -> None:
    served.double.script = None
    async with connection(served, HELLO, "authorization: Bearer one\r\n") as inside:
        job = await served.double.next_job()
        response = await served.ask(headers=bearer("one"))
        assert (response.status_code, response.json()["error"]["code"]) == (429, "key_limit_exceeded")
        assert (int(response.headers["retry-after"]), response.headers["x-should-retry"]) == (2, "true")
        served.double.script = saying("yes")
        assert (await served.ask(headers=bearer("free"))).status_code == 200
        await job.claim()
        await job.done()
        await inside.rest()
    assert (await served.ask(headers=bearer("one"))).status_code == 200


async def test_a_rate_is_kept_and_a_retry_that_cannot_help_is_said_not_to(served: Stack) -> None:
    statuses = [(await served.ask(headers=bearer("rated"))).status_code for _ in range(4)]
    assert statuses[:2] == [200, 200]
    assert 429 in statuses
    assert (await served.ask(headers=bearer("rare"))).status_code == 200
    response = await served.ask(headers=bearer("rare"))
    assert response.json()["error"]["code"] == "rate_limit_exceeded"
    assert response.headers["x-should-retry"] == "false"
    assert 90 < int(response.headers["retry-after"]) <= 100


@pytest.mark.parametrize(
    ("path", "status"),
    [("/health", 200), ("/ready", 200), ("/metrics", 200), ("/v1/models", 401), ("/v1/routes/ada", 401)],
)
async def test_operators_pages_are_open_or_not(served: Stack, path: str, status: int) -> None:
    assert (await served.client.get(path)).status_code == status
    assert (await served.client.get(path, headers=bearer("free"))).status_code == 200


async def test_a_key_sees_the_models_that_it_may_use(served: Stack) -> None:
    for who, models in (("free", [MODEL]), ("elsewhere", [])):
        listed = (await served.client.get("/v1/models", headers=bearer(who))).json()["data"]
        assert [card["id"] for card in listed] == models
    assert (await served.client.get(f"/v1/models/{MODEL}", headers=bearer("elsewhere"))).status_code == 404


async def test_a_key_sees_the_routes_of_the_creators_that_it_may_ask_for(served: Stack) -> None:
    for creator, status in (("ada", 200), ("team-7", 200), ("grace", 403)):
        assert (await served.client.get(f"/v1/routes/{creator}", headers=bearer("bound"))).status_code == status


async def test_the_openai_sdk_knows_what_it_is_refused_for_and_retries_only_what_can_help(served: Stack) -> None:
    async def ask(name: str) -> None:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=name) as sdk:
            await sdk.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello"}])

    with pytest.raises(openai.AuthenticationError) as unknown:
        await ask("wrong")
    assert unknown.value.code == "invalid_api_key"
    with pytest.raises(openai.PermissionDeniedError):
        await ask("elsewhere")
    await served.ask(headers=bearer("rare"))  # the one turn that there is
    before = refusals("rate_limit_exceeded")
    with pytest.raises(openai.RateLimitError):
        await ask("rare")
    assert refusals("rate_limit_exceeded") == before + 1, "it has not tried again"
    for _ in range(3):
        await ask("rated")  # it has come back when it was told to
    assert refusals("rate_limit_exceeded") > before + 1


def refusals(reason: str) -> float:
    """How many requests have been refused for this."""
    return REGISTRY.get_sample_value("headrace_refusals_total", {"reason": reason}) or 0.0


async def test_pages_can_be_opened_and_closed(broker: NatsServer) -> None:
    async with stack(broker.url, keys=KEYS, open_pages=("/v1/routes",)) as served:
        assert (await served.client.get("/metrics")).status_code == 401
        assert (await served.client.get("/v1/routes/ada")).status_code == 200


def entries(*names: str) -> str:
    return "\n".join(f'[[gateway.keys]]\nname = "{name}"\nsha256 = "{hash_of(name)}"' for name in names)


async def test_a_changed_file_is_followed_and_a_broken_one_is_not(broker: NatsServer, tmp_path: Path) -> None:
    source = tmp_path / "headrace.toml"
    source.write_text(entries("old"), "utf-8")
    async with stack(broker.url, source=source, keys=(key("old"),)) as served:
        served.double.script = saying("yes")
        source.write_text(entries("old", "new"), "utf-8")
        await until(served, "new", 200)
        source.write_text(entries("new"), "utf-8")
        await until(served, "old", 401)
        for broken in ("", "[gateway", entries("new", "new"), '[[gateway.keys]]\nname = "x"'):
            source.write_text(broken, "utf-8")
            await served.gateway.guests.look(source)
            assert (await served.ask(headers=bearer("new"))).status_code == 200
            assert (await served.ask()).status_code == 401
        source.unlink()
        await served.gateway.guests.look(source)
        assert (await served.ask(headers=bearer("new"))).status_code == 200


async def until(served: Stack, who: str, status: int) -> httpx.Response:
    """The response of this status, within a few looks at the file."""
    with anyio.fail_after(5):
        while (response := await served.ask(headers=bearer(who))).status_code != status:
            await anyio.sleep(0.05)
    return response


async def test_two_gateways_give_a_key_its_bound_together_or_an_equal_part_each(broker: NatsServer) -> None:
    four = key("four", in_flight_max=4)
    async with (
        stack(broker.url, keys=(four,)) as first,
        serving(config_for(broker.url, keys=(four,)), first.double) as second,
        anyio.create_task_group() as tasks,
    ):
        for number in range(3):
            tasks.start_soon(first.ask, None, bearer("four", **{"x-creator-id": f"c{number}"}))
        jobs = [await first.double.next_job() for _ in range(3)]
        with anyio.fail_after(5):
            while said_of(second, first.gateway.process) != 3:
                await anyio.sleep(0.02)
        for number in range(2):
            tasks.start_soon(second.ask, None, bearer("four", **{"x-creator-id": f"d{number}"}))
        jobs += [await first.double.next_job() for _ in range(2)]
        assert (await second.ask(headers=bearer("four"))).status_code == 429
        for job in jobs:
            await job.claim()
            await job.done()


def said_of(served: Stack, other: str) -> int:
    """What this gateway has heard that the key has in flight at the other."""
    peer = served.gateway.presences.get("gateway", other, outside.monotonic_s())
    return peer.keys["four"].requests if peer and "four" in peer.keys else 0
