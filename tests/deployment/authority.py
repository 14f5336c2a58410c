"""A certificate authority for a test: its certificate, and one for a server and client on loopback that it has signed."""

import datetime
import ipaddress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


class Certificate(NamedTuple):
    """PEM files: of a certificate, its key, and of who has signed it."""

    cert: Path
    key: Path
    ca: Path


def certificate(folder: Path, name: str = "127.0.0.1") -> Certificate:
    """A fresh authority and a certificate of it, for that address or host name alone."""
    folder.mkdir(parents=True, exist_ok=True)
    files = Certificate(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
    root_key, key = generate_private_key(SECP256R1()), generate_private_key(SECP256R1())
    root_name = _name("the test's authority")
    root = _signed(root_key, root_name, root_key, root_name, x509.BasicConstraints(ca=True, path_length=0))
    leaf = _signed(
        key,
        _name(name),
        root_key,
        root_name,
        x509.SubjectAlternativeName([_alternative(name)]),
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
    )
    files.ca.write_bytes(root.public_bytes(Encoding.PEM))
    files.cert.write_bytes(leaf.public_bytes(Encoding.PEM))
    files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return files


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _signed(
    key: EllipticCurvePrivateKey,
    name: x509.Name,
    by: EllipticCurvePrivateKey,
    issuer: x509.Name,
    *extensions: x509.ExtensionType,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
    return builder.sign(by, SHA256())
