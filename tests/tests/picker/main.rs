//! The endpoint picker's contract: the Gateway API inference extension's, and llm-d's.
#![forbid(unsafe_code)]

mod conformance;
mod failing;
mod objectives;
mod rewrite;
mod rig;
mod subset;

pd_router_e2e::on_both_hosts! {
    subset {
        a_header_names_the_endpoints,
        a_request_without_a_body_is_kept_within_it,
        a_header_of_anybody_is_nothing,
        a_subset_is_asked_anew_while_a_request_waits,
    }
    rewrite {
        both_legs_get_the_workers_name_and_the_client_reads_its_own,
        every_other_byte_is_as_it_was,
        the_clients_name_is_read_wherever_a_stream_is_cut,
        the_clients_name_is_read_wherever_an_answer_is_cut,
        a_stream_of_single_bytes_reads_the_same,
        what_has_no_name_is_left_alone,
        a_header_comes_before_an_exact_rule_and_that_before_any,
        targets_have_their_share_by_weight,
        a_name_in_a_header_of_anybody_is_nothing,
    }
    objectives {
        the_urgent_come_first_and_flows_take_turns,
        what_anybody_says_of_its_worth_is_nothing,
    }
}

pd_router_e2e::on_both_hosts! {
    envoy only
    // A rule of the router alone, which the tests of plugin/routing prove as well.
    objectives {
        a_sheddable_request_is_refused_where_a_normal_one_waits,
    }
    conformance {
        gateway_following_epp_routing,
        gateway_following_epp_routing_with_data_parallelism,
        gateway_destination_endpoint_served,
        the_endpoint_served_is_the_one_that_answered,
        the_charge_is_that_ones_too,
        gateway_weighted_across_two_inference_pools,
        http_route_multiple_rules_different_pools,
        http_route_multiple_gateways_different_pools,
        inference_pool_app_protocol,
        inference_pool_invalid_epp_service,
    }
    failing {
        epp_unavailable_fail_open,
        found_b5_nobody_operates_an_engine_where_the_picker_is_gone,
        epp_unavailable_fail_close,
        epp_unavailable_fail_close_for_good,
        epp_empty_fail_open,
        epp_empty_fail_close,
    }
    subset {
        metadata_of_the_stream_name_the_endpoints,
        metadata_of_another_kind_allow_nobody,
        metadata_of_the_route_name_the_endpoints,
    }
}
