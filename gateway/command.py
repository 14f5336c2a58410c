"""`headrace gateway`."""

from typing import Annotated

import typer

from pipeline.cli.options import ConfigOption, configuration


def gateway(
    *,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=0, max=65535, help="0: a free one. Default: the configuration's.", show_default=False
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option("--host", help="Default: the configuration's.", show_default=False)
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Serve OpenAI's chat completions over HTTP.

    SIGTERM drains it: it takes no more requests, and ends when open replies have ended.

    Example: headrace gateway --port 8080
    """
    import msgspec

    from gateway.app import serve
    from pipeline.paths import LOCAL_CONFIG, require
    from pipeline.telemetry import logs

    logs.configure("gateway")
    source = config or require(LOCAL_CONFIG)
    chosen = configuration(source)
    given = {name: value for name, value in (("port", port), ("host", host)) if value is not None}
    serve(msgspec.structs.replace(chosen, gateway=msgspec.structs.replace(chosen.gateway, **given)), source)
