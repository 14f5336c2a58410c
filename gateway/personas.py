"""`PUT` and `GET /v1/personas/{creator}`: whose voice a creator's replies have, for those whose key may say so.

What is put becomes a version of the KV bucket `personas`; its owner loads it before the first request asks. Without keys nobody
may put one over HTTP: an open door is for asking, not for changing what others are answered.
"""

import asyncio
from typing import Any, Final

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.errors import refusal
from gateway.intake import text_of, too_large
from gateway.ops import Guard
from pipeline.bus import personas
from pipeline.bus.connection import Bus
from pipeline.bus.errors import ApiError, BusError
from pipeline.bus.kv import WRONG_REVISION
from pipeline.errors import (
    BrokerUnavailable,
    InvalidField,
    NotAllowed,
    PersonaNotFound,
    PublishedMeanwhile,
    ReplyError,
    TooSlow,
)
from pipeline.limits import PERSONA_BYTES_MAX
from pipeline.protocol import subjects
from pipeline.protocol.keys import Key
from pipeline.protocol.openai import PersonaBody, PersonaPublished
from pipeline.protocol.personas import Persona

BODY_S: Final = 10.0
"""For the body to come, which has 256 KB at most."""

_json = msgspec.json.Encoder().encode
_read = msgspec.json.Decoder(PersonaBody).decode


class Personas:
    """The endpoint."""

    def __init__(self, bus: Bus, guard: Guard) -> None:
        self._bus = bus
        self._guard = guard

    def routes(self) -> list[Route]:
        """One path, two methods."""
        return [Route("/v1/personas/{creator:path}", self.persona, methods=["GET", "PUT"])]

    async def persona(self, request: Request) -> Response:
        """Publish a persona, or show the last one."""
        try:
            body = await (self._put(request) if request.method == "PUT" else self._get(request))
        except ReplyError as error:
            return refusal(error.body())
        except BusError as error:
            return refusal(BrokerUnavailable(f"NATS did not do it: {error}.").body())
        return Response(_json(body), media_type="application/json")

    async def _put(self, request: Request) -> PersonaPublished:
        creator, tenant = self._whose(request)
        said = await _body(request)
        persona = Persona(creator=creator, tenant=tenant, system=said.system, template=said.template)
        try:
            version, new = await personas.put(self._bus, persona)
        except ApiError as error:
            if error.err_code != WRONG_REVISION:
                raise
            raise PublishedMeanwhile(
                f"Another version was published at the same time: {error}. Look at it, and try again."
            ) from None
        return PersonaPublished(creator=request.path_params["creator"], version=version, new=new, **_fields(said))

    async def _get(self, request: Request) -> PersonaPublished:
        creator, tenant = self._whose(request)
        found = await personas.get(self._bus, creator, tenant)
        if found is None:
            raise PersonaNotFound(f"There is no persona of {request.path_params['creator']!r}.")
        persona, version = found
        said = PersonaBody(system=persona.system, template=dict(persona.template))
        return PersonaPublished(creator=request.path_params["creator"], version=version, new=False, **_fields(said))

    def _whose(self, request: Request) -> tuple[str, str]:
        """(the creator's token, its tenant). Raises `KeyUnknown` and `NotAllowed`."""
        key, creator = self._guard.who(request), str(request.path_params["creator"])
        _check(key, creator)
        assert key is not None
        return subjects.token(creator), key.tenant_for(text_of(dict(request.scope["headers"]).get(b"x-tenant-id", b"")))


def _check(key: Key | None, creator: str) -> None:
    if key is None or not key.personas:
        name = (
            "Without keys nobody" if key is None else f"The key {key.name!r} may not, and only one with personas = true"
        )
        raise NotAllowed(
            f"{name} may see or publish personas over HTTP; `headrace persona` does both.", param="authorization"
        )
    key.check_creator(creator)


async def _body(request: Request) -> PersonaBody:
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                raw += piece
                if len(raw) > PERSONA_BYTES_MAX:
                    raise too_large(PERSONA_BYTES_MAX)
    except TimeoutError:
        raise TooSlow(f"The body has not come within {BODY_S:g} s.") from None
    except ClientDisconnect:
        raise InvalidField("The body broke off.") from None
    try:
        return _read(bytes(raw))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidField(f"The body is no persona: {error}. It has system, a text, and may have template.") from None


def _fields(said: PersonaBody) -> dict[str, Any]:
    return {"system": said.system, "template": said.template}
