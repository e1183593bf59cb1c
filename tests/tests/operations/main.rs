//! The gateway as its operators see it: metrics, and the status page in a real browser.
#![forbid(unsafe_code)]

mod metrics;
mod page;

pd_router_e2e::on_both_hosts! {
    metrics {
        every_documented_metric_is_there_from_the_start_and_no_other,
        requests_answers_and_tokens_are_counted_by_pool_and_model,
        pieces_pass_unread_where_nobody_counts_them,
        what_of_a_prefix_was_possible_and_chosen_is_counted,
        first_tokens_and_those_that_follow_are_timed,
        found_lengths_and_hits_are_distributions,
        a_worker_that_left_shows_no_stale_figure,
    }
    page {
        a_browser_shows_the_fleet_and_what_was_refused,
        the_page_is_not_there_unless_enabled_and_loads_nothing_from_outside,
    }
}
