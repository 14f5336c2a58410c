"""The program: its help, its errors, and that it starts quickly."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.cli import OPERATOR_EXIT
from pipeline.cli.chat import text_of
from pipeline.cli.main import explain, operator_error, program
from pipeline.errors import OperatorError


def headrace(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pipeline.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_the_help_teaches_the_first_commands(arguments: list[str]) -> None:
    done = headrace(*arguments)
    text = done.stdout + done.stderr
    for command in ("up", "chat", "bench", "record", "gateway", "worker", "keeper", "streams", "top", "credits", "dlq"):
        assert f"\n  {command} " in text
    assert 'headrace up --ask "What is the capital of France?"' in text


@pytest.mark.parametrize(
    "command", ["up", "chat", "bench", "record", "gateway", "worker", "keeper", "streams", "top", "credits", "dlq"]
)
def test_every_command_explains_itself(command: str) -> None:
    done = headrace(command, "--help")
    assert done.returncode == 0
    assert "--help" in done.stdout


def test_the_version_is_printed() -> None:
    assert headrace("--version").stdout.startswith("headrace 0.")


def test_the_command_line_loads_nothing_heavy() -> None:
    heavy = {"torch", "vllm", "lmcache", "transformers", "nats", "starlette", "uvicorn", "anyio", "structlog"}
    program = f"""
import sys
from pipeline.cli.main import program
program()
print({heavy!r} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


def test_a_command_loads_no_other() -> None:
    """A worker that is started again while its fleet is under load has to be quick."""
    program = "import sys; from pipeline.cli.main import program; program('keeper'); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "'workers.command'" in done.stdout
    assert "'pipeline.cli.bench'" not in done.stdout


def test_a_wrong_set_up_is_one_sentence_and_status_2(tmp_path: Path) -> None:
    done = headrace("chat", "hi", "--config", str(tmp_path / "none.toml"))
    assert done.returncode == OPERATOR_EXIT
    assert done.stderr.count("\n") == 1
    assert "Give an existing file with --config." in done.stderr


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["up", "--engine", "abacus"], ["up", "--prefill", "0"], ["worker"]]
)
def test_a_wrong_command_line_is_status_2(arguments: list[str]) -> None:
    done = headrace(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [("worker", "prefill"), ("keeper",)])
@pytest.mark.parametrize("name", ["prefill.1", "a b", "*"])
def test_a_name_that_no_subject_can_carry_is_refused(arguments: tuple[str, ...], name: str) -> None:
    """The broker would end the connection at its first presence, again and again."""
    result = CliRunner().invoke(program(), [*arguments, "--id", name])
    assert result.exit_code == 2
    assert "make a name" in result.output


def test_an_operators_error_is_found_inside_groups() -> None:
    error = OperatorError("No broker.", "Start one.")
    assert operator_error(ExceptionGroup("tasks", [ValueError(), ExceptionGroup("more", [error])])) is error
    assert operator_error(ExceptionGroup("tasks", [ValueError()])) is None


def test_an_unexpected_error_is_a_sentence_for_people_and_a_traceback_for_logs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert explain(ValueError("odd")) == 1
    assert "ValueError: odd" in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert explain(ValueError("odd")) == 1
    assert "HEADRACE_LOG=debug shows where." in capsys.readouterr().err


def test_an_option_is_text_or_a_file_after_an_at_sign(tmp_path: Path) -> None:
    (tmp_path / "persona").write_text("You are Ada.", "utf-8")
    assert text_of(None) is None
    assert text_of("You are Bob.") == "You are Bob."
    assert text_of(f"@{tmp_path / 'persona'}") == "You are Ada."
    with pytest.raises(OperatorError, match="Give a text file after the @"):
        text_of("@/nowhere/persona")
