"""What to send: seeded, so that the same run is the same requests.

A `run` is in every draw. It holds the time, so that a second bench does not find what the first has left in caches, or is `warm`.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from pipeline.bench.words import text, words
from pipeline.cli import client
from pipeline.planning import source, traffic


class Order(msgspec.Struct, frozen=True):
    """One request: whose, of which conversation, and its body in JSON."""

    creator: str
    body: bytes
    conversation: str | None = None


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Personas and questions: `prompt_words` of a prompt, a word being a token, are its creator's persona but for the last 20."""

    creators: int
    prompt_words: int
    max_tokens: int
    run: str


def encoded(body: Mapping[str, Any]) -> bytes:
    """A body as it is sent."""
    return msgspec.json.encode(body)


def prompt(load: Load, number: int) -> tuple[str, dict[str, Any]]:
    """Creator and body of the request with this number: the same for the same load."""
    creator = f"bench-{number % load.creators}"
    persona = text(f"{load.run}/{creator}", max(1, load.prompt_words - 20))
    question = " ".join(words(f"{load.run}/{number}", 8))
    body = client.chat_body(
        f"Tell a story about: {question}.", system=persona, max_tokens=load.max_tokens, temperature=0
    )
    return creator, body


def plain(load: Load) -> Iterator[Order]:
    """Creators in turn, for ever."""
    for number in itertools.count():
        creator, body = prompt(load, number)
        yield Order(creator, encoded(body))


def seed(work: traffic.Workload, run: str) -> Iterator[Order]:
    """The source's workload, for ever: personas of 1,800 tokens, 5 to 15 turns of 40, a message of 10, a reply of 30."""
    for turn in traffic.requests(work):
        body = client.chat_body("", system=None, max_tokens=source.REPLY_TOKENS, temperature=0, ignore_eos=True)
        yield Order(turn.creator, encoded(body | {"messages": messages(turn, run)}), turn.conversation)


def messages(turn: traffic.Request, run: str) -> list[dict[str, str]]:
    """Persona, history and message. A window's text depends on its name and place alone, so it grows at its end, turn by turn."""
    turns = (turn.tokens - source.PERSONA_TOKENS - source.MESSAGE_TOKENS) // source.TURN_TOKENS
    drawn = words(f"{run}/{turn.conversation}/{turn.history}", turns * source.TURN_TOKENS + source.MESSAGE_TOKENS)
    said = [{"role": "system", "content": text(f"{run}/{turn.creator}", source.PERSONA_TOKENS)}]
    for begin in range(0, turns * source.TURN_TOKENS, source.TURN_TOKENS):
        middle = begin + source.MESSAGE_TOKENS
        said.append({"role": "user", "content": " ".join(drawn[begin:middle])})
        said.append({"role": "assistant", "content": " ".join(drawn[middle : begin + source.TURN_TOKENS])})
    return [*said, {"role": "user", "content": " ".join(drawn[-source.MESSAGE_TOKENS :])}]
