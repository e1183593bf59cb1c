//! Cases from other routers' trackers that no other suite has; tests/FIELD_CASES.md lists them all.
#![forbid(unsafe_code)]

mod deadlines;
mod health;
mod modes;
mod spread;

pd_router_e2e::on_both_hosts! {
    deadlines {
        a_prefills_deadline_grows_with_what_it_must_compute,
        a_long_decode_is_never_cut_off,
        a_prompt_of_220_kilobytes_costs_little,
    }
    health {
        an_ejected_worker_comes_back_after_one_trial,
        killing_one_of_two_prefills_under_load_costs_no_answer,
        an_engine_error_that_is_text_passes_as_it_is,
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
