"""W3C Trace Context, which travels with a request: HTTP, the stored message, the hand-off. What is not valid starts nothing here.

Whoever works on a request takes the headers that came with it, and hands on headers of its own: `traceparent` names the trace,
and in it the span under which what follows hangs.
"""

import re
from collections.abc import Mapping
from typing import Final

from pipeline.limits import TRACE_STATE_BYTES_MAX

PARENT: Final = "traceparent"
STATE: Final = "tracestate"

_PARENT: Final = re.compile(
    r"(?!ff)([0-9a-f]{2})(-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2})(-.*)?", re.ASCII
)
"""Version, trace, span, flags. What later versions may add is left out, as they ask for."""

_PRINTABLE: Final = frozenset(map(chr, range(0x20, 0x7F)))


def context_of(headers: Mapping[str, str] | None) -> dict[str, str]:
    """The trace context among `headers`: nothing where it is not valid."""
    named = {name.lower(): value for name, value in (headers or {}).items()}
    parent = _PARENT.fullmatch(named.get(PARENT, ""))
    if parent is None or (parent[1] == "00" and parent[4] is not None):
        return {}
    context = {PARENT: f"00{parent[2]}"}
    state = named.get(STATE, "")
    if 0 < len(state) <= TRACE_STATE_BYTES_MAX and _PRINTABLE.issuperset(state):
        context[STATE] = state
    return context


def trace_id(context: Mapping[str, str]) -> str:
    """The trace of a valid context, 32 hex digits; empty where there is none."""
    return context[PARENT].split("-")[1] if PARENT in context else ""
