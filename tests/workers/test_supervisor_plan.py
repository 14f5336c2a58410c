"""What must run, in which order, and what falls together: tables."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from pipeline.config import Config, Decode, LMCache, Nats, Up, load
from pipeline.errors import OperatorError
from workers.engines import launch
from workers.engines.simulated.engine import TIER_VARIABLE
from workers.supervisor import plan
from workers.supervisor.plan import Answers, Ended, Options, Present, Site, Stage

SITE = Site(
    run="r1",
    folder=Path("/runs/r1"),
    config_path=Path("/etc/headrace.toml"),
    nats_server=Path("/bin/nats-server"),
    nats_config=Path("/etc/nats.conf"),
    cores=(0, 1, 4, 5),
)
REAL = Config()
SIMULATED = plan.chosen(Config(), Options(engine="simulated", prefill=4, decode=1))


def units(config: Config) -> dict[str, plan.Unit]:
    return {unit.name: unit for unit in plan.plan(config, SITE, list(range(9101, 9120)))}


def test_the_real_engine_needs_broker_model_and_store() -> None:
    after = {name: unit.after for name, unit in units(REAL).items()}
    assert after == {
        "nats": (),
        "streams": ("nats",),
        "model": (),
        "lmcache": (),
        "prefill-1": ("nats", "streams", "model", "lmcache"),
        "decode-1": ("nats", "streams", "model", "lmcache"),
        "keeper": ("nats", "streams"),
        "gateway": ("nats", "streams"),
    }


def test_the_simulated_engine_needs_only_the_broker() -> None:
    after = {name: unit.after for name, unit in units(SIMULATED).items()}
    workers = ("prefill-1", "prefill-2", "prefill-3", "prefill-4", "decode-1")
    assert after == {
        "nats": (),
        "streams": ("nats",),
        **dict.fromkeys(workers, ("nats", "streams")),
        "keeper": ("nats", "streams"),
        "gateway": ("nats", "streams"),
    }


def test_each_engine_on_cpu_has_cores_of_its_own_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "cpu_build", lambda: True)
    config = replace(REAL, up=Up(prefill=1, decode=1, both=1), decode=Decode(threads=2))
    assert {name: unit.cores for name, unit in units(config).items() if unit.cores} == {
        "prefill-1": (0,),
        "decode-1": (1, 4),
        "both-1": (5,),
    }
    crowded = replace(config, up=Up(prefill=2, decode=1, both=1))
    freely = replace(config, up=replace(config.up, pin_cores=False))
    for nobody in (crowded, freely, replace(config, engine="simulated")):
        assert not any(unit.cores for unit in units(nobody).values())


def test_an_engine_on_a_gpu_wanders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "cpu_build", lambda: False)
    assert not any(unit.cores for unit in units(REAL).values())


def test_workers_for_both_are_a_fleet_of_their_own() -> None:
    alone = units(plan.chosen(Config(), Options(engine="simulated", prefill=0, decode=0, both=2)))
    assert [name for name in alone if name.startswith(("prefill", "decode", "both"))] == ["both-1", "both-2"]
    assert alone["both-1"].ready == Present("decode", "both-1")
    assert "both" in alone["both-1"].command
    assert "--as" not in alone["both-1"].command


def test_workers_for_both_begin_as_they_are_told_and_further_ones_as_both() -> None:
    fleet = units(replace(Config(), engine="simulated", up=Up(decode=1, both=3, begin_as=("prefill", "decode"))))
    for name, role in (("both-1", "prefill"), ("both-2", "decode")):
        command = fleet[name].command
        assert command[command.index("--as") + 1] == role
        assert fleet[name].ready == Present(role, name)
    assert all("--as" not in fleet[name].command for name in ("prefill-1", "decode-1", "both-3"))


@pytest.mark.parametrize(("options", "said"), [(Options(prefill=0), "prefill"), (Options(decode=0), "decode")])
def test_a_fleet_in_which_nobody_would_do_a_part_is_refused(options: Options, said: str) -> None:
    with pytest.raises(OperatorError, match=f"Nobody would {said}"):
        plan.check_fleet(plan.chosen(Config(), options).up)


def test_a_fleet_whose_workers_for_both_all_begin_alike_is_refused() -> None:
    up = Up(prefill=0, decode=0, both=2, begin_as=("prefill", "prefill"))
    with pytest.raises(OperatorError, match=r"Nobody would decode.*up\.begin_as"):
        plan.check_fleet(up)
    plan.check_fleet(replace(up, both=3))


def test_workers_fall_with_lmcache_and_with_nothing_else() -> None:
    real = list(units(REAL).values())
    assert plan.falling_with(real, "lmcache") == ("prefill-1", "decode-1")
    others = {unit.name for unit in real} - {"lmcache"}
    assert not any(plan.falling_with(real, name) for name in others)


def test_the_drain_goes_from_who_takes_requests_to_who_carries_them() -> None:
    order = list(plan.drain_order(list(units(REAL).values()), drain_s=20.0))
    assert order == [
        (("gateway",), 10.0),
        (("streams", "model", "prefill-1", "decode-1", "keeper"), 16.0),
        (("lmcache",), 18.0),
        (("nats",), 20.0),
    ]


def test_a_worker_is_known_by_its_presence_and_a_step_by_its_end() -> None:
    real = units(REAL)
    assert real["decode-1"].ready == Present("decode", "decode-1")
    assert isinstance(real["model"].ready, Ended)
    assert real["model"].is_step
    assert not real["nats"].is_step


def test_each_worker_and_the_keeper_have_a_metrics_port_of_their_own() -> None:
    workers = [unit for unit in units(SIMULATED).values() if unit.stage == Stage.WORKERS and not unit.is_step]
    assert [unit.metrics for unit in workers] == [f"http://127.0.0.1:{port}/metrics" for port in range(9101, 9107)]
    assert workers[0].command[-6:] == ("--id", "prefill-1", "--metrics-port", "9101", "--config", "/etc/headrace.toml")


def test_the_keeper_is_known_by_its_metrics() -> None:
    keeper = units(SIMULATED)["keeper"]
    assert keeper.ready == Answers("http://127.0.0.1:9106/metrics")
    assert keeper.command[-6:] == ("--id", "keeper", "--metrics-port", "9106", "--config", "/etc/headrace.toml")


def test_simulated_workers_share_a_tier_and_real_ones_none() -> None:
    simulated, real = units(SIMULATED), units(REAL)
    tiers = {unit.environment.get(TIER_VARIABLE) for unit in simulated.values() if isinstance(unit.ready, Present)}
    assert tiers == {"/runs/r1/simulated-lmcache"}
    assert TIER_VARIABLE not in real["prefill-1"].environment
    assert real["prefill-1"].environment["VLLM_NO_USAGE_STATS"] == "1"


def test_the_broker_listens_on_loopback_and_keeps_its_files_in_the_run() -> None:
    command = units(REAL)["nats"].command
    assert command[:3] == ("/bin/nats-server", "-c", "/etc/nats.conf")
    pairs = dict(zip(command[3::2], command[4::2], strict=True))
    assert pairs == {"-a": "127.0.0.1", "-p": "4222", "-m": "8222", "-sd": "/runs/r1/nats"}


def test_the_store_leaves_its_shared_memory_when_it_is_killed() -> None:
    settled = plan.settled(REAL, "r1", [])
    assert units(settled)["lmcache"].leftovers == (Path("/dev/shm/lmcache_l1_pool_headrace-r1"),)
    assert units(settled)["lmcache"].metrics == f"{launch.lmcache_url(settled)}/metrics"
    without = plan.settled(replace(REAL, lmcache=LMCache(shm_name="")), "r1", [])
    assert units(without)["lmcache"].leftovers == ()


def test_ports_of_zero_become_free_ones_and_others_stay() -> None:
    config = load(None, {"HEADRACE__NATS__URL": "nats://127.0.0.1:0", "HEADRACE__LMCACHE__PORT": "0"})
    settled = plan.settled(config, "r1", [7001, 7002])
    assert settled.nats.url == "nats://127.0.0.1:7001"
    assert settled.lmcache.port == 7002
    assert settled.gateway.port == 8000


def test_children_read_back_exactly_the_settled_configuration() -> None:
    zero = {"NATS__URL": "nats://[::1]:0", "NATS__MONITOR_PORT": "0", "GATEWAY__PORT": "0", "LMCACHE__HTTP_PORT": "0"}
    chosen = plan.chosen(
        load(None, {f"HEADRACE__{name}": value for name, value in zero.items()}),
        Options(engine="simulated", model="/models/m"),
    )
    settled = plan.settled(chosen, "r1", range(7001, 7001 + plan.PORTS_MAX))
    assert load(None, plan.overlay(settled)) == settled


def test_options_leave_alone_what_they_do_not_name() -> None:
    assert plan.chosen(REAL, Options()) == REAL
    assert plan.chosen(REAL, Options(port=0)).gateway.port == 0
    assert plan.chosen(REAL, Options(prefill=3)).up.prefill == 3


def test_up_refuses_a_broker_elsewhere() -> None:
    for url in ("nats://10.0.0.1:4222", "nats://127.0.0.1:port", "nonsense"):
        with pytest.raises(OperatorError, match="starts a NATS server of its own"):
            plan.broker(replace(REAL, nats=Nats(url=url)))
    assert plan.broker(replace(REAL, nats=Nats(url="nats://localhost"))) == ("localhost", 4222)


def test_a_gateway_on_all_addresses_is_reached_on_loopback() -> None:
    config = load(None, {"HEADRACE__GATEWAY__HOST": "0.0.0.0", "HEADRACE__GATEWAY__PORT": "81"})
    assert plan.gateway_url(config) == "http://127.0.0.1:81"


def test_each_port_in_use_can_be_blamed_on_its_setting() -> None:
    assert plan.ports(SIMULATED) == {4222: "nats.url", 8222: "nats.monitor_port", 8000: "gateway.port"}
    assert set(plan.ports(REAL).values()) >= {"lmcache.port", "lmcache.http_port"}
