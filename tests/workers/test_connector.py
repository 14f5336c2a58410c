"""The race between an abort and a load, in every order of the two reports, against vLLM's own bookkeeping.

vLLM's scheduler is real where it acts on the reports (`_update_from_kv_xfer_finished`); LMCache's connector is real where it
answers and where its worker reports. What they would ask a server or a GPU is left out: `tests/e2e/test_engine_abort.py` has it.
"""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from workers.engines.launch import STAYS

pytestmark = pytest.mark.timeout(180)  # the first test imports torch and vLLM

REQUEST = "request"


class Scheduler:
    """vLLM's scheduler as far as it follows one request of a producer, with the given connector class."""

    def __init__(self, parts: SimpleNamespace, connector_class: Any) -> None:
        self._parts = parts
        self.request = SimpleNamespace(request_id=REQUEST, status=parts.RequestStatus.WAITING, kv_transfer_params=None)
        self.requests = {REQUEST: self.request}
        self.finished_recving_kv_req_ids: set[str] = set()
        self.freed = 0
        self.connector = connector_class.__new__(connector_class)
        vars(self.connector).update(
            _can_store=True,
            lazy_offload=False,
            request_trackers={},
            _loading=set(),
            _sending=set(),
            _staying=set(),
            _waited_for=set(),
        )
        self.connector.scheduler_adapter = SimpleNamespace(
            cleanup_lookup_result=lambda _: None, end_session=lambda _: None, free_lookup_locks=lambda **_: None
        )

    def track(self) -> Any:
        """LMCache has heard of the request."""
        prompt = {"all_token_ids": list(range(64)), "num_prompt_tokens": 64, "mm_features": [], "cache_salt": ""}
        tracker = self._parts.Tracker(SimpleNamespace(request_id=REQUEST, sampling_params=None, **prompt))
        self.connector.request_trackers[REQUEST] = tracker
        return tracker

    def load(self) -> None:
        """The request's look-up has found 64 tokens, and their blocks are allocated."""
        self.track().num_lmcache_hit_tokens = 64
        blocks = SimpleNamespace(get_block_ids=lambda: ([1, 2],))
        self.connector.update_state_after_alloc(self.request, blocks, 63)
        self.request.status = self._parts.RequestStatus.WAITING_FOR_REMOTE_KVS

    def finish(self, status: str) -> None:
        """As `finish_requests` and `_free_request` do: who holds the blocks from now on?"""
        loading = self.request.status == self._parts.RequestStatus.WAITING_FOR_REMOTE_KVS
        held = loading and REQUEST not in self.finished_recving_kv_req_ids
        self.request.status = self._parts.RequestStatus[status]
        held |= self.connector.request_finished(self.request, [1, 2])[0]
        if not held:
            self._free_blocks(self.request)

    def report(self, *, received: bool = False, sent: bool = False) -> None:
        """A step's reports from the worker."""
        output = self._parts.KVConnectorOutput(
            finished_recving={REQUEST} if received else set(), finished_sending={REQUEST} if sent else set()
        )
        self._parts.Scheduler._update_from_kv_xfer_finished(self, output)

    def _free_blocks(self, request: Any) -> None:
        self.freed += 1
        del self.requests[request.request_id]

    def _set_kv_fetch_stage(self, *_args: object) -> None:
        """Metrics of vLLM's."""


@pytest.fixture(scope="module")
def parts() -> SimpleNamespace:
    """The classes under test. Importing vLLM and what it imports warns of deprecations that are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
        from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestTracker
        from lmcache.integration.vllm.vllm_multi_process_adapter import LMCacheMPWorkerAdapter
        from vllm.v1.core.sched import scheduler
        from vllm.v1.outputs import KVConnectorOutput
        from vllm.v1.request import RequestStatus

        from workers.engines.connector import PDConnector
    return SimpleNamespace(
        Upstream=LMCacheMPConnector,
        Ours=PDConnector,
        Tracker=LMCacheMPRequestTracker,
        Worker=LMCacheMPWorkerAdapter,
        Scheduler=scheduler.Scheduler,
        KVConnectorOutput=KVConnectorOutput,
        RequestStatus=RequestStatus,
    )


@pytest.fixture
def scheduler(parts: SimpleNamespace) -> Scheduler:
    return Scheduler(parts, parts.Ours)


def test_lmcaches_worker_reports_a_send_that_never_was(parts: SimpleNamespace) -> None:
    worker = SimpleNamespace(
        finished_stores=set(), store_futures={}, previously_finished=set(), _returned_finished=set()
    )
    worker._update_and_get_finished_store = set
    assert parts.Worker._process_finished_stores(worker, set(), {REQUEST}) == {REQUEST}


def test_under_lmcaches_own_connector_that_send_ends_the_scheduler(parts: SimpleNamespace) -> None:
    scheduler = Scheduler(parts, parts.Upstream)
    scheduler.load()
    scheduler.finish("FINISHED_ABORTED")
    scheduler.report(received=True)
    with pytest.raises(AssertionError):
        scheduler.report(sent=True)


def test_a_prompt_whose_logprobs_are_asked_for_is_not_looked_up_and_yet_stored(scheduler: Scheduler) -> None:
    """LMCache's adapter here has no way to be asked: that would raise."""
    scheduler.load()
    scheduler.request.skip_reading_prefix_cache = True
    assert scheduler.connector.get_num_new_matched_tokens(scheduler.request, 0) == (0, False)
    blocks = SimpleNamespace(get_block_ids=lambda: ([1, 2],))
    scheduler.connector.update_state_after_alloc(scheduler.request, blocks, 0)
    assert scheduler.connector.request_trackers[REQUEST].state.name == "READY"
    assert scheduler.connector._can_store


def test_a_request_that_stays_is_neither_looked_up_nor_stored_nor_waited_for(
    parts: SimpleNamespace, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache's adapter here has no way to be asked: that would raise."""
    stored = [SimpleNamespace(request_id=REQUEST), SimpleNamespace(request_id="another")]
    monkeypatch.setattr(parts.Upstream, "build_connector_meta", lambda *_: SimpleNamespace(requests=list(stored)))
    scheduler.track()
    scheduler.request.kv_transfer_params = {STAYS: True}
    scheduler.request.skip_reading_prefix_cache = False
    scheduler.connector.on_new_request(scheduler.request)
    assert scheduler.connector.get_num_new_matched_tokens(scheduler.request, 32) == (0, False)
    assert scheduler.connector.build_connector_meta(None).requests == stored[1:]
    scheduler.finish("FINISHED_STOPPED")
    assert scheduler.freed == 1, "nobody copies them"
    scheduler.report(sent=True)
    assert (scheduler.freed, scheduler.connector._staying) == (1, set())


def test_a_lookup_is_waited_for_a_moment_and_once(
    parts: SimpleNamespace, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[tuple[int | None, bool]] = [(None, True), (None, True), (64, True)]
    silence: tuple[int | None, bool] = (None, True)
    monkeypatch.setattr(parts.Upstream, "get_num_new_matched_tokens", lambda *_: answers.pop(0) if answers else silence)
    scheduler.request.skip_reading_prefix_cache = False
    assert scheduler.connector.get_num_new_matched_tokens(scheduler.request, 0) == (64, True)
    scheduler.track()
    scheduler.finish("FINISHED_ABORTED")
    assert scheduler.connector._waited_for == set()
    assert scheduler.connector.get_num_new_matched_tokens(scheduler.request, 0) == silence, "for a moment only"
    answers += [(None, True), (64, True)]
    assert scheduler.connector.get_num_new_matched_tokens(scheduler.request, 0) == silence, "and not twice"


def test_an_abort_during_a_load_frees_the_blocks_once_when_the_load_is_done(scheduler: Scheduler) -> None:
    scheduler.load()
    scheduler.finish("FINISHED_ABORTED")
    assert scheduler.freed == 0
    scheduler.report(received=True)
    assert scheduler.freed == 1
    scheduler.report(sent=True)
    assert scheduler.freed == 1


def test_both_reports_may_come_in_one_step(scheduler: Scheduler) -> None:
    scheduler.load()
    scheduler.finish("FINISHED_ABORTED")
    scheduler.report(received=True, sent=True)
    assert scheduler.freed == 1


def test_an_early_send_does_not_free_blocks_that_a_load_still_writes(scheduler: Scheduler) -> None:
    scheduler.load()
    scheduler.finish("FINISHED_ABORTED")
    scheduler.report(sent=True)
    assert scheduler.freed == 0
    scheduler.report(received=True)
    assert scheduler.freed == 1


def test_an_abort_after_the_load_waits_for_the_send(scheduler: Scheduler) -> None:
    scheduler.load()
    scheduler.report(received=True)
    scheduler.finish("FINISHED_ABORTED")
    assert scheduler.freed == 0
    scheduler.report(sent=True)
    assert scheduler.freed == 1


def test_a_request_that_loaded_and_ran_to_its_end_waits_for_its_store(scheduler: Scheduler) -> None:
    scheduler.load()
    scheduler.report(received=True)
    scheduler.finish("FINISHED_LENGTH_CAPPED")
    assert scheduler.freed == 0
    scheduler.report(sent=True)
    assert scheduler.freed == 1


def test_nothing_is_remembered_of_requests_that_are_gone(scheduler: Scheduler) -> None:
    scheduler.load()
    scheduler.finish("FINISHED_ABORTED")
    scheduler.report(received=True)
    scheduler.report(sent=True)
    assert (scheduler.connector._loading, scheduler.connector._sending) == (set(), set())
