//! `pd-harness bench` from end to end: a few rows through real Envoy, briefly, and the report of them. No time is judged.
#![forbid(unsafe_code)]

use std::process::Command;

use pd_router_e2e::gateway::name_files;
use pd_router_e2e::process::{Process, read_to_end, unique_name};
use pd_router_e2e::wait::judged;
use pd_router_e2e::{Proxy, paths};
use serde_json::Value;

/// Fields that every row has.
const KEYS: [&str; 15] = [
    "contender",
    "load",
    "body_bytes",
    "connections",
    "streamed",
    "rounds",
    "rps",
    "p50_ms",
    "p90_ms",
    "p99_ms",
    "ttft_p50_ms",
    "cpu_us_per_request",
    "rss_mb",
    "min",
    "max",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_few_rows_and_a_report_of_them() {
    judged("bench", measured()).await;
}

async fn measured() {
    let folder = paths::scratch().join(unique_name("report"));
    let mut command = Command::new(paths::harness());
    command
        .args(["bench", "--quick", "--json", "--no-peers"])
        .args(["--only", "direct,buffer", "--seconds", "0.3"])
        .args(["--memory-prompts", "200"])
        .arg("--lesser")
        .arg(paths::bench_filters())
        .arg("--out")
        .arg(&folder);
    name_files(&mut command, Proxy::Envoy);
    let (mut process, stdout) = Process::spawn(command, "bench");
    let printed = read_to_end(stdout).await;
    let status = process.end_status().await;
    assert!(
        status.is_some_and(|status| status.success()),
        "{status:?}: {}",
        process.log()
    );

    let read = |name: &str| {
        let path = folder.join(name);
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let report: Value = serde_json::from_str(&read("report.json")).expect("JSON");
    let same: Value = serde_json::from_str(&printed).expect("JSON");
    assert_eq!(report, same);
    assert!(read("report.html").contains("pd-router direct"));
    check(&report);
}

fn check(report: &Value) {
    for fact in ["cpu", "cores", "memory_mb", "kernel"] {
        assert!(!report["machine"][fact].is_null(), "{report}");
    }
    assert!(report["versions"]["Envoy"].is_string(), "{report}");
    let rows = report["rows"].as_array().expect("rows");
    for row in rows {
        let missing: Vec<_> = KEYS.iter().filter(|key| row[**key].is_null()).collect();
        assert!(missing.is_empty(), "{missing:?} in {row}");
        assert_eq!(row["success_rate"], 1.0, "{row}");
        assert!(row["cpu_us_per_request"].as_f64() > Some(0.0), "{row}");
    }
    for name in ["envoy+buffer", "pd-router direct"] {
        // Unstreamed and streamed answers to small bodies, and one larger body.
        let of = |list: &str| {
            let all = report[list].as_array().into_iter().flatten();
            all.filter(|row| row["contender"] == name).count()
        };
        assert!(of("rows") >= 3, "{name} in {report}");
        assert_eq!(of("memory"), 1, "{name} in {report}");
    }
}
