//! Ends of requests: prefill's own answer, an error with its reason, or a client that has left.
#![forbid(unsafe_code)]

mod answers;
mod cleanup;
mod hedge;
mod prefill;

pd_router_e2e::on_both_hosts! {
    answers {
        found_b11_an_answer_that_ends_with_trailers_is_judged,
        found_b12_no_part_of_a_good_end_passes_before_prefill_is_good,
        found_b12_a_recovered_answer_waits_for_its_own_prefill,
        found_w2_another_worker_answers_where_one_says_nothing,
    }
    hedge {
        a_late_prefill_gets_a_second_beside_it,
    }
    prefill {
        a_prefill_that_ends_the_answer_is_the_answer,
        a_prefill_that_ends_the_answer_is_a_stream_for_who_asked_for_one,
        a_prefill_without_a_hand_off_is_a_failure,
    }
    cleanup {
        what_clients_leave_behind_in_prefill_is_cleaned_up,
        what_a_clean_up_cannot_fetch_is_counted,
        without_clean_up_what_is_left_is_counted,
        a_client_that_leaves_an_aggregated_worker_leaves_nothing_to_clean_up,
        a_client_that_leaves_during_decode_leaves_nothing_to_clean_up,
        found_b18_what_decode_was_asked_to_fetch_is_in_doubt_when_clients_leave,
    }
}

pd_router_e2e::on_both_hosts! {
    envoy only
    answers {
        found_b11_an_answer_over_http_2_that_ends_with_trailers_is_judged,
    }
}
