"""One stack of real processes with the simulated engine for all tests of the SDK, and the SDK's two clients."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import anyio
import openai
import pytest

from pipeline.protocol.keys import hash_of
from tests.chaos.stack import Settings, Stack
from tests.clients.scrape import Samples, scrape

KEYS: Final = {
    "open": "",
    "paced": "requests_per_s = 0.5",
    "rare": "requests_per_s = 0.01",
    "narrow": 'creators = ["ada"]',
}
"""Bearer keys, and what each is bounded by."""

CONFIG: Final = """
[gateway]
creator_in_flight_max = 2
[requests]
default_max_tokens = 256
""" + "".join(
    f'[[gateway.keys]]\nname = "{name}"\nsha256 = "{hash_of(name)}"\n{bound}\n' for name, bound in KEYS.items()
)

PLACES: Final = 4
"""Of the gateway."""

STEP_S: Final = 0.01
"""Of decode: the longest reply that these tests ask for takes half a minute, longer than anything here waits."""


class Served:
    """The stack as a client sees it, and what its gateway counts."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.base_url = f"{stack.gateways()[0].url}/v1"

    async def counted(self) -> Samples:
        """The gateway's metrics now."""
        return await scrape(self.stack.gateways()[0].url + "/metrics")

    async def settled(self) -> Samples:
        """The same, once nothing is in flight: a reply is counted when its client has it already."""
        with anyio.fail_after(10):
            while (counted := await self.counted()).total("headrace_in_flight"):
                await anyio.sleep(0.02)
        return counted

    async def ended(self, outcome: str) -> float:
        """Requests that have ended so."""
        return (await self.counted()).total("headrace_requests_total", outcome=outcome)


@pytest.fixture(scope="package")
def anyio_backend() -> Any:
    """asyncio's own loop, as for the other tests of a stack."""
    return ("asyncio", {"use_uvloop": False})


@pytest.fixture(scope="package")
async def served(tmp_path_factory: pytest.TempPathFactory, anyio_backend: Any) -> AsyncIterator[Served]:
    """Two prefill workers, a decode worker and a gateway with few places."""
    folder: Path = tmp_path_factory.mktemp("clients")
    (folder / "headrace.toml").write_text(CONFIG, "utf-8")
    settings = Settings(
        prefill=2, decode=1, gateways=1, step_s=STEP_S, in_flight_max=PLACES, config=folder / "headrace.toml"
    )
    async with Stack(folder, settings).running() as stack:
        yield Served(stack)
        assert not stack.unasked


@pytest.fixture
async def sdk(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    """The asynchronous client, with its default of two retries."""
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key="open") as client:
        yield client


@pytest.fixture
def blocking(served: Served) -> Iterator[openai.OpenAI]:
    """The synchronous client; used from a thread."""
    with openai.OpenAI(base_url=served.base_url, api_key="open") as client:
        yield client


@pytest.fixture
def keyed(sdk: openai.AsyncOpenAI) -> Callable[[str], openai.AsyncOpenAI]:
    """The asynchronous client with another key."""
    return lambda key: sdk.with_options(api_key=key)
