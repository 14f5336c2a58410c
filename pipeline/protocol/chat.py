"""A request as it comes from outside: OpenAI's fields, checked as far as we act on them.

A **request** is one flat map: the fields of a chat, or with `prompt` those of a completion (`completions.py`), and beside them
a few of ours (`Envelope`). We type what we act on; every other field stays in the map and reaches the engine's own request
class, which knows what it means. Instead of `messages` it may bring one `message` and name the rest: see `by_reference.py`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import msgspec

from pipeline.errors import InvalidField
from pipeline.limits import REQUEST_ID_BYTES_MAX
from pipeline.protocol.messages import Version, encoding_of


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """A piece of text in a message whose content is a list."""

    text: str


class Message(msgspec.Struct, frozen=True):
    """One turn of the chat. `content` may be missing only where tool calls stand for it."""

    role: str
    content: str | list[TextPart] | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    """OpenAI's `stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What chats and completions have in common of what we act on or check before any engine sees it.

    Unknown fields are accepted. Bounds are those of vLLM 0.32.
    """

    model: str | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    echo: bool | None = None
    prompt_logprobs: int | None = None
    response_format: Mapping[str, Any] | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None


class Chat(Asked, frozen=True, kw_only=True):
    """The part of OpenAI's chat completion request that we act on or check before any engine sees it."""

    prompt_field: ClassVar[str] = "messages"
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    logprobs: bool | None = None
    tools: list[Any] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None

    @property
    def reply_tokens_max(self) -> int | None:
        """The reply's length that the client set, by its new name or its old one."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says of itself beside what it asks for, as it lies in REQUESTS.

    `type` may be missing: a completion is known by its `prompt`.
    `reply_to`: subject for frames (or the header `Reply-To`). `claim_at`: subject that arbitrates claims (or `Claim-At`);
    a producer that is only a subscription has none. `timeout_ms` counts from when the stream stored the request. `id` is the
    publisher's own; without one the stream's sequence names the request. `receiver` is `<id>/<epoch>` of a gateway that says
    in its presence that it lives: once it does not, its requests are dropped. `tenant` is whom the creator
    belongs to: tenants share no cached prefix. `request_id` is the client's own name for it (`x-request-id`), for logs alone:
    the same one twice is two requests.
    """

    type: Literal["chat", "completion"] | None = None
    v: Version = 1
    id: Annotated[str, msgspec.Meta(min_length=1, max_length=REQUEST_ID_BYTES_MAX)] | None = None
    reply_to: str | None = None
    claim_at: str | None = None
    timeout_ms: Annotated[int, msgspec.Meta(ge=1)] | None = None
    receiver: str | None = None
    tenant: str = ""
    request_id: Annotated[str, msgspec.Meta(max_length=REQUEST_ID_BYTES_MAX)] | None = None


PartT = TypeVar("PartT", bound=msgspec.Struct)

RESERVED: Final = frozenset(
    {
        "type",
        "v",
        "id",
        "reply_to",
        "claim_at",
        "timeout_ms",
        "receiver",
        "tenant",
        "request_id",
        "message",
        "conversation",
        "creator",
        "kv_transfer_params",
        "ec_transfer_params",
    }
)
"""Fields that an HTTP client may not set: ours, and those that would reach into the engine's transfers."""


def wants_prompt(chat: Mapping[str, Any]) -> bool:
    """Whether the prompt's length must be known from the first tokens on, or its ids are asked for."""
    options = chat.get("stream_options")
    continuous = isinstance(options, Mapping) and bool(options.get("continuous_usage_stats"))
    return continuous or wants_prompt_ids(chat)


def wants_prompt_ids(chat: Mapping[str, Any]) -> bool:
    """Whether the prompt's ids are asked for. vLLM says them unasked in a streamed completion that echoes its prompt."""
    echoed = chat.get("type") == "completion" and chat.get("echo") and chat.get("stream")
    return bool(chat.get("return_token_ids") or echoed)


def to_map(payload: bytes) -> dict[str, Any]:
    """The request as a plain map. Raises `InvalidField` where it is neither JSON nor msgpack, or no map."""
    encoding = encoding_of(payload)
    try:
        tree = msgspec.msgpack.decode(payload) if encoding == "msgpack" else msgspec.json.decode(payload)
        # What JSON can say and msgpack cannot (a number beyond 64 bits) could not go on from here.
        msgspec.msgpack.encode(tree)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidField(f"The body is not valid {encoding}: {error}.") from None
    except (RecursionError, OverflowError) as error:
        raise InvalidField(f"The body goes beyond what can be carried: {error}.") from None
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise InvalidField("The body must be an object.")
    return tree


def to_part(tree: Mapping[str, Any], as_type: type[PartT]) -> PartT:
    """What `tree` says as `Chat`, `CompletionRequest` or `Envelope`. Raises `InvalidField` whose `param` is the place in it."""
    try:
        part = msgspec.convert(tree, as_type)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        place = path.strip("`").lstrip(".")
        if "missing required field" in message:
            # msgspec puts a missing field's name into the message, not into the path.
            place = ".".join(filter(None, (place, message.split("`")[1])))
        raise InvalidField(f"{_why(message, place)}.", param=place or None) from None
    return part


def _why(message: str, place: str) -> str:
    if place.endswith(".type") and "content" in place:
        return f"{place}: only text parts are served; {message}"
    return f"{place}: {message}" if place else message
