"""Budgets: reply tokens, blocks, salts."""

import pytest

from pipeline.errors import PromptTooLong
from pipeline.protocol.budget import blocks_needed, cache_salt, reply_tokens


@pytest.mark.parametrize(
    ("prompt", "asked", "default", "context", "expected"),
    [
        (10, 5, 99, 100, 5),
        (10, None, 30, 100, 30),
        (90, None, 30, 100, 10),
        (10, None, None, 100, 90),
        (99, 1, None, 100, 1),
    ],
)
def test_a_reply_has_what_was_asked_for_or_the_default_or_the_rest(
    prompt: int, asked: int | None, default: int | None, context: int, expected: int
) -> None:
    assert reply_tokens(prompt, asked, default, context) == expected


@pytest.mark.parametrize(
    ("prompt", "asked", "param"), [(100, None, "messages"), (150, 5, "messages"), (90, 11, "max_tokens")]
)
def test_what_does_not_fit_the_context_says_both_numbers(prompt: int, asked: int | None, param: str) -> None:
    with pytest.raises(PromptTooLong) as caught:
        reply_tokens(prompt, asked, 30, 100)
    assert caught.value.param == param
    assert str(prompt) in caught.value.message
    assert "100" in caught.value.message


def test_blocks_cover_prompt_and_reply_and_the_step_in_flight() -> None:
    assert blocks_needed(2210, 30, 32) == 71
    assert blocks_needed(32, 32, 32) == 3
    assert blocks_needed(1, 1, 32, sequences=3) == 6


def test_a_salt_is_hex_and_tells_creators_and_engines_apart() -> None:
    salts = {cache_salt(creator, "", "creator", print_) for creator in "ab" for print_ in ("x", "y")}
    assert len(salts) == 4
    assert all(set(salt) <= set("0123456789abcdef") for salt in salts)


@pytest.mark.parametrize(
    ("scope", "creators", "tenants"), [("creator", False, False), ("tenant", True, False), ("none", True, True)]
)
def test_who_shares_a_salt_is_the_scope(scope: str, creators: bool, tenants: bool) -> None:
    ours = cache_salt("ada", "acme", scope, "x")
    assert (cache_salt("bob", "acme", scope, "x") == ours) is creators
    assert (cache_salt("ada", "other", scope, "x") == ours) is tenants
    assert cache_salt("ada", "acme", scope, "y") != ours
    assert cache_salt("ada", "acme", scope, "x", "theirs") not in (ours, cache_salt("ada", "acme", scope, "x", "other"))
