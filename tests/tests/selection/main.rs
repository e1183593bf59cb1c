//! Selection and admission: by shared prefixes, by policy, by a caller's overrides, or after a wait.
#![forbid(unsafe_code)]

mod accounting;
mod admission;
mod callers;
mod conditional;
mod conversations;
mod policies;
mod rig;

pd_router_e2e::on_both_hosts! {
    conversations {
        conversations_stick_to_their_prefill_workers,
        a_worker_that_dies_or_leaves_loses_its_prefixes,
    }
    policies {
        every_policy_serves_every_small_fleet,
        a_policy_of_no_name_is_refused_with_the_names_there_are,
    }
    callers {
        a_trusted_caller_may_ask_why_and_name_a_subset,
        an_untrusted_caller_gets_no_explanation_and_no_subset,
    }
    admission {
        requests_wait_for_a_busy_decode_worker_and_are_served_in_order,
        a_full_queue_and_a_wait_too_long_are_told_and_leavers_leave_nothing,
        found_b2_bodies_of_those_who_wait_are_copied_and_read_once,
        the_end_of_a_prefill_lets_the_next_request_in,
    }
    accounting {
        a_chunk_that_carries_only_a_role_ends_no_prefill_charge,
    }
}

// Rules of the router alone, which the tests of plugin/routing prove as well.
pd_router_e2e::on_both_hosts! {
    envoy only
    admission {
        without_a_queue_a_busy_worker_is_told_at_once,
        nobody_waits_where_there_is_no_worker,
    }
    conditional {
        what_decode_holds_and_what_is_short_stays_there,
    }
    policies {
        gateways_that_never_talk_agree_on_beginnings_and_sessions,
    }
}
