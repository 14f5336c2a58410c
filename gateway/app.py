"""The gateway as a whole: the only place that wires its parts together.

HTTP ── Endpoint ──► Bus.store ──► requests.in.<class>.<affinity>.<creator>
           ▲
Replies ───┘ ◄── <inbox>.r frames, <inbox>.c claims        Lookout ◄── presence.>
"""

import asyncio
import contextlib
import errno
import functools
import math
import signal
import socket
import threading
from collections.abc import AsyncIterator, Generator, Sequence
from pathlib import Path
from typing import Final

import anyio
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route

from gateway.account import Account
from gateway.balancing import Balancing
from gateway.chat import Endpoint
from gateway.door import KEEP_ALIVE_S, Door
from gateway.errors import http_error, unforeseen
from gateway.fleet import Lookout
from gateway.intake import Terms
from gateway.keys import Guests
from gateway.ops import Guard, Ops
from gateway.personas import Personas
from gateway.replies import Replies
from gateway.routing import Routing
from gateway.vigil import Vigil
from gateway.warm import Warm
from pipeline import garbage, outside, tls
from pipeline.bus.background import Background
from pipeline.bus.connection import Bus
from pipeline.bus.presence import Announcer, Watcher
from pipeline.bus.settings import Settings
from pipeline.config import Config
from pipeline.errors import CapacityError, OperatorError
from pipeline.limits import ACCUSER_PERIOD_S, PRESENCE_SILENT_MAX_S
from pipeline.protocol.accuser import Accuser
from pipeline.protocol.admission import Admission
from pipeline.protocol.chat import Chat
from pipeline.protocol.completions import CompletionRequest
from pipeline.protocol.keys import Keyring
from pipeline.protocol.messages import Presence
from pipeline.protocol.presence import Presences
from pipeline.protocol.shares import Bounds, Shares
from pipeline.protocol.subjects import CLASSES
from pipeline.telemetry import logs, metrics
from pipeline.telemetry.lag import measure_lag

BACKLOG: Final = 2048
"""Connections that wait to be accepted: a burst of a full gateway."""

HEAR_PERIOD_S: Final = 0.02
"""Between two looks at who is there, before the door opens."""

DRAIN_RATIO: Final = 0.4
"""Of `up.drain_s`: `headrace up` gives the gateway half of it, and streams must have ended, with an error if need be, before."""

SECURITY_HEADERS: Final = [("x-content-type-options", "nosniff"), ("referrer-policy", "no-referrer")]
"""On every response: no browser takes JSON for a page, or tells other sites where it was."""

EXPOSED_HEADERS: Final = ("x-request-id", "x-should-retry", "retry-after", "retry-after-ms")
"""What a page of another site may read of a response, where pages of that site may call."""

STOPPING: Final = CapacityError("The gateway is stopping.", retry_after_s=1.0).body()

log = logs.get("gateway")


class Gateway:
    """One running gateway: what it knows and what it does, over one connection to NATS."""

    def __init__(self, config: Config, bus: Bus, process: str, source: Path | None = None) -> None:
        inbox = bus.inbox()
        self.draining = False
        self.settings = Settings(bus, config)
        self.bus = bus
        self.process = process
        self.epoch = f"{int(outside.unix_s() * 1000):013d}-{outside.token(4)}"
        self.presences = Presences()
        self.terms = Terms(
            reply_to=f"{inbox}.r",
            claim_at=f"{inbox}.c",
            receiver=f"{process}/{self.epoch}",
            default_creator=config.gateway.default_creator,
            timeout_s=config.gateway.timeout_s,
            timeout_max_s={
                klass: config.requests.timeout_max_s.get(klass, config.gateway.timeout_s) for klass in CLASSES
            },
            default_max_tokens=config.requests.default_max_tokens,
        )
        self.admission = Admission(config.gateway.in_flight_max)
        self.guests = Guests(
            Keyring(config.gateway.keys),
            Shares(bounds_of(config)),
            self.presences,
            process,
            outside.monotonic_s,
            source,
        )
        accuser = Accuser(outside.monotonic_s())
        self.replies = Replies(bus, accuser, outside.monotonic_s)
        self.vigil = Vigil(bus, accuser, self.presences, self.replies, process)
        self.lookout = Lookout(self.presences, outside.monotonic_s)
        self.warm = Warm(bus, self.presences, outside.monotonic_s)
        self.routing = Routing(bus, self.presences, self.warm, process, config.requests.shards, outside.monotonic_s)
        self.account = Account(bus, config.telemetry, process)
        self.balancing = Balancing(bus, self.presences, self.routing, config.balancer.rules, outside.monotonic_s)
        endpoint = functools.partial(
            Endpoint,
            bus=bus,
            account=self.account,
            replies=self.replies,
            admission=self.admission,
            guests=self.guests,
            lookout=self.lookout,
            routing=self.routing,
            terms=self.terms,
            body_bytes_max=config.gateway.body_bytes_max,
            body_timeout_s=config.gateway.body_timeout_s,
        )
        self.chats, self.completions = endpoint(Chat), endpoint(CompletionRequest)
        guard = Guard(self.guests, config.gateway.open_pages)
        self.personas = Personas(bus, guard)
        self.ops = Ops(
            self.lookout,
            self.routing,
            self.presences,
            guard,
            lambda: self.bus.connected,
            lambda: self.draining,
        )

    def routes(self) -> list[BaseRoute]:
        """All that it answers."""
        chats = Route("/v1/chat/completions", self.chats, methods=["POST"])
        completions = Route("/v1/completions", self.completions, methods=["POST"])
        return [chats, completions, *self.personas.routes(), *self.ops.routes()]

    def apply(self, config: Config) -> None:
        """The configuration has changed, in what may change while we run."""
        self.admission.in_flight_max = config.gateway.in_flight_max
        self.admission.weights = config.classes.weights
        self.guests.shares.bounds = bounds_of(config)
        self.routing.spill_load = config.placement.spill_load

    def presence(self) -> Presence:
        """What it says of itself. Its id is the second token of its reply subjects, so that workers can tell when it is gone."""
        metrics.QUEUED_TOKENS.set(self.guests.shares.queue.tokens)
        return Presence(
            role="gateway",
            id=self.process,
            epoch=self.epoch,
            ready=not self.draining,
            draining=self.draining,
            load=self.admission.in_flight / self.admission.in_flight_max,
            rate=self.routing.total(),
            rates=self.routing.heaviest(),
            keys=self.guests.shares.used(outside.monotonic_s()),
            settings=self.settings.version,
        )

    async def listen(self) -> None:
        """Be there for frames and claims; returns when the broker knows."""
        await self.bus.subscribe(self.terms.reply_to, self.replies.on_frames)
        await self.bus.subscribe(self.terms.claim_at, self.replies.on_claim)
        await self.account.listen()
        self.bus.on_reconnect(self.replies.ask_holders)
        self.bus.on_disconnect(self.lookout.deaf)
        self.bus.on_reconnect(self.lookout.hearing)
        await self.bus.barrier()

    async def hear_the_fleet(self) -> None:
        """Return when there are workers, or none would have been silent for so long: who comes before is refused for nothing."""
        with anyio.move_on_after(PRESENCE_SILENT_MAX_S):
            while self.lookout.fleet().lacks:
                await asyncio.sleep(HEAR_PERIOD_S)


def bounds_of(config: Config) -> Bounds:
    """What all requests, and those of one creator, may hold of this gateway."""
    return Bounds(
        bytes_max=config.gateway.in_flight_bytes_max,
        creator_requests_max=config.gateway.creator_in_flight_max,
        creator_bytes_max=config.gateway.creator_in_flight_bytes_max,
        tokens_max=config.gateway.queued_tokens_max,
        creator_tokens_max=config.gateway.creator_queued_tokens_max,
    )


@contextlib.asynccontextmanager
async def running(config: Config, source: Path | None = None) -> AsyncIterator[Gateway]:
    """A gateway that is connected and known. Raises `OperatorError` where NATS cannot be reached."""
    process = f"gateway-{outside.token(4)}"
    async with await Bus.connect(config.nats, process) as bus:
        gateway = Gateway(config, bus, process, source)
        watcher = Watcher(bus, gateway.presences, outside.monotonic_s)
        announcer = Announcer(bus, gateway.presence, ACCUSER_PERIOD_S)
        await watcher.start()
        await gateway.settings.start()
        gateway.settings.apply_to(gateway.apply)
        await gateway.listen()
        await announcer.start()
        await gateway.hear_the_fleet()
        await gateway.warm.start()
        await gateway.routing.start()
        settings = Background(gateway.settings.run(), "settings")
        warm = Background(gateway.warm.run(), "warm")
        routing = Background(gateway.routing.run(), "routing")
        balancing = Background(gateway.balancing.run(), "balancing") if config.balancer.enabled else None
        watch = Background(gateway.vigil.run(), "vigil")
        keys = Background(gateway.guests.run(), "keys")
        lag = Background(measure_lag(), "loop lag")
        try:
            yield gateway
        finally:
            await lag.stop()
            await keys.stop()
            await watch.stop()
            if balancing is not None:
                await balancing.stop()
            await routing.stop()
            await warm.stop()
            await settings.stop()
            await gateway.warm.stop()
            gateway.draining = True
            announcer.now()
            await announcer.stop()
            await watcher.stop()
            await asyncio.to_thread(gateway.account.spans.close)


def create_app(config: Config, source: Path | None = None) -> Starlette:
    """The application. Its lifespan connects it to NATS; `app.state.gateway` is the running gateway.

    `source` is the file of `config`, whose keys are followed.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with running(config, source) as gateway:
            app.state.gateway = gateway
            app.router.routes[:] = gateway.routes()
            yield

    return Starlette(
        lifespan=lifespan,
        middleware=_cross_origin(config.gateway.cors_origins),
        exception_handlers={HTTPException: http_error, Exception: unforeseen},
    )


def _cross_origin(origins: Sequence[str]) -> list[Middleware]:
    """Nothing at all where no site may call: then a browser refuses for us."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )
    ]


def serve(config: Config, source: Path | None = None) -> None:
    """Serve until SIGINT or SIGTERM, then let open replies end. Raises `OperatorError`. `source`: see `create_app`."""
    tls.server_files(config.gateway)
    listening = listen_on(config.gateway.host, config.gateway.port)
    with listening as sock, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        garbage.settle()
        runner.run(serve_on(sock, config, source))


async def serve_on(sock: socket.socket, config: Config, source: Path | None = None) -> None:
    """Serve on a listening socket."""
    app = create_app(config, source)
    # We enter the lifespan ourselves: uvicorn would turn a set-up that cannot work into a traceback.
    async with app.router.lifespan_context(app):
        host, port = sock.getsockname()[:2]
        files = tls.server_files(config.gateway)
        log.info("serving", host=host, port=port, tls=files is not None)
        await Server(app, DRAIN_RATIO * config.up.drain_s, files).serve(sockets=[sock])


def listen_on(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `OperatorError`, before anything else is started."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        remedy = "Give another address with --host and --port, or correct gateway.host and gateway.port."
        if error.errno == errno.EADDRINUSE:
            problem = f"Port {port} on {host} is in use."
            remedy = "Stop what uses it, or choose another with --port or gateway.port."
        else:
            problem = f"Cannot listen on {host}, port {port}: {error.strerror}."
        raise OperatorError(problem, remedy) from None


class Server(uvicorn.Server):
    """uvicorn, that ends streams with an error rather than by cutting them off, and leaves by returning.

    `tls`: certificate and key.
    """

    def __init__(self, app: Starlette, drain_s: float, tls: tuple[Path, Path] | None = None) -> None:
        cert, key = tls or (None, None)
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http=Door,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                headers=SECURITY_HEADERS,
                backlog=BACKLOG,
                ssl_certfile=cert,
                ssl_keyfile=key,
                timeout_keep_alive=math.ceil(KEEP_ALIVE_S),
                timeout_graceful_shutdown=math.ceil(drain_s) + 1,
            )
        )
        self._gateway: Gateway = app.state.gateway
        self._drain_s = drain_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """No new requests; what is open may end within `drain_s`, and ends with a retryable error after it."""
        self._gateway.draining = True
        last = asyncio.get_running_loop().call_later(self._drain_s, self._gateway.replies.fail_all, STOPPING)
        try:
            await super().shutdown(sockets)
        finally:
            last.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """uvicorn raises the signal again afterwards, which would end the process before NATS is told."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
