"""Leaving out what a library imports only because it is there.

Some libraries import others that they could do more with, where those are installed, and they are: vLLM brings many. What nobody
uses then costs every process time to start, and memory.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without(module: str) -> Iterator[None]:
    """Within it, that module cannot be imported. One that has been before stays as it is."""
    before = sys.modules.get(module)
    sys.modules[module] = None  # type: ignore[assignment]  # as Python itself spells "do not look for it"
    try:
        yield
    finally:
        del sys.modules[module]
        if before is not None:
            sys.modules[module] = before
