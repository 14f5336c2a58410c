"""What travels over NATS between the pipeline and those outside of it, as AsyncAPI 3: generated from the structs themselves.

`headrace schema asyncapi` prints it, and the gateway serves it at `/asyncapi.json`. It is written from the pipeline's side, as
AsyncAPI wants it: what the pipeline receives, a producer sends. Messages are shown in JSON; who writes msgpack is answered in
msgpack, where frames are arrays of their fields in this order, token ids packed, and a message holds a list of them.
"""

import functools
import importlib.metadata
from typing import Any, Final

import msgspec

from pipeline.protocol.chat import Chat, Envelope
from pipeline.protocol.completions import CompletionRequest
from pipeline.protocol.intake import CLAIM_AT_HEADER, REPLY_TO_HEADER
from pipeline.protocol.messages import (
    Cancel,
    Claim,
    Done,
    Failed,
    Fenced,
    From,
    Go,
    Gone,
    Presence,
    Tokens,
    Whole,
)
from pipeline.protocol.pieces import ChoiceInJson, ExtraInJson
from pipeline.protocol.subjects import CLASSES

REF: Final = "#/components/schemas/{name}"

Node = dict[str, Any]
Named = type[msgspec.Struct]

_MSGPACK: Final = "application/msgpack"
_TEXT: Final[Node] = {"type": "string"}

_REQUEST_HEADERS: Final[Node] = {
    "type": "object",
    "properties": {
        REPLY_TO_HEADER: {"type": "string", "description": "The same as `reply_to`."},
        CLAIM_AT_HEADER: {"type": "string", "description": "The same as `claim_at`."},
        "Nats-Msg-Id": {
            "type": "string",
            "description": "Fresh for each request: the stream drops one that it has seen.",
        },
        "traceparent": {"type": "string", "description": "W3C Trace Context."},
        "tracestate": _TEXT,
    },
}


@functools.cache
def document() -> bytes:
    """The document, as JSON."""
    messages = _messages()
    structs = [Envelope, *(struct for struct, _ in messages.values())]
    _, schemas = msgspec.json.schema_components(structs, ref_template=REF)
    return msgspec.json.encode(
        {
            "asyncapi": "3.0.0",
            "info": {
                "title": "Headrace",
                "version": importlib.metadata.version("headrace"),
                "description": __doc__,
                "license": {"name": "Apache-2.0"},
            },
            "defaultContentType": "application/json",
            "channels": _channels(),
            "operations": _operations(),
            "components": {
                "messages": {name: _message(name, struct, **more) for name, (struct, more) in messages.items()},
                "schemas": schemas,
            },
        }
    )


_IN_JSON: Final[dict[str, Any]] = {
    "ids": list[int],
    "prompt": list[int],
    "extra": ExtraInJson | None,
    "choices": list[ChoiceInJson],
    "prompt_logprobs": list[Any] | None,
    "stages": dict[str, float] | None,
}
"""Fields that are packed in msgpack."""


def in_json(struct: Named) -> Named:
    """A struct as JSON has it: an object, with token ids as a list."""
    config = struct.__struct_config__
    fields: list[Any] = [
        (field.name, _IN_JSON.get(field.name, field.type), *([] if field.required else [msgspec.UNSET]))
        for field in msgspec.structs.fields(struct)
    ]
    said = {"__doc__": struct.__doc__}
    return msgspec.defstruct(
        f"{struct.__name__}InJson", fields, kw_only=True, tag_field=config.tag_field, tag=config.tag, namespace=said
    )


def _messages() -> dict[str, tuple[Named, Node]]:
    """By name: the struct, and what else there is to say."""
    frames: dict[str, tuple[Named, Node]] = {one.__name__.lower(): (in_json(one), {}) for one in (Tokens, Done, Failed)}
    answers: dict[str, tuple[Named, Node]] = {"go": (in_json(Go), {})}
    answers |= {one.__name__.lower(): (one, {}) for one in (Whole, Gone, Fenced, From)}
    return {
        "chat": (Chat, _requests(Chat)),
        "completion": (CompletionRequest, _requests(CompletionRequest)),
        **frames,
        "claim": (Claim, {}),
        **answers,
        "cancel": (Cancel, {"contentType": _MSGPACK}),
        "presence": (Presence, {"contentType": _MSGPACK}),
    }


def _requests(asked: Named) -> Node:
    """What is asked for, and in the same object the envelope."""
    both = [{"$ref": REF.format(name=struct.__name__)} for struct in (asked, Envelope)]
    return {"headers": _REQUEST_HEADERS, "payload": {"allOf": both}}


def _message(name: str, struct: Named, **more: Any) -> Node:
    said = (struct.__doc__ or "").strip()
    return {
        "name": name,
        "summary": said.partition("\n")[0],
        "payload": {"$ref": REF.format(name=struct.__name__)},
        **more,
    }


def _channels() -> Node:
    frames, answers = ("tokens", "done", "failed"), ("go", "whole", "gone", "fenced", "from")
    return {
        "requests": _channel(
            "requests.in.{class}.{affinity}.{creator}",
            "The work queue. One message is one request; it stays until its reply is whole.",
            ("chat", "completion"),
            {
                "class": {"enum": list(CLASSES), "description": "How urgent it is."},
                "affinity": {
                    "description": "What picks the shard: the creator, or `<creator>~<i>` where it is spread."
                },
                "creator": {"description": "One token: `[A-Za-z0-9_-]` as they are, every other byte as `=XX`."},
            },
        ),
        "replies": _channel(None, "The subject that the request names as `reply_to`.", frames),
        "replyAnswers": _channel(None, "NATS's reply subject of an end frame.", answers),
        "claims": _channel(None, "The subject that the request names as `claim_at`, if it does.", ("claim",)),
        "claimAnswers": _channel(None, "NATS's reply subject of a claim.", answers),
        "cancels": _channel(
            "control.cancel.{request}",
            "Stops a request wherever it is.",
            ("cancel",),
            {"request": {"description": "Its id."}},
        ),
        "presences": _channel(
            "presence.{role}.{id}",
            "Every process says five times a second that it lives, and how it is.",
            ("presence",),
            {"role": {"enum": ["gateway", "prefill", "decode"]}, "id": {"description": "The process."}},
        ),
    }


def _channel(address: str | None, text: str, messages: tuple[str, ...], parameters: Node | None = None) -> Node:
    channel: Node = {
        "address": address,
        "description": text,
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in messages},
    }
    return channel | ({"parameters": parameters} if parameters else {})


def _operations() -> Node:
    to_reply, to_claim = "$message.payload#/reply_to", "$message.payload#/claim_at"
    return {
        "receiveRequest": _operation("receive", "requests", "Take a request.", _answered("replies", to_reply)),
        "sendReply": _operation(
            "send", "replies", "Send frames; an end frame asks for an answer.", _answered("replyAnswers")
        ),
        "sendClaim": _operation(
            "send", "claims", f"Ask for the right to work ({to_claim}).", _answered("claimAnswers")
        ),
        "receiveCancel": _operation("receive", "cancels", "Stop a request.", {}),
        "sendPresence": _operation("send", "presences", "Say that we live.", {}),
    }


def _operation(action: str, channel: str, summary: str, more: Node) -> Node:
    return {"action": action, "channel": {"$ref": f"#/channels/{channel}"}, "summary": summary, **more}


def _answered(channel: str, location: str | None = None) -> Node:
    reply: Node = {"channel": {"$ref": f"#/channels/{channel}"}}
    return {"reply": reply | ({"address": {"location": location}} if location else {})}
