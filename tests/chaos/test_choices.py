"""Replies of two choices while decode workers are killed: each equals the undisturbed one, or ends with an error saying why."""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from pipeline.cli import client, http
from tests.chaos.stack import Settings, Stack

pytestmark = pytest.mark.timeout(240)

REQUESTS = 24
KILLS = 3
APART_S = 0.15
CALM_S = 0.6
"""A reply takes as long: at each kill some are in their middle."""


class Told(msgspec.Struct):
    """What a client was told: the text of each choice, the choices that have ended, and the error where there is one."""

    texts: dict[int, str] = {}
    ended: dict[int, str] = {}
    code: str = ""
    whole: bool = False


def body(number: int) -> bytes:
    fields = {"n": 2, "max_tokens": 60, "ignore_eos": True, "stream": True}
    messages = [{"role": "user", "content": f"Story {number}, please. " * 20}]
    return msgspec.json.encode({"messages": messages, "user": f"creator-{number % 5}", **fields})


async def ask(url: str, number: int) -> Told:
    told, buffer = Told(), bytearray()
    headers = {"content-type": "application/json"}
    async with http.requested("POST", f"{url}/v1/chat/completions", body=body(number), headers=headers) as response:
        if response.status != 200:
            told.code = msgspec.json.decode(await response.body())["error"]["code"]
            return told
        async for piece in response.pieces():
            for event in client.events(buffer, piece):
                take(told, event)
    return told


def take(told: Told, event: bytes) -> None:
    if event == b"[DONE]":
        told.whole = not told.code
        return
    chunk: dict[str, Any] = msgspec.json.decode(event)
    told.code = chunk.get("error", {}).get("code", told.code)
    for choice in chunk.get("choices", []):
        index = choice["index"]
        told.texts[index] = told.texts.get(index, "") + (choice["delta"].get("content") or "")
        if choice["finish_reason"]:
            told.ended[index] = choice["finish_reason"]


async def all_of_them(url: str, apart_s: float) -> dict[int, Told]:
    """Every request, one after the other begun, all followed to the end."""
    replies: dict[int, Told] = {}

    async def one(number: int) -> None:
        replies[number] = await ask(url, number)

    async with anyio.create_task_group() as tasks:
        for number in range(REQUESTS):
            tasks.start_soon(one, number)
            await anyio.sleep(apart_s)
    return replies


async def killed_while(stack: Stack, url: str) -> list[tuple[int, Told]]:
    """The same requests, again and again until all kills have been done."""
    killed = anyio.Event()

    async def kill() -> None:
        for _ in range(KILLS):
            await stack.until(lambda: len(stack.up("decode")) == 2, "no two decode workers serve")
            await anyio.sleep(CALM_S)
            stack.kill(min(stack.up("decode"), key=lambda part: part.lives))
        killed.set()

    replies: list[tuple[int, Told]] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill)
        while not killed.is_set():
            replies += (await all_of_them(url, APART_S)).items()
    return replies


def test_a_reply_of_two_choices_is_right_or_ends_with_an_error_whoever_dies() -> None:
    async def main() -> tuple[dict[int, Told], list[tuple[int, Told]]]:
        with tempfile.TemporaryDirectory() as folder:
            stack = Stack(Path(folder), Settings(prefill=2, decode=2, gateways=1, step_s=0.01))
            async with stack.running():
                (gateway,) = stack.gateways()
                url = gateway.url
                return await all_of_them(url, 0.02), await killed_while(stack, url)

    undisturbed, killed = anyio.run(main)
    assert all(told.whole and told.ended == {0: "length", 1: "length"} for told in undisturbed.values())
    assert all(len(set(told.texts.values())) == 2 for told in undisturbed.values())
    for number, told in killed:
        right = undisturbed[number]
        if told.whole:
            assert told == right
        else:
            assert told.code == "reply_lost", told
            assert all(right.texts[index].startswith(text) for index, text in told.texts.items())
    ends = Counter("whole" if told.whole else "lost" for _, told in killed)
    assert ends["lost"] > 0, "a kill in the middle of a reply was to be survived or told"
    assert ends["whole"] > 0
