//! Tests of the complete report: both files in their format, derived from results alone.

use serde_json::Value;

use super::sample::{closed, everything, nothing, row};
use super::*;
use crate::bench::results::Figures;

/// A report of some results: JSON, HTML.
fn report(results: &Results) -> (Value, String) {
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("bench");
    write(results, &inner).unwrap();
    let read = |name| std::fs::read_to_string(inner.join(name)).unwrap();
    let json = serde_json::from_str(&read("report.json")).unwrap();
    (json, read("report.html"))
}

#[test]
fn machines_find_every_key() {
    let (json, _) = report(&everything());
    for key in [
        "machine", "date", "versions", "rows", "memory", "trace", "absent",
    ] {
        assert!(json.get(key).is_some(), "{key} is missing");
    }
    let row = &json["rows"][0];
    for key in [
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
    ] {
        assert!(row.get(key).is_some(), "{key} is missing");
    }
    assert_eq!(row["load"], "closed");
    assert!(row["min"]["rps"].as_f64() < row["rps"].as_f64());
}

#[test]
fn the_page_stands_alone() {
    let (_, page) = report(&everything());
    // CPU and latency, unstreamed and streamed; three of the trace; bodies; connections, unstreamed and streamed, small and long;
    // memory.
    assert_eq!(page.matches("<svg").count(), 2 * 2 + 3 + 1 + 3 + 1);
    for part in [
        "CPU, µs a request",
        "Latency, ms",
        "Throughput by connections",
        "Memory as prompts of 16 KB go by",
        "Memory of the gateway",
        "A &lt;processor&gt;, 2 cores, 15,990 MB, Linux 6.1.0; 2026-03-01T10:00:00Z; Envoy 1.40.0, smg 1.13.0; \
         medians of 5 rounds of 5 s.",
        "1 KB, streamed in 64 events, 16 connections, 1 thread; medians of 5 rounds",
        "<td>117<br><small>109–131</small>",
        "The conversation trace: 12,031 requests, 20 times as fast as recorded",
        "Trace: mean TTFT",
        "prefers-color-scheme: dark",
        "its port was &lt;taken&gt;",
        "open loop, 40 requests/s",
    ] {
        assert!(page.contains(part), "{part} is missing");
    }
    let outside = [
        "<script",
        "<link",
        "@import",
        "src=",
        "<b>new</b>",
        "<taken>",
        "<processor>",
    ];
    for part in outside {
        assert!(!page.contains(part), "{part}");
    }
}

#[test]
fn every_figure_is_on_the_page() {
    let results = everything();
    let (_, page) = report(&results);
    let rows = page.matches("<tr>").count() - page.matches("<thead><tr>").count();
    let figures = results.rows.len() + results.memory.len() + results.trace.len();
    assert_eq!(rows, figures);
}

#[test]
fn the_best_router_is_marked_not_the_control() {
    let fast = |cpu| Figures {
        cpu_us_per_request: cpu,
        ..Figures::default()
    };
    let refuses = Figures {
        success_rate: 0.2,
        ..fast(50.0)
    };
    let results = Results {
        rows: vec![
            row("envoy", closed(1, 16), fast(90.0)),
            row("pd-router nixl", closed(1, 16), fast(250.0)),
            row("smg nixl", closed(1, 16), fast(500.0)),
            row("vllm-router", closed(1, 16), refuses),
        ],
        ..nothing()
    };
    let (_, page) = report(&results);
    let marked = "<td>pd-router nixl</td><td class=\"best\">250</td>";
    assert!(page.contains(marked), "{page}");
    for other in [
        "<td>envoy</td><td>90.0</td>",
        "<td>smg nixl</td><td>500</td>",
        "<td>vllm-router</td><td>50.0</td>",
    ] {
        assert!(page.contains(other), "{other} is missing in {page}");
    }
}

#[test]
fn a_report_of_nothing_says_that_nothing_was_measured() {
    let (_, page) = report(&nothing());
    assert!(page.contains("no rounds"), "{page}");
    assert!(!page.contains("<svg"));
}

#[test]
fn a_folder_that_cannot_be_made_is_named() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let error = write(&nothing(), &file.path().join("bench")).unwrap_err();
    assert!(error.to_string().contains("bench: "), "{error}");
}
