"""Environments, arguments and paths of engines and of the LMCache server; and the hash that says who may exchange KV."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.config import Both, Config, Decode, Engine, LMCache, Model
from pipeline.errors import OperatorError
from pipeline.protocol.arrangement import Role
from workers.engines import launch
from workers.engines.fingerprint import SAMPLE_BYTES, fingerprint

ROLES: tuple[Role, ...] = ("prefill", "decode", "both")


@pytest.fixture(params=[True, False], ids=["cpu", "gpu"])
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(launch, "cpu_build", lambda: request.param)
    return bool(request.param)


def replaced(**tables: Any) -> Config:
    return msgspec.structs.replace(Config(), **tables)


def test_who_prefills_stores_and_who_only_decodes_only_loads() -> None:
    roles = {role: launch.connector(Config(), role)["kv_role"] for role in ROLES}
    assert roles == {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}


def test_a_chunk_that_is_gone_is_recomputed() -> None:
    assert launch.connector(Config(), "decode")["kv_load_failure_policy"] == "recompute"


def test_the_connector_is_ours_and_knows_the_server() -> None:
    config = replaced(lmcache=LMCache(host="10.0.0.1", port=7000, timeout_s=3.0))
    transfer = launch.connector(config, "prefill")
    assert (transfer["kv_connector_module_path"], transfer["kv_connector"]) == (
        "workers.engines.connector",
        "PDConnector",
    )
    extra = transfer["kv_connector_extra_config"]
    assert extra["lmcache.mp.host"] == "tcp://10.0.0.1"
    assert (extra["lmcache.mp.port"], extra["lmcache.mp.mq_timeout"]) == (7000, 3.0)


def test_what_is_for_cpu_stays_on_cpu(cpu: bool) -> None:
    arguments = launch.engine_arguments(Config(), "decode", "/model")
    extra = arguments["kv_transfer_config"]["kv_connector_extra_config"]
    environment = launch.environment(Config(), "decode")
    assert ("enforce_eager" in arguments) is cpu
    assert ("lmcache.mp.mp_transfer_mode" in extra) is cpu
    assert ("VLLM_CPU_OMP_THREADS_BIND" in environment) is cpu
    assert ("OMP_NUM_THREADS" in environment) is cpu


def test_an_eager_engine_compiles_nothing_at_its_first_request_for_logprobs(cpu: bool) -> None:
    assert ("TORCHDYNAMO_DISABLE" in launch.environment(Config(), "decode")) is cpu
    compiled = replaced(decode=Decode(extra={"enforce_eager": False}))
    assert "TORCHDYNAMO_DISABLE" not in launch.environment(compiled, "decode")


def test_each_role_has_its_own_settings() -> None:
    config = replaced(
        prefill=Engine(slots=2, threads=3, kv_cache_bytes=1 << 20),
        decode=Decode(slots=9, threads=4),
        both=Both(slots=5, prefill_slots=2),
    )
    prefill, decode, both = (launch.engine_arguments(config, role, "/model") for role in ROLES)
    assert (prefill["max_num_seqs"], decode["max_num_seqs"], both["max_num_seqs"]) == (2, 9, 7)
    assert prefill["kv_cache_memory_bytes"] == 1 << 20
    assert [launch.environment(config, role)["OMP_NUM_THREADS"] for role in ROLES] == ["3", "4", "1"]


def test_extra_arguments_win() -> None:
    config = replaced(decode=Decode(extra={"max_num_seqs": 3, "seed": 7}))
    arguments = launch.engine_arguments(config, "decode", "/model")
    assert (arguments["max_num_seqs"], arguments["seed"]) == (3, 7)
    assert "seed" not in launch.engine_arguments(config, "prefill", "/model")


def test_steps_are_short_beside_replies_where_the_operator_says_so(cpu: bool) -> None:
    assert "scheduler_cls" not in launch.engine_arguments(Config(), "both", "/model")
    config = replaced(both=Both(prompt_tokens_beside_replies=32))
    arguments = launch.engine_arguments(config, "both", "/model")
    assert arguments["additional_config"] == {launch.BESIDE_REPLIES: 32}
    assert arguments["max_num_batched_tokens"] == config.both.max_num_batched_tokens
    assert arguments["scheduler_cls"].endswith(".YieldingScheduler" if cpu else ".AsyncYieldingScheduler")
    waits = replaced(both=Both(prompt_tokens_beside_replies=32, extra={"async_scheduling": False}))
    assert launch.engine_arguments(waits, "both", "/model")["scheduler_cls"].endswith(".YieldingScheduler")
    assert "scheduler_cls" not in launch.engine_arguments(config, "decode", "/model")


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (replaced(decode=Decode(slots=64, max_num_batched_tokens=32)), "decode.max_num_batched_tokens"),
        (replaced(lmcache=LMCache(chunk_size=48, block_size=32)), "lmcache.chunk_size"),
        (replaced(lmcache=LMCache(chunk_size=16, block_size=16)), "lmcache.block_size"),
    ],
)
def test_settings_that_contradict_each_other_are_the_operators_error(config: Config, names: str) -> None:
    with pytest.raises(OperatorError, match=names):
        launch.engine_arguments(config, "decode", "/model")


def test_a_local_model_needs_no_hub(tmp_path: Path) -> None:
    offline = {
        source: launch.environment(replaced(model=Model(source=source)), "prefill").get("HF_HUB_OFFLINE")
        for source in ("smollm2", str(tmp_path), "org/name")
    }
    assert offline == {"smollm2": "1", str(tmp_path): "1", "org/name": None}


def test_nobody_is_told_of_our_use() -> None:
    environment = launch.environment(Config(), "prefill")
    assert (environment["VLLM_NO_USAGE_STATS"], environment["DO_NOT_TRACK"]) == ("1", "1")
    assert environment["LMCACHE_TRACK_USAGE"] == launch.lmcache_environment()["LMCACHE_TRACK_USAGE"] == "false"


def test_the_environment_is_set_whatever_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*launch.environment(Config(), "decode"), "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.setenv(name, "40")
    launch.apply_environment(Config(), "decode")
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ


def test_vllms_sockets_are_in_a_folder_that_goes_with_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(launch.SOCKETS_AT, raising=False)
    launch.keep_sockets(Path("one"))
    launch.keep_sockets(Path("another"))
    assert os.environ[launch.SOCKETS_AT] == "one", "an operator's, or another engine's, stays"
    launch.forget_sockets(Path("another"))
    assert launch.SOCKETS_AT in os.environ
    launch.forget_sockets(Path("one"))
    assert launch.SOCKETS_AT not in os.environ


def test_a_folder_whose_path_is_too_long_for_sockets_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(launch.SOCKETS_AT, raising=False)
    launch.keep_sockets(Path("long" * 25))
    assert launch.SOCKETS_AT not in os.environ


def test_lmcache_knows_every_option_we_give_it() -> None:
    command = launch.lmcache_command(Config())
    usage = subprocess.run(
        [*command[: command.index("server") + 1], "--help"],
        env=os.environ | launch.lmcache_environment(),
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    ).stdout
    assert [option for option in command if option.startswith("--") and option not in usage] == []


def test_tiers_behind_the_hosts_own_are_lmcaches_options() -> None:
    tiers = ({"type": "resp", "host": "kv", "port": 6379}, {"type": "fs", "base_path": "/kv"})
    command = launch.lmcache_command(replaced(lmcache=LMCache(l2=tiers)))
    given = [command[at + 1] for at, part in enumerate(command) if part == "--l2-adapter"]
    assert [msgspec.json.decode(tier) for tier in given] == list(tiers)


def test_the_lmcache_command_is_this_interpreters() -> None:
    config = replaced(lmcache=LMCache(l1_bytes=1 << 29, shm_name="here"))
    command = launch.lmcache_command(config)
    assert command[0] == sys.executable
    options = dict(zip(command[4::2], command[5::2], strict=True))
    assert (options["--l1-size-gb"], options["--shm-name"]) == ("0.5", "here")
    assert options["--supported-transfer-mode"] == "auto"


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("headrace", Path("/dev/shm/lmcache_l1_pool_headrace")),
        ("lmcache_l1_pool_x", Path("/dev/shm/lmcache_l1_pool_x")),
        ("", None),
    ],
)
def test_the_shared_memory_is_where_lmcache_puts_it(name: str, path: Path | None) -> None:
    config = replaced(lmcache=LMCache(shm_name=name))
    assert launch.shm_path(config) == path
    assert ("--shm-name" in launch.lmcache_command(config)) is (path is not None)


class TestFingerprint:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        header = b'{"weight":{}}'
        weights = len(header).to_bytes(8, "little") + header + bytes(100 * SAMPLE_BYTES)
        for name, content in {"config.json": b"{}", "tokenizer.json": b"[]", "model.safetensors": weights}.items():
            (tmp_path / name).write_bytes(content)
        return tmp_path

    def test_is_the_same_for_the_same_files_elsewhere(
        self, folder: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        other = tmp_path_factory.mktemp("other")
        for path in folder.iterdir():
            (other / path.name).write_bytes(path.read_bytes())
        assert fingerprint(folder, {"dtype": "x"}) == fingerprint(other, {"dtype": "x"})

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
    def test_differs_with_any_file(self, folder: Path, name: str) -> None:
        before = fingerprint(folder, {})
        content = bytearray((folder / name).read_bytes())
        content[-1] ^= 1
        (folder / name).write_bytes(content)
        assert fingerprint(folder, {}) != before

    def test_differs_with_any_fact(self, folder: Path) -> None:
        assert fingerprint(folder, {"isa": "amx"}) != fingerprint(folder, {"isa": "vec"})
        assert fingerprint(None, {"model": "a"}) != fingerprint(None, {"model": "b"})


def test_cache_events_go_to_sockets_in_a_folder_and_only_where_one_is_given(tmp_path: Path) -> None:
    events = launch.engine_arguments(Config(), "prefill", "/model", tmp_path)["kv_events_config"]
    assert events["endpoint"] == f"ipc://{tmp_path}/events", "vLLM would listen for TCP on every interface"
    assert events["replay_endpoint"] == f"ipc://{tmp_path}/replay"
    assert events["buffer_steps"] >= events["hwm"], "what was dropped can be repeated"
    assert "kv_events_config" not in launch.engine_arguments(Config(), "prefill", "/model")
    ranks = replaced(prefill=Engine(slots=4, extra={"data_parallel_size": 2}))
    assert "kv_events_config" not in launch.engine_arguments(ranks, "prefill", "/model", tmp_path)
    with pytest.raises(OperatorError, match="too long"):
        launch.cache_events(tmp_path / ("x" * 100))
