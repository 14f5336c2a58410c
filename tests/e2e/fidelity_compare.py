"""Compares what two servers have answered, field by field, less the differences that are meant.

What may differ, and why:

    id, created, system_fingerprint         each server's own; a tool call's id is drawn
    null against absent                     vLLM writes many nulls; what is null says nothing
    usage.prompt_tokens_details, .headrace  ours says always what was cached, and how the work was split (README)
    the first chunk                         ours carries role and first text together, because clients time the first chunk
    how text is cut into chunks             steps that are ready together are written together; vLLM writes tokens without text,
                                            and an empty delta with the reason
    the order of the choices' chunks        of several replies the reasons come last, all together
    usage null                              OpenAI's way in chunks before the one with usage; vLLM leaves it out
    usage in the chunks                     counts what has been sent up to there; of each choice the last one is compared
    an error's message and type             ours names the field as the body has it; pydantic's are long
    what is not asked here                  no max_tokens: ours has the operator's default; request_id: ours is its own
    an error's code                         a word that programs can look at; vLLM repeats the status
    an error's param                        ours names the field where vLLM says nothing, and without vLLM's `body.` in front
"""

from collections.abc import Iterator
from typing import Any, Final

Answer = dict[str, Any]

_OWN: Final = frozenset({"id", "created", "system_fingerprint"})
_SYNONYMS: Final = {"input_tokens": ("messages", "prompt"), "input_text": ("messages", "prompt")}
"""vLLM's names of what it counts, and the fields of the body to blame."""


def differences(theirs: Answer, ours: Answer) -> list[str]:
    """A line for each field that differs and should not."""
    if theirs["status"] != ours["status"]:
        return [f"status: {theirs['status']} / {ours['status']}: {_brief(theirs)} / {_brief(ours)}"]
    if theirs["kind"] != ours["kind"]:
        return [f"content-type: {theirs['kind']} / {ours['kind']}"]
    if theirs["status"] != 200:
        return _errors(theirs["body"]["error"], ours["body"]["error"])
    return list(_unequal("", _whole(theirs), _whole(ours)))


def _brief(answer: Answer) -> str:
    return str(answer.get("body", {}).get("error", "fine"))[:200]


def _errors(theirs: Any, ours: Any) -> list[str]:
    said = theirs["param"]
    if said is None:
        return []
    # pydantic names the classes that it has tried as well.
    expected = ".".join(part for part in said.removeprefix("body.").split(".") if not part[0].isupper())
    named = (ours["param"] or "").replace("[", ".").replace("]", "")
    fits = named in (expected, *_SYNONYMS.get(expected, ())) or expected.startswith(f"{named}.")
    return [] if named and fits else [f"error.param: {said} / {ours['param']}"]


def _whole(answer: Answer) -> Any:
    return _bare(answer["body"]) if "body" in answer else _joined(answer["events"])


def _joined(events: list[Any]) -> Any:
    """A stream as one object. What its chunks must be in themselves is checked here."""
    *chunks, end = events
    assert end == "[DONE]", end
    choices: dict[int, Any] = {}
    whole: dict[str, Any] = {"usage": None, "usage of choices": {}}
    for chunk in chunks:
        assert chunk["object"] == chunks[0]["object"] in ("chat.completion.chunk", "text_completion")
        assert (chunk["id"], chunk["created"]) == (chunks[0]["id"], chunks[0]["created"])
        for choice in chunk["choices"]:
            _add(choices.setdefault(choice["index"], {"text": "", "ends": 0}), choice)
            if chunk.get("usage"):
                whole["usage of choices"][choice["index"]] = chunk["usage"]
        if not chunk["choices"]:
            whole["usage"] = chunk["usage"]
        if chunk.get("prompt_token_ids"):
            whole["prompt_token_ids"] = chunk["prompt_token_ids"]
    return _bare(whole | {"choices": [choices[index] for index in sorted(choices)], "model": chunks[0]["model"]})


def _add(said: dict[str, Any], choice: Any) -> None:
    delta = choice.get("delta") or {"content": choice.get("text")}
    assert not said["ends"], "a choice goes on after its reason"
    if "role" in delta:
        assert "role" not in said, "the role is said once"
        said["role"] = delta["role"]
    said["text"] += delta.get("content") or ""
    if delta.get("reasoning"):
        said["reasoning"] = said.get("reasoning", "") + delta["reasoning"]
    columns = {"token_ids": choice.get("token_ids"), **(choice.get("logprobs") or {})}
    for name, more in columns.items():
        if more is not None:
            said.setdefault(name, []).extend(more)
    if choice.get("prompt_token_ids"):
        assert "prompt_token_ids" not in said, "the prompt is said once"
        said["prompt_token_ids"] = choice["prompt_token_ids"]
    for call in delta.get("tool_calls") or []:
        _call(said.setdefault("tool_calls", {}), call)
    if choice["finish_reason"] is not None:
        said["ends"] += 1
        said |= {"finish_reason": choice["finish_reason"], "stop_reason": choice.get("stop_reason")}


def _call(calls: dict[int, Any], call: Any) -> None:
    """A piece of a tool call. Its id and name come once, its arguments in pieces."""
    said = calls.setdefault(call["index"], {"ids": 0, "name": "", "arguments": ""})
    said["ids"] += bool(call.get("id"))
    said["name"] += call["function"].get("name") or ""
    said["arguments"] += call["function"].get("arguments") or ""


def _bare(node: Any) -> Any:
    """Without what is each server's own, and without nulls."""
    if isinstance(node, dict):
        usage = {"prompt_tokens_details", "headrace"} if "total_tokens" in node else set()
        left = {name: _bare(value) for name, value in node.items() if name not in _OWN | usage}
        return {name: value for name, value in left.items() if value is not None}
    return [_bare(one) for one in node] if isinstance(node, list) else node


def _unequal(at: str, theirs: Any, ours: Any) -> Iterator[str]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in sorted({*theirs, *ours}, key=str):
            yield from _unequal(f"{at}.{name}", theirs.get(name), ours.get(name))
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for index, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            yield from _unequal(f"{at}[{index}]", one, other)
    elif isinstance(theirs, float) and isinstance(ours, float):
        # Another batch, and a prompt whose KV was loaded: float32 sums in another order.
        if abs(theirs - ours) > 1e-3:
            yield f"{at}: {theirs} / {ours}"
    elif theirs != ours:
        yield f"{at}: {str(theirs)[:120]!r} / {str(ours)[:120]!r}"
