"""Configuration: the shipped file, the overlay, and errors that name their place."""

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from pipeline.config import Config, Requests, flat, load, sources, with_live
from pipeline.errors import OperatorError
from pipeline.paths import LOCAL_CONFIG
from pipeline.protocol.keys import Key

FREE_TABLES = {"extra", "timeout_max_s"}
"""Maps whose keys are the operator's."""


def places(struct: type[msgspec.Struct], prefix: str = "") -> set[str]:
    """Every entry that a configuration may have, as `gateway.port`."""
    found = set()
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            found |= places(field.type, f"{prefix}{field.name}.")
        else:
            found.add(prefix + field.name)
    return found


def named(tree: dict[str, Any], prefix: str = "") -> set[str]:
    """Every entry of a TOML tree."""
    found = set()
    for key, value in tree.items():
        if isinstance(value, dict) and key not in FREE_TABLES:
            found |= named(value, f"{prefix}{key}.")
        else:
            found.add(prefix + key)
    return found


def test_the_shipped_file_names_every_entry_there_is() -> None:
    tree = tomllib.loads(LOCAL_CONFIG.read_text("utf-8"))
    assert named(tree) == places(Config) - {"prefill.extra", "decode.extra", "both.extra", "gateway.keys"}


def test_the_shipped_example_of_a_key_is_one_and_names_every_entry_there_is() -> None:
    text = LOCAL_CONFIG.read_text("utf-8")
    example = re.search(r"(?m)^# (\[\[gateway\.keys\]\]\n(?:# \w.*\n)+)", text)
    assert example
    (entry,) = tomllib.loads(example[1].replace("\n# ", "\n").replace("…", "0" * 64))["gateway"]["keys"]
    assert entry.keys() == set(Key.__struct_fields__)
    assert msgspec.convert(entry, Key).name == "team-a"


def test_a_table_that_names_one_entry_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    """`decode` and `both` have more seats than `prefill`, also where their tables only say something else."""
    path = tmp_path / "headrace.toml"
    for table in ("prefill", "decode", "both"):
        path.write_text(f"[{table}]\nthreads = 3\n")
        assert getattr(load(path), table) == replace(getattr(Config(), table), threads=3)


def test_the_shipped_file_says_what_the_code_defaults_to_but_for_the_reply_length() -> None:
    expected = msgspec.structs.replace(Config(), requests=Requests(default_max_tokens=256))
    assert load(LOCAL_CONFIG, {}) == expected


def test_live_settings_lie_over_everything_and_each_entry_knows_its_source(tmp_path: Path) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text("[prefill]\nslots = 3\n[gateway]\nport = 1\n", "utf-8")
    environ = {"HEADRACE__GATEWAY__PORT": "2"}
    config = with_live(load(path, environ), {"prefill.slots": 5, "credits.reserve_ratio": 0.2})
    assert (config.prefill.slots, config.gateway.port, config.credits.reserve_ratio) == (5, 2, 0.2)
    assert flat(config)["prefill.slots"] == 5
    assert sources(path, environ) == {"prefill.slots": "file", "gateway.port": "environment"}


def test_a_worker_cannot_take_back_at_a_higher_load_than_it_gives() -> None:
    with pytest.raises(OperatorError, match=r"spill_back_load must be less than spill_load"):
        load(None, {"HEADRACE__PLACEMENT__SPILL_LOAD": "0.5"})


def test_the_environment_lies_over_the_file() -> None:
    environ = {"HEADRACE__GATEWAY__PORT": "8080", "HEADRACE__PREFILL__EXTRA__SEED": "3", "OTHER": "1"}
    config = load(LOCAL_CONFIG, environ)
    assert config.gateway.port == 8080
    assert config.prefill.extra == {"seed": "3"}


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"HEADRACE__GATEWAY__PORT": "70000"}, r"<= 65535 - at `\$\.gateway\.port`"),
        ({"HEADRACE__GATEWAY__PORT": "many"}, r"`\$\.gateway\.port`"),
        ({"HEADRACE__GATEWAY__PROT": "1"}, "unknown field `prot`"),
        ({"HEADRACE__ENGINE__NAME": "x"}, "names a table where the file has a value"),
    ],
)
def test_a_wrong_entry_is_named_with_its_place(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(OperatorError, match=sentence):
        load(LOCAL_CONFIG, environ)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"port = ", "is not TOML"), (b"\xff", "is not TOML"), (None, "Cannot read configuration")],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    path = tmp_path / "mine.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OperatorError, match=f"{sentence}.*"):
        load(path, {})
