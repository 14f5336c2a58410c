"""How a process shows the broker who it is, and makes sure of the broker: NKeys, TLS, several addresses."""

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.bus.access import Nkey, access_of
from pipeline.bus.connection import Bus
from pipeline.config import Nats
from pipeline.errors import OperatorError
from tests.deployment.authority import Certificate, certificate
from tests.nats_server import NatsServer
from tests.ports import free_port

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


def server(folder: Path, config: str) -> NatsServer:
    (path := folder / "nats.conf").write_text(config, "utf-8")
    return NatsServer(folder / "nats", path)


@pytest.fixture
def files(tmp_path: Path) -> Certificate:
    return certificate(tmp_path / "tls")


@pytest.fixture
def mutual(tmp_path: Path, files: Certificate) -> Iterator[NatsServer]:
    """A server that wants a certificate of its clients."""
    tls = f'cert_file: "{files.cert}", key_file: "{files.key}", ca_file: "{files.ca}", verify: true'
    started = server(tmp_path, f"tls {{ {tls} }}\n").start()
    yield started
    started.kill9()


def test_a_seed_is_read_as_it_was_spelt() -> None:
    key = Nkey.fresh()
    assert (key.seed[:2], key.public[0]) == ("SU", "U")
    assert (len(key.seed), len(key.public)) == (58, 56)
    again = Nkey.of_seed(key.seed)
    assert (again.seed, again.public) == (key.seed, key.public)
    assert again.sign("nonce") == key.sign("nonce")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda key: key.seed[:9] + ("A" if key.seed[9] != "A" else "B") + key.seed[10:],
        lambda key: key.public,
        lambda key: "SU",
        lambda key: "not base32!",
        lambda key: "SAAPN4W3EG6KCJGUQTKTJ5GSB5NHK5CHAJL4DBGFUM3HHROI4XUEP4OBK4",
    ],
    ids=["a slip of the pen", "the public key", "cut short", "something else", "an account's"],
)
def test_what_is_no_seed_of_a_user_is_refused_by_name(tmp_path: Path, wrong: Any) -> None:
    (seed := tmp_path / "seed").write_text(wrong(Nkey.fresh()), "ascii")
    with pytest.raises(OperatorError, match=r"nats\.nkey_seed, .*seed, cannot be read"):
        access_of(Nats(nkey_seed=str(seed)))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"url": " , "}, "nats.url is empty"),
        (
            {"url": "nats://h, wss://me:secret@h:443"},
            "nats.url names wss://h:443, which is no way to reach NATS that we speak",
        ),
        ({"ca": "x.pem"}, "asks for no TLS"),
        ({"url": "tls://h", "cert": "x.pem"}, "only one is set"),
        ({"url": "tls://h", "ca": "/nowhere/ca.pem"}, "nats.ca, /nowhere/ca.pem, cannot be read: No such file"),
        ({"url": "tls://h", "cert": "/nowhere/c", "key": "/nowhere/k"}, "nats.cert, /nowhere/c, cannot be read"),
        ({"nkey_seed": "/nowhere/seed"}, "nats.nkey_seed, /nowhere/seed, cannot be read"),
    ],
)
def test_settings_that_cannot_work_are_named(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OperatorError, match=sentence):
        access_of(Nats(**settings))


def test_a_file_that_is_no_certificate_is_named(tmp_path: Path) -> None:
    (path := tmp_path / "ca.pem").write_text("nothing of the kind", "utf-8")
    with pytest.raises(OperatorError, match=r"nats\.ca"):
        access_of(Nats(url="tls://h", ca=str(path)))


def test_only_tls_1_3_is_spoken(files: Certificate) -> None:
    context = access_of(Nats(url="tls://h", ca=str(files.ca))).tls
    assert context is not None
    assert (context.minimum_version, context.verify_mode) == (ssl.TLSVersion.TLSv1_3, ssl.CERT_REQUIRED)
    assert context.check_hostname


async def test_a_server_that_wants_a_certificate_gets_ours(mutual: NatsServer, files: Certificate) -> None:
    ours = Nats(url=f"tls://127.0.0.1:{mutual.port}", ca=str(files.ca), cert=str(files.cert), key=str(files.key))
    async with await Bus.connect(ours, "test") as bus:
        await bus.barrier()
    without = Nats(url=ours.url, ca=ours.ca, connect_timeout_s=1.0)
    with pytest.raises(OperatorError, match="Cannot reach NATS"):
        await Bus.connect(without, "test")


async def test_a_certificate_for_another_host_is_not_believed(tmp_path: Path) -> None:
    other = certificate(tmp_path / "other", "elsewhere.example")
    started = server(tmp_path, f'tls {{ cert_file: "{other.cert}", key_file: "{other.key}" }}\n').start()
    try:
        here = Nats(url=f"tls://127.0.0.1:{started.port}", ca=str(other.ca), connect_timeout_s=1.0)
        with pytest.raises(OperatorError, match="certificate verify failed"):
            await Bus.connect(here, "test")
    finally:
        started.kill9()


async def test_a_server_without_tls_is_not_talked_to_where_tls_is_asked_for(tmp_path: Path, files: Certificate) -> None:
    started = server(tmp_path, "max_payload: 1MB\n").start()
    try:
        here = Nats(url=f"tls://127.0.0.1:{started.port}", ca=str(files.ca), connect_timeout_s=1.0)
        with pytest.raises(OperatorError, match="offers no TLS"):
            await Bus.connect(here, "test")
    finally:
        started.kill9()


async def test_of_several_addresses_one_that_answers_is_enough(tmp_path: Path) -> None:
    started = server(tmp_path, "max_payload: 1MB\n").start()
    try:
        urls = f"nats://127.0.0.1:{free_port()}, {started.url},nats://127.0.0.1:{free_port()}"
        async with await Bus.connect(urls, "test") as bus:
            await bus.barrier()
    finally:
        started.kill9()
    with pytest.raises(OperatorError, match=r"Cannot reach NATS at nats://127\.0\.0\.1:\d+, nats://127\.0\.0\.1:\d+, "):
        await Bus.connect(urls, "test", connect_timeout_s=0.5)
