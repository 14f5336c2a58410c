"""What Headrace counts, read from `/metrics` as any Prometheus reads it."""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from pipeline.cli import http

TIMEOUT_S: Final = 10.0


class Sample(msgspec.Struct, frozen=True):
    """One line: `name{labels} value`."""

    name: str
    labels: Mapping[str, str]
    value: float


class Samples:
    """All lines of one process, or of several."""

    def __init__(self, samples: Iterable[Sample] = ()) -> None:
        self._samples = tuple(samples)

    @classmethod
    def parsed(cls, text: str) -> "Samples":
        """Prometheus' text."""
        families = text_string_to_metric_families(text)
        return cls(Sample(line.name, line.labels, line.value) for family in families for line in family.samples)

    def __add__(self, other: "Samples") -> "Samples":
        return Samples((*self._samples, *other._samples))

    def total(self, name: str, **labels: str) -> float:
        """The sum of all lines of this name that have these labels. 0 where there is none: a label appears with its first use."""
        return sum(line.value for line in self._samples if line.name == name and labels.items() <= line.labels.items())


async def scrape(url: str) -> Samples:
    """Read one process. Raises `OSError` where it does not answer, and `RuntimeError` where it refuses."""
    status, body = await http.get(url, TIMEOUT_S)
    if status != 200:
        raise RuntimeError(f"{url} answers {status}: {body[:200]!r}")
    return Samples.parsed(body.decode())
