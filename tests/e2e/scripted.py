"""What an engine would say, scripted, and the replies that vLLM's serving code and ours make of it. No engine runs: parsers and
tokeniser are real.
"""

import copy
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Final

import msgspec
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest as TheirCompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from gateway import chat as gateway_chat
from gateway.intake import Order, Terms, take
from gateway.replies import Reply
from pipeline.protocol.chat import Chat, wants_prompt, wants_prompt_ids
from pipeline.protocol.completions import CompletionRequest, prompt_logprobs
from pipeline.protocol.messages import Claim, Usage, pack_ids
from pipeline.protocol.pieces import Echo
from pipeline.protocol.reply import Outbox
from tests.e2e.fidelity import Answer
from tests.e2e.fidelity_completions import Body
from workers.engines import vllm_chat, vllm_completions

TERMS: Final = Terms(
    reply_to="r", claim_at="c", receiver="g/1", default_creator="d", timeout_s=9, timeout_max_s={"interactive": 9}
)


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """`texts` are the replies, by choice. `step` tokens of each come at a time."""

    texts: list[str]
    finish_reason: str = "stop"
    step: int = 1


class Stage:
    """Both servers, without engines. `online` is the renderer, with its parsers."""

    def __init__(self, engine: Any, online: Any) -> None:
        self._engine = engine
        self._online = online
        self._tokenizer = engine.renderer.tokenizer

    async def theirs(self, body: Body, script: Script) -> Answer:
        """By vLLM's serving code."""
        if "prompt" in body:
            return await self._their_completion(body, script)
        request = ChatCompletionRequest(**copy.deepcopy(body))  # whose messages vLLM changes in place
        conversation, (rendered,) = await self._online.render_chat(request)
        prompt, serving = rendered["prompt_token_ids"], self._chat_serving()
        named = ("id", "smollm2", conversation, self._tokenizer, SimpleNamespace())
        kwargs = self._online.effective_chat_template_kwargs(request)
        if body.get("stream"):
            outputs = self._deltas(body, prompt, script)
            stream = serving.chat_completion_stream_generator(request, outputs, *named, chat_template_kwargs=kwargs)
            return _streamed([event async for event in stream])
        parser = serving.parser_cls and serving._make_parser(request, self._tokenizer, kwargs)
        outputs = self._whole(body, prompt, script)
        reply = await serving.chat_completion_full_generator(request, outputs, *named, parser=parser)
        return _whole(reply)

    async def _their_completion(self, body: Body, script: Script) -> Answer:
        request = TheirCompletionRequest(**body)
        rendered = await self._online.render_completion(request)
        (prompt,) = (one["prompt_token_ids"] for one in rendered)
        serving = self._completion_serving()
        named = ("id", 1, "smollm2")
        if body.get("stream"):

            async def merged() -> AsyncIterator[tuple[int, RequestOutput]]:
                async for output in self._deltas(body, prompt, script):
                    yield 0, output

            stream = serving.completion_stream_generator(
                request, rendered, merged(), *named, 1, self._tokenizer, SimpleNamespace()
            )
            return _streamed([event async for event in stream])
        async for output in self._whole(body, prompt, script):
            output.prompt = rendered[0].get("prompt")
            reply = serving.request_output_to_completion_response(
                [output], request, *named, self._tokenizer, SimpleNamespace()
            )
        return _whole(reply)

    async def ours(self, body: Body, script: Script) -> Answer:
        """By what our workers and the gateway make of it."""
        kind = CompletionRequest if "prompt" in body else Chat
        order = take("r", {}, msgspec.json.encode(body), TERMS, kind=kind)
        order.model = "smollm2"
        tree = body | {"type": "completion" if kind is CompletionRequest else "chat"}
        return await self._written(kind, order, await self._worked(tree, script))

    async def _worked(self, tree: Body, script: Script) -> Reply:
        """The reply as the gateway holds it after all frames and the end."""
        words = vllm_completions if tree["type"] == "completion" else vllm_chat
        rendered = await words.render(self._engine, self._online, tree, {})
        prompt, told = rendered.token_ids, ("", "")
        if prompt_logprobs(tree) is not None:
            told = words.told_of_prompt(self._engine, tree, prompt, self._prompt_logprobs(prompt))
        left = {name: value for name, value in tree.items() if name not in ("messages", "prompt")}
        how = words.sampling(self._online, left, prompt, 99, {})
        echo, streamed = Echo(rendered.echo, told[1]), bool(tree.get("stream"))
        said = words.Said(self._engine, self._online, how.request, prompt, echo, streamed=streamed)
        reply = Reply("r", 0.0)
        reply.detailed = True
        reply.receiver.claim(Claim(request="r", claim="c", epoch="e", holder="h", ack="a"))
        outbox = Outbox("r", "c")
        outbox.prompt_logprobs = told[0]
        if wants_prompt(tree):
            outbox.prompt_tokens = len(prompt)
            outbox.prompt = pack_ids(prompt) if wants_prompt_ids(tree) else b""
        reasoning: list[int] = []
        async for output in self._deltas(tree, prompt, script):
            for choice in output.outputs:
                step = await said.step(choice, 0)
                frame = outbox.add(list(step.token_ids), step.text, step.choice, step.logprobs, step.message)
                for piece in reply.receiver.frame(frame, 0.0).pieces if frame else ():
                    reply.add(piece)
                if step.finish_reason is not None:
                    outbox.end(step.choice, step.finish_reason, step.stop_reason)
                reasoning += [] if step.reasoning_tokens is None else [step.reasoning_tokens]
        done = outbox.done(_usage(len(prompt), outbox.length, sum(reasoning) if reasoning else None))
        for piece in reply.receiver.frame(done, 0.0).pieces:
            reply.add(piece)
        reply.finish(done)
        return reply

    async def _written(self, kind: type[Chat | CompletionRequest], order: Order, reply: Reply) -> Answer:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        write = gateway_chat.stream if order.stream else gateway_chat.whole
        await write(kind, order, reply, gateway_chat.Outgoing(send, ""))
        text = b"".join(message.get("body", b"") for message in sent).decode()
        return _streamed(text.split("\n\n")) if order.stream else _json(text)

    def _chat_serving(self) -> Any:
        serving: Any = OpenAIServingChat.__new__(OpenAIServingChat)
        vars(serving).update(_SETTINGS, parser_cls=self._online.parser, online_renderer=self._online)
        serving.enable_auto_tools = self._online.enable_auto_tools
        serving.model_config = self._engine.model_config
        serving._include_reasoning_tokens_details = bool(
            self._online.parser and self._online.parser.reasoning_parser_cls
        )
        return serving

    def _completion_serving(self) -> Any:
        serving: Any = OpenAIServingCompletion.__new__(OpenAIServingCompletion)
        vars(serving).update(_SETTINGS, model_config=self._engine.model_config)
        return serving

    async def _deltas(self, body: Body, prompt: Sequence[int], script: Script) -> AsyncIterator[Any]:
        """The steps of all choices, one after the other."""
        for index, text in enumerate(script.texts):
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            said = 0
            for at in range(0, len(ids), script.step):
                new = ids[at : at + script.step]
                last = at + script.step >= len(ids)
                upto = text if last else self._tokenizer.decode(ids[: at + script.step])
                yield self._output(body, prompt, index, new, upto[said:], script.finish_reason if last else None)
                said = len(upto)

    async def _whole(self, body: Body, prompt: Sequence[int], script: Script) -> AsyncIterator[Any]:
        outputs = []
        for index, text in enumerate(script.texts):
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            outputs += self._output(body, prompt, index, ids, text, script.finish_reason).outputs
        yield self._request_output(body, prompt, outputs)

    def _output(
        self, body: Body, prompt: Sequence[int], index: int, ids: list[int], text: str, reason: str | None
    ) -> Any:
        logprobs = [self._logprob(token) for token in ids]
        return self._request_output(
            body, prompt, [CompletionOutput(index, text, ids, None, logprobs, None, reason, None)]
        )

    def _request_output(self, body: Body, prompt: Sequence[int], outputs: list[Any]) -> Any:
        asked = prompt_logprobs(body | {"type": "completion" if "prompt" in body else "chat"})
        told = None if asked is None else self._prompt_logprobs(prompt)
        return RequestOutput("id", None, list(prompt), told, outputs, finished=False)

    def _logprob(self, token: int) -> dict[int, Any]:
        """A token's own, and another's."""
        pair: Iterator[int] = iter((token, token - 1 if token else 1))
        return {one: Logprob(-0.5 - rank, rank + 1, self._tokenizer.decode([one])) for rank, one in enumerate(pair)}

    def _prompt_logprobs(self, prompt: Sequence[int]) -> list[Any]:
        return [None, *(self._logprob(token) for token in prompt[1:])]


_SETTINGS: Final[dict[str, Any]] = {
    "response_role": "assistant",
    "return_tokens_as_token_ids": False,
    "enable_force_include_usage": False,
    "enable_prompt_tokens_details": False,
    "enable_per_request_metrics": False,
    "enable_log_outputs": False,
    "request_logger": None,
    "system_fingerprint": None,
    "chat_template": None,
    "chat_template_content_format": "auto",
    "default_chat_template_kwargs": {},
}
"""Of vLLM's serving classes, with the defaults of `vllm serve`."""


def _usage(prompt: int, completion: int, reasoning: int | None) -> Usage:
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=0,
        decode_cached_tokens=0,
        prefill_generated_tokens=1,
        prefill="p",
        decode="d",
        reasoning_tokens=reasoning,
    )


def _streamed(texts: Sequence[str]) -> Answer:
    events = [text.strip().removeprefix("data: ") for text in texts if text.strip()]
    said = [event if event == "[DONE]" else json.loads(event) for event in events]
    return {"status": 200, "kind": "text/event-stream", "events": said}


def _json(text: str) -> Answer:
    return {"status": 200, "kind": "application/json", "body": json.loads(text)}


def _whole(reply: Any) -> Answer:
    return _json(reply.model_dump_json())
