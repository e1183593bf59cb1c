//! Owns the warnings about Envoy's configuration of the filter itself.

use routing::config::Config;
use routing::handoff::LegOrder;

use super::{Code, Warning, warning};
use crate::check::node::Node;

/// Checks `plugin`, a Wasm filter's `config`.
pub fn check(plugin: &Node<'_>, config: &Config) -> Vec<Warning> {
    stop_iteration(plugin)
        .into_iter()
        .chain(policy(plugin, config))
        .collect()
}

fn stop_iteration(plugin: &Node<'_>) -> Option<Warning> {
    let allowed = plugin.field("allow_on_headers_stop_iteration");
    (!allowed.is_true()).then(|| {
        warning(
            Code::NoStopIteration,
            &allowed,
            "a request that the filter holds at its headers never gets its body: every request with one hangs",
            "true (Envoy 1.35 or newer)",
        )
    })
}

fn policy(plugin: &Node<'_>, config: &Config) -> Option<Warning> {
    let policy = plugin.field("failure_policy");
    let older = plugin.field("fail_open");
    let (place, is_open) = match older.is_true() {
        true => (&older, true),
        false => (&policy, policy.text() == Some("FAIL_OPEN")),
    };
    if is_open {
        let mut pools = config.pools.iter();
        let pool = pools.find(|pool| pool.rules().order != LegOrder::NoHandoff)?;
        return Some(warning(
            Code::FailOpen,
            place,
            format!(
                "after a crash requests pass the filter by, to workers of the pool \"{}\" that cannot run them whole",
                pool.name
            ),
            "failure_policy: FAIL_RELOAD; FAIL_OPEN only where every pool has the protocol \"aggregated\"",
        ));
    }
    (policy.text() != Some("FAIL_RELOAD")).then(|| {
        warning(
            Code::NoReload,
            place,
            "after one crash of the filter its thread answers 503 until Envoy is started anew",
            "FAIL_RELOAD, with reload_config: {backoff: {base_interval: 0.5s}}",
        )
    })
}
