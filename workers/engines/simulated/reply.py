"""Replies: what the engine says, token by token.

Token `i` of a reply depends on the seeds, the prompt, which choice it is and `i` alone, in any process. So a reply that is
continued after `k` tokens, which then stand at the prompt's end, goes on as if nothing had happened: reply ids have a range of
their own, by which they are told from the prompt. What the other parameters change is only where the reply ends.

    index    0      1      2         3         …   length - 1
    token   " the" " sea" <F0 9F>  <8C 8A>         EOS
    text    " the" " sea" ""       "🌊"             ""

Some characters take two tokens, beginning at an even index, so that a step now and then adds no text.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Annotated, Any, Final

import msgspec

from pipeline.errors import InvalidField
from workers.engines.port import FinishReason

_WORDS: Final = (
    " the a of to and in that it is was for on are with as his they at be this from have or by one had not but what all were"
    " when we there can an your which their said if do will each about how up out them then she many some so these would other"
    " into has more her two like him see time could no make than first been its who now people my made over did down only way"
    " find use may water long little very after words called just where most know café naïve señor über"
)
_ENDS: Final = (",", ".", "!", "?")
_PICTURES: Final = "🌊🎣🐟🌱🔥🌙🚀💧"

REPLY_FIRST: Final = 49_152
EOS: Final = REPLY_FIRST

_TEXTS: Final = ("", *(f" {word}" for word in _WORDS.split()), *_ENDS)
_HALVES: Final = tuple(half for picture in _PICTURES for half in (picture.encode()[:2], picture.encode()[2:]))
_HALF_FIRST: Final = REPLY_FIRST + len(_TEXTS)
REPLY_LAST: Final = _HALF_FIRST + len(_HALVES) - 1
_PLAIN: Final = len(_TEXTS) - 1
_RUN: Final = 64
"""Tokens drawn at a time: one BLAKE2b digest, a byte each."""

_LENGTH_MIN, _LENGTHS = 9, 28
"""A reply that ends by itself has 9, 11, …, 63 tokens: EOS stands at an even index and cuts no character in two."""


class Sampling(msgspec.Struct, frozen=True):
    """What we honour of a chat's parameters, as vLLM means it."""

    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    seed: int | None = None
    n: Annotated[int, msgspec.Meta(ge=1)] = 1

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings; empty ones stop nothing."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in given if stop)


_NEED_A_MODEL: Final[Mapping[str, tuple[Any, ...]]] = {
    "logprobs": (False,),
    "prompt_logprobs": (),
    "tools": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
}
"""Field → the values under which a reply is one text that nothing constrains."""


def sampling_of(chat: Mapping[str, Any]) -> Sampling:
    """What of a chat is honoured.

    Raises `InvalidField` where a parameter has the wrong type, or asks for what needs a model. An explicit null is the default.
    """
    for name, harmless in _NEED_A_MODEL.items():
        value = chat.get(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in harmless):
            raise InvalidField(f"The simulated engine has no {name}: it only models time.", param=name)
    given = {name: chat[name] for name in Sampling.__struct_fields__ if chat.get(name) is not None}
    try:
        return msgspec.convert(given, Sampling)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        raise InvalidField(f"{message}.", param=path.rstrip("`") or None) from None


class _Text:
    """From ids to text, holding back what may become a character or a stop string."""

    def __init__(self, sampling: Sampling) -> None:
        self._stops = sampling.stops
        self._include = sampling.include_stop_str_in_output
        self._held_back = 0 if self._include else max((len(stop) for stop in self._stops), default=1) - 1
        self._half = b""
        self._text = ""
        self._said = 0

    @property
    def length(self) -> int:
        """Characters so far, said or held back."""
        return len(self._text)

    def add(self, token_id: int) -> None:
        """One more token. The first half of a character waits for the second."""
        if token_id < _HALF_FIRST:
            self._half = b""
            self._text += _TEXTS[token_id - REPLY_FIRST]
            return
        number = token_id - _HALF_FIRST
        self._half = _HALVES[number] if number % 2 == 0 else self._half + _HALVES[number]
        if number % 2:
            self._text += self._half.decode("utf-8", "replace")

    def say(self) -> str:
        """What can be said now."""
        return self._say(len(self._text) - self._held_back)

    def stop(self, new_from: int) -> str | None:
        """The last words, where a stop string ends after character `new_from`; else None."""
        for stop in self._stops:
            at = self._text.find(stop, max(0, new_from - len(stop) + 1))
            if at >= 0:
                return self._say(at + len(stop) if self._include else at)
        return None

    def rest(self) -> str:
        """All that is held back. Half a character stays unsaid."""
        return self._say(len(self._text))

    def _say(self, to: int) -> str:
        if to <= self._said:
            return ""
        said, self._said = self._text[self._said : to], to
        return said


class Reply:
    """One reply, from the token after the `delivered` ones, which have given the text `before`.

    Where they are the whole of it, `last_words` are what was held back of them.
    """

    def __init__(
        self,
        seed: int,
        prompt: bytes,
        delivered: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        choice: int = 0,
    ) -> None:
        named = f"{seed}/{sampling.seed}/{choice or ''}".encode()
        self._root = blake2b(prompt, key=blake2b(named, digest_size=32).digest(), digest_size=16).digest()
        self._run = b""
        self._run_number = -1
        self._index = len(delivered)
        self._left = max_tokens - len(delivered)
        self._check_from = sampling.min_tokens
        length = _LENGTH_MIN + 2 * (self._root[0] % _LENGTHS)
        self._eos_at = -1 if sampling.ignore_eos else max(length - 1, self._check_from + self._check_from % 2)
        self._stop_ids = frozenset(sampling.stop_token_ids or ())
        self._text = _Text(sampling)
        self.before = self.last_words = ""
        self._over: FinishReason | None = None
        for index, token_id in enumerate(delivered):
            said, self._over = self._read(token_id, index, max_tokens - index - 1)
            self.last_words = said if self._over else ""
            self.before += "" if self._over else said

    @property
    def over(self) -> FinishReason | None:
        """Set where nothing is left to generate."""
        return self._over

    def next(self) -> tuple[int, str, FinishReason | None]:
        """The next token, the text it adds, and why it is the last, if it is."""
        assert self._over is None, "the reply is over"
        index = self._index
        self._index += 1
        self._left -= 1
        token_id = EOS if index == self._eos_at else self._token(index)
        text, self._over = self._read(token_id, index, self._left)
        return token_id, text, self._over

    def _read(self, token_id: int, index: int, left: int) -> tuple[str, FinishReason | None]:
        """What a token adds, and why it is the last, if it is."""
        if token_id == EOS and self._eos_at >= 0:
            return self._text.rest(), "stop"
        before = self._text.length
        self._text.add(token_id)
        ending = self._ending(token_id, before) if index >= self._check_from else None
        if ending is not None:
            return ending, "stop"
        return (self._text.rest(), "length") if left < 1 else (self._text.say(), None)

    def _ending(self, token_id: int, before: int) -> str | None:
        """What is left to say where a stop string or token ends the reply here, else None."""
        ending = self._text.stop(before)
        return self._text.rest() if ending is None and token_id in self._stop_ids else ending

    def _token(self, index: int) -> int:
        even = index & ~1
        drawn = self._drawn(even)
        if drawn < len(_PICTURES):
            return _HALF_FIRST + 2 * drawn + (index & 1)
        if index & 1:
            drawn = self._drawn(index)
        return REPLY_FIRST + 1 + drawn % _PLAIN

    def _drawn(self, index: int) -> int:
        number = index // _RUN
        if number != self._run_number:
            self._run = blake2b(number.to_bytes(8, "little"), key=self._root, digest_size=_RUN).digest()
            self._run_number = number
        return self._run[index % _RUN]


def first_of(seed: int, prompt: bytes, sampling: Sampling, max_tokens: int) -> tuple[int, str]:
    """The first token of a reply, and the text with which another engine will go on from it."""
    token_id, _, _ = Reply(seed, prompt, (), sampling, max_tokens).next()
    return token_id, Reply(seed, prompt, (token_id,), sampling, max_tokens).before
