"""The rules that a real nats-server has forced on us, and the tests that fail where one of them is broken.

Each rule was broken on purpose, in the smallest way that one might think of, and each test named beside it has failed then. Who
takes a test away, or finds that a rule is not needed any more, changes this index with it. A rule that rests on what the broker
does names the test that shows it, too: where that one fails, the broker has changed, and the rule may go.
"""

import ast
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]

RULES: Final[dict[str, tuple[str, ...]]] = {
    "A message that has been delivered before is claimed before anything is spent on it.": (
        "tests/protocol/test_request.py::test_a_redelivered_request_is_claimed_before_anything_is_spent_on_it",
        "tests/workers/test_loops.py::test_a_request_that_kills_its_workers_is_poison_and_is_kept",
    ),
    "The number of a delivery is no fence: after a broker was killed it can go backwards.": (
        "tests/bus/test_redelivery.py::"
        "test_after_a_broker_was_killed_a_later_delivery_may_count_less_and_gets_the_go_all_the_same",
        "tests/protocol/test_claims.py::test_a_delivery_that_counts_less_than_the_last_one_supersedes_it_all_the_same",
    ),
    "A lease is no fence: a first holder's renewal, NAK and ack still work, so the receiver hears only the last claim.": (
        "tests/bus/test_redelivery.py::test_a_first_holders_ack_removes_the_message_that_a_second_one_holds",
        "tests/bus/test_redelivery.py::test_a_first_holders_nak_takes_the_message_from_the_second",
        "tests/bus/test_redelivery.py::"
        "test_a_first_holders_lease_is_renewed_and_answered_while_a_second_one_holds_the_message",
        "tests/protocol/test_claims.py::test_a_new_delivery_supersedes_and_the_old_claim_is_fenced_for_ever",
        "tests/protocol/test_reply.py::test_frames_of_a_superseded_claim_are_refused_and_their_sender_is_told",
    ),
    "A holder that was fenced neither acks nor NAKs.": (
        "tests/protocol/test_request.py::test_who_may_have_lost_the_message_neither_acks_nor_naks",
        "tests/protocol/test_request.py::test_the_message_is_acked_only_after_the_receiver_has_the_whole",
        "tests/protocol/test_request.py::test_in_doubt_frames_are_held_until_the_receiver_confirms_the_claim",
    ),
    "A lease is renewed by a request, and 0.8 of it without an answer put its holder in doubt.": (
        "tests/workers/test_in_doubt.py::test_a_holder_is_in_doubt_before_its_lease_can_have_ended",
        "tests/workers/test_in_doubt.py::test_a_late_answer_renews_the_lease_only_from_when_it_was_asked_for",
        "tests/workers/test_leases.py::test_a_silent_broker_puts_a_lease_in_doubt_before_it_lapses",
        "tests/workers/test_leases.py::test_a_consumer_that_is_not_there_answers_no_lease",
    ),
    "A holder in doubt sends no frames, renews nothing and acks nothing until the receiver has confirmed its claim.": (
        "tests/protocol/test_request.py::test_in_doubt_frames_are_held_until_the_receiver_confirms_the_claim",
        "tests/workers/test_in_doubt.py::test_a_prefill_worker_in_doubt_stops_and_says_nothing_more_about_the_message",
        "tests/workers/test_in_doubt.py::"
        "test_a_decode_worker_in_doubt_sends_no_frames_until_its_receiver_has_confirmed_the_claim",
        "tests/workers/test_leases.py::test_a_lease_held_anew_after_the_doubt_is_kept_when_the_broker_answers",
    ),
    "Lease keeping does not share the fate of a busy event loop.": (
        "tests/workers/test_in_doubt.py::test_a_worker_process_whose_loop_is_blocked_for_a_while_keeps_its_message",
    ),
    "A lease ends with a loop that is dead, an engine that has failed, and a deadline that has passed.": (
        "tests/workers/test_leases.py::test_a_loop_that_is_dead_loses_its_messages_and_is_told_if_it_wakes",
        "tests/workers/test_leases.py::test_leases_lapse_when_the_engine_has_failed",
        "tests/workers/test_leases.py::test_a_lease_ends_with_its_deadline",
        "tests/workers/test_in_doubt.py::test_a_worker_process_lets_its_leases_lapse_when_its_engine_fails",
        "tests/workers/test_in_doubt.py::test_both_workers_keep_a_lease_no_longer_than_its_end_may_take_to_be_told",
    ),
    "A stream re-subjects its class's requests by affinity, with the class as a literal.": (
        "tests/bus/test_declared.py::test_the_affinity_picks_the_shard_and_creator_and_affinity_keep_their_places",
    ),
    "Each shard has one durable consumer, at which the lowest priority with a pull is served.": (
        "tests/bus/test_puller.py::test_rank_0_gets_everything_while_it_has_pulls_and_the_next_rank_at_once_after",
        "tests/bus/test_puller.py::test_an_owner_that_tops_up_on_delivery_loses_no_message_to_the_next_rank",
    ),
    "Everything is stored in files: what is kept in memory is gone with a killed broker.": (
        "tests/bus/test_declared.py::test_every_stream_lies_in_files",
        "tests/bus/test_declared.py::test_what_every_stream_holds_is_there_after_its_broker_was_killed",
        "tests/bus/test_declared.py::test_no_consumer_keeps_its_state_in_memory_or_waits_longer_with_every_delivery",
    ),
    "A leased message that passes its stream's max_age vanishes, so no deadline lies beyond that of its class.": (
        "tests/bus/test_redelivery.py::test_a_leased_message_that_passes_max_age_vanishes_under_its_holder",
        "tests/protocol/test_intake.py::test_a_deadline_is_at_most_the_classes",
    ),
    "A class's longest deadline and 30 s more fit into its stream's max_age.": (
        "tests/bus/test_streams.py::test_the_files_agree_with_the_limits_and_the_configuration",
        "tests/workers/test_runtime.py::"
        "test_a_deadline_that_may_lie_beyond_the_life_of_its_message_is_the_operators_error",
        "tests/workers/test_runtime.py::test_a_worker_does_not_start_with_either",
    ),
    "The DLQ keeper answers what has aged out, before the broker drops it.": (
        "tests/workers/test_keeper.py::test_what_aged_out_with_no_worker_alive_is_answered_and_kept",
        "tests/workers/test_keeper.py::test_what_aged_out_is_answered_before_the_broker_drops_it",
    ),
    "A message id is its publisher's own: a duplicate on a first publish is an error, and on a repeated one it is none.": (
        "tests/bus/test_store.py::test_a_duplicate_of_somebody_elses_message_is_an_error",
        "tests/bus/test_store.py::test_a_repetition_of_ones_own_message_is_no_error",
        "tests/gateway/test_failures.py::test_an_id_that_is_not_fresh_is_a_409_that_no_retry_mends",
        "tests/gateway/test_stream.py::test_a_clients_request_id_is_echoed_but_never_used",
    ),
    "A dead letter is replayed under a new message id.": (
        "tests/cli/test_dlq.py::test_a_replay_is_stored_again_though_its_own_id_is_remembered",
    ),
    "A stream knows an id for longer than its publisher repeats it.": (
        "tests/bus/test_declared.py::test_a_publish_that_is_repeated_is_recognised_for_as_long_as_anybody_repeats_it",
        "tests/bus/test_declared.py::test_a_kept_reply_is_recognised_for_as_long_as_its_request_may_be_delivered",
    ),
    "More pulls than free slots stand only on shards without backlog; shards with one share the free slots in turn.": (
        "tests/protocol/test_slots.py::test_shards_with_backlog_share_exactly_the_free_slots_in_turn",
        "tests/workers/test_backlog.py::test_a_backlog_alone_costs_no_deliveries",
    ),
    "A message beyond the free slots is held for a moment, then given back, and its shard is left alone for a moment.": (
        "tests/protocol/test_slots.py::test_a_surplus_message_is_given_back_and_asked_for_as_soon_as_a_slot_frees",
        "tests/workers/test_backlog.py::test_a_message_beyond_the_free_slots_is_anothers_long_before_its_lease_ends",
    ),
    "A pull inbox is never ended while a message may be on its way to it.": (
        "tests/bus/test_in_flight.py::test_a_drained_inbox_waits_for_what_is_on_its_way",
        "tests/bus/test_in_flight.py::test_a_puller_that_stops_takes_what_is_on_its_way",
        "tests/bus/test_in_flight.py::"
        "test_a_puller_that_takes_a_new_inbox_still_takes_what_is_on_its_way_to_the_old_one",
    ),
    "No responders is not gone: what nobody can hear is said again, after a pause.": (
        "tests/workers/test_unheard.py::"
        "test_a_claim_that_nobody_can_hear_for_a_while_costs_the_while_and_not_the_request",
        "tests/workers/test_unheard.py::test_a_receiver_that_is_never_heard_is_given_up_after_its_time_and_not_before",
        "tests/workers/test_unheard.py::test_an_end_that_nobody_can_hear_for_a_while_is_told_all_the_same",
        "tests/workers/test_unheard.py::test_what_nobody_can_hear_is_repeated_after_a_pause_and_not_in_a_storm",
    ),
    "A worker that nobody listens for any more, a moment long, is dead; after a restart of the broker that says nothing.": (
        "tests/gateway/test_vigil.py::test_the_broker_tells_who_listens",
        "tests/protocol/test_accuser.py::test_who_listens_nowhere_for_a_moment_is_dead",
        "tests/protocol/test_accuser.py::test_after_a_broker_s_restart_a_worker_may_come_back_later_than_its_accuser",
    ),
    "A receiver is gone after 2 s of silence on a connection of our own that has lasted, or when a newer life of it speaks.": (
        "tests/protocol/test_presence.py::"
        "test_a_receiver_is_gone_when_it_has_been_silent_for_two_seconds_of_our_own_connection",
        "tests/workers/test_unheard.py::test_a_receivers_silence_counts_only_from_our_own_connection_on",
        "tests/protocol/test_presence.py::test_a_receiver_is_gone_when_a_newer_life_of_it_speaks",
        "tests/workers/test_unheard.py::test_a_receiver_in_a_new_life_is_not_waited_for",
    ),
    "A plain producer's request is finished, whatever is heard of the producer.": (
        "tests/workers/test_unheard.py::test_the_request_of_a_plain_producer_is_finished_though_nothing_is_heard_of_it",
    ),
    "A gateway that was silent for 2 s asks each holder, and ends with a retryable error what nobody answers for.": (
        "tests/gateway/test_absence.py::test_a_connection_that_was_lost_for_too_long_makes_it_ask",
        "tests/gateway/test_absence.py::test_a_loop_that_stood_still_for_too_long_makes_it_ask",
        "tests/gateway/test_absence.py::"
        "test_a_reply_that_nobody_answers_for_ends_with_a_retryable_error_and_is_not_published_again",
        "tests/gateway/test_vigil.py::test_after_a_long_absence_holders_are_asked_and_silence_ends_the_reply",
    ),
    "A request is never published twice: two messages of it would fence each other for ever.": (
        "tests/gateway/test_absence.py::"
        "test_a_reply_that_nobody_answers_for_ends_with_a_retryable_error_and_is_not_published_again",
    ),
    "What was delivered and is not claimed is given back by its receiver, which knows no more of it than its sequence.": (
        "tests/bus/test_acks.py::test_who_knows_only_the_sequence_gives_a_message_back",
        "tests/gateway/test_strays.py::"
        "test_what_a_dead_worker_took_and_never_claimed_is_delivered_again_before_its_lease_ends",
        "tests/protocol/test_strays.py::test_what_is_delivered_and_not_claimed_is_given_back",
        "tests/protocol/test_strays.py::test_what_still_waits_in_the_queue_is_left_there",
    ),
    "A consumer has no backoff, which would replace its ack_wait and be ignored by a NAK.": (
        "tests/bus/test_streams.py::test_the_files_agree_with_the_limits_and_the_configuration",
        "tests/bus/test_declared.py::test_no_consumer_keeps_its_state_in_memory_or_waits_longer_with_every_delivery",
    ),
    "One creator cannot fill a queue, and a shard's unacked messages do not stop its consumer.": (
        "tests/bus/test_store.py::test_one_creator_fills_only_its_own_share",
        "tests/bus/test_declared.py::test_each_creator_has_a_share_of_its_own_of_a_classs_queue",
        "tests/bus/test_declared.py::test_a_shard_may_have_all_that_a_large_fleet_holds_in_flight",
    ),
}
"""Each rule in a sentence, and the tests that fail without it."""

FORCED: Final = 29
"""Rules that there are. A new one raises this, and so does one that is split; none may be lost unnoticed."""


def names_in(file: Path) -> Counter[str]:
    """The test functions of a module that pytest would find, without running anything of it."""
    tree = ast.parse(file.read_text("utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return Counter(function.name for function in functions if function.name.startswith("test_"))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.rstrip(".").replace(" ", "-")[:60])
def test_every_rule_has_tests_that_exist(rule: str) -> None:
    assert RULES[rule], "a rule that nothing holds"
    for node in RULES[rule]:
        file, _, name = node.partition("::")
        assert (ROOT / file).is_file(), f"{file} is not there"
        assert names_in(ROOT / file)[name] == 1, f"{node} is not there, or another test of its name hides it"


def test_no_rule_is_lost() -> None:
    assert len(RULES) == FORCED
    assert all(rule.endswith(".") for rule in RULES), "each is a sentence"
