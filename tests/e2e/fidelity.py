"""Asks a server all of `fidelity_requests` and keeps what it answers, raw: `python -m tests.e2e.fidelity URL FILE`."""

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.e2e.fidelity_completions import Body
from tests.e2e.fidelity_requests import all_requests, path_of

Answer = dict[str, Any]


def ask(url: str, name: str, body: Body) -> Answer:
    """Status, and the body or the events of a stream."""
    data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}{path_of(name)}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, kind, text = answer.status, answer.headers["content-type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        status, kind, text = error.code, error.headers["content-type"], error.read().decode()
    if not kind.startswith("text/event-stream"):
        return {"status": status, "kind": kind, "body": json.loads(text)}
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    return {"status": status, "kind": kind, "events": [e if e == "[DONE]" else json.loads(e) for e in events]}


def ask_all(url: str, requests: Mapping[str, Body]) -> dict[str, Answer]:
    """One after the other, by name."""
    return {name: ask(url, name, body) for name, body in requests.items()}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(ask_all(sys.argv[1], all_requests()), indent=1))
