"""`python -m workers.engines.store`: this host's LMCache server, as the configuration sets it up.

What `headrace up` starts as a child, for a host whose processes systemd or Kubernetes starts. It becomes the server: signals
and the exit status are LMCache's own.
"""

import os
from typing import NoReturn

import typer

from pipeline.cli.options import ConfigOption, configuration
from workers.engines import launch


def store(*, config: ConfigOption = None) -> NoReturn:
    """Run the LMCache server of this host. It answers GET /healthcheck on lmcache.http_port."""
    chosen = configuration(config)
    segment = launch.shm_path(chosen)
    if segment is not None:
        segment.unlink(missing_ok=True)  # what a killed one has left: the next would not start over it
    command = launch.lmcache_command(chosen)
    os.execve(command[0], command, {**os.environ, **launch.lmcache_environment()})


if __name__ == "__main__":
    typer.run(store)
