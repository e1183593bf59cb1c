//! Fleets that change: workers drain, are replaced, leave, and come from sources that fail.
#![forbid(unsafe_code)]

mod clusters;
mod draining;
mod identity;
mod leaving;
mod original;
mod registration;
mod rig;
mod stale;

pd_router_e2e::on_both_hosts! {
    draining {
        a_draining_worker_gets_nothing_new_and_finishes_what_it_has,
        a_draining_worker_alone_is_as_good_as_none,
    }
    identity {
        a_new_id_at_a_known_address_is_a_new_worker,
        a_stream_outlives_the_identity_of_its_worker,
    }
    leaving {
        who_is_gone_gets_nothing_and_who_comes_is_used,
        a_request_whose_prefill_worker_leaves_goes_to_another_at_once,
        a_request_whose_decode_worker_leaves_goes_to_another_at_once,
        a_stream_whose_decode_worker_leaves_before_its_first_byte_goes_to_another_at_once,
    }
    stale {
        a_source_that_fails_leaves_the_fleet_as_it_is_and_that_is_told,
        a_fleet_is_given_up_when_its_source_has_failed_for_too_long,
        an_empty_list_is_believed_the_second_time,
        what_has_not_changed_costs_nothing,
    }
    registration {
        workers_register_renew_and_expire,
        workers_are_taken_off_the_list,
        nobody_registers_without_the_token,
        what_cannot_be_registered_is_refused_by_name,
        a_full_list_takes_nobody_more,
        a_pool_with_another_source_takes_no_registrations,
    }
    clusters {
        the_hosts_of_a_file_are_the_fleet,
        what_envoy_knows_of_its_hosts_counts,
        the_addresses_of_a_name_are_the_fleet,
    }
    original {
        workers_that_no_cluster_lists_are_reached_within_the_networks,
    }
}
