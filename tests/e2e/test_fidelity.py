"""Headrace answers as `vllm serve` of the same model does, field by field, less the differences that `fidelity_compare` lists."""

import pytest

from tests.e2e.conftest import Stacks
from tests.e2e.fidelity import Answer, ask
from tests.e2e.fidelity_compare import differences
from tests.e2e.fidelity_requests import all_requests
from tests.e2e.serving import answers_of_vllm

pytestmark = pytest.mark.timeout(600)  # the fixtures' start counts to the first test that uses them


@pytest.fixture(scope="module")
def theirs(stacks: Stacks, model_path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """What `vllm serve` answers, by the request's name."""
    stacks.down()
    return answers_of_vllm(model_path, tmp_path_factory.mktemp("serve"), all_requests())


@pytest.fixture(scope="module")
def ours(theirs: dict[str, Answer], stacks: Stacks) -> str:
    """Headrace's URL, started after the other has ended."""
    assert theirs
    running = stacks.up()
    running.await_whole()
    return running.gateway


@pytest.mark.parametrize("name", all_requests())
def test_headrace_answers_as_vllm_serve_does(name: str, theirs: dict[str, Answer], ours: str) -> None:
    assert differences(theirs[name], ask(ours, name, all_requests()[name])) == []
