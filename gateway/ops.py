"""What operators and clients ask beside chat: is it alive, does it serve, what does it serve, how does it do."""

import time
from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway import openai
from gateway.errors import refusal
from gateway.explain import explain
from gateway.fleet import Fleet, Lookout
from gateway.routing import Routing
from pipeline import outside
from pipeline.errors import ModelNotFound
from pipeline.protocol.presence import Presences
from pipeline.telemetry import metrics

_json = msgspec.json.Encoder().encode


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/ready`. `reasons` says what is missing, and is empty where nothing is."""

    ready: bool
    reasons: list[str]
    prefill: int
    decode: int


def readiness(fleet: Fleet, *, connected: bool, draining: bool) -> Readiness:
    """Whether a request sent now would be served."""
    reasons = [] if connected else ["NATS is not connected"]
    reasons += fleet.lacks
    if draining:
        reasons.append("the gateway is stopping")
    return Readiness(ready=not reasons, reasons=reasons, prefill=fleet.prefill, decode=fleet.decode)


class Ops:
    """The endpoints. `connected` and `draining` are asked at each request."""

    def __init__(
        self,
        lookout: Lookout,
        routing: Routing,
        presences: Presences,
        connected: Callable[[], bool],
        draining: Callable[[], bool],
    ) -> None:
        self._lookout = lookout
        self._routing = routing
        self._presences = presences
        self._connected = connected
        self._draining = draining
        self._since = int(time.time())

    def routes(self) -> list[Route]:
        """Paths are vLLM's."""
        return [
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/v1/routes/{creator:path}", self.route),
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

    async def models(self, request: Request) -> Response:
        """What ready workers serve."""
        served = self._lookout.fleet().models
        cards = [openai.model_card(model, length, self._since) for model, length in served.items()]
        return _json_response(openai.ModelList(data=cards))

    async def model(self, request: Request) -> Response:
        """One of them."""
        asked = request.path_params["model"]
        served = self._lookout.fleet().models
        if asked not in served:
            return refusal(ModelNotFound(f"The model {asked!r} is not served here.", param="model").body())
        return _json_response(openai.model_card(asked, served[asked], self._since))

    async def route(self, request: Request) -> Response:
        """Where a creator's requests go, and why."""
        creator = request.path_params["creator"]
        return _json_response(explain(creator, self._routing, self._presences, outside.monotonic_s))


def _json_response(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(_json(body), status, {"content-type": "application/json"})
