//! Workers that join, leave and come back with a new identity, under traffic, in both hosts.
#![forbid(unsafe_code)]

mod meeting;
mod policies;
mod probe;
mod restarts;

pd_router_e2e::on_both_hosts! {
    restarts {
        all_decode_workers_are_restarted_again_and_again,
        all_prefill_workers_are_restarted_again_and_again,
    }
    meeting {
        decode_comes_first_and_leaves_and_returns_and_then_prefill_comes,
        prefill_comes_first_and_then_decode,
        a_roster_that_cannot_be_read_changes_nothing,
    }
    probe {
        a_health_probe_kills_busy_decode_workers_under_bursts,
    }
    policies {
        prefill_gone_and_back_where_decode_runs_whole_requests,
        a_failed_prefill_is_tried_elsewhere_and_then_fails,
        decode_only_is_refused_where_decode_only_decodes,
    }
}

// Rules of the router alone, which the tests of plugin/routing prove as well.
pd_router_e2e::on_both_hosts! {
    envoy only
    policies {
        prefill_gone_and_back_where_decode_only_decodes,
        prefill_gone_and_back_where_the_policy_is_to_fail,
        prefill_gone_and_back_where_disaggregation_is_enforced,
        a_failed_prefill_fails_at_once_where_configured,
        a_failed_prefill_is_done_by_decode_where_configured,
        enforced_disaggregation_is_never_decode_only,
    }
}
