"""Few clients, of whom each asks again when it has its reply: what `headrace bench` sends, and what it should then report."""

from typing import Final

from pipeline.planning.rates import Rates

ROUNDS: Final = 20
"""Until the batch in decode and the step that depends on it agree."""


def first_token_s(rates: Rates, computed: float) -> float:
    """Of one cold prompt with nothing beside it, and a plain reply, which prefill begins."""
    return _prefill_s(rates, computed) + rates.way_s


def _prefill_s(rates: Rates, computed: float) -> float:
    return rates.prefill_overhead_s + computed * (1 / rates.prefill_tokens_per_s + 1 / rates.store_tokens_per_s)


def replies_per_s(rates: Rates, computed: float, output: int, clients: int) -> float:
    """Replies a second, cold prompts, one prefill and one decode engine.

    Two stations: prefill, one after the other, and decode, where all run at once and each slows all. By mean value analysis: the
    queue that one of N clients finds at prefill is the one that N - 1 leave there.
    """
    work_s = rates.prefill_overhead_s + computed / rates.prefill_tokens_per_s
    behind_s = _prefill_s(rates, computed) - work_s + rates.behind_prefill_s(computed, 1) - rates.decode_step_s(1)
    waiting, per_s, decoding = 0.0, 0.0, 1.0
    for count in range(1, clients + 1):
        prefill_s = work_s * (1 + waiting)
        for _ in range(ROUNDS):
            decode_s = (output - 1) * rates.decode_step_s(decoding)
            per_s = count / (prefill_s + behind_s + decode_s)
            decoding = max(1.0, per_s * decode_s)
        waiting = per_s * prefill_s
    return per_s
