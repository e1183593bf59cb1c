//! SGLang's hand-off: both legs at once, which meet in a room.
#![forbid(unsafe_code)]

mod answers;
mod failures;
mod restarts;
mod rig;
mod rooms;

pd_router_e2e::on_both_hosts! {
    answers {
        chats_and_completions_are_answered_by_both_legs,
        a_prefill_worker_is_asked_for_its_bootstrap_port,
        a_prefill_worker_that_does_not_tell_is_pending_until_it_does,
        decode_ends_only_after_prefill_is_known_to_be_good,
    }
    rooms {
        no_room_is_used_twice,
        every_rank_has_its_rooms,
        a_pinned_rank_has_rooms_of_its_own,
    }
    restarts {
        prefill_workers_that_restart_are_asked_again,
        decode_workers_that_restart_are_used_again,
    }
    failures {
        a_prefill_that_fails_first_is_an_error,
        a_prefill_that_fails_under_a_stream_ends_it_without_done,
        a_prefill_that_fails_after_a_short_stream_ends_it_without_done,
        a_prefill_that_fails_late_is_an_error_where_nothing_was_read,
        a_client_that_leaves_stops_both_legs,
        a_client_that_leaves_during_decode_stops_it,
        found_c10_what_a_recovery_calls_off_is_known_when_it_is_answered,
    }
}
