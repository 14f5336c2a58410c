"""`headrace key`: bearer keys for the gateway."""

from typing import Annotated

import typer

from pipeline.errors import OperatorError

app = typer.Typer(no_args_is_help=True, help="Make bearer keys for the gateway.")

KEY_PREFIX = "hr-"
"""So that a key that is found somewhere is known for what it is."""


@app.callback()
def key() -> None:
    """Make bearer keys for the gateway."""


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
