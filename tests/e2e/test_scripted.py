"""Of the same outputs of an engine our workers and gateway make the replies that vLLM's serving code makes.

What a small model cannot be brought to say is scripted here: reasoning of several kinds, tools after it, steps of several tokens.
"""

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline import config as configuration
from tests.e2e.fidelity_compare import differences
from tests.e2e.fidelity_completions import MODEL, Body
from workers.engines import launch

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.timeout(180),  # the first test imports torch and vLLM
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # which are vLLM's own
]

USER = {"role": "user", "content": "What is the capital of France?"}
BEGUN = {"role": "assistant", "content": "The capital"}
GOES_ON: Body = {"messages": [USER, BEGUN], "continue_final_message": True, "add_generation_prompt": False}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
THOUGHT = "<think>The user asks for a capital.</think>It is Paris."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
GRANITE = "Here is my thought process: a capital. Here is my response: Paris."


@pytest.fixture(scope="module")
def staged(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Both servers, by the parser of reasoning."""
    folder: Path = tmp_path_factory.mktemp("scripted")
    (folder / "headrace.toml").touch()
    launch.apply_environment(configuration.load(folder / "headrace.toml", {}), "decode")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.renderers import renderer_from_config

        from tests.e2e.scripted import Stage
        from workers.engines import vllm_chat

        arguments = AsyncEngineArgs(model=model_path, dtype="float32", max_model_len=3072, enforce_eager=True)
        config = arguments.create_engine_config()
        renderer = renderer_from_config(config)
    engine = SimpleNamespace(model_config=config.model_config, vllm_config=config, renderer=renderer)

    @cache
    def stage(parser: str) -> Any:
        return Stage(engine, vllm_chat.renderer(engine, "hermes", parser))

    return stage


def body(**fields: Any) -> Body:
    return {"model": MODEL, "messages": [USER]} | fields


def prompted(prompt: Any = "The capital of France is", **fields: Any) -> Body:
    return {"model": MODEL, "prompt": prompt} | fields


CHATS: dict[str, tuple[str, Body, list[str]]] = {
    "no parser": ("", body(), ["It is Paris."]),
    "no parser, hidden": ("", body(include_reasoning=False, logprobs=True), ["It is Paris."]),
    "olmo3": ("olmo3", body(), [THOUGHT]),
    "olmo3, no thought": ("olmo3", body(), ["It is Paris."]),
    "olmo3, thought alone": ("olmo3", body(), ["<think>The user asks"]),
    "olmo3, hidden": ("olmo3", body(include_reasoning=False), [THOUGHT]),
    "olmo3, hidden with its tokens": (
        "olmo3",
        body(include_reasoning=False, logprobs=True, top_logprobs=1, return_token_ids=True),
        [THOUGHT],
    ),
    "olmo3, tokens": ("olmo3", body(logprobs=True, top_logprobs=1, return_token_ids=True), [THOUGHT]),
    "olmo3, several": ("olmo3", body(n=2, temperature=1.0), [THOUGHT, "It is Rome."]),
    "olmo3, a call": ("olmo3", body(tools=[TOOL]), [f"<think>Weather.</think>{CALL}"]),
    "olmo3, tools unused": ("olmo3", body(tools=[TOOL], tool_choice="none"), [THOUGHT]),
    "olmo3, echo": ("olmo3", body(**GOES_ON, echo=True), [THOUGHT]),
    "olmo3, prompt_logprobs": ("olmo3", body(prompt_logprobs=0), [THOUGHT]),
    "granite": ("granite", body(), [GRANITE]),
    "granite, hidden": ("granite", body(include_reasoning=False), [GRANITE]),
    "qwen3": ("qwen3", body(), [THOUGHT]),
    "qwen3, not thinking": ("qwen3", body(chat_template_kwargs={"enable_thinking": False}), ["It is Paris."]),
    "a call": ("", body(tools=[TOOL]), [CALL]),
    "echo": ("", body(**GOES_ON, echo=True), [" is Paris."]),
    "echo and a call": ("", body(**GOES_ON, echo=True, tools=[TOOL]), [CALL]),
    "echo of several": ("", body(**GOES_ON, echo=True, n=2, temperature=1.0), [" is Paris.", " is Rome."]),
    "prompt_logprobs": ("", body(prompt_logprobs=1), ["It is Paris."]),
}
PROMPTS: dict[str, tuple[Body, list[str]]] = {
    "plain": (prompted(), [" Paris."]),
    "a parser reads no completion": (prompted(), [THOUGHT]),
    "logprobs": (prompted(logprobs=1), [" Paris, of course."]),
    "logprobs 0": (prompted(logprobs=0), [" Paris."]),
    "logprobs as ids": (prompted(logprobs=1, return_tokens_as_token_ids=True), [" Paris."]),
    "echo": (prompted(echo=True), [" Paris."]),
    "echo of ids": (prompted([504, 3575, 282, 4649, 314], echo=True), [" Paris."]),
    "echo and logprobs": (prompted(echo=True, logprobs=1), [" Paris, of course."]),
    "echo, logprobs, several": (prompted(echo=True, logprobs=1, n=2, temperature=1.0), [" Paris.", " Rome, too."]),
    "echo and ids": (prompted(echo=True, return_token_ids=True, logprobs=0), [" Paris."]),
    "echo alone": (prompted(echo=True, max_tokens=0), [" Paris"]),
    "echo alone and logprobs": (prompted(echo=True, max_tokens=0, logprobs=1), [" Paris"]),
    "ids": (prompted(return_token_ids=True), [" Paris."]),
    "prompt_logprobs": (prompted(prompt_logprobs=1, logprobs=1), [" Paris."]),
    "prompt_logprobs and echo": (prompted(prompt_logprobs=1, echo=True, logprobs=1), [" Paris."]),
}

WAYS: dict[str, Body] = {
    "whole": {},
    "streamed": {"stream": True, "stream_options": {"include_usage": True}},
}


async def compared(stage: Any, asked: Body, texts: list[str], step: int) -> list[str]:
    from tests.e2e.scripted import Script

    script = Script(texts=texts, step=step)
    return differences(await stage.theirs(asked, script), await stage.ours(asked, script))


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CHATS)
async def test_a_chat_is_said_as_vllm_says_it(staged: Callable[[str], Any], name: str, way: str, step: int) -> None:
    parser, asked, texts = CHATS[name]
    if way == "streamed" and asked.get("prompt_logprobs"):
        asked = asked | {"prompt_logprobs": 0}  # vLLM refuses others in a stream
    assert await compared(staged(parser), asked | WAYS[way], texts, step) == []


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROMPTS)
async def test_a_completion_is_said_as_vllm_says_it(
    staged: Callable[[str], Any], name: str, way: str, step: int
) -> None:
    asked, texts = PROMPTS[name]
    if way == "streamed" and asked.get("prompt_logprobs"):
        asked = asked | {"prompt_logprobs": 0}
    parser = "olmo3" if name == "a parser reads no completion" else ""
    assert await compared(staged(parser), asked | WAYS[way], texts, step) == []
