"""`headrace persona` on a real broker: versions are put, shown, and told apart."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from typer.testing import CliRunner, Result

from pipeline.bus import streams
from pipeline.bus.connection import Bus
from pipeline.bus.kv import Bucket
from pipeline.cli.main import program
from pipeline.errors import OperatorError
from pipeline.limits import PERSONA_BYTES_MAX
from pipeline.paths import JETSTREAM
from pipeline.protocol.personas import BUCKET, key_of
from tests.nats_server import NatsServer


class Line:
    """The command line on a broker of its own."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        (folder / "headrace.toml").write_text(f'[nats]\nurl = "{url}"\n', "utf-8")

    def run(self, *arguments: str, stdin: str | None = None) -> Result:
        config = str(self.folder / "headrace.toml")
        return CliRunner().invoke(program(), ["persona", *arguments, "--config", config], input=stdin)

    def said(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json").stdout)

    def file(self, name: str, text: str) -> str:
        (path := self.folder / name).write_text(text, "utf-8")
        return str(path)


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    server = NatsServer(tmp_path / "nats").start()

    async def declare() -> None:
        async with await Bus.connect(server.url, "test") as bus:
            await streams.apply(bus, streams.declared(JETSTREAM))

    anyio.run(declare)
    yield Line(server.url, tmp_path)
    server.kill9()


def test_a_version_is_put_and_shown_and_the_same_again_is_none(line: Line) -> None:
    first, second = line.file("ada.txt", "You are Ada.\n"), line.file("ada2.txt", "You are Ada Lovelace.")
    assert "version 1 is published" in line.run("put", "ada", first).stdout
    assert "version 1 says the same" in line.run("put", "ada", first).stdout
    assert "version 2 is published" in line.run("put", "ada", second).stdout
    assert line.run("get", "ada").stdout == "You are Ada Lovelace.\n"
    assert line.run("get", "ada", "--version", "1").stdout == "You are Ada.\n"
    assert [row["version"] for row in line.said("history", "ada")] == [1, 2]
    assert "You are Ada." in line.run("history", "ada").stdout


def test_a_file_may_bring_arguments_of_the_template(line: Line) -> None:
    toml = line.file("ada.toml", 'system = "You are Ada."\n[template]\nmood = "merry"\n')
    line.run("put", "ada", toml)
    assert line.said("get", "ada")["template"] == {"mood": "merry"}
    line.run("put", "bob", line.file("bob.json", '{"system": "You are Bob.", "template": {"thinking": false}}'))
    shown = line.run("get", "bob")
    assert shown.stdout == "You are Bob.\n"
    assert '{"thinking":false}' in shown.stderr
    line.run("put", "eve", "-", stdin="You are Eve.")
    assert [row["creator"] for row in line.said("list")] == ["ada", "bob", "eve"]
    assert "You are Eve." in line.run("list").stdout


def test_a_tenants_creator_is_another(line: Line) -> None:
    line.run("put", "ada", line.file("ada.txt", "You are Ada."))
    line.run("put", "ada", line.file("other.txt", "You are another Ada."), "--tenant", "acme")
    assert line.said("get", "ada", "--tenant", "acme")["system"] == "You are another Ada."
    assert line.said("get", "ada")["system"] == "You are Ada."
    assert {(row["creator"], row["tenant"]) for row in line.said("list")} == {("ada", ""), ("ada", "acme")}
    assert key_of("ada", "acme") != "ada"


def test_sixteen_versions_are_kept(line: Line) -> None:
    for number in range(18):
        line.run("put", "ada", "-", stdin=f"You are Ada {number}.")
    assert [row["version"] for row in line.said("history", "ada")] == list(range(3, 19))


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.txt", " \n", "is no persona"),
        ("a.toml", "system = ", "is no persona"),
        ("a.json", '{"system": 7}', "is no persona"),
        ("a.json", '{"system": "x", "mood": "merry"}', "other fields than system and template"),
        ("a.txt", "x" * PERSONA_BYTES_MAX, "shorten its system prompt"),
    ],
)
def test_what_is_no_persona_is_not_published(line: Line, name: str, text: str, sentence: str) -> None:
    done = line.run("put", "ada", line.file(name, text))
    assert isinstance(done.exception, OperatorError)
    assert sentence in str(done.exception)
    assert line.said("list") == []


def test_what_is_not_there_is_said_so(line: Line) -> None:
    for arguments in (("get", "ada"), ("get", "ada", "--version", "3"), ("put", "ada", "nowhere.txt")):
        assert isinstance(line.run(*arguments).exception, OperatorError)


def test_a_persona_that_was_deleted_elsewhere_is_put_anew_and_what_is_none_is_shown_as_such(line: Line) -> None:
    async def meddle() -> None:
        async with await Bus.connect(line.url, "test") as bus:
            bucket = Bucket(bus, BUCKET)
            await bucket._store("ada", b"", {"KV-Operation": "DEL"})
            await bucket.write("bob", b"no persona")

    anyio.run(meddle)
    assert line.said("history", "ada") == []
    assert "is published" in line.run("put", "ada", "-", stdin="You are Ada.").stdout
    assert line.said("get", "bob")["system"].startswith("(What the bucket holds is no persona")


def test_without_a_broker_the_remedy_is_said(tmp_path: Path) -> None:
    done = Line("nats://127.0.0.1:1", tmp_path).run("list")
    assert isinstance(done.exception, OperatorError)
