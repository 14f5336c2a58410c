"""Whether two engines may exchange KV: a hash over all that changes its bytes. LMCache's own keys hold none of this."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

WEIGHTS: Final = ("*.safetensors", "*.bin", "*.gguf")
DESCRIPTION: Final = ("config.json", "tokenizer*", "*.model", "vocab*", "merges.txt", "special_tokens_map.json")

SAMPLES: Final = 64
SAMPLE_BYTES: Final = 4096
"""Of each weights file: 64 places, evenly spread, of a page each. A fine-tune changes nearly every page, and hashing whole
files would cost a second for each GB. Names and times of files are not enough: they differ, or agree, between hosts."""


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...


def fingerprint(folder: Path | None, facts: Mapping[str, str]) -> str:
    """32 hex digits over the model's files in `folder` and over `facts` (dtype, ISA, versions…), in about 20 ms.

    Without a folder `facts` must name the model and its revision.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(facts.items()):
        digest.update(f"{name}={value}\0".encode())
    if folder is not None:
        for path in _matching(folder, DESCRIPTION):
            digest.update(f"{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
        for path in _matching(folder, WEIGHTS):
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            _sample(path, digest)
    return digest.hexdigest()


def _matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def _sample(path: Path, digest: _Hash) -> None:
    """The header, which for safetensors names every tensor with its place, and pages from all over the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header_bytes, size)))
        for index in range(SAMPLES):
            file.seek(index * max(size - SAMPLE_BYTES, 0) // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
