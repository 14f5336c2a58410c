"""Continuing a reply that another worker had begun, on vLLM.

For vLLM the delivered tokens are prompt, so its own detokeniser would know nothing of a character or a stop string that begins in
them. So it is told not to detokenise, and its detokeniser is run here, over the delivered tokens first. Imports vLLM.
"""

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from workers.engines.port import FinishReason, Step


class Continuation:
    """One reply from the token after the `delivered` ones, which have given the text `before`.

    `parameters` are the sampling parameters of the whole reply; `prompt` has none of it.
    """

    def __init__(self, engine: Any, prompt: Sequence[int], parameters: Any, delivered: Sequence[int]) -> None:
        self._parameters = parameters
        stops = _stops(engine, parameters)
        self._delivered = delivered
        request = SimpleNamespace(
            request_id="", prompt_token_ids=list(prompt), prompt_embeds=None, sampling_params=parameters
        )
        self._text = IncrementalDetokenizer.from_new_request(engine.renderer.tokenizer, request)
        self.before = ""
        self._stopped_by: int | str | None = None
        self.over: FinishReason | None = None
        for token_id in delivered:
            self.over = self._feed([token_id], is_stop_token=token_id in stops)
            if self._stopped_by is None:
                self._stopped_by = stops.get(token_id)
            if self.over is None:
                self.before += self._text.get_next_output_text(finished=False, delta=True)
        if self.over is None and len(delivered) >= parameters.max_tokens:
            self.over = "length"

    def parameters(self) -> Any:
        """What vLLM is asked for: the rest of the reply, as tokens alone."""
        rest = copy.copy(self._parameters)
        rest.max_tokens -= len(self._delivered)
        rest.min_tokens = max(0, rest.min_tokens - len(self._delivered))
        rest.stop = []
        rest.detokenize = False
        rest.output_text_buffer_length = 0
        return rest

    def nothing_left(self) -> Step:
        """The one step of a reply that was complete."""
        assert self.over is not None
        return self._step([], self.over, cached_tokens=0)

    def step(
        self,
        token_ids: Sequence[int],
        reason: FinishReason | None,
        cached_tokens: int,
        stop_reason: int | str | None = None,
    ) -> Step:
        """vLLM's new tokens with their text, cut where a stop string ends."""
        had = self._text.num_output_tokens()
        stopped = self._feed(list(token_ids), is_stop_token=reason == "stop")
        kept = self._text.num_output_tokens() - had
        return self._step(token_ids[:kept], stopped or reason, cached_tokens, stop_reason)

    def _feed(self, token_ids: list[int], *, is_stop_token: bool) -> FinishReason | None:
        self._stopped_by = stop_string = self._text.update(token_ids, is_stop_token)
        return "stop" if stop_string is not None or is_stop_token else None

    def _step(
        self,
        token_ids: Sequence[int],
        reason: FinishReason | None,
        cached_tokens: int,
        stop_reason: int | str | None = None,
    ) -> Step:
        text = self._text.get_next_output_text(finished=reason is not None, delta=True)
        step = Step(
            token_ids=list(token_ids),
            text=text,
            cached_tokens=cached_tokens,
            finish_reason=reason,
            before=self.before,
            stop_reason=stop_reason if self._stopped_by is None else self._stopped_by,
        )
        self.before = ""
        return step


def _stops(engine: Any, parameters: Any) -> dict[int, int | None]:
    """The tokens that end this reply, and the `stop_reason` that vLLM gives for each: none for the model's own end.

    vLLM adds the model's own to the parameters only when it takes the request in.
    """
    told = copy.deepcopy(parameters)
    eos = engine.renderer.get_eos_token_id()
    told.update_from_generation_config(engine.input_processor.generation_config_fields, eos)
    stops: dict[int, int | None] = {token_id: token_id for token_id in told.stop_token_ids or ()}
    return stops if told.ignore_eos or eos is None else {**stops, eos: None}
