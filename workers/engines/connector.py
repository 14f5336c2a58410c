"""LMCache's connector, with one race closed.

vLLM and a connector agree on when a finished request's blocks may be freed. The connector says "later" (`request_finished`
returns True), and its worker side reports the request in `finished_sending` once the store is done. LMCache 0.5.6 says
"later" for every request of a producer, and its worker reports every request that finished. But a request that is
aborted *while it loads* has its blocks held for the load already, and vLLM frees it and forgets it when the load ends:

    abort ─► request_finished ─► finished_recving: freed, forgotten ─► finished_sending: `assert req_id in self.requests`

and the engine is dead (LMCache issues 4938 and 4185). Where the second report comes first, the blocks go to another request
while the load still writes to them.

So for such a request we do not ask vLLM to wait for a send, and we hide from it every send that we have not asked it to
wait for. All of this is on the scheduler's side, after vLLM has merged the reports of its workers.

And where vLLM wants nothing of a prompt from any cache, because it is asked for that prompt's logprobs, LMCache is not asked
either: vLLM would ignore the answer, and what LMCache has locked for the load would stay locked.

Nor is it asked where a request stays in the engine that has prefilled it (`launch.STAYS`): a look-up costs steps, since vLLM asks
for its result with the next ones, and a store costs a copy before a step is reported.

Where it is asked, its answer is waited for a moment. It comes within a millisecond or two, in two rounds, and vLLM would look for
each of them only at its next step, which may be a long prompt's.

And it is told that nobody wants cache events. Where vLLM tells those of its own cache, the connector would add LMCache's: for
every chunk a hash and all its tokens, and a second stream from the server.
"""

import copy
import time
from typing import Any, Final

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector, LMCacheMPRequestState

from workers.engines.launch import STAYS

LOOKUP_S: Final = 0.005
"""Of one request's look-up, that others may wait for it: about a step of a decode engine on a GPU."""

LOOKUP_POLL_S: Final = 0.0002


class PDConnector(LMCacheMPConnector):  # type: ignore[misc]  # LMCache has no types
    """Loaded by vLLM through `kv_connector_module_path`, once in the scheduler and once in each worker."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        quiet = copy.copy(vllm_config)
        quiet.kv_events_config = None
        super().__init__(quiet, role, kv_cache_config)
        self._loading: set[str] = set()
        self._sending: set[str] = set()
        self._staying: set[str] = set()
        self._waited_for: set[str] = set()

    def on_new_request(self, request: Any) -> None:
        """LMCache would begin its look-up here."""
        if not _stays(request):
            super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded. What is computed all the same is still stored, unless it stays."""
        if stays := _stays(request):
            self._staying.add(request.request_id)
        if stays or request.skip_reading_prefix_cache:
            self._get_or_create_request_tracker(request).state = LMCacheMPRequestState.BYPASS_LMCACHE
            return 0, False
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found[0] is None and request.request_id not in self._waited_for:
            self._waited_for.add(request.request_id)
            until_s = time.monotonic() + LOOKUP_S
            while found[0] is None and time.monotonic() < until_s:
                time.sleep(LOOKUP_POLL_S)
                found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request with tokens to load is loading from here until its worker reports it in `finished_recving`."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens > 0:
            self._loading.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """What the worker loads and stores in this step."""
        metadata = super().build_connector_meta(scheduler_output)
        if self._staying:
            metadata.requests = [one for one in metadata.requests if one.request_id not in self._staying]
        return metadata

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether vLLM must hold the blocks until `finished_sending`, and what the request's output carries."""
        waits, parameters = super().request_finished(request, block_ids)
        self._waited_for.discard(request.request_id)
        if request.request_id in self._staying:
            self._staying.remove(request.request_id)
            waits = False
        if request.request_id in self._loading:
            waits = False  # vLLM itself holds them until `finished_recving`
        if waits:
            self._sending.add(request.request_id)
        return waits, parameters

    def update_connector_output(self, connector_output: Any) -> None:
        """vLLM calls this with a step's reports before it acts on them."""
        super().update_connector_output(connector_output)
        self._loading -= connector_output.finished_recving or set()
        reported = connector_output.finished_sending or set()
        connector_output.finished_sending = reported & self._sending
        self._sending -= reported


def _stays(request: Any) -> bool:
    return bool(request.kv_transfer_params and request.kv_transfer_params.get(STAYS))
