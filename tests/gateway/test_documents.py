"""`/openapi.json` and `/asyncapi.json` say what is really served."""

import re
from typing import Any

import jsonschema
import msgspec
import pytest
from openapi_spec_validator import validate

from pipeline import asyncapi, openapi
from pipeline.errors import EngineFailed, ErrorBody
from pipeline.protocol.messages import Claim, Done, Failed, Go, Tokens, Usage, claim_for, frame_for, pack_ids
from tests.gateway.stack import CHAT, HELLO, Stack, events
from tests.gateway.worker_double import failing, saying

pytestmark = pytest.mark.anyio

HTTP: dict[str, Any] = msgspec.json.decode(openapi.document())
NATS: dict[str, Any] = msgspec.json.decode(asyncapi.document())


def fits(document: dict[str, Any], schema: str, value: Any) -> None:
    """Raise where a value is not what the document says."""
    whole = {"$ref": f"#/components/schemas/{schema}", "components": document["components"]}
    jsonschema.Draft202012Validator(whole).validate(value)


def references(node: Any) -> set[str]:
    """All that a document refers to in itself."""
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(references, node.values()))
    return set().union(*map(references, node)) if isinstance(node, list) else set()


def found(document: dict[str, Any], reference: str) -> Any:
    """What a reference points to."""
    node: Any = document
    for part in reference.removeprefix("#/").split("/"):
        node = node[part]
    return node


async def test_the_openapi_document_is_valid() -> None:
    validate(HTTP)


async def test_both_documents_are_served(served: Stack) -> None:
    assert (await served.client.get("/openapi.json")).json() == HTTP
    assert (await served.client.get("/asyncapi.json")).json() == NATS


async def test_every_path_is_in_the_openapi_document_and_no_other(served: Stack) -> None:
    served_paths = {
        (re.sub(r":\w+}", "}", route.path), method.lower())  # type: ignore[attr-defined]
        for route in served.gateway.routes()
        for method in route.methods  # type: ignore[attr-defined]
        if method != "HEAD"
    }
    said = {
        (path, method) for path, item in HTTP["paths"].items() for method in item if method in ("get", "put", "post")
    }
    assert said == served_paths


async def test_replies_and_errors_are_what_the_document_says(served: Stack) -> None:
    fits(HTTP, "Chat", HELLO)
    served.double.script = saying("Par", "is.")
    fits(HTTP, "Completion", (await served.ask()).json())
    stream = await served.ask(stream=True, stream_options={"include_usage": True})
    for event in events(stream.content)[:-1]:
        fits(HTTP, "Chunk", event)
    served.double.script = failing(EngineFailed("The engine failed.").body())
    response = await served.ask()
    fits(HTTP, "ErrorReply", response.json())
    assert str(response.status_code) in HTTP["paths"][CHAT]["post"]["responses"]
    for path, schema in (("/ready", "Readiness"), ("/v1/models", "ModelList"), ("/v1/models/double-1", "ModelCard")):
        fits(HTTP, schema, (await served.client.get(path)).json())


async def test_a_body_that_the_gateway_refuses_does_not_fit_the_document() -> None:
    wrong: list[dict[str, Any]] = [{"messages": []}, {"max_tokens": 0}, {"temperature": 3}]
    for fields in wrong:
        with pytest.raises(jsonschema.ValidationError):
            fits(HTTP, "Chat", HELLO | fields)


async def test_the_asyncapi_document_holds_together() -> None:
    """What AsyncAPI 3 asks of its parts; its own JSON schema (380 kB) is no part of this project."""
    assert NATS["asyncapi"] == "3.0.0"
    assert {"title", "version"} <= NATS["info"].keys()
    for reference in references(NATS):
        assert found(NATS, reference)
    for channel in NATS["channels"].values():
        named = set(re.findall(r"{(\w+)}", channel["address"] or ""))
        assert named == channel.get("parameters", {}).keys()
        assert channel["messages"]
    for operation in NATS["operations"].values():
        assert operation["action"] in ("send", "receive")
        assert operation["channel"]["$ref"].startswith("#/channels/")
        if "reply" in operation:
            assert operation["reply"]["channel"]["$ref"].startswith("#/channels/")
    for message in NATS["components"]["messages"].values():
        assert references(message["payload"])
        assert message["summary"]


USAGE = Usage(
    prompt_tokens=1,
    completion_tokens=1,
    cached_tokens=0,
    decode_cached_tokens=0,
    prefill_generated_tokens=1,
    prefill="p",
    decode="d",
)
ERROR = ErrorBody(message="m", type="t", code="c", status=500)


@pytest.mark.parametrize(
    ("message", "payload"),
    [
        ("tokens", frame_for(Tokens(1, "r", "c", 0, pack_ids([1, 2]), "ab"), "json")),
        ("done", frame_for(Done(1, "r", "c", 1, pack_ids([1]), "a", "stop", USAGE), "json")),
        ("failed", frame_for(Failed(1, "r", "c", 0, ERROR), "json")),
        ("claim", claim_for(Claim(request="r", claim="c", epoch="1", holder="holder.p", ack="$JS"), "json")),
        ("done", frame_for(Done(1, "r", "c", 1, b"", "a", "stop", USAGE, prompt_logprobs="[null]"), "json")),
        ("chat", msgspec.json.encode(HELLO | {"type": "chat", "reply_to": "_INBOX.a"})),
        ("completion", b'{"prompt": [1, 2], "echo": true, "reply_to": "_INBOX.a", "timeout_ms": 5}'),
        ("go", b'{"type": "go", "ids": [1, 2]}'),
        ("go", b'{"type": "go"}'),
        ("whole", b'{"type": "whole"}'),
    ],
)
async def test_what_travels_in_json_is_what_the_asyncapi_document_says(message: str, payload: bytes) -> None:
    for reference in references(NATS["components"]["messages"][message]["payload"]):
        fits(NATS, reference.rpartition("/")[2], msgspec.json.decode(payload))


async def test_go_is_described_as_it_is_defined() -> None:
    assert set(NATS["components"]["schemas"]["GoInJson"]["properties"]) == {"type", *Go.__struct_fields__}
