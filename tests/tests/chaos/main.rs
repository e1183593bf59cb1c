//! Engines that fail while clients send requests: `pd-harness chaos` in both hosts, briefly, and at length in a soak.
#![forbid(unsafe_code)]

mod verdicts;

pd_router_e2e::on_both_hosts! {
    verdicts {
        every_scenario_keeps_the_rules,
        every_source_keeps_the_rules_while_workers_come_and_go,
    }
}
