"""KV across hosts: two LMCache servers that share nothing but a Redis, by `lmcache.l2`. Real vLLM, LMCache and redis-server."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.e2e.conftest import Engines, lmcache_server
from tests.e2e.engines import Reply
from tests.e2e.hosts import AT_ONCE, AWAITED, Crossed
from tests.e2e.prompts import PROMPTS, loadable
from tests.redis_server import redis_server

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """The configuration files of two hosts whose LMCache servers run."""
    folders = [tmp_path_factory.mktemp(name) for name in ("tier", "here", "there")]
    with redis_server(folders[0]) as tier:
        shared = f"l1_bytes = 400_000_000\nl2 = [{{ type = 'resp', host = '127.0.0.1', port = {tier.port} }}]\n"
        with lmcache_server(folders[1], "here", shared) as here, lmcache_server(folders[2], "there", shared) as there:
            yield here, there


@pytest.fixture(scope="module")
def crossed(engines: Engines, two: tuple[Path, Path], model_path: str) -> Crossed:
    here, there = map(str, two)
    return msgspec.json.decode(engines("hosts", model_path, here, there, timeout_s=300), type=Crossed)


def test_what_one_hosts_server_stores_another_hosts_finds(crossed: Crossed) -> None:
    assert crossed.awaited_cached == loadable(AWAITED.tokens)


def test_a_reply_is_that_of_one_engine_also_where_decode_has_looked_at_once(
    crossed: Crossed, reference_replies: list[Reply]
) -> None:
    replies = [reference_replies[PROMPTS.index(prompt)].token_ids for prompt in (AWAITED, AT_ONCE)]
    assert [crossed.awaited, crossed.at_once] == replies
