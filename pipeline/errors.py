"""The one error tree.

Every error knows what HTTP makes of it, whether a retry can help, and who is to blame. There are four kinds:

    RequestError    the caller's: mend the request, a retry of the same cannot help
    CapacityError   nobody's: there is no room now, come back after `retry_after_s`
    ServiceError    ours: a worker, the broker or an engine failed
    OperatorError   a set-up that cannot work: it ends the process with one sentence and its remedy

The first three travel to the client as an `ErrorBody`, in OpenAI's shape with vLLM's type names.
"""

from typing import ClassVar

import msgspec


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a client is told. `param` names the field to blame; `retry_after_s` is set where waiting helps."""

    message: str
    type: str
    code: str
    status: int
    param: str | None = None
    retryable: bool = False
    retry_after_s: float | None = None


class HeadraceError(Exception):
    """Root of the tree. Not raised itself."""


class ReplyError(HeadraceError):
    """An error that a client sees: HTTP status, body, or an `error` frame in a stream."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "InternalServerError"
    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> ErrorBody:
        """The wire form."""
        return ErrorBody(
            message=self.message,
            type=self.type,
            code=self.code,
            status=self.status,
            param=self.param,
            retryable=self.retryable,
            retry_after_s=self.retry_after_s,
        )


class RequestError(ReplyError):
    """The request itself is wrong."""

    status = 400
    type = "BadRequestError"
    code = "invalid_request"


class InvalidField(RequestError):
    """One field is wrong; `param` names it."""

    code = "invalid_value"


class PromptTooLong(RequestError):
    """The prompt and the reply asked for do not fit the model's context."""

    code = "context_length_exceeded"


class ModelNotFound(RequestError):
    """No live worker serves this model."""

    status = 404
    type = "NotFoundError"
    code = "model_not_found"


class PersonaNotFound(RequestError):
    """A request names a creator without a persona, or a version of it that is not kept any more."""

    status = 404
    type = "NotFoundError"
    code = "persona_not_found"


class BodyTooLarge(RequestError):
    """The body passes the limit; it was never sent to the broker."""

    status = 413
    type = "RequestEntityTooLargeError"
    code = "request_too_large"


class HeadTooLarge(RequestError):
    """The request's line and headers pass the limit."""

    status = 431
    type = "RequestHeaderFieldsTooLargeError"
    code = "headers_too_large"


class PublishedMeanwhile(RequestError):
    """Somebody else has changed what was to be changed."""

    status = 409
    type = "ConflictError"
    code = "published_meanwhile"
    retryable = True


class TooSlow(RequestError):
    """The request did not come in time."""

    status = 408
    type = "RequestTimeoutError"
    code = "request_timeout"
    retryable = True


class BodyEncoded(RequestError):
    """The body is compressed, or encoded in another way."""

    status = 415
    type = "UnsupportedMediaTypeError"
    code = "unsupported_content_encoding"


class KeyUnknown(RequestError):
    """No key, where one is needed, or one that is not ours."""

    status = 401
    type = "AuthenticationError"
    code = "invalid_api_key"


class NotAllowed(RequestError):
    """The key is good, but not for this."""

    status = 403
    type = "PermissionDeniedError"
    code = "permission_denied"


class Poisoned(RequestError):
    """Workers die of this request."""

    status = 500
    type = "InternalServerError"
    code = "poison"


class CapacityError(ReplyError):
    """No room now. A retry after `retry_after_s` may find some."""

    status = 503
    type = "ServiceUnavailableError"
    code = "overloaded"
    retryable = True


class CreatorBusy(CapacityError):
    """This creator's own share of the queue is full; other creators are still served."""

    status = 429
    type = "RateLimitError"
    code = "creator_queue_full"


class KeyBusy(CapacityError):
    """A key has all that it may have at a time; other keys are still served."""

    status = 429
    type = "RateLimitError"
    code = "key_limit_exceeded"


class RateExceeded(KeyBusy):
    """A key asks more often than it may. Where its next turn is further away than clients wait, a retry cannot help."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float, in_vain: bool) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.in_vain = in_vain

    def body(self) -> ErrorBody:
        """The wire form."""
        return msgspec.structs.replace(super().body(), retryable=not self.in_vain)


class NoWorkers(CapacityError):
    """No live worker of a kind that the request needs."""

    code = "no_workers"


class BrokerUnavailable(CapacityError):
    """NATS did not confirm the request."""

    code = "broker_unavailable"


class FirstTokenLate(CapacityError):
    """The reply would begin, or has not begun, later than it may (`requests.first_token_s`)."""

    code = "first_token_late"


class ServiceError(ReplyError):
    """A part of the pipeline failed."""

    retryable = True


class EngineFailed(ServiceError):
    """The engine could not compute this request."""

    code = "engine_failed"


class EngineDead(EngineFailed):
    """The engine has died: its worker must be restarted."""

    code = "engine_dead"


class DeadlineExceeded(ServiceError):
    """The request's time ran out before its reply was whole."""

    status = 504
    type = "TimeoutError"
    code = "deadline"


class ReplyLost(ServiceError):
    """A reply could not be completed, and what is missing is not coming."""

    status = 502
    code = "reply_lost"


class OperatorError(HeadraceError):
    """The set-up cannot work. Says what is wrong and what to do about it."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem} {remedy}")
        self.problem = problem
        self.remedy = remedy
