"""Each fault is found by its name, with the remedy that mends it, and a sound pipeline has none."""

from typing import Any

import msgspec
import pytest

from pipeline.config import Config, LMCache, Requests
from pipeline.doctor.facts import Consumer, Facts, Heard, Machine, Package, Server, Store
from pipeline.doctor.findings import SKEW_MAX_S, Finding, findings
from pipeline.protocol.messages import Account, Presence

GIB = 2**30


def peer(role: Any, name: str, **fields: Any) -> Heard:
    ahead_s = fields.pop("ahead_s", 0.0)
    alike = {"model": "m", "fingerprint": "f", "block_size": 32, "max_model_len": 4096, "ready": True}
    return Heard(presence=Presence(role=role, id=name, epoch="1", **{**alike, **fields}), ahead_s=ahead_s)


def consumer(**fields: Any) -> Consumer:
    sound = {"pending": 0, "ack_pending": 0, "ack_pending_max": 100, "pulls": 4}
    return Consumer(stream="REQUESTS_interactive", name="s0", **{**sound, **fields})


def account(**fields: Any) -> Account:
    sound = dict.fromkeys(
        ("granted", "released", "returned", "expired", "refused", "waiting", "granted_now", "granted_blocks",
         "consumed_now", "consumed_blocks", "engine_blocks", "preemptions", "disagreements"), 0,
    )  # fmt: skip
    return Account(**{"decode": "d1", "epoch": "1", "blocks": 100, "free": 100, "reserve": 10, **sound, **fields})


SOUND = Facts(
    server=Server(version="2.15.1", max_payload=1_048_576),
    differences=(),
    shards={"interactive": 16, "batch": 16},
    heard=(peer("gateway", "g1", model=""), peer("prefill", "p1"), peer("prefill", "p2"), peer("decode", "d1")),
    consumers=(consumer(), consumer(pending=3, ack_pending=8)),
    keeper_pulls=1,
    accounts={"d1": account()},
    store=Store(url="http://127.0.0.1:5656"),
    packages=(Package(name="nats-py", wanted="nats-py<2.17", found="2.16.0", fits=True),),
    machine=Machine(memory=24 * GIB, memory_free=8 * GIB, shm_free=GIB),
)


def unsound(facts: Facts, config: Config | None = None) -> list[Finding]:
    return [finding for finding in findings(config or Config(), facts) if finding.level != "ok"]


def but(**fields: Any) -> Facts:
    return msgspec.structs.replace(SOUND, **fields)


def test_a_sound_pipeline_has_no_finding_but_what_was_looked_at() -> None:
    assert unsound(SOUND) == []
    assert {finding.what for finding in findings(Config(), SOUND)} >= {"nats", "streams", "prefill", "decode", "clock"}


@pytest.mark.parametrize(
    ("what", "facts", "said", "remedy"),
    [
        ("nats", but(nats_error="Cannot reach NATS.", server=None), "Cannot reach", "correct nats.url"),
        ("nats", but(server=Server(version="2.10.4", max_payload=1_048_576)), "2.10.4", "Use 2.12 or later"),
        ("jetstream", but(server=Server(version="2.15.1", max_payload=1, jetstream_error="no answer")), "no answer", "JetStream"),
        ("payload", but(server=Server(version="2.15.1", max_payload=65_536)), "65,536", "max_payload"),
        ("streams", but(differences=("A.", "B.", "C.", "D.")), "A. B. C. And 1 more", "streams apply"),
        ("shards", but(shards={"interactive": 32}), "32 shards", "requests.shards = 32"),
        ("prefill", but(heard=(peer("decode", "d1"),)), "No prefill worker says", "headrace worker prefill"),
        ("decode", but(heard=(peer("prefill", "p1"), peer("decode", "d1", ready=False))), "d1 starts", "Wait"),
        ("decode", but(heard=(peer("prefill", "p1"), peer("decode", "d1", paused=True))), "paused: d1", "headrace resume d1"),
        ("keeper", but(keeper_pulls=0), "No keeper", "headrace keeper"),
        ("keeper", but(keeper_pulls=None), "cannot be looked at", "streams apply"),
        ("model", but(heard=(peer("prefill", "p1"), peer("decode", "d1", model="n"))), "m: p1; n: d1", "model.served_name"),
        ("fingerprint", but(heard=(peer("prefill", "p1", fingerprint="g"), peer("decode", "d1"))), "f: d1; g: p1", "chunk_size"),
        ("block size", but(heard=(peer("prefill", "p1"), peer("decode", "d1", block_size=16))), "16: d1; 32: p1", "block_size"),
        ("context", but(heard=(peer("prefill", "p1"), peer("decode", "d1", max_model_len=1))), "1: d1", "max_model_len"),
        ("clock", but(heard=(peer("prefill", "p1"), peer("decode", "d1", ahead_s=-3.0))), "d1 is 3.0 s behind", "NTP"),
        ("queue", but(consumers=(consumer(ack_pending=95),)), "95 of 100", "max_ack_pending"),
        ("queue", but(consumers=(consumer(pending=7, pulls=0),)), "7 requests wait", "headrace shards"),
        ("ledger", but(accounts={"d1": None}), "does not open its books", "headrace credits"),
        ("ledger", but(accounts={"d1": account(preemptions=2)}), "2 preemptions", "past the credits"),
        ("dlq", but(dead_letters=4), "4 dead letters", "headrace dlq list"),
        ("gateway", but(gateway_error="No gateway answers at x."), "No gateway answers", "headrace gateway"),
        ("lmcache", but(store=Store(url="u", error="refused")), "at u: refused", "lmcache.http_port"),
        ("packages", but(packages=(Package(name="a", wanted="a<2", found="3", fits=False),)), "a is 3 here", "pip install 'a<2'"),
        ("packages", but(packages=(Package(name="a", wanted="a<2", found="", fits=False),)), "not installed", "a<2"),
        ("memory", but(machine=Machine(memory=100 * GIB, memory_free=GIB, shm_free=GIB)), "1.0 GiB of 100.0", "kv_cache_bytes"),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_its_remedy(what: str, facts: Facts, said: str, remedy: str) -> None:
    found = unsound(facts)
    assert [finding.what for finding in found] == [what], "this fault and no other"
    assert said in found[0].said
    assert remedy in found[0].remedy


def test_chunks_that_are_no_multiple_of_a_block_are_found_in_the_configuration() -> None:
    [found] = unsound(SOUND, Config(lmcache=LMCache(chunk_size=48)))
    assert (found.what, found.level) == ("chunks", "wrong")


def test_clocks_may_differ_by_less_than_a_first_token_takes() -> None:
    heard = (peer("prefill", "p1", ahead_s=SKEW_MAX_S), peer("decode", "d1", ahead_s=-SKEW_MAX_S))
    assert unsound(but(heard=heard)) == []


def test_a_class_with_shards_as_configured_is_not_blamed_for_another() -> None:
    config = Config(requests=Requests(shards=32))
    found = unsound(but(shards={"interactive": 16, "batch": 32}), config)
    assert ["interactive" in finding.said for finding in found] == [True]


def test_what_is_wrong_comes_first() -> None:
    levels = [finding.level for finding in findings(Config(), but(keeper_pulls=0))]
    assert levels[0] == "wrong"
    assert set(levels[1:]) == {"ok"}
