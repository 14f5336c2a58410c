"""Orders of an operator: every state against every order."""

import pytest

from pipeline.protocol.arrangement import Role
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
        ("turning", "resume", "turning"),
        ("turning", "drain", "draining"),
        ("draining", "drain", "draining"),
    ],
)
def test_an_order_is_obeyed_also_where_it_changes_nothing(state: State, action: Action, after: State) -> None:
    assert obey(state, "both", "both", Order(action)) == (after, "")


@pytest.mark.parametrize("order", [Order("pause"), Order("resume"), Order("turn", "both"), Order("turn", "decode")])
def test_who_drains_is_about_to_leave_and_cannot_be_kept(order: Order) -> None:
    state, refused = obey("draining", "both", "both", order)
    assert state == "draining"
    assert "leaves" in refused


@pytest.mark.parametrize("order", [Order("pause"), Order("turn", "decode")])
def test_who_turns_ends_that_first(order: Order) -> None:
    state, refused = obey("turning", "prefill", "both", order)
    assert state == "turning"
    assert "still becoming prefill" in refused


@pytest.mark.parametrize("state", ["serving", "paused", "turning", "draining"])
def test_a_look_changes_nothing(state: State) -> None:
    assert obey(state, "prefill", "prefill", Order("look")) == (state, "")


def test_a_worker_turns_to_another_role_and_not_to_its_own() -> None:
    assert obey("serving", "both", "both", Order("turn", "prefill")) == ("turning", "")
    assert obey("serving", "both", "both", Order("turn", "both")) == ("serving", "")
    assert obey("turning", "decode", "both", Order("turn", "decode")) == ("turning", "")


@pytest.mark.parametrize(
    ("state", "built_for", "role", "said"),
    [
        ("serving", "prefill", "decode", "started for prefill alone: start one with `headrace worker both`"),
        ("serving", "both", None, "names no role"),
        ("paused", "both", "decode", "resume it first"),
    ],
)
def test_a_turn_that_cannot_be_is_refused_with_the_reason(
    state: State, built_for: Role, role: Role | None, said: str
) -> None:
    after, refused = obey(state, "prefill", built_for, Order("turn", role))
    assert after == state
    assert said in refused


def test_orders_and_their_answers_travel() -> None:
    assert order_decoder.decode(encode(Order("turn", "decode"))) == Order("turn", "decode")
    standing = Standing(worker="w", role="prefill", state="paused", under_way=3, refused="why")
    assert standing_decoder.decode(encode(standing)) == standing
