"""The life of a request: every (state, event) pair has one defined outcome, and the important paths read as stories."""

import itertools

import pytest

from pipeline.protocol.request import (
    DECODE_ENDS,
    ENDING_ENDS,
    PREFILL_ENDS,
    READY,
    Decode,
    Effect,
    Event,
    Prefill,
    Progress,
    Stage,
    step_decode,
    step_prefill,
)

E, F, S, P = Event, Effect, Stage, Progress
OFFERED = READY | P.OFFERED


def prefill(*events: Event, state: Prefill | None = None) -> tuple[Prefill, list[Effect]]:
    state, out = state or Prefill(), list[Effect]()
    for event in events:
        state, effects = step_prefill(state, event)
        out += effects
    return state, out


def decode(*events: Event, arbitrated: bool = True) -> tuple[Decode, list[Effect]]:
    state, out = Decode(arbitrated=arbitrated), list[Effect]()
    for event in events:
        state, effects = step_decode(state, event)
        out += effects
    return state, out


@pytest.mark.parametrize("order", list(itertools.permutations([E.GO, E.STORED, E.GRANTED])))
def test_the_hand_off_comes_when_all_is_true_in_whatever_order(order: tuple[Event, ...]) -> None:
    state, effects = prefill(E.DELIVERED, E.RENDERED, *order)
    assert effects == [F.CLAIM, F.RENDER, F.ASK, F.PREFILL, F.BEGIN, F.HAND_OFF]
    assert state == Prefill(S.HANDING, OFFERED)
    assert prefill(E.ACCEPTED, state=state) == (Prefill(S.ENDED, OFFERED), [])


def test_a_silent_decode_worker_loses_the_claim_or_has_it_and_only_the_receiver_knows() -> None:
    handing, _ = prefill(E.DELIVERED, E.RENDERED, E.GO, E.STORED, E.GRANTED)
    untaken, effects = prefill(E.UNTAKEN, state=handing)
    assert effects == [F.RECLAIM, F.ASK]
    assert prefill(E.FENCED, state=untaken)[1] == [F.STOP]
    assert prefill(E.GRANTED, state=untaken)[1] == [], "granted elsewhere, but perhaps not ours any more"
    again, effects = prefill(E.GRANTED, E.GO, state=untaken)
    assert effects == [F.BEGIN, F.HAND_OFF]
    assert again == handing


def test_what_a_decode_worker_may_have_is_never_given_back_in_its_place() -> None:
    handing, _ = prefill(E.DELIVERED, E.RENDERED, E.GO, E.STORED, E.GRANTED)
    untaken, _ = prefill(E.UNTAKEN, state=handing)
    assert prefill(E.LEFT, state=handing)[1] == [F.STOP]
    assert prefill(E.LEFT, state=untaken)[1] == [F.STOP]
    assert prefill(E.GO, E.LEFT, state=untaken)[1] == [F.STOP, F.NAK]


@pytest.mark.parametrize("missing", [E.GO, E.STORED, E.GRANTED, E.RENDERED])
def test_nothing_is_handed_off_while_anything_is_missing(missing: Event) -> None:
    _, effects = prefill(
        E.DELIVERED, *(event for event in (E.RENDERED, E.GO, E.STORED, E.GRANTED) if event is not missing)
    )
    assert F.HAND_OFF not in effects


def test_a_request_whose_receiver_does_not_answer_gives_its_slot_away_and_comes_back_later() -> None:
    assert prefill(E.DELIVERED, E.RENDERED, E.STORED, E.UNANSWERED) == (
        Prefill(S.ENDED, P.BEGUN | P.RENDERED | P.STORED),
        [F.CLAIM, F.RENDER, F.ASK, F.PREFILL, F.STOP],
    )
    assert prefill(E.DELIVERED, E.INVALID, E.UNANSWERED) == (
        Prefill(S.ENDED, P.BEGUN),
        [F.CLAIM, F.RENDER, F.STOP, F.DEAD_LETTER],
    )


def test_a_request_whose_conversation_is_worked_on_goes_back_for_a_while_before_it_is_claimed() -> None:
    for delivered in (E.DELIVERED, E.DELIVERED_AGAIN):
        state, effects = prefill(delivered, E.BUSY)
        assert state.stage is S.ENDED
        assert effects[-2:] == [F.STOP, F.NAK_FOR_A_WHILE]
    _, effects = prefill(E.DELIVERED, E.DEADLINE, E.BUSY)
    assert not {F.ACK, F.NAK, F.NAK_FOR_A_WHILE} & set(effects), "it comes again, too late to enter, and is told"


def test_a_redelivered_request_is_claimed_before_anything_is_spent_on_it() -> None:
    state, effects = prefill(E.DELIVERED_AGAIN)
    assert effects == [F.CLAIM]
    state, effects = prefill(E.GO, state=state)
    assert effects == [F.COUNT]
    assert prefill(E.COUNTED, state=state)[1] == [F.RENDER]
    assert prefill(E.POISONED, state=state)[1] == [F.STOP, F.DEAD_LETTER, F.TELL]
    assert prefill(E.WHOLE, state=state)[1] == [F.STOP, F.ACK]


def test_a_lost_grant_is_asked_for_again() -> None:
    state, _ = prefill(E.DELIVERED, E.RENDERED, E.GO, E.GRANTED, E.GRANT_LOST, E.STORED)
    assert state.stage is S.WORKING
    assert prefill(E.GRANTED, state=state)[1] == [F.BEGIN, F.HAND_OFF]
    handing, _ = prefill(E.DELIVERED, E.RENDERED, E.GO, E.GRANTED, E.STORED)
    assert step_prefill(handing, E.GRANT_LOST) == (handing, ()), "whether it was taken, its own answer says"
    again, effects = step_prefill(handing, E.REFUSED)
    assert (again.stage, effects) == (S.WORKING, (F.ASK,))


def test_an_error_waits_for_the_claim_before_it_is_told_and_the_ack_waits_for_the_answer() -> None:
    state, effects = prefill(E.DELIVERED, E.INVALID)
    assert effects == [F.CLAIM, F.RENDER, F.STOP, F.DEAD_LETTER]
    state, effects = prefill(E.GO, state=state)
    assert effects == [F.TELL]
    assert prefill(E.WHOLE, state=state) == (Prefill(S.ENDED, state.progress), [F.ACK])


def test_an_error_under_a_claim_is_told_at_once() -> None:
    assert prefill(E.DELIVERED, E.GO, E.FAILED)[1] == [F.CLAIM, F.RENDER, F.STOP, F.TELL]


@pytest.mark.parametrize("event", [E.FENCED, E.DOUBT])
def test_who_may_have_lost_the_message_neither_acks_nor_naks(event: Event) -> None:
    for _, effects in (prefill(E.DELIVERED, E.GO, event), prefill(E.DELIVERED, E.GO, E.FAILED, event)):
        assert not {F.ACK, F.NAK} & set(effects)


def test_decode_accepts_only_after_the_claim_is_its_own() -> None:
    assert decode(E.TAKEN)[1] == [F.CLAIM]
    assert decode(E.TAKEN, E.GO) == (Decode(S.DECODING), [F.CLAIM, F.ACCEPT, F.DECODE])


@pytest.mark.parametrize("event", [E.FENCED, E.GONE, E.WHOLE, E.CANCELLED, E.DEADLINE, E.LEFT])
def test_decode_refuses_what_it_may_not_take_and_leaves_the_message_to_prefill(event: Event) -> None:
    state, effects = decode(E.TAKEN, event)
    assert effects == [F.CLAIM, F.REFUSE, F.STOP]
    assert state.stage is S.ENDED


def test_the_message_is_acked_only_after_the_receiver_has_the_whole() -> None:
    state, effects = decode(E.TAKEN, E.GO, E.GENERATED)
    assert effects[-2:] == [F.STOP, F.TELL]
    assert F.ACK not in effects
    assert step_decode(state, E.WHOLE) == (Decode(S.ENDED), (F.ACK,))
    assert step_decode(state, E.FENCED) == (Decode(S.ENDED), ())


def test_in_doubt_frames_are_held_until_the_receiver_confirms_the_claim() -> None:
    state, effects = decode(E.TAKEN, E.GO, E.DOUBT, E.DOUBT)
    assert effects[3:] == [F.HOLD_FRAMES, F.CLAIM]
    assert step_decode(state, E.GO) == (Decode(S.DECODING), (F.LET_FRAMES_GO,))
    assert step_decode(state, E.FENCED) == (Decode(S.ENDED), (F.STOP,))


def test_in_doubt_without_an_arbiter_the_worst_is_assumed() -> None:
    state, effects = decode(E.TAKEN, E.GO, E.DOUBT, arbitrated=False)
    assert effects[3:] == [F.STOP]
    assert state.stage is S.ENDED


PREFILL_STATES = [
    Prefill(stage, progress)
    for stage in (S.WORKING, S.HANDING, S.ENDING, S.ENDED)
    for progress in (P.NOTHING, READY, OFFERED)
]
DECODE_STATES = [
    Decode(stage, arbitrated)
    for stage in (S.TAKING, S.DECODING, S.SUSPENDED, S.ENDING, S.ENDED)
    for arbitrated in (True, False)
]


@pytest.mark.parametrize("event", list(Event))
def test_every_event_in_every_state_has_an_outcome_and_an_ended_request_stays_ended(event: Event) -> None:
    for prefill_state in PREFILL_STATES:
        after, effects = step_prefill(prefill_state, event)
        _check(prefill_state.stage, after.stage, event, effects)
    for decode_state in DECODE_STATES:
        later, effects = step_decode(decode_state, event)
        assert later.arbitrated == decode_state.arbitrated
        _check(decode_state.stage, later.stage, event, effects)


def _check(before: Stage, after: Stage, event: Event, effects: tuple[Effect, ...]) -> None:
    assert not {F.ACK, F.NAK} <= set(effects), "never both"
    if before is S.ENDED:
        assert (after, effects) == (S.ENDED, ())
    if F.ACK in effects:
        assert event in (E.WHOLE, E.GONE, E.CANCELLED, E.UNHEARD), "an ack needs a receiver that has it, or is gone"
        assert after is S.ENDED


def test_what_ends_early_always_stops_the_work_first() -> None:
    for ends in (PREFILL_ENDS, DECODE_ENDS):
        assert all(effects[0] is F.STOP for _, effects in ends.values())
    assert all(F.STOP not in effects for _, effects in ENDING_ENDS.values()), "it was stopped on the way there"
