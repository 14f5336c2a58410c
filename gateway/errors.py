"""Errors as HTTP says them: the status, OpenAI's body, and whether and when to try again.

The OpenAI SDK retries by status (408, 409, 429, 5xx) unless `x-should-retry` says better, and waits as `retry-after-ms` or
`Retry-After` say. So every error says it.
"""

import math
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pipeline.errors import ErrorBody, ServiceError
from pipeline.protocol.openai import ErrorDetail, ErrorReply

Headers = list[tuple[bytes, bytes]]

_json = msgspec.json.Encoder().encode


def error_object(error: ErrorBody) -> bytes:
    """`{"error": {…}}`, as a body and as an event of a stream."""
    return _json(ErrorReply(ErrorDetail(message=error.message, type=error.type, param=error.param, code=error.code)))


def status_of(error: ErrorBody) -> int:
    """Its HTTP status. An error that calls itself no error (a worker said so) is ours."""
    return error.status if 400 <= error.status <= 599 else 500


def phrase_of(status: int) -> str:
    """What HTTP calls a status."""
    return HTTPStatus(status).phrase


def headers_of(error: ErrorBody) -> Headers:
    """Content type, and what a retry may hope for. `Retry-After` counts whole seconds, upwards."""
    headers = [
        (b"content-type", b"application/json"),
        (b"x-should-retry", b"true" if error.retryable else b"false"),
    ]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % math.ceil(error.retry_after_s)))
        headers.append((b"retry-after-ms", b"%d" % math.ceil(error.retry_after_s * 1000)))
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status == HTTPStatus.REQUEST_TIMEOUT:
        headers.append((b"connection", b"close"))  # what is left of the body would be read as the next request
    return headers


def refusal(error: ErrorBody) -> Response:
    """The error as a Starlette response."""
    headers = {name.decode(): value.decode() for name, value in headers_of(error)}
    return Response(error_object(error), status_of(error), headers)


async def http_error(request: Request, raised: Exception) -> Response:
    """Starlette's own refusals (no such path, no such method) in OpenAI's shape. `OPTIONS` is told what is allowed."""
    assert isinstance(raised, HTTPException)
    allowed = dict(raised.headers or {})
    if request.method == "OPTIONS" and raised.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return Response(status_code=HTTPStatus.NO_CONTENT, headers=allowed)
    phrase = HTTPStatus(raised.status_code).phrase
    response = refusal(
        ErrorBody(
            message=f"{phrase}: {request.method} {request.url.path}.",
            type=phrase.title().replace(" ", "") + "Error",
            code=phrase.lower().replace(" ", "_"),
            status=raised.status_code,
        )
    )
    response.headers.update(allowed)
    return response


async def unforeseen(request: Request, raised: Exception) -> Response:
    """A defect of ours. The log has the traceback; the client learns no more than that."""
    return refusal(ServiceError("The gateway failed at this request.").body())
