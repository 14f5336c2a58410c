"""And so it does where a parser of reasoning is named. See `fidelity_reasoning`."""

from typing import Any

import pytest

from tests.e2e.conftest import Stacks
from tests.e2e.fidelity import Answer, ask
from tests.e2e.fidelity_compare import differences
from tests.e2e.fidelity_reasoning import PARSER, reasoning_requests
from tests.e2e.serving import answers_of_vllm

pytestmark = pytest.mark.timeout(600)  # the fixtures' start counts to the first test that uses them


@pytest.fixture(scope="module")
def theirs(stacks: Stacks, model_path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """What `vllm serve` answers, by the request's name."""
    stacks.down()
    folder = tmp_path_factory.mktemp("serve")
    return answers_of_vllm(model_path, folder, reasoning_requests(), "--reasoning-parser", PARSER)


@pytest.fixture(scope="module")
def ours(theirs: dict[str, Answer], stacks: Stacks) -> str:
    """Headrace's URL, started after the other has ended."""
    assert theirs
    running = stacks.up(f"reasoning_parser = '{PARSER}'\n")
    running.await_whole()
    return running.gateway


@pytest.mark.parametrize("name", reasoning_requests())
def test_headrace_answers_as_vllm_serve_with_a_parser_of_reasoning(
    name: str, theirs: dict[str, Answer], ours: str
) -> None:
    """A stream is asked for up to three times. vLLM joins the tokens of a reader that falls behind, and where `</think>` comes
    in the midst of such a delta, its parser keeps what follows and never gives it out: there as here, by chance of timing.
    """
    found = [""]
    for _ in range(3 if name.endswith("streamed") else 1):
        if found:
            found = differences(theirs[name], ask(ours, name, reasoning_requests()[name]))
    assert found == []


def said(answer: Answer) -> dict[str, Any]:
    """The first message of a reply that is not streamed."""
    message: dict[str, Any] = answer["body"]["choices"][0]["message"]
    return message


def test_a_thought_is_really_there(theirs: dict[str, Answer], ours: str) -> None:
    """Else the comparison would compare nothing."""
    assert ours
    assert said(theirs["thought"])["reasoning"]
    assert said(theirs["thought"])["content"]
    assert not said(theirs["thought hidden"]).get("reasoning")
