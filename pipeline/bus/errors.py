"""What can go wrong between us and the broker.

`BusError`s are for the code that talks to NATS: each says what is known about the message. `Duplicate` is for a client.
"""

from pipeline.errors import HeadraceError, RequestError


class BusError(HeadraceError):
    """NATS could not do what was asked."""


class Disconnected(BusError):
    """There is no connection, or it was lost before the answer came: whether the message arrived is not known."""


class NoResponders(BusError):
    """Nobody listens on the subject: the broker says so at once, and the message reached no one."""


class Unanswered(BusError):
    """No answer within the time: whether the message was acted on is not known."""


class BadSubject(BusError):
    """The subject or a header is not one that NATS can carry. Nothing was sent."""


class ApiError(BusError):
    """JetStream refused. `code` is HTTP-like, `err_code` the server's own number for the reason."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(f"{description} (code {code}, error {err_code})")
        self.code = code
        self.err_code = err_code
        self.description = description


class Duplicate(RequestError):
    """A message with this id is stored already, and this publisher did not send it: it took an id that was not fresh."""

    status = 409
    type = "ConflictError"
    code = "duplicate_id"
