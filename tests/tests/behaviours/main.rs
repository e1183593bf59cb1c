//! What pd-router does, written once and run in both hosts, with two worker threads.
#![forbid(unsafe_code)]

mod aggregated;
mod answers;
mod bodies;
mod calls;
mod demonstration;
mod endpoints;
mod failures;
mod forgery;
mod leaving;
mod limits;
mod refusals;
mod surface;
mod transport;
mod uploads;

pd_router_e2e::on_both_hosts! {
    answers {
        chats_and_completions_are_answered_by_one_prefill_and_one_decode,
        responses_are_answered_through_a_hand_off,
        an_answer_streams_while_the_decode_still_runs,
        workers_are_named_only_where_configured,
        workers_go_by_their_configured_names,
        requests_are_spread_evenly_over_all_pairs,
        the_models_are_listed,
        the_metrics_count_what_happened,
    }
    bodies {
        the_decode_leg_keeps_every_byte_of_the_body,
        the_prefill_leg_differs_only_by_its_edits,
        numbers_that_no_float_holds_reach_both_legs,
        the_length_is_right_on_both_legs,
        a_chunked_body_is_framed_in_one_way_on_both_legs,
        the_path_and_query_are_the_same_on_both_legs,
        every_request_has_an_id_of_its_own,
        the_clients_headers_reach_both_legs,
        headers_that_the_client_did_not_send_stay_absent,
    }
    calls {
        found_b17_a_call_carries_what_is_listed_and_nothing_else,
        found_b17_grpc_in_a_content_type_hides_no_failure,
        found_b17_grpc_in_a_content_type_lets_no_dead_worker_in,
        found_ids_a_client_that_sends_its_id_twice_at_once_has_two_of_ours,
        found_ids_a_line_of_the_log_has_the_clients_id_and_ours,
        found_b10_a_clients_words_are_on_one_line_and_cut,
        found_l3_an_answer_by_a_recovery_has_its_workers_own_headers,
    }
    refusals {
        an_unknown_model_is_not_found,
        an_empty_body_is_refused,
        a_compressed_body_is_refused_with_the_reason,
        refused_requests_are_counted_and_reach_no_worker,
    }
    surface {
        found_b5_what_operates_an_engine_is_not_forwarded,
        found_b5_a_pool_forwards_what_its_own_list_names,
    }
    forgery {
        a_client_cannot_choose_its_workers,
        a_forged_header_is_ignored_where_there_is_no_body,
        mixed_case_and_doubled_headers_are_stripped_too,
        routing_headers_never_reach_the_engines,
        a_forged_hand_off_is_refused,
        an_empty_hand_off_is_tolerated,
    }
    limits {
        a_body_of_900_kilobytes_passes_a_limit_of_one_mebibyte,
        a_body_above_a_limit_of_one_mebibyte_is_too_large,
        a_body_of_20_megabytes_passes_the_shipped_limit,
        a_body_above_the_shipped_limit_is_too_large,
        found_b13_a_body_above_the_default_limit_is_told_so_before_it_has_come,
    }
    uploads {
        found_b6_a_body_that_does_not_come_in_time_is_told_so,
        found_b6_incomplete_bodies_give_way_to_complete_ones,
    }
    transport {
        a_request_with_trailers_is_routed,
        a_body_in_chunks_of_one_byte_is_routed,
        an_http_1_0_client_is_answered,
        a_client_that_expects_100_continue_is_answered,
        a_header_of_any_bytes_is_no_danger,
        many_requests_use_one_connection,
        requests_written_one_after_the_other_are_answered_in_order,
        http_2_without_asking_first_is_answered,
        a_get_of_an_unknown_path_is_answered,
        strange_bodies_are_answered,
    }
    leaving {
        clients_that_leave_in_the_middle_of_prefill_leave_no_charge_behind,
        clients_that_leave_in_the_middle_of_a_stream_leave_no_charge_behind,
        clients_that_leave_in_the_middle_of_their_body_leave_no_charge_behind,
        a_prefill_that_fails_after_its_client_left_leaves_no_charge_behind,
        found_b9_a_call_whose_client_has_left_holds_its_share_of_the_budget,
    }
    failures {
        with_one_of_two_decode_workers_dead_all_are_answered,
        with_both_decode_workers_dead_the_client_is_told_until_one_is_back,
        with_one_of_two_prefill_workers_dead_all_are_answered,
        with_both_prefill_workers_dead_the_client_is_told,
        a_refusal_by_the_prefill_worker_is_the_answer,
    }
    endpoints {
        readiness_follows_the_workers,
        without_a_prefill_worker_it_is_not_ready,
        without_a_decode_worker_it_is_not_ready,
        the_status_page_is_json_where_configured,
        the_status_page_is_not_there_by_default,
        an_unknown_field_of_the_configuration_is_refused_by_name,
    }
    demonstration {
        a_simulated_fleet_answers_without_a_configuration,
        the_gateway_ends_when_its_stdin_closes,
        nothing_is_left_of_a_gateway_that_was_killed,
    }
    aggregated {
        aggregated_workers_get_the_request_as_it_was,
        aggregated_workers_stream_too,
        an_unreadable_body_goes_to_an_aggregated_worker,
    }
}

// Rules of the router alone, which the tests of plugin/routing prove as well.
pd_router_e2e::on_both_hosts! {
    envoy only
    refusals {
        a_missing_model_is_refused_by_name,
        a_model_that_is_no_text_is_refused_by_name,
        missing_messages_are_refused_by_name,
        an_array_is_no_request,
        what_is_not_json_is_refused,
    }
}
