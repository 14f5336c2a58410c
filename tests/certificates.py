"""Certificates as an operator makes them by hand: signed by themselves, for loopback."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import NameOID

PASSPHRASE = b"a secret"


def self_made(folder: Path, name: str = "door", *, locked: bool = False) -> tuple[Path, Path]:
    """Certificate and key of `name`, good for a day. `locked`: the key has a passphrase."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    alternatives = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, SHA256())
    )
    cert_at, key_at = folder / f"{name}.pem", folder / f"{name}-key.pem"
    cert_at.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    encryption = serialization.BestAvailableEncryption(PASSPHRASE) if locked else serialization.NoEncryption()
    key_at.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))
    return cert_at, key_at
