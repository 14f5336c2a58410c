"""Requests and replies as they lie in streams and on subjects, in msgpack or, where a producer prefers it, in JSON."""

from collections.abc import Mapping

import msgspec

from pipeline.errors import ErrorBody
from pipeline.protocol.messages import AnyFrame, Done, Failed, Tokens, Usage, encoding_of, frames_decoder, pack_ids
from pipeline.protocol.pieces import Choice, Extra


def frames_of(data: bytes) -> list[AnyFrame]:
    """The frames of a message. In JSON there is one, with its fields spelled out. Raises `msgspec.DecodeError`."""
    if not data.startswith(b"{"):
        return frames_decoder.decode(data)
    said = msgspec.json.decode(data)
    if "kind" not in said:
        raise msgspec.DecodeError("no frame")
    head = (said["v"], said["request"], said["claim"], said["index"])
    if said["kind"] == "error":
        return [Failed(*head, msgspec.convert(said["error"], ErrorBody))]
    ids, text = pack_ids(said["ids"]), said["text"]
    if said["kind"] == "tokens":
        extra = said["extra"] and Extra(said["extra"]["choice"])
        return [Tokens(*head, ids, text, extra)]
    choices = [Choice(pack_ids(one["ids"]), one["text"], one["finish_reason"]) for one in said["choices"]]
    return [Done(*head, ids, text, said["finish_reason"], msgspec.convert(said["usage"], Usage), choices)]


def id_of(data: bytes) -> str:
    """The id of a request."""
    decode = msgspec.msgpack.decode if encoding_of(data) == "msgpack" else msgspec.json.decode
    try:
        tree = decode(data)
    except msgspec.DecodeError:
        return "?"
    return str(tree.get("id", "?")) if isinstance(tree, Mapping) else "?"
