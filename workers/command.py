"""The commands that the workers' side offers: `headrace worker`, `headrace keeper` and `headrace up`.

Everything heavy is imported inside the commands: vLLM takes seconds, and must not be imported before its environment is set.
"""

from typing import Annotated, Literal, NoReturn

import typer

from pipeline.cli.options import ConfigOption, configuration
from pipeline.config import Config

Role = Literal["prefill", "decode", "both"]

EngineOption = Annotated[
    Literal["vllm", "simulated"] | None,
    typer.Option("--engine", help="What computes. Default: the configuration's.", show_default=False),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="smollm2 (packaged), a local HF folder, or a hub id. Default: the configuration's.",
        show_default=False,
    ),
]


def worker(
    *,
    role: Annotated[
        Role, typer.Argument(help="Which pool it joins; both: either, or both at once.", show_default=False)
    ],
    worker_id: Annotated[
        str | None,
        typer.Option("--id", help="Its name in the fleet. Default: role, host and process id.", show_default=False),
    ] = None,
    engine: EngineOption = None,
    as_role: Annotated[
        Role | None,
        typer.Option("--as", help="The role that a worker for both begins in. Default: both.", show_default=False),
    ] = None,
    model: ModelOption = None,
    metrics_port: Annotated[int, typer.Option("--metrics-port", min=0, max=65535, help="0: no metrics.")] = 0,
    config: ConfigOption = None,
) -> None:
    """Run one worker: prefill, decode, or both over one engine.

    SIGTERM drains it: it takes no more requests, and ends when its own have ended. A worker for both may change its role while it
    runs, by `headrace role`.

    Example: headrace worker prefill --id prefill-1
    """
    import anyio

    from pipeline.telemetry import logs
    from workers.supervisor import plan

    if as_role is not None and role != "both":
        raise typer.BadParameter("only a worker for both can begin as something else", param_hint="--as")
    chosen = plan.chosen(configuration(config), plan.Options(engine=engine, model=model))
    name = _name(role, worker_id)
    logs.configure(name)
    _serve_metrics(chosen, metrics_port)
    model_path = _prepared(chosen, role)

    from pipeline import garbage
    from workers.runtime import run_worker

    garbage.settle()
    anyio.run(run_worker, chosen, role, name, model_path, as_role, backend_options={"use_uvloop": True})
    if chosen.engine == "vllm":
        _leave()


def keeper(
    *,
    keeper_id: Annotated[
        str | None,
        typer.Option("--id", help="Its name in the fleet. Default: keeper, host and process id.", show_default=False),
    ] = None,
    metrics_port: Annotated[int, typer.Option("--metrics-port", min=0, max=65535, help="0: no metrics.")] = 0,
    config: ConfigOption = None,
) -> None:
    """Run a keeper: it ends what no worker can end.

    Requests that ran out of time in the queue, or of deliveries: their receivers are told, and a copy of each is kept
    (see headrace dlq). Several may run.

    Example: headrace keeper --id keeper-1
    """
    import anyio

    from pipeline.telemetry import logs

    chosen, name = configuration(config), _name("keeper", keeper_id)
    logs.configure(name)

    from workers.keeper import run_keeper

    anyio.run(run_keeper, chosen, name, metrics_port)


def up(
    *,
    engine: EngineOption = None,
    prefill: Annotated[int | None, typer.Option("--prefill", min=0, help="Prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option("--decode", min=0, help="Decode workers.")] = None,
    both: Annotated[
        int | None, typer.Option("--both", min=0, help="Workers that may be either, and begin as up.begin_as says.")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="Of the gateway; 0 chooses a free one.")
    ] = None,
    ask: Annotated[str | None, typer.Option("--ask", help="Stream a reply to this once all is ready.")] = None,
    model: ModelOption = None,
    config: ConfigOption = None,
) -> None:
    """Start the whole stack on this machine.

    Broker, KV store, workers and gateway, on loopback. Ctrl-C drains and stops them.

    Example: headrace up --ask "What is the capital of France?"
    """
    from pipeline.paths import LOCAL_CONFIG, require
    from workers.supervisor import plan
    from workers.supervisor import up as supervisor

    options = plan.Options(engine=engine, prefill=prefill, decode=decode, both=both, port=port, model=model)
    supervisor.up(config or require(LOCAL_CONFIG), options, ask)


def _name(role: str, given: str | None) -> str:
    """The name that was given, or one that no other process of the fleet has. It stands in subjects, as one token."""
    import os
    import re
    import socket

    if given:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", given):
            raise typer.BadParameter(f"{given!r}: letters, digits, - and _ make a name", param_hint="--id")
        return given
    return f"{role}-{socket.gethostname().split('.')[0]}-{os.getpid()}"


def _leave() -> NoReturn:
    """End at once and well. The engine is closed, and what Python would still do, taking torch and vLLM apart, takes seconds."""
    import os
    import sys

    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _serve_metrics(config: Config, port: int) -> None:
    if port:
        from pipeline.telemetry import metrics

        metrics.serve(port, config.metrics.host)


def _prepared(config: Config, role: Role) -> str | None:
    """The model's path, made ready; None for the simulated engine. Sets the engine's environment first."""
    if config.engine == "simulated":
        return None
    from pipeline.telemetry import logs
    from workers.engines import launch, model

    launch.apply_environment(config, role)
    return model.prepare(config.model.source, config.up.state_dir, lambda line: logs.get("model").info(line))
