"""What the gateway serves over HTTP, as OpenAPI 3.1: generated from the structs that it reads and writes.

`headrace schema openapi` prints it, and the gateway serves it at `/openapi.json`. A test holds it against the gateway's routes.
"""

import functools
import importlib.metadata
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec

from pipeline.limits import REQUEST_ID_BYTES_MAX
from pipeline.protocol.chat import Chat
from pipeline.protocol.completions import CompletionRequest
from pipeline.protocol.openai import (
    Chunk,
    Completion,
    ErrorReply,
    ModelCard,
    ModelList,
    PersonaBody,
    PersonaPublished,
    Readiness,
    TextCompletion,
)
from pipeline.protocol.subjects import CLASSES

REF: Final = "#/components/schemas/{name}"

Node = dict[str, Any]

_TEXT: Final[Node] = {"type": "string"}

_HEADERS: Final[tuple[tuple[str, str, Node], ...]] = (
    ("x-creator-id", "Whose persona the prompt carries: its requests share a prefix cache. Without it, `user`.", _TEXT),
    ("x-conversation-id", "Which requests share a history. Without it, `prompt_cache_key`.", _TEXT),
    ("x-tenant-id", "Whom the creator belongs to; with a key, only what that key may name.", _TEXT),
    ("x-request-class", "How urgent it is.", {"enum": list(CLASSES), "default": CLASSES[0]}),
    ("x-request-timeout-ms", "How long the reply may take.", {"type": "integer", "minimum": 1}),
    (
        "x-request-id",
        "The client's own name for it, for logs; the response has it again.",
        {"type": "string", "maxLength": REQUEST_ID_BYTES_MAX},
    ),
    ("traceparent", "W3C Trace Context, carried to the stored message.", _TEXT),
    ("tracestate", "What belongs to it.", _TEXT),
)

_GENERATION_ERRORS: Final = (400, 401, 403, 404, 408, 413, 415, 429, 500, 502, 503, 504)
_RETRIED: Final = (429, 503)

_RETRY_HEADERS: Final[Node] = {
    "x-should-retry": {"description": "Whether a retry may help.", "schema": {"enum": ["true", "false"]}},
    "retry-after": {"description": "When, in seconds.", "schema": {"type": "integer"}},
    "retry-after-ms": {"description": "The same in milliseconds.", "schema": {"type": "integer"}},
}


@functools.cache
def document() -> bytes:
    """The document, as JSON."""
    served = (
        *(Chat, Completion, Chunk, CompletionRequest, TextCompletion, ModelList, ModelCard),
        *(PersonaBody, PersonaPublished, ErrorReply, Readiness),
    )
    _, components = msgspec.json.schema_components(served, ref_template=REF)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Headrace",
                "version": importlib.metadata.version("headrace"),
                "description": "OpenAI's chat completions and completions, served by a prefill and a decode pool. Errors have "
                "OpenAI's shape, and say in `x-should-retry` whether a retry can help.",
                "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            },
            "paths": _paths(),
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            # An operator may have configured keys, or none.
            "security": [{}, {"key": []}],
        }
    )


def _paths() -> Node:
    return {
        "/v1/chat/completions": {"post": _generation("chat", "One reply to a chat.", Chat, Completion, Chunk)},
        "/v1/completions": {
            "post": _generation(
                "complete", "What follows a prompt, or several.", CompletionRequest, TextCompletion, TextCompletion
            )
        },
        "/v1/models": {"get": _get("models", "What is served now.", _json(ModelList), (401,))},
        "/v1/models/{model}": {
            "parameters": [_in_path("model")],
            "get": _get("model", "One of them.", _json(ModelCard), (401, 404)),
        },
        "/v1/personas/{creator}": {
            "parameters": [_in_path("creator")],
            "get": _get("persona", "Whose voice its replies have.", _json(PersonaPublished), (401, 403, 404, 503)),
            "put": _put_persona(),
        },
        "/v1/routes/{creator}": {
            "parameters": [_in_path("creator")],
            "get": _get(
                "route", "Where a creator's requests go now, and why.", _body("application/json", {}), (401, 403)
            ),
        },
        "/health": {"get": _open(_get("health", "The process answers.", {"description": "It does."}))},
        "/ready": {"get": _open(_ready())},
        "/metrics": {"get": _get("metrics", "Prometheus' text.", _body("text/plain", _TEXT), (401,))},
        "/openapi.json": {"get": _open(_get("openapi", "This document.", _body("application/json", {})))},
        "/asyncapi.json": {"get": _open(_get("asyncapi", "The same for NATS.", _body("application/json", {})))},
        "/": {"get": _open(_get("playground", "A page to try it.", _body("text/html", _TEXT)))},
    }


def _generation(
    name: str, summary: str, asked: type[msgspec.Struct], reply: type[msgspec.Struct], event: type[msgspec.Struct]
) -> Node:
    whole = _json(reply)
    whole["description"] = "The reply; with `stream`, as server-sent events, of which the last is `[DONE]` or an error."
    whole["content"]["text/event-stream"] = {"schema": _ref(event)}
    whole["headers"] = {"x-request-id": {"description": "The client's, or ours.", "schema": _TEXT}}
    return {
        "operationId": name,
        "summary": summary,
        "parameters": [
            {"name": header, "in": "header", "description": text, "schema": schema} for header, text, schema in _HEADERS
        ],
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(asked)}}},
        "responses": {"200": whole, **_errors(_GENERATION_ERRORS)},
    }


def _put_persona() -> Node:
    errors = (400, 401, 403, 408, 409, 413, 503)
    operation = _get("putPersona", "Publish a version, which its owner warms up.", _json(PersonaPublished), errors)
    return operation | {
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(PersonaBody)}}}
    }


def _ready() -> Node:
    operation = _get("ready", "The pipeline answers: a request sent now would be served.", _json(Readiness))
    operation["responses"]["503"] = _json(Readiness) | {"description": "It does not, for these reasons."}
    return operation


def _get(name: str, summary: str, found: Node, errors: Sequence[int] = ()) -> Node:
    return {"operationId": name, "summary": summary, "responses": {"200": found, **_errors(errors)}}


def _open(operation: Node) -> Node:
    """Needs no key, whatever is configured."""
    return operation | {"security": []}


def _in_path(name: str) -> Node:
    return {"name": name, "in": "path", "required": True, "schema": _TEXT}


def _errors(statuses: Sequence[int]) -> Node:
    return {str(status): _error(status) for status in statuses}


def _error(status: int) -> Node:
    headers = _RETRY_HEADERS if status in _RETRIED else {"x-should-retry": _RETRY_HEADERS["x-should-retry"]}
    return _json(ErrorReply) | {"description": f"{HTTPStatus(status).phrase}.", "headers": headers}


def _json(body: type[msgspec.Struct]) -> Node:
    return _body("application/json", _ref(body))


def _body(content_type: str, schema: Node) -> Node:
    return {"description": "Found.", "content": {content_type: {"schema": schema}}}


def _ref(body: type[msgspec.Struct]) -> Node:
    return {"$ref": REF.format(name=body.__name__)}
