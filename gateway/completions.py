"""Completions in OpenAI's words, as vLLM serves them: in one piece, and as server-sent events.

A request may have several prompts: the replies to each follow those to the one before, and so do their numbers.
"""

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from gateway import openai, sse
from gateway.intake import Order
from pipeline.protocol.messages import Done, Usage, unpack_ids
from pipeline.protocol.openai import TextChoice, TextCompletion, TextLogprobs, UsageBody
from pipeline.protocol.pieces import Choice as Said
from pipeline.protocol.reply import Piece, Receiver

_json = msgspec.json.Encoder().encode


def reply_id(request: str) -> str:
    """vLLM's id of the reply to a request."""
    return f"cmpl-{request}"


def completion(order: Order, created: int, dones: Sequence[Done]) -> bytes:
    """The body of a reply that is not streamed."""
    body = TextCompletion(
        id=reply_id(order.id),
        created=created,
        model=order.model,
        choices=list(_choices(order, dones)),
        usage=openai.usage_of(usage_of_all([done.usage for done in dones])),
    )
    return _json(body)


def usage_of_all(usages: Sequence[Usage]) -> Usage:
    """What the replies to all prompts have taken together, by whoever it was."""
    if len(usages) == 1:
        return usages[0]
    counts = ("prompt_tokens", "completion_tokens", "cached_tokens", "decode_cached_tokens", "hbm_tokens")
    return Usage(
        **{name: sum(getattr(usage, name) for usage in usages) for name in (*counts, "prefill_generated_tokens")},
        prefill=",".join(sorted({usage.prefill for usage in usages})),
        decode=",".join(sorted({usage.decode for usage in usages})),
    )


def _choices(order: Order, dones: Sequence[Done]) -> Iterator[TextChoice]:
    detail = order.detail
    for number, done in enumerate(dones):
        for index, choice in enumerate(done.all_choices, number * detail.choices):
            yield TextChoice(
                index=index,
                text=choice.text,
                logprobs=logprobs_of(choice.logprobs) if detail.logprobs else None,
                finish_reason=choice.finish_reason,
                stop_reason=UNSET if choice.stop_reason is None else choice.stop_reason,
                token_ids=unpack_ids(choice.ids) if detail.ids else UNSET,
                prompt_token_ids=unpack_ids(done.prompt) if detail.ids else UNSET,
                prompt_logprobs=openai.raw_or_unset(done.prompt_logprobs),
            )


def logprobs_of(written: str) -> TextLogprobs:
    """Workers write the columns of some tokens at a time; here they are put together."""
    some = msgspec.json.decode(f"[{written}]", type=list[TextLogprobs])
    return TextLogprobs(
        text_offset=[value for one in some for value in one.text_offset],
        token_logprobs=[value for one in some for value in one.token_logprobs],
        tokens=[value for one in some for value in one.tokens],
        top_logprobs=[value for one in some for value in one.top_logprobs],
    )


class CompletionChunks:
    """The events of one streamed completion. `receivers` know the prompts once the first tokens are there."""

    def __init__(self, order: Order, created: int, receivers: Sequence[Receiver]) -> None:
        self._order = order
        self._created = created
        self._receivers = receivers
        self._counts: dict[int, int] = {}

    def pieces(self, pieces: Sequence[Piece]) -> bytes:
        """A chunk for each choice that goes on."""
        return b"".join(self._chunk(piece) for piece in pieces)

    def last(self, pieces: Sequence[Piece], dones: Sequence[Done]) -> bytes:
        """All that remains: the last news and the reasons of all choices, usage where it is wanted, and `[DONE]`."""
        return b"".join(self._ends(pieces, dones)) + sse.DONE

    def _ends(self, pieces: Sequence[Piece], dones: Sequence[Done]) -> Iterator[bytes]:
        news = {piece.choice: piece for piece in pieces}
        for index, choice in enumerate(choice for done in dones for choice in done.all_choices):
            yield self._chunk(news.get(index) or Piece(index, "", ()), choice)
        if self._order.include_usage:
            yield self._event([], openai.usage_of(usage_of_all([done.usage for done in dones])))

    def _chunk(self, piece: Piece, end: Said | None = None) -> bytes:
        detail, receiver = self._order.detail, self._receivers[piece.choice // self._order.detail.choices]
        first = piece.choice not in self._counts
        count = self._counts[piece.choice] = self._counts.get(piece.choice, 0) + len(piece.ids)
        choice = TextChoice(
            index=piece.choice,
            text=piece.text,
            logprobs=logprobs_of(piece.logprobs) if detail.logprobs and piece.logprobs else None,
            finish_reason=end.finish_reason if end else None,
            stop_reason=UNSET if end is None or end.stop_reason is None else end.stop_reason,
            token_ids=list(piece.ids) if detail.ids else UNSET,
            prompt_token_ids=unpack_ids(receiver.prompt) if first and receiver.prompt else UNSET,
        )
        return self._event([choice], self._usage(receiver.prompt_tokens, count))

    def _usage(self, prompt: int, count: int) -> UsageBody | UnsetType | None:
        if not self._order.detail.continuous_usage:
            return None if self._order.include_usage else UNSET
        return UsageBody(prompt_tokens=prompt, completion_tokens=count, total_tokens=prompt + count)

    def _event(self, choices: list[TextChoice], usage: UsageBody | UnsetType | None) -> bytes:
        chunk = TextCompletion(
            id=reply_id(self._order.id),
            created=self._created,
            model=self._order.model,
            choices=choices,
            usage=usage,
        )
        return sse.event(_json(chunk))
