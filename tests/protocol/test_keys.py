"""Whose a key is, and what it may."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pipeline.errors import KeyUnknown, NotAllowed, OperatorError
from pipeline.limits import KEYS_MAX
from pipeline.protocol.keys import ANY_TENANT, Key, Keyring, hash_of


def key(name: str = "a", secret: str = "secret", **fields: Any) -> Key:
    return msgspec.convert({"name": name, "sha256": hash_of(secret), **fields}, Key)


def test_no_key_is_needed_where_none_is_configured() -> None:
    assert Keyring().find(None) is None
    assert Keyring().find("Bearer whatever") is None


@pytest.mark.parametrize("said", ["Bearer s1", "bearer s1", "BEARER  s1 "])
def test_a_key_is_known_by_its_hash(said: str) -> None:
    ring = Keyring([key("a", "s1"), key("b", "s2")])
    found = ring.find(said)
    assert found is not None
    assert found.name == "a"


@pytest.mark.parametrize(
    "said", [None, "", "s1", "Bearer", "Bearer ", "Basic s1", "Bearer s3", "Bearer s1x", "Bearer \xff"]
)
def test_anything_else_is_a_401_that_tells_nothing(said: str | None) -> None:
    ring = Keyring([key("a", "s1"), key("b", "s2")])
    with pytest.raises(KeyUnknown) as refused:
        ring.find(said)
    body = refused.value.body()
    assert (body.status, body.code, body.retryable) == (401, "invalid_api_key", False)
    assert "s1" not in body.message


def test_the_hash_itself_is_no_key() -> None:
    with pytest.raises(KeyUnknown):
        Keyring([key("a", "s1")]).find(f"Bearer {hash_of('s1')}")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([key("a", "s1"), key("a", "s2")], "have the name 'a'"),
        ([key("a", "s1"), key("b", "s1")], "have the sha256"),
        ([key(f"k{number}", f"s{number}") for number in range(KEYS_MAX + 1)], "are more than"),
    ],
)
def test_keys_that_cannot_be_told_apart_or_are_too_many_are_an_operators_error(keys: list[Key], words: str) -> None:
    with pytest.raises(OperatorError, match=words):
        Keyring(keys)


@pytest.mark.parametrize(
    "fields",
    [
        {"sha256": "00"},
        {"sha256": "A" * 64},
        {"name": ""},
        {"name": "a b"},
        {"requests_per_s": 0},
        {"in_flight_max": 0},
        {"classes": ["urgent"]},
        {"admin": True},
    ],
)
def test_an_entry_that_means_nothing_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        key(**{"name": "a", **fields})


BOUND = key(models=["m1", "big-*"], creators=["ada", "team-*"], classes=["batch"], reply_tokens_max=100, tenant="acme")


@pytest.mark.parametrize(
    "allowed",
    [
        lambda: BOUND.check_model("m1"),
        lambda: BOUND.check_model("big-"),
        lambda: BOUND.check_model("big-7"),
        lambda: BOUND.check_creator("ada"),
        lambda: BOUND.check_creator("team-7"),
        lambda: BOUND.check_class("batch"),
        lambda: BOUND.check_tokens(100),
        lambda: BOUND.check_tokens(None),
        lambda: key().check_model("any"),
        lambda: key().check_creator("any"),
        lambda: key().check_class("interactive"),
        lambda: key().check_tokens(10**9),
    ],
)
def test_what_a_key_names_it_may_and_an_unset_list_restricts_nothing(allowed: Callable[[], None]) -> None:
    allowed()


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (lambda: BOUND.check_model("m2"), "model"),
        (lambda: BOUND.check_model("m12"), "model"),
        (lambda: BOUND.check_creator("Ada"), "x-creator-id"),
        (lambda: BOUND.check_creator("my-team-7"), "x-creator-id"),
        (lambda: BOUND.check_class("interactive"), "x-request-class"),
        (lambda: BOUND.check_tokens(101), "max_tokens"),
        (lambda: BOUND.tenant_for("other"), "x-tenant-id"),
        (lambda: key().tenant_for("other"), "x-tenant-id"),
    ],
)
def test_anything_else_is_a_403_that_names_the_field(asked: Callable[[], None], param: str) -> None:
    with pytest.raises(NotAllowed) as refused:
        asked()
    body = refused.value.body()
    assert (body.status, body.code, body.param, body.retryable) == (403, "permission_denied", param, False)


@pytest.mark.parametrize(
    ("tenant", "said", "becomes"),
    [("acme", "", "acme"), ("acme", "acme", "acme"), ("", "", ""), (ANY_TENANT, "x", "x"), (ANY_TENANT, "", "")],
)
def test_the_tenant_is_the_keys_and_a_proxys_key_may_name_one(tenant: str, said: str, becomes: str) -> None:
    assert key(tenant=tenant).tenant_for(said) == becomes
