"""How long KV takes from a prefill to a decode worker."""

from pathlib import Path
from typing import Annotated

import msgspec

from pipeline.planning import data


class Transport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One direction of one worker's link: the line rate, the share of it that transfers reach, the smallest time."""

    bytes_per_s: Annotated[float, msgspec.Meta(gt=0)]
    latency_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    efficiency: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0

    @property
    def reached_bytes_per_s(self) -> float:
        """What large transfers get."""
        return self.bytes_per_s * self.efficiency

    def floor_s(self, size_bytes: float) -> float:
        """No transfer is faster: the bytes at line rate."""
        return size_bytes / self.bytes_per_s

    def transfer_s(self, size_bytes: float) -> float:
        """What to expect."""
        return self.latency_s + size_bytes / self.reached_bytes_per_s


def known(name: str) -> Transport:
    """By its name in `configs/planning/transports.toml`, or by the path of a TOML file. Raises `OperatorError`."""
    if name.endswith(".toml"):
        return data.own(Path(name).expanduser(), Transport)
    return data.entry("transports.toml", name, Transport)


def all_known() -> dict[str, Transport]:
    """Those of our file, in its order."""
    return {name: known(name) for name in data.names("transports.toml")}
