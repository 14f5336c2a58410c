"""What the gateway knows of the workers: which models they serve, and how many are ready."""

import math
from collections.abc import Callable
from typing import Final

import msgspec

from pipeline.errors import ModelNotFound
from pipeline.limits import PRESENCE_SILENT_MAX_S
from pipeline.protocol.classes import BATCH
from pipeline.protocol.presence import Presences

_FRESH_S: Final = 0.05
"""A look at the presences serves all requests of this long: a quarter of a presence period, so nothing is missed by it."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """Ready workers of both kinds; the slots that prefill has free, in all and for batch; by served model the longest context.

    The longest is the one that all take.
    """

    prefill: int = 0
    decode: int = 0
    slots_free: int = 0
    batch_slots_free: int = 0
    models: dict[str, int] = {}

    def choose(self, model: str) -> str:
        """The model to answer with: the one asked for, or where none was, the one there is. Raises `ModelNotFound`.

        With no worker ready nothing is known of models, and any is let through to be refused for that.
        """
        if not self.models:
            return model
        if not model:
            return next(iter(self.models))
        if model not in self.models:
            served = ", ".join(self.models)
            raise ModelNotFound(f"The model {model!r} is not served here; served is {served}.", param="model")
        return model

    def saturated(self, klass: str) -> bool:
        """Whether a request of this class has to wait for a slot."""
        return (self.batch_slots_free if klass == BATCH else self.slots_free) == 0

    @property
    def lacks(self) -> list[str]:
        """What keeps the fleet from serving, in words."""
        kinds = (("prefill", self.prefill), ("decode", self.decode))
        return [f"no {kind} worker is ready" for kind, ready in kinds if not ready]


def survey(presences: Presences, as_of_s: float) -> Fleet:
    """Count what was ready then, or has said so since."""
    prefill = presences.ready("prefill", as_of_s)
    decode = presences.ready("decode", as_of_s)
    models: dict[str, int] = {}
    for worker in (*prefill, *decode):
        models[worker.model] = min(models.get(worker.model, worker.max_model_len), worker.max_model_len)
    return Fleet(
        prefill=len(prefill),
        decode=len(decode),
        slots_free=sum(worker.slots_free for worker in prefill),
        batch_slots_free=sum(
            worker.slots_free if worker.batch_slots_free is None else worker.batch_slots_free for worker in prefill
        ),
        models=models,
    )


class Lookout:
    """The fleet as of now, or as of a moment ago.

    While we cannot hear, silence proves nothing: who was live when the broker was lost counts as live until it is back, and has
    had the time to say so. Requests of that time wait for the broker, not for workers.
    """

    def __init__(self, presences: Presences, clock: Callable[[], float]) -> None:
        self._presences = presences
        self._clock = clock
        self._seen = Fleet()
        self._seen_s = -math.inf
        self._deaf_from_s = -math.inf
        self._deaf_until_s = -math.inf

    def fleet(self) -> Fleet:
        """At most `_FRESH_S` old."""
        now_s = self._clock()
        if now_s - self._seen_s > _FRESH_S:
            self._presences.forget_silent(now_s)
            as_of_s = self._deaf_from_s if now_s < self._deaf_until_s else now_s
            self._seen, self._seen_s = survey(self._presences, as_of_s), now_s
        return self._seen

    def deaf(self) -> None:
        """The broker is lost."""
        if self._clock() >= self._deaf_until_s:
            self._deaf_from_s = self._clock()
        self._deaf_until_s = math.inf

    def hearing(self) -> None:
        """It is back, and soon everybody else will be."""
        self._deaf_until_s = self._clock() + PRESENCE_SILENT_MAX_S
