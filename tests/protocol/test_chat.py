"""Requests: what is accepted, what is refused and by which field."""

import math
from typing import Any

import msgspec
import pytest

from pipeline.errors import InvalidField
from pipeline.protocol import chat
from pipeline.protocol.chat import Chat, Envelope

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": 7, "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [USER], "max_tokens": 0}, "max_tokens"),
        ({"messages": [USER], "max_tokens": -1}, "max_tokens"),
        ({"messages": [USER], "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": [USER], "temperature": 2.5}, "temperature"),
        ({"messages": [USER], "temperature": -0.1}, "temperature"),
        ({"messages": [USER], "temperature": math.nan}, "temperature"),
        ({"messages": [USER], "top_p": 0}, "top_p"),
        ({"messages": [USER], "n": 0}, "n"),
        ({"messages": [USER], "logprobs": 1}, "logprobs"),
        ({"messages": [USER], "tools": {}}, "tools"),
        ({"messages": [USER], "timeout_ms": 0}, "timeout_ms"),
        ({"messages": [USER], "id": ""}, "id"),
        ({"messages": [USER], "v": 2}, "v"),
    ],
)
def test_a_bad_field_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidField) as caught:
        [chat.to_part(body, part) for part in (Envelope, Chat)]
    assert caught.value.param == param
    assert caught.value.message


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, False),
        ({"stream_options": {"include_usage": True}}, False),
        ({"stream_options": {"continuous_usage_stats": True}}, True),
        ({"return_token_ids": True}, True),
    ],
)
def test_the_prompt_travels_only_where_it_is_asked_for(body: dict[str, Any], wanted: bool) -> None:
    assert chat.wants_prompt(body) is wanted


def test_unknown_fields_are_accepted_and_parts_of_text_too() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "surprise": 1, "n": 1}
    read = chat.to_part(body, Chat)
    assert read.reply_tokens_max is None


def test_the_new_name_of_max_tokens_wins() -> None:
    read = chat.to_part({"messages": [USER], "max_tokens": 5, "max_completion_tokens": 7}, Chat)
    assert read.reply_tokens_max == 7
    assert chat.to_part({"messages": [USER], "max_tokens": 5}, Chat).reply_tokens_max == 5


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"x",
        b"[]",
        b'{"a":"\xff"}',
        b'{"temperature":NaN}',
        b"\xff\x00",
        b"\x81\x01\x02",
        b'{"a":' * 100_000,
        b'{"seed": 99999999999999999999999}',
    ],
)
def test_what_is_no_map_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidField):
        chat.to_map(payload)


def test_both_encodings_are_read() -> None:
    body = {"messages": [USER]}
    assert chat.to_map(msgspec.json.encode(body)) == chat.to_map(msgspec.msgpack.encode(body)) == body


def test_a_byte_order_mark_is_blamed_as_json() -> None:
    with pytest.raises(InvalidField, match="not valid json"):
        chat.to_map(b"\xef\xbb\xbf{}")
