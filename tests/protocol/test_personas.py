"""Personas: written and read alike, and no tenant's is another's."""

import pytest

from pipeline.errors import InvalidField
from pipeline.limits import CREATOR_TOKEN_BYTES_MAX, PERSONA_BYTES_MAX
from pipeline.protocol import personas, subjects
from pipeline.protocol.personas import Persona, key_of


def test_a_persona_is_read_as_it_was_written() -> None:
    persona = Persona(creator="ada", tenant="t", system="You are Ada.", template={"mood": "merry"})
    assert personas.read(personas.write(persona)) == persona
    assert personas.write(personas.read(personas.write(persona))) == personas.write(persona)


@pytest.mark.parametrize("data", [b"", b"x", b"{}", b'{"type":"persona","creator":"a","system":""}', b'"\xff"'])
def test_what_is_no_persona_is_said_so(data: bytes) -> None:
    with pytest.raises(InvalidField):
        personas.read(data)


def test_a_persona_that_is_too_large_is_not_written() -> None:
    with pytest.raises(InvalidField, match="shorten"):
        personas.write(Persona(creator="ada", system="x" * PERSONA_BYTES_MAX))


def test_tenants_share_no_key_and_every_key_is_one_token() -> None:
    keys = [key_of("ada", ""), key_of("ada", "t"), key_of("ada", "u"), key_of("bob", "t"), key_of("t", "ada")]
    assert len(set(keys)) == len(keys)
    assert keys[0] == "ada"
    assert all(subjects.is_token(key) and len(key) <= CREATOR_TOKEN_BYTES_MAX for key in keys)
    assert not any(subjects.token(key).startswith("=t") for key in keys), "no creator is called so"
