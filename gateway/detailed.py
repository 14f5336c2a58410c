"""Streamed replies that say more than one text: several choices, logprobs, token ids, usage in every chunk, calls, reasoning.

Their chunks are `sse.Chunks`' in all else. They cost more, and few ask for them.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from gateway import openai, sse
from gateway.intake import Order
from pipeline.protocol.messages import Done, unpack_ids
from pipeline.protocol.openai import Chunk, ChunkChoice, Delta, LogprobsBody, UsageBody
from pipeline.protocol.reply import Piece, Receiver

_NOTHING_YET: Final = b"{}"

_json = msgspec.json.Encoder().encode


class DetailedChunks:
    """The events of one streamed reply. `receiver` knows the prompt once the first tokens are there."""

    def __init__(self, order: Order, created: int, receiver: Receiver) -> None:
        self._order = order
        self._created = created
        self._receiver = receiver
        self._counts: dict[int, int] = {}
        self._parsed = False

    def pieces(self, pieces: Sequence[Piece]) -> bytes:
        """A chunk for each choice that goes on."""
        return b"".join(self._piece(piece) for piece in pieces)

    def last(self, pieces: Sequence[Piece], dones: Sequence[Done]) -> bytes:
        """All that remains: the last news and the reasons of all choices, usage where it is wanted, and `[DONE]`."""
        (done,) = dones
        return b"".join(self._ends(pieces, done)) + sse.DONE

    def _ends(self, pieces: Sequence[Piece], done: Done) -> Iterator[bytes]:
        news = {piece.choice: piece for piece in pieces}
        for index, choice in enumerate(done.all_choices):
            piece = news.get(index) or Piece(index, "", ())
            yield self._piece(piece, choice.finish_reason, UNSET if choice.stop_reason is None else choice.stop_reason)
        if self._order.include_usage:
            yield self._event([], openai.usage_of(done.usage), UNSET)

    def _piece(
        self, piece: Piece, finish_reason: str | None = None, stop_reason: int | str | UnsetType = UNSET
    ) -> bytes:
        first = piece.choice not in self._counts
        self._counts.setdefault(piece.choice, 0)
        self._parsed = self._parsed or bool(piece.message)
        *deltas, last = self._deltas(piece, first=first)
        before = b"".join(self._chunk(Piece(piece.choice, "", ()), delta) for delta in deltas)
        return before + self._chunk(piece, last, finish_reason, stop_reason)

    def _deltas(self, piece: Piece, *, first: bool) -> list[Delta | msgspec.Raw]:
        """Text and who speaks; or where a parser makes a message of the text, what the worker has written of it."""
        if not self._parsed:
            return [Delta(role=self._order.detail.role if first else None, content=piece.text)]
        head: list[Delta | msgspec.Raw] = [Delta(role=self._order.detail.role, content="")] if first else []
        said = msgspec.json.decode(f"[{piece.message}]", type=list[msgspec.Raw])
        return [*head, *(delta for delta in said if bytes(delta) != _NOTHING_YET)] or [Delta()]

    def _chunk(
        self,
        piece: Piece,
        delta: Delta | msgspec.Raw,
        finish_reason: str | None = None,
        stop_reason: int | str | UnsetType = UNSET,
    ) -> bytes:
        detail = self._order.detail
        first = not any(self._counts.values())
        self._counts[piece.choice] += len(piece.ids)
        choice = ChunkChoice(
            index=piece.choice,
            delta=delta,
            logprobs=self._logprobs(piece),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            token_ids=list(piece.ids) if detail.ids and self._shows else UNSET,
        )
        prompt = unpack_ids(self._receiver.prompt) if detail.ids and first and piece.ids else UNSET
        return self._event([choice], self._usage(self._counts[piece.choice]), prompt)

    def _logprobs(self, piece: Piece) -> LogprobsBody | None:
        wanted = self._order.detail.logprobs and self._shows
        return openai.logprobs_of(piece.logprobs) if wanted and piece.logprobs else None

    @property
    def _shows(self) -> bool:
        """Whether tokens may be seen: not where they would tell the reasoning that is to be hidden."""
        return not (self._parsed and self._order.detail.hides_reasoning)

    def _usage(self, count: int) -> UsageBody | UnsetType | None:
        if not self._order.detail.continuous_usage:
            return None if self._order.include_usage else UNSET
        prompt = self._receiver.prompt_tokens
        return UsageBody(prompt_tokens=prompt, completion_tokens=count, total_tokens=prompt + count)

    def _event(
        self,
        choices: list[ChunkChoice],
        usage: UsageBody | UnsetType | None,
        prompt: list[int] | UnsetType,
    ) -> bytes:
        chunk = Chunk(
            id=openai.reply_id(self._order.id),
            created=self._created,
            model=self._order.model,
            choices=choices,
            usage=usage,
            prompt_token_ids=prompt,
        )
        return sse.event(_json(chunk))
