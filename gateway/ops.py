"""What operators and clients ask beside chat: is it alive, does it serve, what does it serve, how does it do."""

import time
from collections.abc import Awaitable, Callable, Collection

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.errors import refusal
from gateway.explain import explain
from gateway.fleet import Fleet, Lookout
from gateway.keys import Guests
from gateway.openai import model_card
from gateway.playground import playground
from gateway.routing import Routing
from pipeline import asyncapi, openapi, outside
from pipeline.errors import InvalidField, KeyUnknown, ModelNotFound, NotAllowed
from pipeline.protocol.keys import Key
from pipeline.protocol.openai import ModelList, Readiness
from pipeline.protocol.presence import Presences
from pipeline.telemetry import metrics

_json = msgspec.json.Encoder().encode


def readiness(fleet: Fleet, *, connected: bool, draining: bool) -> Readiness:
    """Whether a request sent now would be served."""
    reasons = [] if connected else ["NATS is not connected"]
    reasons += fleet.lacks
    if draining:
        reasons.append("the gateway is stopping")
    return Readiness(ready=not reasons, reasons=reasons, prefill=fleet.prefill, decode=fleet.decode)


Page = Callable[[Request], Awaitable[Response]]


class Guard:
    """Which pages need a key, where there are keys. `/health` and `/ready` never do: who asks them has none to give."""

    def __init__(self, guests: Guests, open_pages: Collection[str]) -> None:
        self._guests = guests
        self._open = open_pages

    def who(self, request: Request) -> Key | None:
        """Whose key a request has. Raises `KeyUnknown`."""
        return self._guests.who(dict(request.scope["headers"]))

    def reader(self, request: Request, path: str) -> Key | None:
        """Whose key a page is read with; None where all may read it. Raises `KeyUnknown`."""
        return None if path in self._open else self.who(request)

    def over(self, path: str, page: Page) -> Page:
        """The page, for those who have a key, unless the operator has opened it."""
        if path in self._open:
            return page

        async def guarded(request: Request) -> Response:
            try:
                self.who(request)
            except KeyUnknown as error:
                return refusal(error.body())
            return await page(request)

        return guarded


class Ops:
    """The endpoints. `connected` and `draining` are asked at each request."""

    def __init__(
        self,
        lookout: Lookout,
        routing: Routing,
        presences: Presences,
        guard: Guard,
        connected: Callable[[], bool],
        draining: Callable[[], bool],
    ) -> None:
        self._lookout = lookout
        self._routing = routing
        self._presences = presences
        self._guard = guard
        self._connected = connected
        self._draining = draining
        self._since = int(time.time())

    def routes(self) -> list[Route]:
        """Paths are vLLM's."""
        return [
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/", playground),
            Route("/openapi.json", self.openapi),
            Route("/asyncapi.json", self.asyncapi),
            Route("/metrics", self._guard.over("/metrics", self.metrics)),
            Route("/v1/models", self._guard.over("/v1/models", self.models)),
            Route("/v1/models/{model:path}", self._guard.over("/v1/models", self.model)),
            Route("/v1/routes/{creator:path}", self._guard.over("/v1/routes", self.route)),
        ]

    async def health(self, request: Request) -> Response:
        """The process answers."""
        return Response()

    async def ready(self, request: Request) -> Response:
        """The pipeline answers."""
        state = readiness(self._lookout.fleet(), connected=self._connected(), draining=self._draining())
        return _json_response(state, 200 if state.ready else 503)

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text."""
        body, content_type = metrics.render()
        return Response(body, headers={"content-type": content_type})

    async def openapi(self, request: Request) -> Response:
        """What is served here."""
        return Response(openapi.document(), media_type="application/json")

    async def asyncapi(self, request: Request) -> Response:
        """What producers may say over NATS."""
        return Response(asyncapi.document(), media_type="application/json")

    async def models(self, request: Request) -> Response:
        """What ready workers serve, as far as the key may use it."""
        served = self._served(request)
        cards = [model_card(model, length, self._since) for model, length in served.items()]
        return _json_response(ModelList(data=cards))

    async def model(self, request: Request) -> Response:
        """One of them."""
        asked = request.path_params["model"]
        served = self._served(request)
        if asked not in served:
            return refusal(ModelNotFound(f"The model {asked!r} is not served here.", param="model").body())
        return _json_response(model_card(asked, served[asked], self._since))

    def _served(self, request: Request) -> dict[str, int]:
        key = self._guard.who(request)
        models = self._lookout.fleet().models
        return {model: length for model, length in models.items() if key is None or key.serves(model)}

    async def route(self, request: Request) -> Response:
        """Where a creator's requests go, and why: for those who may ask for them."""
        creator, key = request.path_params["creator"], self._guard.reader(request, "/v1/routes")
        try:
            if key is not None:
                key.check_creator(creator)
            told = explain(creator, self._routing, self._presences, outside.monotonic_s)
        except (InvalidField, NotAllowed) as error:  # no name at all, or another's
            return refusal(error.body())
        return _json_response(told)


def _json_response(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(_json(body), status, {"content-type": "application/json"})
