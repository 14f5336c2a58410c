"""The length of an engine's steps."""

import pytest

from workers.engines.steps import step_tokens


@pytest.mark.parametrize(
    ("beside_replies", "writing", "tokens"),
    [(0, 0, 512), (0, 7, 512), (32, 0, 512), (32, 1, 33), (32, 7, 39), (511, 1, 512), (512, 100, 512)],
)
def test_a_step_is_short_only_beside_replies_and_where_a_bound_is_set(
    beside_replies: int, writing: int, tokens: int
) -> None:
    assert step_tokens(512, beside_replies, writing) == tokens
