"""Requests of a recorded trace: as long, as far apart, and sharing what those shared.

Text is drawn by the ids of a trace's blocks, so equal ids are equal text, at the same place of the prompt: the template's own
tokens count as part of the first and the last block. (Where its tail is longer than the last block, it ends the one before, too.)
Prefixes are found in caches within a creator only, so the creator is the first block's id: what shares anything shares that.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from pipeline.bench.orders import Order, encoded
from pipeline.bench.template import Template, body_of
from pipeline.bench.words import text
from pipeline.errors import OperatorError
from pipeline.limits import TRACE_LINES_MAX
from pipeline.protocol.traces import BLOCK_TOKENS, Line


def read(path: Path) -> list[Line]:
    """The lines of a trace by time, from 0 on. Raises `OperatorError`, naming the place, for what is none."""
    decoder, lines = msgspec.json.Decoder(Line), list[Line]()
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    lines.append(_checked(decoder.decode(raw), number))
                if len(lines) > TRACE_LINES_MAX:
                    raise OperatorError(f"{path} has more than {TRACE_LINES_MAX:,} lines.", "Cut it: head -n.")
    except OSError as error:
        raise OperatorError(f"Cannot read {path}: {error.strerror}.", "Give a trace in Mooncake's format.") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise OperatorError(
            f"Line {number} of {path} is no line of a trace: {error}.",
            "It takes objects with timestamp (ms), input_length, output_length and hash_ids.",
        ) from None
    if not lines:
        raise OperatorError(f"{path} is empty.", "Give a trace in Mooncake's format.")
    lines.sort(key=lambda line: line.timestamp)
    return lines


def _checked(line: Line, number: int) -> Line:
    if line.timestamp < 0 or line.input_length < 1 or line.output_length < 1:
        raise ValueError("timestamp must be 0 or more, lengths 1 or more")
    blocks = -(-line.input_length // BLOCK_TOKENS)
    if len(line.hash_ids) >= blocks:
        return line
    # A writer that names full blocks only: what it does not name is shared with nobody.
    unnamed = [-(number * TRACE_LINES_MAX + place) for place in range(len(line.hash_ids), blocks)]
    return msgspec.structs.replace(line, hash_ids=[*line.hash_ids, *unnamed])


def times_s(lines: Sequence[Line], speed: float) -> Iterator[float]:
    """When each is due, in seconds from the first."""
    return ((line.timestamp - lines[0].timestamp) / 1000 / speed for line in lines)


def orders(lines: Sequence[Line], template: Template, run: str) -> Iterator[Order]:
    """The requests, in that order."""
    for line in lines:
        body = body_of(
            words_of(line, template, run),
            max_tokens=line.output_length,
            ignore_eos=True,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        yield Order(f"trace-{line.hash_ids[0]}", encoded(body))


def words_of(line: Line, template: Template, run: str) -> str:
    """The words between the template's head and tail: token `p` of the prompt belongs to block `p // 512`. One at least."""
    begin = template.head
    end = max(begin + 1, line.input_length - template.tail)
    parts = []
    for place, name in enumerate(line.hash_ids):
        first, last = max(begin, place * BLOCK_TOKENS), min(end, (place + 1) * BLOCK_TOKENS)
        if first < last:
            parts.append(_part(f"{run}/{name}", first % BLOCK_TOKENS, last - place * BLOCK_TOKENS, template))
    return " ".join(parts) or text(f"{run}/{line.hash_ids[0]}", 1)


def _part(key: str, first: int, last: int, template: Template) -> str:
    """Tokens `first` to `last` of a block's text."""
    whole = text(key, BLOCK_TOKENS)
    if (first, last) == (0, BLOCK_TOKENS) and template.exact:
        return whole
    return " ".join(whole.split()[round(first / template.tokens_per_word) : round(last / template.tokens_per_word)])
