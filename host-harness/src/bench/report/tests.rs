//! Tests of the complete report: three files in their format, derived from results alone.

use serde_json::Value;

use super::sample::{closed, everything, nothing, row};
use super::*;
use crate::bench::results::Figures;

/// A report of some results: JSON, Markdown, HTML.
fn report(results: &Results) -> (Value, String, String) {
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("bench");
    write(results, &inner).unwrap();
    let read = |name| std::fs::read_to_string(inner.join(name)).unwrap();
    let json = serde_json::from_str(&read("report.json")).unwrap();
    (json, read("report.md"), read("report.html"))
}

#[test]
fn machines_find_every_key() {
    let (json, _, _) = report(&everything());
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
fn readme_has_its_tables() {
    let (_, text, _) = report(&everything());
    let first = text.lines().next().unwrap();
    assert_eq!(
        first,
        "A &lt;processor>, 2 cores, 15,990 MB, Linux 6.1.0; 2026-03-01T10:00:00Z; Envoy 1.40.0, smg 1.13.0; \
         medians of 5 rounds of 5 s."
    );
    for part in [
        "1 KB, whole, 16 connections, 1 thread; medians of 5 rounds:",
        "1 KB, streamed in 64 events, 16 connections, 1 thread; medians of 5 rounds:",
        "| envoy+buffer | 117 (109–131) |",
        "| contender | 1 KB | 4 KB | 16 KB | 220 KB |",
        "The conversation trace: 12,031 requests, 20 times as fast as recorded",
        "Memory of the gateway",
        "a &lt;b>new&lt;/b> \\| one",
    ] {
        assert!(text.contains(part), "{part} is missing in\n{text}");
    }
    assert!(text.ends_with("Not measured:\n\n- sglang-router: its port was &lt;taken>\n"));
}

#[test]
fn the_tables_of_markdown_are_whole() {
    let (_, text, _) = report(&everything());
    let columns = |line: &str| line.replace("\\|", "").matches('|').count();
    for table in text.split("\n\n").filter(|part| part.starts_with('|')) {
        let lines: Vec<&str> = table.lines().collect();
        assert!(lines.len() > 2, "{table}");
        assert!(
            lines.iter().all(|line| columns(line) == columns(lines[0])),
            "{table}"
        );
    }
}

#[test]
fn the_page_stands_alone() {
    let (_, _, page) = report(&everything());
    // CPU and latency, unstreamed and streamed; three of the trace; bodies; connections, unstreamed and streamed, small and long;
    // memory.
    assert_eq!(page.matches("<svg").count(), 2 * 2 + 3 + 1 + 3 + 1);
    for part in [
        "CPU, µs a request",
        "Latency, ms",
        "Throughput by connections",
        "Memory as prompts of 16 KB go by",
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
    let (_, _, page) = report(&results);
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
    let (_, text, _) = report(&results);
    assert!(text.contains("| pd-router nixl | **250** |"), "{text}");
    for other in [
        "| envoy | 90.0 |",
        "| smg nixl | 500 |",
        "| vllm-router | 50.0 |",
    ] {
        assert!(text.contains(other), "{other} is missing in {text}");
    }
}

#[test]
fn a_report_of_nothing_says_that_nothing_was_measured() {
    let (_, text, page) = report(&nothing());
    assert!(text.contains("no rounds"), "{text}");
    assert!(!page.contains("<svg"));
}

#[test]
fn a_folder_that_cannot_be_made_is_named() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let error = write(&nothing(), &file.path().join("bench")).unwrap_err();
    assert!(error.to_string().contains("bench: "), "{error}");
}
