"""TLS settings: what cannot work is said before anything starts."""

from pathlib import Path

import pytest

from pipeline import tls
from pipeline.config import Config, Gateway
from pipeline.errors import OperatorError
from tests.certificates import self_made
from workers.supervisor import checks


def door(cert: Path | str = "", key: Path | str = "") -> Gateway:
    return Gateway(tls_cert=str(cert), tls_key=str(key))


def test_without_a_certificate_the_door_is_plain_and_with_one_it_has_both_files(tmp_path: Path) -> None:
    assert tls.server_files(door()) is None
    assert tls.server_files(door(*self_made(tmp_path))) == (tmp_path / "door.pem", tmp_path / "door-key.pem")


def test_a_certificate_without_its_key_is_refused_and_the_missing_one_is_named(tmp_path: Path) -> None:
    cert, key = self_made(tmp_path)
    with pytest.raises(OperatorError, match=r"gateway\.tls_key is not set"):
        tls.server_files(door(cert))
    with pytest.raises(OperatorError, match=r"gateway\.tls_cert is not set"):
        tls.server_files(door(key=key))


def test_what_cannot_be_read_or_does_not_belong_together_is_named(tmp_path: Path) -> None:
    cert, key = self_made(tmp_path)
    _, other = self_made(tmp_path, "other")
    with pytest.raises(OperatorError, match=r"Cannot read gateway\.tls_cert .*none\.pem: No such file"):
        tls.server_files(door(tmp_path / "none.pem", key))
    with pytest.raises(OperatorError, match=r"Cannot read gateway\.tls_key"):
        tls.server_files(door(cert, tmp_path))
    with pytest.raises(OperatorError, match="cannot be used together"):
        tls.server_files(door(cert, other))
    with pytest.raises(OperatorError, match="cannot be used together"):
        tls.server_files(door(key, cert))


def test_a_key_with_a_passphrase_is_refused_rather_than_asked_for(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="without a passphrase"):
        tls.server_files(door(*self_made(tmp_path, locked=True)))


def test_up_looks_at_them_before_it_starts_anything(tmp_path: Path) -> None:
    config = Config(engine="simulated", gateway=door(tmp_path / "none.pem", tmp_path / "none.pem"))
    with pytest.raises(OperatorError, match=r"gateway\.tls_cert"):
        checks.check_machine(config, {})


def test_what_is_no_certificate_to_trust_is_refused_with_the_option_or_setting_that_named_it(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("nothing")
    with pytest.raises(OperatorError, match="--ca"):
        tls.trusting(nothing)
    with pytest.raises(OperatorError, match=r"gateway\.tls_cert"):
        tls.trusting_ours(nothing)
    assert tls.trusting(None) is None
