"""How a process reaches the brokers and shows them who it is: addresses, TLS, an NKey.

An NKey is an Ed25519 key in NATS's own spelling: base32 of a prefix, the 32 bytes and a CRC-16. The server sends a nonce, and
gets it back signed: no secret leaves the process, so none can be taken from the broker or its configuration.
"""

import base64
import binascii
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self
from urllib.parse import urlsplit

import msgspec

from pipeline.config import Nats
from pipeline.errors import OperatorError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_SEED: Final = 18 << 3
"""The first five bits of a seed: `S`. The next five say whose."""
_USER: Final = 20 << 3
"""`U`, a user's."""
_SEED_BYTES: Final = 32


class Nkey:
    """A user's key. `public` (`U…`) is what the broker's configuration names."""

    def __init__(self, key: "Ed25519PrivateKey") -> None:
        self._key = key
        self.public: Final = _spelt(bytes([_USER]) + key.public_key().public_bytes_raw())

    @classmethod
    def fresh(cls) -> Self:
        """A new one, from the system's randomness."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415

        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def of_seed(cls, seed: str) -> Self:
        """Read `SU…`. Raises `ValueError` for anything else."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415

        raw = base64.b32decode(seed + "=" * (-len(seed) % 8))
        body, check = raw[:-2], raw[-2:]
        if len(body) != 2 + _SEED_BYTES or _checksum(body) != check:
            raise ValueError("its checksum is wrong")
        if body[0] & 0xF8 != _SEED or (body[0] & 7) << 5 | body[1] >> 3 != _USER:
            raise ValueError("it is not a user's")
        return cls(Ed25519PrivateKey.from_private_bytes(body[2:]))

    @property
    def seed(self) -> str:
        """`SU…`, the secret."""
        head = bytes([_SEED | _USER >> 5, (_USER & 31) << 3])
        return _spelt(head + self._key.private_bytes_raw())

    def sign(self, nonce: str) -> bytes:
        """The server's nonce, signed, in base64."""
        return base64.b64encode(self._key.sign(nonce.encode()))


def _spelt(body: bytes) -> str:
    return base64.b32encode(body + _checksum(body)).decode().rstrip("=")


def _checksum(body: bytes) -> bytes:
    return binascii.crc_hqx(body, 0).to_bytes(2, "little")


class Access(msgspec.Struct, frozen=True):
    """What a connection is made with. With `demands_tls` a server that offers none is not talked to."""

    urls: tuple[str, ...]
    demands_tls: bool
    tls: ssl.SSLContext | None
    nkey: Nkey | None


def split(urls: str) -> list[str]:
    """The addresses of `nats.url`."""
    return [url for part in urls.split(",") if (url := part.strip())]


def shown(url: str) -> str:
    """An address without its password."""
    try:
        parts = urlsplit(url)
        return f"{parts.scheme}://{parts.hostname}:{parts.port or 4222}" if parts.hostname else url
    except ValueError:
        return url


def access_of(nats: Nats) -> Access:
    """Read the files that a configuration names. Raises `OperatorError` naming the entry that is wrong."""
    urls = tuple(split(nats.url))
    if not urls:
        raise OperatorError("nats.url is empty.", "Name a server, as nats://127.0.0.1:4222.")
    for url in urls:
        if "://" in url and not url.startswith(("nats://", "tls://")):
            raise OperatorError(
                f"nats.url names {shown(url)}, which is no way to reach NATS that we speak.",
                "Name the servers' client ports, as nats://host:4222, or tls://host:4222 where they have TLS.",
            )
    demands = any(url.startswith("tls://") for url in urls)
    if not demands and (nats.ca or nats.cert):
        raise OperatorError(
            "nats.ca or nats.cert is set, but nats.url asks for no TLS.", "Write it as tls://host:4222."
        )
    return Access(urls, demands, _context(nats) if demands else None, _nkey(nats.nkey_seed) if nats.nkey_seed else None)


def _context(nats: Nats) -> ssl.SSLContext:
    if bool(nats.cert) != bool(nats.key):
        raise OperatorError("Of nats.cert and nats.key only one is set.", "Set both, or neither.")
    try:
        context = ssl.create_default_context(cafile=nats.ca or None)
    except (OSError, ssl.SSLError) as error:
        raise _unread("ca", nats.ca, error) from None
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if nats.cert:
        try:
            context.load_cert_chain(nats.cert, nats.key)
        except (OSError, ssl.SSLError) as error:
            raise _unread("cert", nats.cert, error) from None
    return context


def _nkey(path: str) -> Nkey:
    try:
        return Nkey.of_seed(Path(path).expanduser().read_text("ascii").strip())
    except (OSError, ValueError) as error:
        raise _unread("nkey_seed", path, error) from None


def _unread(entry: str, path: str, error: Exception) -> OperatorError:
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    remedies = {
        "ca": "Name a PEM file of certificates.",
        "cert": "Name a PEM file of a certificate, and nats.key of its key.",
        "nkey_seed": "Name a file that holds one user seed, SU…: `headrace key nats` makes one.",
    }
    return OperatorError(f"nats.{entry}, {path}, cannot be read: {why}.", remedies[entry])
