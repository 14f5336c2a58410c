"""`headrace chat`: one question, the reply streamed into the terminal, and what it took."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from pipeline.cli import client
from pipeline.cli.options import CaOption, ConfigOption, UrlOption, configuration
from pipeline.errors import OperatorError


def chat(
    *,
    message: Annotated[str, typer.Argument(help="What to say.")],
    creator: Annotated[
        str | None, typer.Option("--creator", help="Whose persona answers: requests of one creator share a warm cache.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System prompt: text, or @FILE.")] = None,
    url: UrlOption = None,
    ca: CaOption = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Longest reply.")] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, max=2.0, help="0: always the likeliest token.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    config: ConfigOption = None,
) -> None:
    """Ask one question, and stream the reply.

    Example: headrace chat "What is the capital of France?" --creator ada
    """
    gateway = client.gateway(url, ca, configuration(config))
    body = client.chat_body(message, system=text_of(system), max_tokens=max_tokens, temperature=temperature)
    reply = asyncio.run(client.chat(gateway, body, creator, (lambda _: None) if as_json else _write))
    _conclude(reply, as_json=as_json)


def _conclude(reply: client.Reply, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(reply).decode())
    elif reply.error is None:
        print()
        print(client.summary(reply), file=sys.stderr)
    if reply.error is not None:
        print(reply.error, file=sys.stderr)
        raise typer.Exit(1)


def text_of(option: str | None) -> str | None:
    """An option's text, or with `@` before it the content of that file. Raises `OperatorError`."""
    if option is None or not option.startswith("@"):
        return option
    try:
        return Path(option[1:]).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(f"Cannot read {option[1:]}: {error}.", "Give a text file after the @.") from None


def _write(piece: str) -> None:
    print(piece, end="", flush=True)
