"""vLLM's cache events, read from its sockets and put into our words.

vLLM publishes what a step has changed as `topic, number (8 bytes, big-endian), [time, events, rank]`, and keeps the last
`CACHE_BATCHES_KEPT` batches to be repeated by another socket. Both are Unix sockets in a folder of ours.

This runs on the worker's event loop. ZeroMQ's own thread empties the socket whatever the loop does, and a thread of ours would
not spare it anything: decoding and naming cost some microseconds a block, and hold the interpreter wherever they run. So the loop
is given its turn after every batch, and a batch is one engine step.

Only blocks of the engine's own memory count, and of its first group of layers: a dense model has no other.
"""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from pipeline.errors import EngineFailed
from pipeline.limits import CACHE_BATCHES_UNREAD, CACHE_REPLAY_TIMEOUT_S
from pipeline.protocol.messages import pack_ids
from pipeline.protocol.warmth import Batch, Cleared, Event, Removed, Stored

MEDIUM: Final = "GPU"
"""vLLM's word for the engine's own memory, on CPU as well."""

END: Final = (-1).to_bytes(8, "big", signed=True)

_Hash = int | bytes


class BlockStored(msgspec.Struct, tag=True):
    """vLLM's; see `vllm.distributed.kv_events`. `extra_keys` of a block are what its hash has beside tokens: here the salt."""

    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """vLLM's."""

    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """vLLM's."""


class _Published(msgspec.Struct, array_like=True):
    at_s: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


_decoder: Final = msgspec.msgpack.Decoder(_Published)


def batch_of(number: bytes, payload: bytes, block_size: int) -> Batch:
    """One message of vLLM's. Events of other memory than the engine's leave an empty batch, so that no number is missing."""
    events: list[Event] = []
    for event in _decoder.decode(payload).events:
        if isinstance(event, AllBlocksCleared):
            events.append(Cleared())
        elif event.medium in (None, MEDIUM) and not event.group_idx:
            if isinstance(event, BlockRemoved):
                events.append(Removed([_number(block) for block in event.block_hashes]))
            elif event.block_size == block_size and len(event.token_ids) == block_size * len(event.block_hashes):
                events.extend(_stored(event, block_size))
    return Batch(int.from_bytes(number, "big"), events)


def _stored(event: BlockStored, block_size: int) -> list[Stored]:
    """As one run of blocks; where a block has keys of its own, another run begins with it."""
    hashes = [_number(block) for block in event.block_hashes]
    keys = event.extra_keys or [None] * len(hashes)
    starts = [0, *(at for at in range(1, len(hashes)) if keys[at]), len(hashes)]
    packed, size = pack_ids(event.token_ids), 4 * block_size
    parent = None if event.parent_block_hash is None else _number(event.parent_block_hash)
    runs = []
    for start, stop in pairwise(starts):
        salt = "\0".join(map(str, keys[start] or ()))
        before = hashes[start - 1] if start else parent
        runs.append(Stored(hashes[start:stop], before, packed[start * size : stop * size], salt))
    return runs


def _number(block: _Hash) -> int:
    return block if isinstance(block, int) else int.from_bytes(block[-8:], "big")


class VllmCacheEvents:
    """Implements `workers.engines.port.CacheEvents`. Made on the event loop that reads it, of a started engine."""

    def __init__(self, endpoint: str, replay_endpoint: str, block_size: int) -> None:
        self._block_size = block_size
        self._replay_endpoint = replay_endpoint
        self._context = zmq.asyncio.Context()
        self._events = self._socket(zmq.SUB, endpoint, lambda socket: socket.subscribe(b""))

    async def read(self) -> Batch:
        """See `CacheEvents`. Gives the loop its turn first: a socket that is full is read without waiting."""
        await asyncio.sleep(0)
        _, number, payload = await self._events.recv_multipart()
        return batch_of(number, payload, self._block_size)

    async def replay(self, start: int) -> list[Batch]:
        """See `CacheEvents`. Raises `EngineFailed` after `CACHE_REPLAY_TIMEOUT_S`."""
        # A socket of its own: what an earlier one still gets, after its time, is not the answer to this.
        socket = self._socket(zmq.DEALER, self._replay_endpoint)
        try:
            async with asyncio.timeout(CACHE_REPLAY_TIMEOUT_S):
                await socket.send_multipart([b"", start.to_bytes(8, "big")])
                batches: list[Batch] = []
                while True:
                    _, _, number, payload = await socket.recv_multipart()
                    if number == END:
                        return batches
                    batches.append(batch_of(number, payload, self._block_size))
                    await asyncio.sleep(0)
        except TimeoutError:
            raise EngineFailed("The engine did not repeat its cache events.") from None
        finally:
            socket.close(linger=0)

    def close(self) -> None:
        """Let go of the sockets. Again does nothing."""
        self._context.destroy(linger=0)

    def _socket(
        self, kind: int, endpoint: str, prepare: Callable[[zmq.asyncio.Socket], None] = lambda _: None
    ) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.RCVHWM, CACHE_BATCHES_UNREAD if kind == zmq.SUB else 0)
        prepare(socket)
        socket.connect(endpoint)
        return socket
