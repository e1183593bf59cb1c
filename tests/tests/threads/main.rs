//! Four threads: knowledge of each other's load and decisions, and the state after the death of one of them.
#![forbid(unsafe_code)]

mod clients;
mod conversations;
mod leader;
mod load;
mod rig;
mod serving;

pd_router_e2e::on_both_hosts! {
    load {
        threads_avoid_the_workers_that_another_has_loaded,
        without_sharing_no_thread_knows_what_another_has_loaded,
        what_a_thread_lets_go_the_others_use_again,
    }
    conversations {
        conversations_stick_on_whatever_thread_they_go_on,
        without_sharing_conversations_move,
    }
    leader {
        when_the_leader_dies_a_thread_takes_over,
        when_that_one_dies_too_another_takes_over,
    }
    serving {
        when_a_serving_vm_dies_the_others_never_notice,
    }
}
