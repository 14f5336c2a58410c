"""Names of KV blocks must be the same in every process, or caches are never hit: what depends on a process's random seed."""

import os
import subprocess
import sys

import msgspec
import pytest

from pipeline.config import Config, Engine
from pipeline.errors import OperatorError
from workers.engines import launch

NAMES = """
import sys
from pipeline.protocol.budget import cache_salt
from pipeline.protocol.messages import pack_ids
from pipeline.protocol.warm_view import key_of
from pipeline.protocol.warmth import names_of, root_of
from workers.engines.fingerprint import fingerprint
from lmcache.v1.multiprocess.token_hasher import TokenHasher

hasher = TokenHasher(32, "blake3")
salt = cache_salt("ada", "", "creator", fingerprint(None, {"model": "m", "dtype": "float32"}))
names = names_of(pack_ids(range(64)), 32, root_of(salt))
sys.stdout.write(repr((salt, names, key_of("ada"), hasher.hash_tokens(list(range(32))))))
"""


def names(seed: str | None) -> str:
    """What a process with this PYTHONHASHSEED calls the same things."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    environment |= launch.environment(Config(), "prefill") | ({} if seed is None else {"PYTHONHASHSEED": seed})
    command = [sys.executable, "-c", NAMES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
    return done.stdout.splitlines()[-1]


def test_21_mixed_hash_seeds_are_harmless_and_random_hashes_are_refused() -> None:
    """By name, test 21 of the field's failure modes: process-random hashes.

    Harmless: what travels between processes (the salt, LMCache's chunks, the index's names, a creator's key) is the same under
    any `PYTHONHASHSEED`. vLLM's own names follow it, and stay in one engine. Refused: a hash that vLLM seeds at random.
    """
    assert len({names(seed) for seed in (None, "0", "4711")}) == 1
    for role in ("prefill", "decode"):
        for algorithm in ("xxhash", "xxhash_cbor"):
            engine = Engine(slots=4, extra={"prefix_caching_hash_algo": algorithm})
            config = msgspec.structs.replace(Config(), **{role: engine})
            with pytest.raises(OperatorError, match=r"prefix_caching_hash_algo.*process to process"):
                launch.engine_arguments(config, role, "/model")


@pytest.mark.parametrize("algorithm", launch.HASHES)
def test_hash_functions_that_need_no_seed_are_taken(algorithm: str) -> None:
    engine = Engine(slots=4, extra={"prefix_caching_hash_algo": algorithm})
    config = msgspec.structs.replace(Config(), prefill=engine)
    assert launch.engine_arguments(config, "prefill", "/model")["prefix_caching_hash_algo"] == algorithm
