//! Two pools behind one gateway: neither affects the other.
#![forbid(unsafe_code)]

mod apart;
mod refused;
mod rig;
mod same_workers;

pd_router_e2e::on_both_hosts! {
    apart {
        each_pool_serves_its_own_models_by_its_own_protocol,
        a_dead_pool_does_not_touch_the_other,
        workers_of_one_pool_come_and_go_and_the_other_never_notices,
    }
    same_workers {
        pools_of_the_same_workers_share_neither_prefixes_nor_loads,
    }
    refused {
        two_pools_of_one_name_are_refused,
        a_wrong_second_pool_is_refused_by_its_place,
    }
}
