"""TLS at the gateway's door, from both sides: what its server needs, and whom the commands of this machine trust."""

import ssl
from pathlib import Path

from pipeline.config import Gateway
from pipeline.errors import OperatorError


def server_files(gateway: Gateway) -> tuple[Path, Path] | None:
    """Certificate (with its chain) and key; None where the door speaks plain HTTP.

    Raises `OperatorError`, before anything is started, where they cannot be read or do not belong together.
    """
    if not gateway.tls_cert and not gateway.tls_key:
        return None
    if not gateway.tls_cert or not gateway.tls_key:
        missing = "tls_key" if gateway.tls_cert else "tls_cert"
        raise OperatorError(
            f"TLS needs a certificate and its key, and gateway.{missing} is not set.", "Set both, or neither."
        )
    cert, key = Path(gateway.tls_cert).expanduser(), Path(gateway.tls_key).expanduser()
    for setting, path in (("tls_cert", cert), ("tls_key", key)):
        _check_readable(setting, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise OperatorError(
            f"gateway.tls_cert {cert} and gateway.tls_key {key} cannot be used together: {error}.",
            "Give a certificate in PEM, and the key that it was made for, without a passphrase.",
        ) from None
    return cert, key


def trusting(ca: Path | None) -> ssl.SSLContext | None:
    """What a client of any gateway needs: who may have signed its certificate. None: whom this system trusts.

    Raises `OperatorError`.
    """
    if ca is None:
        return None
    path = ca.expanduser()
    try:
        return ssl.create_default_context(cafile=path)
    except (OSError, ssl.SSLError) as error:
        raise OperatorError(f"Cannot take certificates from {path}: {error}.", "Give a PEM file with --ca.") from None


def trusting_ours(cert: str | Path) -> ssl.SSLContext:
    """For commands on the gateway's own machine: what is in this file alone, whoever has signed it, for whatever name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    path = Path(cert).expanduser()
    try:
        context.load_verify_locations(path)
    except (OSError, ssl.SSLError) as error:
        raise OperatorError(f"Cannot read the certificate {path}: {error}.", "Correct gateway.tls_cert.") from None
    return context


def _check_readable(setting: str, path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise OperatorError(
            f"Cannot read gateway.{setting} {path}: {error.strerror}.", "Correct the path, or who may read it."
        ) from None


def _no_password() -> str:
    """OpenSSL would ask the terminal for one."""
    raise ValueError("the key has a passphrase")
