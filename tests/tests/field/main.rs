//! Cases from other routers' trackers that no other suite has; tests/FIELD_CASES.md lists them all.
#![forbid(unsafe_code)]

mod bodies;
mod deadlines;
mod figures;
mod found;
mod health;
mod hops;
mod modes;
mod spread;

pd_router_e2e::on_both_hosts! {
    bodies {
        long_prompts_reach_the_worker_byte_for_byte,
        prompts_and_inputs_of_all_shapes_are_answered,
        a_compressed_answer_passes_as_it_is,
    }
    deadlines {
        a_prefills_deadline_grows_with_what_it_must_compute,
        a_long_decode_is_never_cut_off,
        a_prompt_of_220_kilobytes_costs_little,
    }
    figures {
        every_worker_is_asked_at_its_own_port,
    }
    found {
        found_b14_a_redirect_is_a_workers_fault_and_reaches_no_client,
        found_b7_a_worker_is_ejected_for_its_silence_only_where_none_of_its_streams_moves,
        found_l1_behind_sidecars_a_dead_prefill_worker_costs_no_answer,
    }
    health {
        an_ejected_worker_comes_back_after_one_trial,
        killing_one_of_two_prefills_under_load_costs_no_answer,
        an_engine_error_that_is_text_passes_as_it_is,
    }
    hops {
        answers_are_whole_over_http_1_and_2,
        what_a_worker_says_of_its_connection_goes_no_further,
    }
    modes {
        a_protocol_of_no_name_is_refused_with_the_names_there_are,
        the_status_page_tells_the_protocol,
    }
    spread {
        prompts_that_nobody_knows_go_to_whoever_has_least_to_do,
        a_conversation_is_known_by_all_its_messages_and_its_tools,
    }
}

pd_router_e2e::on_both_hosts! {
    envoy only
    found {
        found_b1_a_path_that_is_no_text_is_the_clients_own_fault,
    }
}
