"""The workload and the rates of the source article, and what had to be assumed beside them.

From the source: tokens of a prompt, 1,000 requests/s, 550,000 prefill tokens/s per worker, KV of 163,840 bytes a token, 4 prefill
workers and 1 for decode, InfiniBand of 50 GB/s, under 2 ms for a hand-over within a node.

Assumed, since the source does not say:

* **Overhead.** A warm request computes 60 tokens, 0.1 ms: what it costs is the step that it rides on. The 70 GB of weights (70B,
  fp8) of a group of four H100s, which the source's tensor parallel 4 is, are read at 4 × 3.35 TB/s in 5.2 ms; two requests share
  a step. So 2.6 ms of the engine's time per request. With it, 1,000 warm requests/s are 70 % of what four workers can do; the
  share of time that engines compute is measured in the run, and printed.
* **Sharing.** What runs on an engine shares its time evenly (processor sharing). Loads and stores of KV do not take any of it.
* **HBM.** Four H100s have 320 GB; less the weights and a tenth for activations, some 218 GB are left. KV gets 65,536 blocks of 16
  tokens, 172 GB: least recently used out first, of a prompt the end before its beginning, as in vLLM.
* **LMCache.** Host memory of the prefill nodes, shared by all: 524,288 blocks, 1.37 TB. A worker reads and writes it at 50 GB/s,
  one after another; all together at 200 GB/s. A request holds its slot until what it has computed is stored.
* **Slots.** 4 per worker, the default of our configuration.
* **First token.** After prefill: the hand-over (2 ms), then one decode step, which reads 70 GB at 3.35 TB/s (20.9 ms). That is
  the source's way; a plain reply begins sooner, with a token of prefill. There is always credit: the decode worker is not what is
  studied here.
* **Network.** Measured on one host: 0.19 ms from a publish to the worker whose standing pull it answers, with 256 shards and 8
  workers, so 0.1 ms for each of its two ways; and 0.22 ms that a router in Rust adds when it passes a request on to a worker.
* **Conversations** append: 10 tokens of a message and 30 of its reply a turn. The window of history moves in steps: it grows from
  5 turns to 15, on average 400 tokens, and falls back to the last 5. 10,000 are under way at a time, of 30 turns on average; at
  1,000 requests/s a turn follows its last by 10 s on average. Who begins brings a history of another day, that is in no cache.
* **Creators** besides the hot one: 2,000, Zipf with exponent 1.
"""

from typing import Final

BLOCK_TOKENS: Final = 16
PERSONA_TOKENS: Final = 1800
MESSAGE_TOKENS: Final = 10
REPLY_TOKENS: Final = 30
TURN_TOKENS: Final = MESSAGE_TOKENS + REPLY_TOKENS
TURNS_KEPT: Final = 5
"""Turns of history that a window keeps when it moves."""
TURNS_STEP: Final = 11
"""Turns until it moves again: it holds 5 to 15, on average 10."""
TURNS_MEAN: Final = 30
"""Of a conversation."""

PERSONA_BLOCKS: Final = PERSONA_TOKENS // BLOCK_TOKENS
"""Full blocks that all requests of a creator share. The next one already holds history."""

KV_BYTES_PER_BLOCK: Final = 163_840 * BLOCK_TOKENS

REQUESTS_PER_S: Final = 1000.0
PREFILL_TOKENS_PER_S: Final = 550_000.0
PREFILL_OVERHEAD_S: Final = 0.0026
PREFILL_WORKERS: Final = 4
PREFILL_SLOTS: Final = 4
HBM_BLOCKS: Final = 65_536

LMCACHE_BLOCKS: Final = 524_288
LINK_BLOCKS_PER_S: Final = 50e9 / KV_BYTES_PER_BLOCK
"""One worker to LMCache and back: InfiniBand."""
LMCACHE_BLOCKS_PER_S: Final = 4 * LINK_BLOCKS_PER_S

HANDOVER_S: Final = 0.002
DECODE_STEP_S: Final = 0.0209
FIRST_TOKEN_S: Final = HANDOVER_S + DECODE_STEP_S
"""From the end of prefill to the first token of decode."""

HOP_S: Final = 0.0001
"""To the broker, or from it."""
ROUTER_S: Final = 0.00022
"""Through a router that pushes, to a worker; and back, for what it knows of workers."""

TURN_GAP_S: Final = 10.0
"""From one turn of a conversation to the next, on average."""
CONVERSATIONS: Final = int(REQUESTS_PER_S * TURN_GAP_S)
CREATORS: Final = 2000

BUDGET_TTFT_MS: Final = 200.0
"""What the source's users wait for at most."""
