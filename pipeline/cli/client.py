"""A client of the gateway: one streamed chat, timed, and which gateway to ask."""

import os
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from pipeline import tls
from pipeline.cli import http
from pipeline.config import Config
from pipeline.paths import state_folder

KEY_VARIABLE: Final = "HEADRACE_KEY"
"""A bearer key, where the gateway needs one. Not an option: what is on a command line every user of the machine can read."""

LAST_RUN: Final = "last.json"
"""In the state folder: the endpoints of the stack that `headrace up` started last."""


# --------------------------------------------------------------------------------------------------------------
# The running stack


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """What a client reads of `endpoints.json`: the process that holds the stack, its gateway, and that one's certificate."""

    pid: int
    gateway: str
    certificate: str = ""


class Gateway(msgspec.Struct, frozen=True):
    """Where to ask, and for https whose certificates to believe; None: those that the system trusts."""

    url: str
    trust: ssl.SSLContext | None = None


def gateway(url: str | None, ca: Path | None, config: Config) -> Gateway:
    """The gateway that was asked for, else that of the running `headrace up`, else the configured one.

    The last two are known by their own certificate, unless `ca` says who must have signed it. Raises `OperatorError`.
    """
    if url:
        return Gateway(url.rstrip("/"), tls.trusting(ca))
    found = last_run(state_folder(config.up.state_dir) / LAST_RUN) or _configured(config)
    ours = tls.trusting_ours(found.certificate) if found.certificate and ca is None else None
    return Gateway(found.gateway, ours or tls.trusting(ca))


def _configured(config: Config) -> Endpoints:
    scheme = "https" if config.gateway.tls_cert else "http"
    url = f"{scheme}://{config.gateway.host}:{config.gateway.port or 8000}"
    return Endpoints(pid=0, gateway=url, certificate=config.gateway.tls_cert)


def last_run(path: Path) -> Endpoints | None:
    """The endpoints in `path`, while the process that wrote them lives."""
    try:
        endpoints = msgspec.json.decode(path.read_bytes(), type=Endpoints)
    except (OSError, msgspec.DecodeError):
        return None
    return endpoints if psutil.pid_exists(endpoints.pid) else None


# --------------------------------------------------------------------------------------------------------------
# What an answer holds


class PromptDetails(msgspec.Struct, frozen=True):
    """OpenAI's: prompt tokens that prefill did not compute."""

    cached_tokens: int = 0


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """Ours: how the work was split between the two pools."""

    hbm_tokens: int = 0
    decode_cached_tokens: int = 0
    prefill_generated_tokens: int = 0
    prefill: str = "?"
    decode: str = "?"


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The last chunk's `usage`."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None
    headrace: Split | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that prefill did not compute."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else 0


class Delta(msgspec.Struct, frozen=True):
    """A piece of the reply."""

    content: str | None = None


class Choice(msgspec.Struct, frozen=True):
    """The one choice of a chunk."""

    delta: Delta = Delta()
    finish_reason: str | None = None


class Fault(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str = ""
    code: str | int | None = None


class Chunk(msgspec.Struct, frozen=True):
    """One event of the stream, or the body of a refusal."""

    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    error: Fault | None = None


class Reply(msgspec.Struct, kw_only=True):
    """A streamed chat as its client saw it. Times in seconds from sending the request; `error` says why it is not whole."""

    text: str = ""
    ttft_s: float | None = None
    e2e_s: float = 0.0
    finish_reason: str | None = None
    usage: Usage = Usage()
    error: str | None = None


_chunk: Final = msgspec.json.Decoder(Chunk)


def events(buffer: bytearray, piece: bytes) -> list[bytes]:
    """Add `piece` to `buffer` and take the payloads of all complete `data:` events out of it."""
    buffer += piece
    *whole, rest = bytes(buffer).split(b"\n\n")
    buffer[:] = rest
    return [event[5:].strip() for event in whole if event.startswith(b"data:")]


# --------------------------------------------------------------------------------------------------------------
# One chat


def chat_body(message: str, *, system: str | None, max_tokens: int | None, **fields: Any) -> dict[str, Any]:
    """The request of one turn."""
    messages = [{"role": "system", "content": system}] if system else []
    body: dict[str, Any] = {
        "messages": [*messages, {"role": "user", "content": message}],
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    return body | ({"max_tokens": max_tokens} if max_tokens is not None else {})


async def chat(at: Gateway, body: dict[str, Any], creator: str | None, on_text: Callable[[str], None]) -> Reply:
    """Stream one reply; `on_text` gets its pieces. Never raises for what the gateway answers: see `Reply.error`."""
    reply, started_s, url = Reply(), time.perf_counter(), at.url
    payload = msgspec.json.encode(body)
    try:
        async with http.requested(
            "POST", f"{url}/v1/chat/completions", body=payload, headers=headers_of(creator), trust=at.trust
        ) as response:
            await _follow(response, reply, started_s, on_text)
    except ConnectionRefusedError:
        reply.error = f"No gateway answers at {url}. Start one with `headrace up`, or give --url."
    except ssl.SSLCertVerificationError as error:
        reply.error = (
            f"The certificate of {url} is not trusted: {error.verify_message}. "
            "Give the certificate of who has signed it with --ca."
        )
    except OSError as error:
        reply.error = f"The gateway {url} broke off: {error}."
    reply.e2e_s = time.perf_counter() - started_s
    return reply


def headers_of(creator: str | None = None) -> dict[str, str]:
    """What goes with a chat: the body's type, the creator, and the bearer key where there is one."""
    headers = {"content-type": "application/json"}
    if creator:
        headers["x-creator-id"] = creator
    if key := os.environ.get(KEY_VARIABLE):
        headers["authorization"] = f"Bearer {key}"
    return headers


async def _follow(response: http.Response, reply: Reply, started_s: float, on_text: Callable[[str], None]) -> None:
    if response.status != 200:
        reply.error = refusal(response.status, await response.body())
        return
    buffer, ended = bytearray(), False
    async for piece in response.pieces():
        for event in events(buffer, piece):
            if event == b"[DONE]":
                ended = True
            else:
                _take(reply, _chunk.decode(event), time.perf_counter() - started_s, on_text)
    if not ended and reply.error is None:
        reply.error = "The stream stopped before its end."


def refusal(status: int, body: bytes) -> str:
    """What a body that is no stream says, in one sentence."""
    try:
        fault = _chunk.decode(body).error
    except msgspec.DecodeError:
        fault = None
    return f"HTTP {status}: {fault.message}" if fault else f"HTTP {status}: {body[:200].decode(errors='replace')}"


def _take(reply: Reply, chunk: Chunk, at_s: float, on_text: Callable[[str], None]) -> None:
    if chunk.error:
        reply.error = chunk.error.message
    if chunk.usage:
        reply.usage = chunk.usage
    for choice in chunk.choices:
        reply.finish_reason = choice.finish_reason or reply.finish_reason
        if choice.delta.content:
            reply.ttft_s = at_s if reply.ttft_s is None else reply.ttft_s
            reply.text += choice.delta.content
            on_text(choice.delta.content)


def summary(reply: Reply) -> str:
    """One line under a reply: times, tokens, who did it."""
    usage = reply.usage
    parts = [
        f"first token {reply.ttft_s * 1000:.0f} ms" if reply.ttft_s is not None else "no token",
        f"whole {reply.e2e_s:.2f} s",
        f"prompt {usage.prompt_tokens} tokens, {usage.cached_tokens} cached",
        f"reply {usage.completion_tokens} tokens",
    ]
    if usage.headrace:
        split = usage.headrace
        parts.append(f"{split.prefill} → {split.decode}, {split.decode_cached_tokens} handed over")
    return " · ".join(parts)
