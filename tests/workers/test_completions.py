"""Completions through both loops, as a producer sends them."""

import json
import secrets
from typing import Any

import anyio
import pytest

from pipeline.bus.connection import Message
from tests.nats_server import NatsServer
from tests.workers.fleet import Fleet, config_for, fleet, until

pytestmark = pytest.mark.anyio


async def published(made: Fleet, **body: Any) -> list[dict[str, Any]]:
    """The frames that come for a request in JSON, up to its end."""
    frames: list[dict[str, Any]] = []
    inbox = made.bus.inbox()

    def came(message: Message) -> None:
        frames.append(json.loads(message.data))

    await made.bus.subscribe(inbox, came)
    payload = json.dumps(body | {"reply_to": inbox}).encode()
    await made.bus.store("requests.in.interactive.ada.ada", payload, msg_id=secrets.token_hex(8), timeout_s=2.0)
    with anyio.fail_after(5):
        await until(lambda: bool(frames) and frames[-1]["kind"] != "tokens")
    return frames


async def test_a_prompt_is_completed_and_echoed_where_that_is_asked_for(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        *tokens, done = await published(made, prompt="Once upon a time", max_tokens=5, echo=True)
        assert done["text"].startswith("Once upon a time ")
        assert "".join(frame["text"] for frame in tokens) == done["text"]
        assert (len(done["ids"]), done["usage"]["prompt_tokens"]) == (5, 4)
        *_, done = await published(made, prompt=[5, 6, 7], ignore_eos=True)
        assert (len(done["ids"]), done["usage"]["prompt_tokens"], done["prompt_logprobs"]) == (16, 3, None)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": "a", "messages": []}, "prompt"),
        ({"type": "completion"}, "prompt"),
        ({"prompt": [5], "echo": True}, "echo"),
        ({"prompt": [60_000]}, "prompt"),
        ({"prompt": "a", "logprobs": 0}, "logprobs"),
        ({"prompt": "a", "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt": "word " * 5000}, "messages"),
    ],
)
async def test_what_cannot_be_completed_is_answered_with_its_field(
    broker: NatsServer, body: dict[str, Any], param: str
) -> None:
    async with fleet(config_for(broker.url)) as made:
        (failed,) = await published(made, **body)
        assert (failed["kind"], failed["error"]["param"]) == ("error", param)
