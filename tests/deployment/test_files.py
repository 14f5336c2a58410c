"""The files an operator rolls out, each held to its own tool or schema, and to what the code does: options, metrics, drains."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import compose_spec
import kubernetes_validate
import msgspec
import pytest
import yaml

from gateway.app import DRAIN_RATIO
from pipeline.config import Config, load
from pipeline.limits import DRAIN_S
from pipeline.paths import CONFIGS
from pipeline.protocol.arrangement import Role
from pipeline.telemetry import metrics
from tests.cli.test_main import headrace
from tests.deployment.cluster import PRODUCTION
from workers.engines import launch

SYSTEMD: Final = sorted((CONFIGS / "deploy" / "systemd").glob("*.service"))
COMPOSE: Final = CONFIGS / "deploy" / "compose" / "compose.yaml"
MANIFESTS: Final = sorted((CONFIGS / "deploy" / "kubernetes").glob("*.yaml"))
KUBERNETES: Final = ("1.31", "1.37")
"""The oldest version and the newest that the manifests are checked for. Sidecars came with 1.29."""

WORKER_STOP_S: Final = DRAIN_S + 1.0 + 15.0
"""A worker's drain, the second in which it gives requests back, and vLLM's own bound for its engine."""


def objects() -> list[dict[str, Any]]:
    """Everything in the manifests."""
    return [found for path in MANIFESTS for found in yaml.safe_load_all(path.read_text("utf-8"))]


def pods() -> dict[str, dict[str, Any]]:
    """The pod of each workload, by its name."""
    return {
        found["metadata"]["name"]: found["spec"]["template"]["spec"]
        for found in objects()
        if "template" in found["spec"]
    }


def production() -> Config:
    """The configuration, as every process of the fleet reads it."""
    return load(PRODUCTION, {})


# --------------------------------------------------------------------------------------------------------------
# systemd


@pytest.mark.system
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    """With programs in the places that they name: `verify` looks for those, too."""
    tool = shutil.which("systemd-analyze")
    assert tool, "this test needs systemd-analyze: apt-get install systemd"
    for name in ("headrace", "python", "nats-server"):
        (tmp_path / name).symlink_to("/bin/true")
    units = []
    for path in SYSTEMD:
        text = path.read_text("utf-8").replace("/opt/headrace/.venv/bin", str(tmp_path))
        (tmp_path / path.name).write_text(text, "utf-8")
        units.append(str(tmp_path / path.name.replace("@", "@0")))
        (tmp_path / path.name.replace("@", "@0")).write_text(text, "utf-8")
    done = subprocess.run([tool, "verify", *units], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_unit_waits_for_as_long_as_its_process_may_drain() -> None:
    stops_s = {
        path.stem: int(re.search(r"(?m)^TimeoutStopSec=(\d+)$", path.read_text("utf-8"))[1])  # type: ignore[index]
        for path in SYSTEMD
    }
    assert min(stops_s[f"headrace-{role}@"] for role in ("prefill", "decode", "both")) > WORKER_STOP_S
    assert stops_s["headrace-gateway"] > DRAIN_RATIO * production().up.drain_s + 1
    assert stops_s["headrace-nats"] > _lame_duck_s()


def test_a_workers_engine_is_not_told_to_end_before_its_worker_is() -> None:
    for path in SYSTEMD:
        assert ("KillMode=mixed" in path.read_text("utf-8")) == ("@" in path.name), path.name


# --------------------------------------------------------------------------------------------------------------
# Compose


def compose() -> dict[str, Any]:
    """The file with its anchors resolved."""
    tree: dict[str, Any] = yaml.safe_load(COMPOSE.read_text("utf-8"))
    return tree


def test_the_compose_file_is_of_the_specification_and_names_nothing_that_it_lacks() -> None:
    parsed = compose_spec.PyCompose.from_json(json.dumps(compose()))
    parsed.validate()
    services = compose()["services"]
    assert set(parsed.service_names()) == set(services)
    for service in services.values():
        assert set(service.get("depends_on", ())) <= set(services)


def test_the_compose_file_mounts_files_that_are_there_or_that_its_head_names() -> None:
    mounts = {mount.split(":")[0] for service in compose()["services"].values() for mount in service.get("volumes", ())}
    files = {mount for mount in mounts if mount.startswith(".")}
    given = {file for file in files if (COMPOSE.parent / file).exists()}
    assert given == {"../../production.toml", "../../nats"}
    assert files - given == {"./tls", "./tls/ca.pem"}


def test_a_container_has_the_time_that_its_drain_takes() -> None:
    graces_s = {name: int(service["stop_grace_period"].removesuffix("s")) for name, service in compose()["services"].items()
                if "stop_grace_period" in service}  # fmt: skip
    workers = [grace for name, grace in graces_s.items() if name.startswith(("prefill", "decode", "both"))]
    assert len(workers) == 7
    assert min(workers) > WORKER_STOP_S
    assert graces_s["gateway"] > DRAIN_RATIO * production().up.drain_s + 1
    assert {graces_s[f"nats-{number}"] for number in range(3)} == {60}


# --------------------------------------------------------------------------------------------------------------
# Kubernetes


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_kubernetes_takes_the_manifests(path: Path, version: str) -> None:
    found = list(yaml.safe_load_all(path.read_text("utf-8")))
    assert found
    for one in found:
        kubernetes_validate.validate(one, version, strict=True)


def test_the_schema_does_refuse() -> None:
    wrong = next(found for found in objects() if found["kind"] == "Deployment")
    wrong["spec"]["template"]["spec"]["terminationGracePeriod"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        kubernetes_validate.validate(wrong, KUBERNETES[-1], strict=True)


def test_kustomize_finds_every_manifest_and_the_files_that_pods_mount() -> None:
    tree = yaml.safe_load((CONFIGS / "kustomization.yaml").read_text("utf-8"))
    assert {CONFIGS / path for path in tree["resources"]} == set(MANIFESTS)
    files = {made["name"]: made["files"] for made in tree["configMapGenerator"]}
    assert all((CONFIGS / file).exists() for made in files.values() for file in made)
    mounted = {
        volume["configMap"]["name"]
        for pod in pods().values()
        for volume in pod.get("volumes", ())
        if "configMap" in volume
    }
    assert mounted == set(files)
    included = set(re.findall(r"(?m)^include \./(\S+)", "".join(_conf(file) for file in files["headrace-nats"])))
    assert {f"nats/{file}" for file in included} | {"nats/cluster.conf"} == set(files["headrace-nats"])


def test_a_pod_has_the_time_that_its_drain_takes() -> None:
    grace_s = {name: int(pod.get("terminationGracePeriodSeconds", 30)) for name, pod in pods().items()}
    (gateway,) = pods()["headrace-gateway"]["containers"]
    before_s = int(gateway["lifecycle"]["preStop"]["exec"]["command"][1])
    assert grace_s["headrace-gateway"] > before_s + DRAIN_RATIO * production().up.drain_s + 1
    assert grace_s["headrace-engines"] > WORKER_STOP_S + 15, "the store ends after the workers, within 15 s"
    assert grace_s["nats"] > _lame_duck_s()


def test_what_takes_requests_is_ready_when_it_says_so_itself() -> None:
    probes = {
        container["name"]: container["readinessProbe"]["httpGet"]["path"]
        for name, pod in pods().items()
        for container in pod["containers"]
        if name.startswith("headrace-") and name != "headrace-streams"
    }
    assert probes == dict.fromkeys(("gateway", "keeper", "prefill", "decode"), "/ready")


def test_scaling_follows_metrics_that_there_are() -> None:
    followed = [
        one["pods"]["metric"]
        for found in objects()
        if found["kind"] == "HorizontalPodAutoscaler"
        for one in found["spec"]["metrics"]
    ]
    assert len(followed) == 4
    known = {family.name for family in metrics.REGISTRY.collect()}
    for metric in followed:
        assert metric["name"] in known
        wanted = metric.get("selector", {}).get("matchLabels", {})
        assert all(value in metrics.LABELS[metric["name"]][label] for label, value in wanted.items())


def test_scaling_targets_are_shares_of_what_the_configuration_gives() -> None:
    config = production()
    targets = {
        (one["pods"]["metric"]["name"]): int(one["pods"]["target"]["averageValue"])
        for found in objects()
        if found["kind"] == "HorizontalPodAutoscaler"
        for one in found["spec"]["metrics"]
    }
    token_bytes = 32 * 2 * 8 * 128 * 2  # an 8B model: layers × (K, V) × KV heads × head size × bfloat16
    blocks = config.decode.kv_cache_bytes // (token_bytes * config.lmcache.block_size)
    assert 0.6 < targets["headrace_blocks"] / blocks < 0.8
    assert 0.6 < targets["headrace_slots"] / config.prefill.slots < 0.85
    assert 0.4 < targets["headrace_in_flight"] / config.gateway.in_flight_max < 0.6


# --------------------------------------------------------------------------------------------------------------
# All of them


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command line of ours in these files, as (where, arguments of `headrace`)."""
    for path in SYSTEMD:
        line = re.search(r"(?m)^ExecStart=\S+/headrace (.+)$", path.read_text("utf-8").replace("\\\n", ""))
        if line:
            yield path.stem, line[1].split()
    for name, service in compose()["services"].items():
        if service["image"].startswith("headrace") and "entrypoint" not in service:
            yield name, service["command"]
    for pod in pods().values():
        for container in pod["containers"]:
            if container["image"].startswith("headrace"):
                yield container["name"], container["args"]


def test_every_option_is_one_that_the_command_has() -> None:
    used: dict[tuple[str, ...], set[str]] = {}
    for _, arguments in commands():
        words = [word for word in arguments[:2] if not word.startswith("-")]
        command = tuple(words if words[0] == "streams" else words[:1])
        used.setdefault(command, set()).update(word for word in arguments if word.startswith("--"))
        assert arguments[arguments.index("--config") + 1] == "/etc/headrace/production.toml"
    assert set(used) == {("gateway",), ("keeper",), ("worker",), ("streams", "apply")}
    for command, options in used.items():
        usage = headrace(*command, "--help").stdout
        assert [option for option in sorted(options) if option not in usage] == []


def environments() -> Iterator[tuple[str, dict[str, str]]]:
    """What these files set of our configuration, by who is started with it."""
    for name, service in compose()["services"].items():
        yield (
            name,
            {key: str(value) for key, value in service.get("environment", {}).items() if key.startswith("HEADRACE__")},
        )
    for pod in pods().values():
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            settings = {entry["name"]: entry.get("value", "") for entry in container.get("env", ())}
            yield container["name"], {key: value for key, value in settings.items() if key.startswith("HEADRACE__")}


def test_every_variable_is_a_setting_and_gives_a_role_its_key_and_inboxes() -> None:
    roles = {"gateway": "gateway", "keeper": "keeper", "streams": "operator"}
    seen = 0
    for name, environ in environments():
        config = load(PRODUCTION, environ)
        role = roles.get(name, name.partition("-simulated")[0])
        if environ:
            seen += 1
            assert config.nats.inbox_prefix == f"_INBOX.{role}"
            assert re.fullmatch(rf"/(run/secrets|etc/headrace/nkeys)/{role}(\.seed)?", config.nats.nkey_seed)
    assert seen == 15


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_the_engines_settings_agree_on_a_gpu(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "cpu_build", lambda: False)
    config = production()
    arguments = launch.engine_arguments(config, role, config.model.source)
    assert arguments["block_size"] == 16
    assert config.lmcache.chunk_size == 256
    assert "lmcache.mp.mp_transfer_mode" not in arguments["kv_transfer_config"]["kv_connector_extra_config"], (
        "CUDA IPC is its own choice"
    )
    assert config.nats.replicas == 3


def test_lmcache_knows_the_tiers_also_the_one_that_is_offered() -> None:
    """LMCache's own parser, in a process of its own: it imports torch."""
    text = PRODUCTION.read_text("utf-8")
    offered = re.search(r"(?m)^# (l2 = .+)$", text)
    assert offered
    tiers = [*production().lmcache.l2, *_tiers(offered[1])]
    assert [tier["type"] for tier in tiers] == ["resp", "nixl_native"]
    program = (
        "import argparse, sys; from lmcache.v1.distributed.l2_adapters import config as c; p = argparse.ArgumentParser();"
        "c.add_l2_adapters_args(p); a = p.parse_args(sys.argv[1:]); print(len(c.parse_args_to_l2_adapters_config(a).adapters))"
    )
    options = [part for tier in tiers for part in ("--l2-adapter", msgspec.json.encode(tier).decode())]
    done = subprocess.run(
        [sys.executable, "-c", program, *options],
        env=os.environ | launch.lmcache_environment(), capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.stdout.strip().endswith("2"), done.stderr[-2000:]


def _tiers(line: str) -> list[dict[str, Any]]:
    tiers: list[dict[str, Any]] = tomllib.loads(line)["l2"]
    return tiers


def _conf(file: str) -> str:
    return (CONFIGS / file).read_text("utf-8")


def _lame_duck_s() -> int:
    """Until a node that leaves has gone: it lets clients go for so long, and waits before."""
    text = _conf("nats/cluster.conf")
    return math.ceil(sum(int(found) for found in re.findall(r'lame_duck_\w+: "(\d+)s"', text)))
