"""What a request may take: tokens of its reply, blocks of a decode worker, and whose cache it may share."""

import hashlib
from math import ceil

from pipeline.errors import PromptTooLong


def reply_tokens(
    prompt_tokens: int, asked: int | None, default: int | None, context: int, field: str = "messages"
) -> int:
    """How many tokens the reply may have. Raises `PromptTooLong`, naming both numbers, where the context has no room.

    `field` is where the request says its prompt.
    Where the client asks for none, `default` applies as far as there is room; without a default, the rest of the context.
    """
    room = context - prompt_tokens
    if room < 1:
        raise PromptTooLong(
            f"The prompt has {prompt_tokens} tokens and the model's context is {context}: "
            f"shorten the {field}, so that at least one token of reply fits.",
            param=field,
        )
    if asked is not None and asked > room:
        raise PromptTooLong(
            f"The model's context is {context} tokens, but the prompt has {prompt_tokens} and the reply asked for {asked}: "
            f"shorten the {field}, or ask for at most {room} tokens.",
            param="max_tokens",
        )
    return asked or min(default or room, room)


def blocks_needed(prompt_tokens: int, reply_tokens_max: int, block_size: int, sequences: int = 1) -> int:
    """KV blocks that a request may come to hold: prompt and whole reply, and one for the step in flight; per sequence."""
    return sequences * (ceil((prompt_tokens + reply_tokens_max) / block_size) + 1)


def cache_salt(creator: str, tenant: str, scope: str, fingerprint: str, theirs: str = "") -> str:
    """Who shares cached prefixes, as the hex that engine and LMCache fold into their keys.

    `scope` is `creator` (the requests of one creator of one tenant), `tenant` (all of a tenant's creators) or `none` (everybody).
    LMCache's keys know nothing of weights, dtype, block size or versions, so the engine's fingerprint is in it. `theirs` is the
    client's own salt, which divides further and joins nothing.
    """
    owner = {"creator": f"{tenant}\0{creator}", "tenant": tenant, "none": ""}[scope]
    named = f"{scope}\0{owner}\0{fingerprint}" + (f"\0{theirs}" if theirs else "")
    return hashlib.sha256(named.encode()).hexdigest()[:32]
