"""`headrace schema`."""

import msgspec
import pytest

from pipeline import asyncapi, openapi
from tests.cli.test_main import headrace


@pytest.mark.parametrize(("kind", "document"), [("openapi", openapi.document()), ("asyncapi", asyncapi.document())])
def test_it_prints_the_document_that_the_gateway_serves(kind: str, document: bytes) -> None:
    assert msgspec.json.decode(headrace("schema", kind).stdout) == msgspec.json.decode(document)


def test_another_kind_is_refused() -> None:
    assert headrace("schema", "wsdl").returncode == 2
