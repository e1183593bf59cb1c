//! Requests with special demands: a query only, a named worker, a pair within a rack.
#![forbid(unsafe_code)]

mod limits;
mod pins;
mod query;
mod rig;
mod topology;

pd_router_e2e::on_both_hosts! {
    query {
        a_query_is_answered_here_and_books_nothing,
        a_query_keeps_its_pins,
        a_query_from_an_untrusted_caller_is_an_ordinary_request,
    }
    pins {
        pins_in_headers_are_kept,
        pins_in_the_body_are_kept,
        pins_of_untrusted_callers_never_reach_the_engines_headers,
        an_aggregated_worker_is_pinned_by_its_backend_id,
    }
    topology {
        required_domains_make_pairs_within_racks,
    }
    limits {
        too_many_tokens_before_prefill_are_refused_at_once,
    }
}

// Rules of the router alone, which the tests of plugin/routing prove as well.
pd_router_e2e::on_both_hosts! {
    envoy only
    limits {
        a_decode_that_left_during_prefill_is_replaced,
    }
    pins {
        one_pin_leaves_the_other_side_free,
        headers_win_over_the_body,
        a_pin_does_not_move_the_next_request,
        an_unknown_id_is_refused_by_name,
        a_worker_of_the_wrong_role_is_refused_by_name,
        a_rank_out_of_range_is_refused_by_name,
        pins_of_untrusted_callers_are_ignored,
        direct_selection_without_a_pin_names_the_header,
    }
    query {
        a_query_as_a_stream_is_one_event_and_its_end,
        a_query_that_carries_tokens_gets_them_back,
        a_query_does_not_move_the_next_request,
    }
    topology {
        required_domains_fail_closed,
        preferred_domains_never_fail,
        two_sets_of_one_role_are_ambiguous_until_one_is_gone,
    }
}
