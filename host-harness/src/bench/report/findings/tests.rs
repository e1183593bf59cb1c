//! Tests with made-up rows: met, missed by how much, not measured.

use super::*;
use crate::bench::report::sample::{
    closed, everything, memory, nothing, open, paced, row, streamed, trace,
};
use crate::bench::results::{Figures, MemoryRow, Row, TraceRow};

fn cpu(contender: &str, load: Load, micros: f64) -> Row {
    let figures = Figures {
        cpu_us_per_request: micros,
        ..Figures::default()
    };
    row(contender, load, figures)
}

/// The findings with this number.
fn several(results: &Results, number: &str) -> Vec<Finding> {
    let of = all(results).into_iter();
    of.filter(|finding| finding.number == number).collect()
}

/// The only finding with this number.
fn one(results: &Results, number: &str) -> Finding {
    let mut of = several(results, number);
    assert_eq!(of.len(), 1, "{number}: {of:?}");
    of.remove(0)
}

fn from_rows(rows: Vec<Row>) -> Results {
    Results { rows, ..nothing() }
}

fn missed(by: &str) -> Verdict {
    Verdict::Missed(by.to_owned())
}

fn not_measured(why: &str) -> Verdict {
    Verdict::NotMeasured(why.to_owned())
}

#[test]
fn each_finding_is_there_once_measured_or_not() {
    let numbers = [
        "1a", "1b", "2a", "2b", "2c", "2d", "2e", "2f", "3a", "3b", "3c", "4a", "4b", "5a", "5b",
        "5c", "5d", "6a", "6b",
    ];
    let of = |results| {
        all(&results)
            .iter()
            .map(|finding| finding.number)
            .collect::<Vec<_>>()
    };
    assert_eq!(of(nothing()), numbers);
    assert_eq!(of(everything()), numbers);
    let unknown = |finding: &Finding| matches!(finding.verdict, Verdict::NotMeasured(_));
    assert!(all(&nothing()).iter().all(unknown));
    assert!(!all(&everything()).iter().any(unknown));
}

#[test]
fn what_direct_mode_adds_is_at_most_60_micros() {
    let adds = |direct| {
        from_rows(vec![
            cpu("pd-router direct", closed(4, 16), direct),
            cpu("envoy+buffer", closed(4, 16), 120.0),
        ])
    };
    let reached = one(&adds(180.0), "1a");
    assert_eq!(reached.verdict, Verdict::Reached);
    assert_eq!(reached.measured, "60.0 µs (180 − 120)");
    assert_eq!(one(&adds(192.5), "1a").verdict, missed("by 12.5 µs"));
    assert_eq!(
        one(&adds(180.001), "1a").verdict,
        missed("by less than 0.01 µs")
    );
    let nan = one(&adds(f64::NAN), "1a");
    assert_eq!(nan.verdict, not_measured("what was measured is no number"));
}

#[test]
fn rows_of_another_load_are_not_compared() {
    let results = from_rows(vec![
        cpu("pd-router direct", closed(4, 16), 150.0),
        cpu("envoy+buffer", closed(4, 64), 120.0),
        cpu("envoy+buffer", streamed(4, 16), 120.0),
    ]);
    let finding = one(&results, "1a");
    assert_eq!(
        finding.verdict,
        not_measured("envoy+buffer was not measured under this load")
    );
    assert_eq!(finding.measured, "");
}

#[test]
fn two_numbers_of_threads_are_two_findings_where_both_were_measured() {
    let two = Load {
        threads: 2,
        ..closed(4, 16)
    };
    let mut rows = vec![
        cpu("pd-router direct", closed(4, 16), 150.0),
        cpu("envoy+buffer", closed(4, 16), 120.0),
        cpu("pd-router direct", two.clone(), 220.0),
    ];
    assert_eq!(
        one(&from_rows(rows.clone()), "1a").verdict,
        Verdict::Reached
    );
    rows.push(cpu("envoy+buffer", two, 120.0));
    let both = several(&from_rows(rows), "1a");
    assert_eq!(both.len(), 2);
    assert!(
        both[0]
            .what
            .ends_with("(4 KB, whole, 16 connections, 1 thread)"),
        "{}",
        both[0].what
    );
    assert!(both[1].what.ends_with("2 threads)"));
    assert_eq!(both[1].verdict, missed("by 40.0 µs"));
}

#[test]
fn what_was_measured_and_failed_is_not_left_out() {
    let two = Load {
        threads: 2,
        ..closed(4, 16)
    };
    let mut rows = Vec::new();
    for load in [closed(4, 16), two] {
        rows.push(cpu("envoy+buffer", load.clone(), 120.0));
        rows.push(cpu("pd-router direct", load, 150.0));
    }
    rows[3].median.success_rate = 0.5;
    let both = several(&from_rows(rows), "1a");
    assert_eq!(both.len(), 2, "{both:?}");
    assert_eq!(
        both[1].verdict,
        not_measured("pd-router direct answered only 50.0 % of its requests")
    );
}

#[test]
fn long_bodies_are_measured_in_parses() {
    let parses = |direct, twice| {
        from_rows(vec![
            cpu("pd-router direct", closed(220, 16), direct),
            cpu("envoy+buffer", closed(220, 16), 400.0),
            cpu("envoy+parse", closed(220, 16), 700.0),
            cpu("envoy+parse2", closed(220, 16), twice),
        ])
    };
    let reached = one(&parses(1000.0, 1000.0), "1b");
    assert_eq!(reached.measured, "2.00 (600 µs; a parse 300 µs)");
    assert_eq!(reached.verdict, Verdict::Reached);
    assert_eq!(
        one(&parses(1300.0, 1000.0), "1b").verdict,
        missed("by 0.50")
    );
    let noise = one(&parses(1000.0, 690.0), "1b");
    assert!(matches!(noise.verdict, Verdict::NotMeasured(why) if why.contains("cost nothing")));
}

/// NIXL and two peers under the usual load: CPU, p50, p99.
fn beside(smg: &str, ours: [f64; 3], theirs: [f64; 3]) -> Vec<Row> {
    let of = |contender: &str, [cpu_us_per_request, p50_ms, p99_ms]: [f64; 3]| {
        let figures = Figures {
            cpu_us_per_request,
            p50_ms,
            p99_ms,
            ..Figures::default()
        };
        row(contender, closed(1, 16), figures)
    };
    vec![
        of("pd-router nixl", ours),
        of(smg, theirs),
        of("envoy+vllm-router", [1000.0, 15.0, 30.0]),
    ]
}

#[test]
fn peers_are_beaten_by_so_much_or_not() {
    let better = from_rows(beside(
        "envoy+smg nixl",
        [450.0, 4.0, 9.0],
        [600.0, 7.0, 20.0],
    ));
    assert_eq!(
        one(&better, "2a").measured,
        "0.75 (450 µs, envoy+smg nixl 600 µs)"
    );
    for number in ["2a", "2b", "2c"] {
        assert_eq!(one(&better, number).verdict, Verdict::Reached, "{number}");
    }
    let worse = from_rows(beside(
        "envoy+smg nixl",
        [700.0, 7.0, 31.0],
        [600.0, 7.0, 20.0],
    ));
    assert_eq!(one(&worse, "2a").verdict, missed("by 0.42"));
    assert_eq!(one(&worse, "2b").verdict, missed("by 0.10"));
    assert_eq!(
        one(&worse, "2c").verdict,
        missed(
            "p50 by less than 0.01 ms to envoy+smg nixl, p99 by 11.0 ms to envoy+smg nixl, p99 by 1.00 ms to envoy+vllm-router"
        )
    );
}

#[test]
fn smg_counts_with_the_hand_off_that_works() {
    let results = from_rows(beside(
        "envoy+smg sglang",
        [300.0, 4.0, 9.0],
        [600.0, 7.0, 20.0],
    ));
    assert!(
        one(&results, "2a")
            .measured
            .contains("envoy+smg sglang 600")
    );
    let mut rows = beside("envoy+smg nixl", [300.0, 4.0, 9.0], [600.0, 7.0, 20.0]);
    rows[1].median.success_rate = 0.031;
    assert_eq!(
        one(&from_rows(rows), "2a").verdict,
        not_measured(
            "envoy+smg nixl answered only 3.1 % of its requests; envoy+smg sglang was not measured under this load"
        )
    );
}

#[test]
fn long_prompts_go_through_as_fast_as_through_a_buffer() {
    let of = |contender: &str, load: Load, rps: f64, ttft_p50_ms: f64| {
        let figures = Figures {
            rps,
            ttft_p50_ms,
            ..Figures::default()
        };
        row(contender, load, figures)
    };
    let results = from_rows(vec![
        of("pd-router direct", streamed(220, 20), 900.0, 0.0),
        of("envoy+buffer", streamed(220, 20), 1000.0, 0.0),
        of("pd-router nixl", streamed(220, 20), 500.0, 0.0),
        of("pd-router direct", streamed(220, 200), 800.0, 0.0),
        of("envoy+buffer", streamed(220, 200), 1000.0, 0.0),
        of("pd-router direct", open(), 0.0, 7.5),
        of("envoy+buffer", open(), 0.0, 5.0),
    ]);
    let few = one(&results, "3a");
    assert_eq!(few.measured, "0.90 (900 and 1,000); NIXL 0.50");
    assert_eq!(few.verdict, Verdict::Reached);
    let many = one(&results, "3b");
    assert!(many.measured.ends_with("NIXL not measured"));
    assert_eq!(many.verdict, missed("by 0.05"));
    assert_eq!(
        one(&results, "3c").measured,
        "2.50 ms (7.50 − 5.00); NIXL not measured"
    );
    assert_eq!(one(&results, "3c").verdict, missed("by 0.50 ms"));
}

#[test]
fn a_chunk_costs_what_many_cost_beyond_one() {
    let of = |contender, each: f64| {
        [64u64, 1].map(|chunks| cpu(contender, paced(chunks), 200.0 + each * chunks as f64))
    };
    let mut rows: Vec<Row> = of("envoy+empty", 10.0).into();
    rows.extend(of("pd-router direct", 17.0));
    rows.extend(of("pd-router direct, no accounting", 15.0));
    let results = from_rows(rows.clone());
    assert_eq!(one(&results, "4a").measured, "7.00 µs (17.0 − 10.0)");
    assert_eq!(one(&results, "4a").verdict, Verdict::Reached);
    assert_eq!(one(&results, "4b").verdict, missed("by 2.00 µs"));
    rows.remove(1);
    assert_eq!(
        one(&from_rows(rows), "4a").verdict,
        not_measured("envoy+empty was not measured under this load, with an answer of 1 event")
    );
}

fn with_memory(rows: Vec<MemoryRow>) -> Results {
    Results {
        memory: rows,
        ..nothing()
    }
}

#[test]
fn memory_is_bounded_and_then_flat() {
    let results = with_memory(vec![memory("pd-router direct", 21.0)]);
    assert_eq!(
        one(&results, "5a").measured,
        "21.2 MB (62.0 to 83.2 MB, 1 thread)"
    );
    assert_eq!(one(&results, "5a").verdict, Verdict::Reached);
    assert_eq!(
        one(&results, "5b").measured,
        "0.02 MB (83.3 MB at 150,000 prompts)"
    );
    assert_eq!(one(&results, "5b").verdict, Verdict::Reached);
    assert_eq!(
        one(&results, "5c").verdict,
        not_measured("there is no such row")
    );
    let grows = MemoryRow {
        points: vec![(0, 60.0), (100_000, 200.0), (200_000, 215.0)],
        ..memory("pd-router nixl", 0.0)
    };
    let two = MemoryRow {
        threads: 2,
        ..grows.clone()
    };
    assert_eq!(
        one(&with_memory(vec![grows.clone()]), "5c").verdict,
        missed("by 76.0 MB")
    );
    assert_eq!(
        one(&with_memory(vec![grows]), "5d").verdict,
        missed("by 1.00 MB")
    );
    assert_eq!(
        one(&with_memory(vec![two]), "5c").verdict,
        missed("by 6.00 MB")
    );
}

#[test]
fn memory_of_a_short_run_is_not_judged() {
    let short = MemoryRow {
        points: vec![(0, 60.0), (10_000, 61.0)],
        ..memory("pd-router direct", 0.0)
    };
    let results = with_memory(vec![short]);
    for number in ["5a", "5b"] {
        assert_eq!(
            one(&results, number).verdict,
            not_measured("no more than 10,000 prompts were sent")
        );
    }
}

fn with_trace(rows: Vec<TraceRow>) -> Results {
    Results {
        trace: rows,
        ..nothing()
    }
}

#[test]
fn the_trace_is_won_by_pd_router_and_no_control() {
    let won = with_trace(vec![
        trace("pd-router round_robin", 900.0, 0.1, 1.0),
        trace("pd-router kv", 800.0, 0.3, 1.0),
        trace("smg nixl", 1_200.0, 0.3, 0.99),
    ]);
    assert_eq!(
        one(&won, "6a").measured,
        "800 ms (pd-router kv); the best other is pd-router round_robin with 900 ms"
    );
    assert_eq!(one(&won, "6a").verdict, Verdict::Reached);
    assert_eq!(one(&won, "6b").verdict, Verdict::Reached);
    let lost = with_trace(vec![
        trace("pd-router kv", 1_300.0, 0.3, 0.987),
        trace("smg nixl", 1_200.0, 0.3, 0.99),
    ]);
    assert_eq!(one(&lost, "6a").verdict, missed("by 100 ms"));
    assert_eq!(one(&lost, "6b").verdict, missed("by 0.30 points"));
}

#[test]
fn a_trace_without_peers_is_not_judged() {
    let alone = with_trace(vec![trace("pd-router kv", 800.0, 0.3, 1.0)]);
    assert_eq!(
        one(&alone, "6a").verdict,
        not_measured("nobody else played the trace")
    );
    let others = with_trace(vec![trace("pd-router round_robin", 800.0, 0.3, 1.0)]);
    assert_eq!(
        one(&others, "6b").verdict,
        not_measured("pd-router did not play the trace")
    );
}
