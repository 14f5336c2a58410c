"""`headrace key`: a key that the gateway takes, and an entry that the configuration takes."""

import tomllib
from pathlib import Path

from pipeline.bus.access import Nkey
from pipeline.config import load
from pipeline.protocol.keys import Keyring
from tests.cli.test_main import headrace


def test_a_fresh_key_fits_its_own_entry(tmp_path: Path) -> None:
    said = headrace("key", "new", "team-a").stdout
    fresh, _, rest = said.partition("\n")
    entry = rest[rest.index("[[") :]
    assert tomllib.loads(entry)["gateway"]["keys"][0]["name"] == "team-a"
    (path := tmp_path / "local.toml").write_text(entry, "utf-8")
    found = Keyring(load(path, {}).gateway.keys).find(f"Bearer {fresh}")
    assert found is not None
    assert found.name == "team-a"
    assert fresh not in entry
    assert headrace("key", "new", "team-a").stdout.partition("\n")[0] != fresh


def test_a_name_that_would_break_the_entry_is_refused() -> None:
    done = headrace("key", "new", 'a"\nb')
    assert done.returncode == 2
    assert done.stdout == ""
    assert "is no name for a key" in done.stderr


def test_an_nkeys_seed_is_for_its_owner_alone_and_only_the_public_key_is_shown(tmp_path: Path) -> None:
    seed = tmp_path / "gateway.seed"
    said = headrace("key", "nats", str(seed)).stdout.strip()
    assert said == Nkey.of_seed(seed.read_text("ascii").strip()).public
    assert seed.stat().st_mode & 0o777 == 0o600
    before = seed.read_text("ascii")
    done = headrace("key", "nats", str(seed))
    assert done.returncode == 2
    assert "cannot be made: File exists" in done.stderr
    assert seed.read_text("ascii") == before
