"""Whose voice a reply has: a creator's persona, published once and named by every request after that.

A persona lies in the KV bucket `personas`, in JSON, a version for each time that it was put. A version's number is its revision
in the bucket, so that it names one text for ever: a prompt that is rendered anew is rendered from the same version.

    $KV.personas.<creator>            the creator is a subject token
    $KV.personas.=t<hash>             of a tenant's creator: nothing of one tenant is ever read for another
"""

import base64
import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

from pipeline.errors import InvalidField
from pipeline.limits import PERSONA_BYTES_MAX
from pipeline.protocol.messages import Version

BUCKET: Final = "personas"


class Persona(msgspec.Struct, frozen=True, kw_only=True, tag="persona"):
    """What every prompt of a creator begins with.

    `creator` is its subject token, `tenant` whom it belongs to. `system` is the system prompt; `template` holds arguments of the
    chat template (`chat_template_kwargs`), which a request may override.
    """

    v: Version = 1
    creator: str
    tenant: str = ""
    system: Annotated[str, msgspec.Meta(min_length=1)]
    template: Mapping[str, Any] = {}


def key_of(creator: str, tenant: str) -> str:
    """Under which token the personas and conversations of a creator (a subject token) lie."""
    if not tenant:
        return creator
    digest = hashlib.sha256(f"{tenant}\0{creator}".encode("utf-8", "surrogatepass")).digest()
    return f"=t{base64.b32encode(digest).decode().rstrip('=').lower()}"


def write(persona: Persona) -> bytes:
    """As it lies in the bucket. Raises `InvalidField` where it is too large."""
    data = msgspec.json.encode(persona)
    if len(data) > PERSONA_BYTES_MAX:
        raise InvalidField(
            f"A persona of {len(data)} bytes is larger than {PERSONA_BYTES_MAX}: shorten its system prompt."
        )
    return data


def read(data: bytes) -> Persona:
    """What lies in the bucket. Raises `InvalidField` where it is no persona."""
    try:
        return _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidField(f"What the bucket holds is no persona: {error}.") from None


_decode: Final = msgspec.json.Decoder(Persona).decode
