"""Bearer keys: who asks, and what they may.

A key is random and long, so its SHA-256 is as good as a password's slow hash, and is all that is written down. One key may be
restricted to models and creators (names, or prefixes with a `*` at their end) and to classes; an empty list restricts nothing.
Its tenant is the operator's word: a client that names another is refused rather than quietly served from a cache that it did not
mean. What a key may have at a time, and how often, is in `shares.py`.
"""

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from typing import Annotated, Final, Literal

import msgspec

from pipeline.errors import KeyUnknown, NotAllowed, OperatorError
from pipeline.limits import KEYS_MAX

ANY_TENANT: Final = "*"
"""A key of a proxy that knows its clients: it says in `x-tenant-id` for whom it asks."""

_Count = Annotated[int, msgspec.Meta(ge=1)]


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key as it is configured. `sha256` is in hex, of the whole key. Unset bounds are none."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
    tenant: str = ""
    models: tuple[str, ...] = ()
    creators: tuple[str, ...] = ()
    classes: tuple[Literal["interactive", "batch"], ...] = ()
    requests_per_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    in_flight_max: _Count | None = None
    in_flight_bytes_max: _Count | None = None
    queued_tokens_max: _Count | None = None
    reply_tokens_max: _Count | None = None
    personas: bool = False
    """Whether it may publish its creators' personas."""

    def check_class(self, klass: str) -> None:
        """Raise `NotAllowed` for a class that this key may not use."""
        if self.classes and klass not in self.classes:
            raise self._refusal(f"requests of the class {klass}", "x-request-class")

    def check_creator(self, creator: str) -> None:
        """Raise `NotAllowed` for a creator, as the client spells it, that this key may not ask for."""
        if not _listed(creator, self.creators):
            raise self._refusal(f"the creator {creator!r}", "x-creator-id")

    def check_model(self, model: str) -> None:
        """Raise `NotAllowed` for a model that this key may not use."""
        if not self.serves(model):
            raise self._refusal(f"the model {model!r}", "model")

    def serves(self, model: str) -> bool:
        """Whether it may use this model."""
        return _listed(model, self.models)

    def check_tokens(self, asked: int | None) -> None:
        """Raise `NotAllowed` for a longer reply than this key may ask for. One that asks for none gets what it may."""
        if self.reply_tokens_max is not None and asked is not None and asked > self.reply_tokens_max:
            raise self._refusal(f"replies of more than {self.reply_tokens_max} tokens", "max_tokens")

    def tenant_for(self, said: str) -> str:
        """The tenant of a request whose client says `said` (empty: nothing). Raises `NotAllowed` for another than its own."""
        if self.tenant == ANY_TENANT:
            return said
        if said and said != self.tenant:
            raise self._refusal("another tenant", "x-tenant-id")
        return self.tenant

    def _refusal(self, what: str, param: str) -> NotAllowed:
        return NotAllowed(f"The key {self.name!r} may not ask for {what}.", param=param)


class KeyUse(msgspec.Struct, frozen=True, array_like=True, order=True):
    """What a bearer key uses at one gateway: requests a second let in, requests and bytes in flight, prompt tokens queued."""

    rate: float = 0.0
    requests: int = 0
    bytes: int = 0
    tokens: int = 0


class Keyring:
    """The keys that are good now. Raises `OperatorError` for ones that cannot be told apart, and for too many."""

    def __init__(self, keys: Sequence[Key] = ()) -> None:
        for field in ("name", "sha256"):
            if twice := _repeated(getattr(key, field) for key in keys):
                raise OperatorError(f"Two of gateway.keys have the {field} {twice!r}.", "Take one of them out.")
        if len(keys) > KEYS_MAX:
            raise OperatorError(
                f"{len(keys)} keys are more than the {KEYS_MAX} that a gateway takes.", "Take some out."
            )
        self.keys = tuple(keys)
        self._hashes = [(bytes.fromhex(key.sha256), key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self.keys)

    def find(self, authorization: str | None) -> Key | None:
        """Whose the header `Authorization` is; None where no key is needed. Raises `KeyUnknown`.

        It is compared with every key, each in constant time: how long that takes says nothing of what is right of it.
        """
        if not self:
            return None
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise KeyUnknown("A key is needed: send it as 'Authorization: Bearer …'.")
        digest = hashlib.sha256(token.strip().encode()).digest()
        found: Key | None = None
        for known, key in self._hashes:
            if hmac.compare_digest(known, digest):
                found = key
        if found is None:
            raise KeyUnknown("This key is not known here.")
        return found


def hash_of(key: str) -> str:
    """What is written down of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def _listed(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(
        name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern for pattern in patterns
    )


def _repeated(values: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None
