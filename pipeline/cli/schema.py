"""`headrace schema`: documents from which others generate clients, and check them."""

from enum import StrEnum
from typing import Annotated

import typer


class Kind(StrEnum):
    """Which document."""

    OPENAPI = "openapi"
    ASYNCAPI = "asyncapi"


def schema(kind: Annotated[Kind, typer.Argument(help="openapi: over HTTP. asyncapi: over NATS.")]) -> None:
    """Print the OpenAPI 3.1 document of the gateway, or the AsyncAPI 3 document of the subjects.

    Example: headrace schema openapi > openapi.json
    """
    import msgspec

    from pipeline import asyncapi, openapi

    document = openapi.document() if kind is Kind.OPENAPI else asyncapi.document()
    print(msgspec.json.format(document, indent=2).decode())
