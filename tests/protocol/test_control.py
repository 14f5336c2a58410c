"""Orders of an operator: every state against every order."""

import pytest

from pipeline.protocol.control import Action, Order, Standing, State, obey, order_decoder, standing_decoder
from pipeline.protocol.messages import encode


@pytest.mark.parametrize(
    ("state", "action", "after"),
    [
        ("serving", "pause", "paused"),
        ("serving", "resume", "serving"),
        ("serving", "drain", "draining"),
        ("paused", "pause", "paused"),
        ("paused", "resume", "serving"),
        ("paused", "drain", "draining"),
        ("draining", "drain", "draining"),
    ],
)
def test_an_order_is_obeyed_also_where_it_changes_nothing(state: State, action: Action, after: State) -> None:
    assert obey(state, action) == (after, "")


@pytest.mark.parametrize("action", ["pause", "resume"])
def test_who_drains_is_about_to_leave_and_cannot_be_kept(action: Action) -> None:
    state, refused = obey("draining", action)
    assert state == "draining"
    assert "leaves" in refused


@pytest.mark.parametrize("state", ["serving", "paused", "draining"])
def test_a_look_changes_nothing(state: State) -> None:
    assert obey(state, "look") == (state, "")


def test_orders_and_their_answers_travel() -> None:
    assert order_decoder.decode(encode(Order("pause"))) == Order("pause")
    standing = Standing(worker="w", role="prefill", state="paused", under_way=3, refused="why")
    assert standing_decoder.decode(encode(standing)) == standing
