"""A stack of real processes whose gateway needs keys and takes few requests at a time, and a browser."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.protocol.keys import hash_of
from tests.browser import chromium
from tests.cli.test_up import CONFIG, Up

KEY = "hr-a-key-of-the-tests"

LIMITS = f"""
[[gateway.keys]]
name = "page"
sha256 = "{hash_of(KEY)}"
[simulated]
step_s = 0.03
"""
"""A token every 30 ms: a reply that one can see come."""


@pytest.fixture(scope="package")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a gateway that serves."""
    folder = tmp_path_factory.mktemp("stack")
    config = folder / "headrace.toml"
    few = "[gateway]\nport = 0\nin_flight_max = 2\ncreator_in_flight_max = 1\n"
    text = CONFIG.format(state_dir=folder / "state").replace("gateway = { port = 0 }\n", "")
    config.write_text(f"{text}{few}{LIMITS}", "utf-8")
    up = Up(config)
    try:
        up.until("Ready at")
        yield up.endpoints["gateway"]
    finally:
        up.end()


@pytest.fixture(scope="package")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    """A browser's tab for all tests."""
    if chromium.program() is None:
        pytest.fail(chromium.REMEDY)
    with chromium.page(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture
def page(tab: chromium.Page, gateway: str) -> chromium.Page:
    """The playground, freshly loaded on a wide screen, with a key."""
    tab.look_like(1280, 900)
    tab.open(f"{gateway}/")
    tab.value("document.querySelector('details').open = true")
    tab.fill("key", KEY)
    return tab


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Where screenshots go."""
    return tmp_path
