"""`headrace key`: bearer keys for the gateway, and NKeys for the brokers."""

from pathlib import Path
from typing import Annotated

import typer

from pipeline.errors import OperatorError

app = typer.Typer(
    no_args_is_help=True, help="Make keys: for clients of the gateway, and for processes that connect to NATS."
)

KEY_PREFIX = "hr-"
"""So that a key that is found somewhere is known for what it is."""


@app.callback()
def key() -> None:
    """Make keys: for clients of the gateway, and for processes that connect to NATS."""


@app.command()
def new(name: Annotated[str, typer.Argument(help="Whose it is: letters, digits, '.', '_' and '-'.")]) -> None:
    """Print a fresh key, and its entry for the configuration, which holds only its hash. The key is shown once.

    Example: headrace key new team-a
    """
    import msgspec

    from pipeline import outside
    from pipeline.protocol.keys import Key, hash_of

    fresh = f"{KEY_PREFIX}{outside.token(32)}"
    try:
        entry = msgspec.convert({"name": name, "sha256": hash_of(fresh)}, Key)
    except msgspec.ValidationError:
        raise OperatorError(
            f"{name!r} is no name for a key.", "Use up to 64 letters, digits, '.', '_' and '-'."
        ) from None
    print(f"{fresh}\n")
    print("Its entry in the gateway's configuration, which running gateways follow:\n")
    print(f'[[gateway.keys]]\nname = "{entry.name}"\nsha256 = "{entry.sha256}"')


@app.command()
def nats(
    seed_file: Annotated[Path, typer.Argument(help="Where the secret seed goes. It must not be there yet.")],
) -> None:
    """Make an NKey: its seed into a file that only you may read, its public key on the screen.

    The seed's file is nats.nkey_seed of one role; the public key goes into the brokers' users.conf.

    Example: headrace key nats /etc/headrace/nkeys/gateway.seed
    """
    import os

    from pipeline.bus.access import Nkey

    fresh = Nkey.fresh()
    try:
        handle = os.open(seed_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise OperatorError(
            f"{seed_file} cannot be made: {error.strerror}.", "Name a file that is not there yet, in a folder that is."
        ) from None
    with os.fdopen(handle, "w") as file:
        file.write(f"{fresh.seed}\n")
    print(fresh.public)
