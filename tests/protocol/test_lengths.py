"""How long prompts are, as one guesses who only sees bytes."""

import pytest

from pipeline.protocol.lengths import (
    REPLIES_REMEMBERED,
    TOKENS_PER_BYTE_MAX,
    TOKENS_PER_BYTE_MIN,
    Lengths,
)


def test_before_anything_is_known_four_bytes_are_a_token() -> None:
    lengths = Lengths()
    assert lengths.tokens(4000, referred=False) == lengths.tokens(4000, referred=True) == 1000
    assert lengths.tokens(0, referred=False) == 1, "there is no prompt without a token"


def test_what_replies_say_of_their_prompts_is_believed_of_the_next_ones() -> None:
    lengths = Lengths()
    lengths.learn(1000, 200, referred=False)
    assert lengths.tokens(5000, referred=False) == 1000
    lengths.learn(9000, 3800, referred=False)
    assert lengths.tokens(1000, referred=False) == pytest.approx(400, rel=0.01), "a long one says more"


def test_requests_by_reference_are_as_long_as_others_were_whatever_their_size() -> None:
    lengths = Lengths()
    lengths.learn(90, 1900, referred=True)
    lengths.learn(110, 2100, referred=True)
    assert lengths.tokens(4, referred=True) == pytest.approx(2000, rel=0.01)
    assert lengths.tokens(4000, referred=False) == 1000, "the others are not touched"


def test_what_was_long_ago_is_forgotten() -> None:
    lengths = Lengths()
    for _ in range(1000):
        lengths.learn(1000, 250, referred=False)
    for _ in range(5 * REPLIES_REMEMBERED):
        lengths.learn(1000, 800, referred=False)
    assert lengths.tokens(1000, referred=False) == pytest.approx(800, rel=0.02)


def test_one_padded_body_cannot_make_all_prompts_look_short_nor_one_reply_make_them_endless() -> None:
    lengths = Lengths()
    lengths.learn(100_000, 1, referred=False)
    assert lengths.tokens(1000, referred=False) == round(1000 * TOKENS_PER_BYTE_MIN)
    lengths = Lengths()
    lengths.learn(10, 1_000_000, referred=False)
    assert lengths.tokens(1000, referred=False) == 1000 * TOKENS_PER_BYTE_MAX
