"""The queue of prefill, aggregated engines step by step, and clients in a closed loop: against what is known in closed form."""

import math
import random
from itertools import islice, pairwise

import msgspec
import pytest

from pipeline.planning import closed, presets, queueing, replicas
from pipeline.planning.estimate import aggregated, split, times
from pipeline.planning.queueing import Pool, evaluate
from pipeline.planning.rates import Rates
from pipeline.planning.replicas import Replica
from pipeline.planning.workload import Asked, poisson

RATES = Rates(origin="given", prefill_tokens_per_s=1000.0, prefill_overhead_s=0.0, step_s=0.01, step_per_sequence_s=0.0)
SHARED = msgspec.structs.replace(RATES, in_order=False)


def prompts(per_s: float, tokens: int = 100, count: int = 20_000, output: int = 1) -> list[Asked]:
    return [Asked(at_s, tokens, 0, 0, output) for at_s in islice(poisson(per_s, random.Random(7)), count)]


def mean_s(queue: queueing.Queue) -> float:
    return sum(one.took_s for one in queue.prefilled) / len(queue.prefilled)


def test_in_order_one_engine_is_an_m_d_1_queue() -> None:
    queue = evaluate(prompts(7.0), RATES, Pool(engines=1, slots=4))
    assert queue.busy == pytest.approx(0.7, rel=0.02)
    assert mean_s(queue) == pytest.approx(0.1 * (1 + 0.7 / (2 * 0.3)), rel=0.08)  # Pollaczek and Khinchine


def test_shared_evenly_it_takes_its_work_over_what_is_idle() -> None:
    queue = evaluate(prompts(7.0), SHARED, Pool(engines=1, slots=1000))
    assert mean_s(queue) == pytest.approx(0.1 / 0.3, rel=0.1)  # M/G/1 with processor sharing


def test_nothing_is_faster_than_the_floor_and_alone_it_is_just_that() -> None:
    rates = msgspec.structs.replace(RATES, prefill_overhead_s=0.02, load_tokens_per_s=5000.0, store_tokens_per_s=2000.0)
    asked = [Asked(float(at), 1000, 200, 300, 1) for at in range(10)]
    floor = queueing.floor_s(asked, rates)
    assert floor == pytest.approx(300 / 5000 + 0.02 + 500 / 1000 + 500 / 2000)
    assert {round(one.took_s, 9) for one in evaluate(asked, rates, Pool(engines=1, slots=1)).prefilled} == {
        round(floor, 9)
    }


def test_what_is_served_elsewhere_loads_what_its_owner_has_but_for_what_all_have() -> None:
    rates = msgspec.structs.replace(RATES, load_tokens_per_s=1000.0)
    burst = [Asked(0.0, 1000, 600, 0, 1, everywhere) for everywhere in (0, 0, 600, 600)] * 5
    done = evaluate(burst, rates, Pool(engines=2, slots=1), seed=3).prefilled
    assert any(one.foreign for one in done)
    assert len(evaluate(burst, rates, Pool(engines=2, slots=1), seed=3).prefilled) == len(done)


def test_lmcache_moves_for_all_engines_no_faster_than_it_can() -> None:
    asked = [Asked(0.0, 1000, 0, 999, 1) for _ in range(8)]
    free = evaluate(asked, RATES, Pool(engines=8, slots=1))
    bound = evaluate(asked, RATES, Pool(engines=8, slots=1, lmcache_tokens_per_s=1000.0))
    assert max(one.took_s for one in free.prefilled) < 0.5
    assert max(one.took_s for one in bound.prefilled) > 7


def test_the_highest_rate_is_what_engines_can_compute() -> None:
    found = queueing.capacity_per_s(lambda per_s: prompts(per_s, count=5000), RATES, Pool(engines=3, slots=2), 1.0)
    assert found == pytest.approx(30, rel=0.02)


def test_the_queue_is_the_same_every_time() -> None:
    asked = prompts(20.0, count=2000)
    assert evaluate(asked, RATES, Pool(engines=3, slots=2)) == evaluate(asked, RATES, Pool(engines=3, slots=2))


# ---- aggregated engines


def replica(chunk: int = 512, sequences: float = math.inf, **rates: object) -> Replica:
    of = msgspec.structs.replace(RATES, **rates)
    return Replica(rates=of, prefill_tokens_per_s=of.prefill_tokens_per_s, chunk_tokens=chunk, sequences_max=sequences)


def test_a_prompt_alone_takes_its_chunks_and_its_reply_its_steps() -> None:
    asked = [Asked(float(10 * number), 1000, 0, 0, 11) for number in range(5)]
    outcome = replicas.serve(asked, replica(), 1)
    assert outcome.ttfts_s == pytest.approx([1.0] * 4)
    assert len(outcome.steps) >= 30
    assert set(outcome.steps) == {(0.01, 1)}


def test_a_prompt_in_the_step_delays_all_who_decode() -> None:
    asked = [Asked(0.0, 1, 0, 0, 1000), Asked(0.005, 1, 0, 0, 1000), Asked(1.0, 1000, 0, 0, 2)]
    outcome = replicas.serve(asked, replica(chunk=102), 1)
    slow = [step_s for step_s, _ in outcome.steps if step_s > 0.05]
    assert slow[:9] == pytest.approx([0.11] * 9)  # 100 tokens, beside one token of each of the two
    assert outcome.mixed > 0.3


def test_on_a_gpu_computing_hides_behind_reading_weights() -> None:
    asked = [Asked(0.0, 1, 0, 0, 100), Asked(0.1, 5, 0, 0, 2)]
    apart, hidden = (replicas.serve(asked, replica(overlaps=overlaps), 1) for overlaps in (False, True))
    assert max(apart.steps)[0] == pytest.approx(0.015)
    assert max(hidden.steps)[0] == pytest.approx(0.01)


def test_no_more_decode_than_there_is_room_for() -> None:
    asked = [Asked(0.0, 10, 0, 0, 50) for _ in range(20)]
    assert max(decoding for _, decoding in replicas.serve(asked, replica(sequences=4), 1).steps) == 4


def test_every_request_is_served_once_by_several_engines() -> None:
    asked = prompts(30.0, count=2000, output=5)
    outcome = replicas.serve(asked, replica(), 4)
    assert len(outcome.ttfts_s) == 1600  # all but the warm-up
    assert sum(decoding for _, decoding in outcome.steps) == pytest.approx(1600 * 4, rel=0.02)


# ---- estimates


def test_more_load_is_never_better() -> None:
    question = presets.seed()
    estimates = [split(question, per_s, 4, 1) for per_s in (300, 700, 1000, 1100)]
    p99s = [one.ttft_ms.p99 for one in estimates if one.ttft_ms]
    assert len(p99s) == 4
    assert all(before < after for before, after in pairwise(p99s))
    assert split(question, 3000, 4, 1).ttft_ms is None
    assert aggregated(question, 30_000, 5).ttft_ms is None


def test_percentiles_are_nearest_ranks() -> None:
    of = times(number / 1000 for number in range(1, 201))
    assert (of.p50, of.p90, of.p99) == (100, 180, 198)


# ---- closed loops


def test_one_client_waits_for_nobody() -> None:
    prefill_s = RATES.prefill_overhead_s + 500 / RATES.prefill_tokens_per_s + 500 / RATES.store_tokens_per_s
    alone_s = prefill_s + RATES.behind_prefill_s(500, 1) + (20 - 2) * RATES.decode_step_s(1)
    assert closed.replies_per_s(RATES, 500, 20, 1) == pytest.approx(1 / alone_s)


def test_many_clients_get_what_prefill_can_do() -> None:
    assert closed.replies_per_s(RATES, 500, 20, 50) == pytest.approx(2.0, rel=0.01)
