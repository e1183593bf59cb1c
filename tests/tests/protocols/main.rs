//! Every engine's hand-off, from outside: each kind of request is answered, and the legs are byte for byte those that the
//! engine's protocol demands.
#![forbid(unsafe_code)]

mod client_requests;
mod contract;
mod forged;
mod handoffs;
mod legs;
mod llmd;
mod mooncake;
mod rig;
mod scripted_pair;
mod sglang;
mod trtllm;
mod usage;

pd_router_e2e::on_both_hosts! {
    legs {
        nixl_legs_are_golden,
        mooncake_legs_are_golden,
        sglang_legs_are_golden,
        trtllm_legs_are_golden,
        llmd_legs_are_golden,
        aggregated_legs_are_golden,
    }
    contract {
        c01_what_is_not_split_passes_byte_for_byte,
        c02_decode_gets_the_original_parameters,
        c03_no_token_of_prefill_gets_into_a_stream,
        c04_every_combination_of_limits,
        c05_min_tokens_and_stream_options_are_decodes_alone,
        c06_unknown_fields_and_tools_survive_both_legs,
        c07_several_choices_are_refused_before_any_leg,
        c08_a_hand_off_of_the_clients_is_refused,
    }
    handoffs {
        c09_a_missing_hand_off_never_reaches_decode,
        c10_fields_of_the_wrong_type_never_reach_decode,
        c11_nested_groups_of_blocks_are_kept,
        c12_empty_groups_of_blocks_are_accepted,
        c13_further_fields_of_a_hand_off_are_forwarded,
    }
    forged {
        hand_off_fields_of_every_protocol_are_refused,
        a_trusted_callers_hand_off_goes_to_decode_as_it_came,
        several_sequences_run_whole_where_a_worker_can,
    }
    usage {
        cached_tokens_are_prefills_in_a_whole_answer,
        cached_tokens_are_prefills_in_a_stream,
        cached_tokens_are_decodes_where_nothing_is_configured,
        cached_tokens_are_prefills_under_every_sequential_protocol,
    }
    sglang {
        batches_and_choices_have_a_room_each,
        generate_is_handed_off_like_the_rest,
        ranks_are_named_on_both_legs,
        log_probabilities_of_the_prompt_are_prefills,
    }
    trtllm {
        the_context_answer_reaches_generation_byte_for_byte,
        a_context_answer_without_ids_is_a_failure,
    }
    mooncake {
        each_rank_has_its_engine_id,
        a_prefill_worker_that_restarts_is_asked_for_its_id_again,
        nobody_is_asked_for_an_answer_before_the_engine_ids_are_known,
    }
    llmd {
        the_sidecar_is_told_of_prefill_in_a_header_alone,
        an_ipv6_prefill_worker_is_in_brackets,
        every_prefill_worker_has_its_turn,
        without_prefill_the_request_is_as_it_was,
    }
}
