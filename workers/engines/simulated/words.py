"""Prompts as token ids, without a tokeniser.

Text is cut into words with their leading space, and words into pieces of at most six bytes: English comes out at about four
characters a token, as with a real tokeniser. A piece's id is its checksum, so that equal text has equal ids in every process
and nothing has to be loaded. Ids do not lead back to text; replies have a vocabulary of their own (`reply.py`).

The template is that of SmolLM2, in special ids:

    START role NEWLINE content… END NEWLINE   for each message
    START assistant NEWLINE                   for the reply

A completion's prompt has no template.
"""

import re
from array import array
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final
from zlib import crc32

import msgspec

from pipeline.errors import InvalidField
from pipeline.protocol.chat import Message

START: Final = 1
END: Final = 2
NEWLINE: Final = 3
ROLES: Final = {"system": 4, "developer": 5, "user": 6, "assistant": 7, "tool": 8}

PIECE_FIRST: Final = 1_000
PIECES: Final = 48_000
PIECE_BYTES: Final = 6

TEXTS_REMEMBERED: Final = 512
"""Texts whose ids are kept: system prompts come back with every request. About 10 KB each, for the longest ones."""

_WORD: Final = re.compile(r" ?[^\W\d_]+| ?\d{1,3}| ?[^\s\w]+|\s+|_+")


class _Conversation(msgspec.Struct, frozen=True):
    messages: list[Message]


def tokenise(text: str) -> "array[int]":
    """The ids of `text`."""
    ids = array("I")
    for word in _WORD.findall(text):
        raw = word.encode("utf-8", "surrogatepass")
        for at in range(0, len(raw), PIECE_BYTES):
            ids.append(PIECE_FIRST + crc32(raw[at : at + PIECE_BYTES]) % PIECES)
    return ids


_remembered = lru_cache(maxsize=TEXTS_REMEMBERED)(tokenise)


def prompt_of(chat: Mapping[str, Any]) -> list[int]:
    """The chat's messages under the template, or a completion's prompt. Raises `InvalidField` where they do not fit."""
    if chat.get("type") == "completion":
        prompt = chat["prompt"]
        return _remembered(prompt).tolist() if isinstance(prompt, str) else _checked(prompt)
    try:
        conversation = msgspec.convert({"messages": chat.get("messages")}, _Conversation)
    except msgspec.ValidationError as error:
        raise InvalidField(f"{error}.", param="messages") from None
    if not conversation.messages:
        raise InvalidField("messages must not be empty.", param="messages")
    ids = array("I")
    for message in conversation.messages:
        if message.role not in ROLES:
            raise InvalidField(f"The simulated engine knows no role {message.role!r}.", param="messages")
        ids.extend((START, ROLES[message.role], NEWLINE))
        ids.extend(_remembered(_text_of(message)))
        ids.extend((END, NEWLINE))
    ids.extend((START, ROLES["assistant"], NEWLINE))
    return ids.tolist()


def _checked(ids: list[int]) -> list[int]:
    if max(ids) >= PIECE_FIRST + PIECES:
        raise InvalidField(f"prompt: the simulated engine has no token {max(ids)}.", param="prompt")
    return ids


def _text_of(message: Message) -> str:
    if message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    return "\n".join(part.text for part in message.content)
