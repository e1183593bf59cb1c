//! The output of chaos for every scenario, read as another program would read it.

use std::collections::BTreeSet;
use std::process::Command;

use pd_router_e2e::gateway::name_files;
use pd_router_e2e::process::{Process, read_to_end};
use pd_router_e2e::wait::count;
use pd_router_e2e::{Proxy, paths};
use serde::Deserialize;

/// Discovery sources of a gateway.
const SOURCES: usize = 5;

/// Scenarios that must be among those played.
const NAMED: [&str; 25] = [
    "prefill-killed",
    "prefill-hangs",
    "prefill-500s",
    "decode-429",
    "every-decode-503",
    "decode-refuses",
    "decode-dies-mid-stream",
    "decode-silent",
    "prefill-killed-2p1d",
    "rolling-restart",
    "client-aborts",
    "slow-client",
    "slow-readers",
    "uploads-trickle",
    "uploads-time-out",
    "big-prompts-refused",
    "big-prefills-left",
    "slow-engine",
    "decode-empty",
    "engines-full",
    "every-engine-full",
    "metrics-hang-overloaded",
    "keep-alive-closed",
    "poison",
    "sidecar-prefill-dead",
];

/// Scenarios in which the gateway sees no hand-off.
const OUT_OF_SIGHT: [&str; 1] = ["sidecar-prefill-dead"];

/// Minimum number of concurrent clients, and so of requests.
const CLIENTS: u64 = 40;

#[derive(Deserialize)]
struct Document {
    scenarios: Vec<Scenario>,
}

#[derive(Debug, Deserialize)]
struct Scenario {
    name: String,
    host: String,
    sent: u64,
    answered: u64,
    engine_status: u64,
    reset: u64,
    refused: u64,
    failed: u64,
    failed_with_healthy_pair: u64,
    #[serde(rename = "ejected_after_ms")]
    _ejected_after_ms: Option<u64>,
    kv_leaked: u64,
    kv_leaked_counted: u64,
    kv_unknown: u64,
    bookings_left: u64,
    wrongly_ejected: u64,
    left: u64,
    broken: Vec<String>,
}

pub async fn every_scenario_keeps_the_rules(proxy: Proxy) {
    let seconds = count(3, 30);
    // A scenario mostly waits; in a soak it runs alone, so that its timings are those of an idle machine.
    let at_once = count(3, 1);
    let played = play(proxy, "all", seconds, at_once).await;
    let missing: Vec<_> = NAMED
        .iter()
        .filter(|name| !played.contains(**name))
        .collect();
    assert!(missing.is_empty(), "not played: {missing:?}");
}

pub async fn every_source_keeps_the_rules_while_workers_come_and_go(proxy: Proxy) {
    let played = play(proxy, "churn", count(20, 180), count(3, 1)).await;
    assert_eq!(played.len(), SOURCES, "{played:?}");
}

/// Plays these scenarios, `at_once` at a time, and checks their results. Returns their names.
async fn play(proxy: Proxy, scenarios: &str, seconds: usize, at_once: usize) -> BTreeSet<String> {
    let command = command(proxy, scenarios, seconds, at_once);
    let (mut process, stdout) = Process::spawn(command, "chaos");
    let text = read_to_end(stdout).await;
    let status = process.end_status().await;
    let document: Document = serde_json::from_str(&text)
        .unwrap_or_else(|error| panic!("no verdict ({error}), {status:?}: {}", process.log()));
    for scenario in &document.scenarios {
        check(scenario, proxy);
    }
    assert!(
        status.is_some_and(|status| status.success()),
        "no rule is broken, and yet: {status:?}"
    );
    let log = process.log();
    assert!(!log.contains("panicked"), "the plugin died: {log}");
    let played = document.scenarios.into_iter();
    played.map(|scenario| scenario.name).collect()
}

fn check(scenario: &Scenario, proxy: Proxy) {
    assert!(scenario.broken.is_empty(), "{scenario:#?}");
    assert_eq!(scenario.host, proxy.as_str());
    let ends = [
        scenario.answered,
        scenario.engine_status,
        scenario.reset,
        scenario.refused,
        scenario.failed,
    ];
    assert_eq!(ends.iter().sum::<u64>(), scenario.sent, "{scenario:#?}");
    assert!(scenario.sent + scenario.left >= CLIENTS, "{scenario:#?}");
    assert_eq!(scenario.failed_with_healthy_pair, 0, "{scenario:#?}");
    assert_eq!(scenario.bookings_left, 0, "{scenario:#?}");
    assert_eq!(scenario.wrongly_ejected, 0, "{scenario:#?}");
    let known = scenario.kv_leaked_counted;
    assert!(known <= scenario.kv_leaked, "{scenario:#?}");
    let is_told = scenario.kv_leaked <= known + scenario.kv_unknown;
    assert!(
        is_told || OUT_OF_SIGHT.contains(&&*scenario.name),
        "{scenario:#?}"
    );
}

fn command(proxy: Proxy, scenarios: &str, seconds: usize, at_once: usize) -> Command {
    let mut command = Command::new(paths::harness());
    command
        .args(["chaos", "--scenario", scenarios, "--json"])
        .args(["--proxy", proxy.as_str()])
        .args(["--seconds", &seconds.to_string()])
        .args(["--at-once", &at_once.to_string()]);
    name_files(&mut command, proxy);
    command
}
