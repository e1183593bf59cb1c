//! Tests of complete runs: figures in their format, reproducible, and a report with plots.

use clap::Parser;
use serde_json::Value;

use super::*;
use contender::ReplayContender;
use gateways::Gateways;

#[derive(clap::Parser)]
struct Cli {
    #[command(flatten)]
    args: Args,
}

fn args(more: &[&str]) -> Args {
    let given = ["replay", "--trace", "t.jsonl"].iter().chain(more);
    Cli::try_parse_from(given).unwrap().args
}

/// Conversations that go on: each prompt is the previous one and two more blocks.
fn conversations() -> Trace {
    let mut lines = String::new();
    for turn in 0u64..8 {
        for who in 0u64..12 {
            let ids: Vec<u64> = (0..=turn * 2 + 1).map(|at| who * 1000 + at).collect();
            let line = serde_json::json!({
                "timestamp": turn * 30_000 + who * 700, "input_length": ids.len() * 512 - 100, "output_length": 50 + who,
                "hash_ids": ids,
            });
            lines += &format!("{line}\n");
        }
    }
    Trace::read(lines.as_bytes(), 512, None).unwrap()
}

const PEERS: [ReplayContender; 2] = [
    ReplayContender::SglangThreshold,
    ReplayContender::LeastRequests,
];

fn compared<R>(
    args: &Args,
    contenders: &[ReplayContender],
    then: impl FnOnce(&Comparison<'_>) -> R,
) -> R {
    let (trace, parameters) = (conversations(), args.parameters());
    let rows = contenders.iter().flat_map(|contender| {
        args.gateways.iter().map(|gateways| {
            let seeds = &args.seed;
            ReplayRow::run(
                *contender,
                *gateways,
                &trace,
                &parameters,
                seeds,
                &mut || {},
            )
            .unwrap()
        })
    });
    then(&Comparison {
        trace_name: "a <trace>".to_owned(),
        trace: &trace,
        parameters: &parameters,
        seeds: &args.seed,
        gateways: &args.gateways,
        rows: rows.collect(),
    })
}

fn parsed(text: &str) -> Value {
    assert_eq!(text.matches('\n').count(), 1);
    serde_json::from_str(text).unwrap()
}

#[test]
fn a_program_gets_one_object_with_all_figures() {
    let args = args(&[
        "--policy",
        "least_requests",
        "--prefill",
        "3",
        "--seed",
        "4",
        "--json",
    ]);
    let text = compared(&args, &PEERS[1..], |comparison| {
        output::for_machines(comparison, &args.policy)
    });
    let figures = parsed(&text);
    assert_eq!(figures["requests"], 96);
    assert_eq!(
        (&figures["policy"], &figures["seed"]),
        (&"least_requests".into(), &4.into())
    );
    for spread in ["ttft_ms", "itl_ms", "wait_ms"] {
        for part in ["mean", "p50", "p90", "p99"] {
            assert!(
                figures[spread][part].is_f64(),
                "{spread}.{part} in {figures}"
            );
        }
    }
    for rate in ["prefix_hit_rate", "imbalance", "decisions_per_second"] {
        assert!(figures[rate].as_f64().unwrap() > 0.0, "{rate} in {figures}");
    }
    let parameters = &figures["parameters"];
    assert_eq!(
        (&parameters["prefill"], &parameters["kv_blocks"]),
        (&3.into(), &4000.into())
    );
    assert_eq!(parameters["model"], "fcfs");
}

#[test]
fn several_seeds_are_a_mean_and_several_policies_a_list() {
    let args = args(&["--seed", "1-3"]);
    let text = compared(&args, &PEERS, |comparison| {
        output::for_machines(comparison, &args.policy)
    });
    let document = parsed(&text);
    let rows = document["policies"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    let (mean, runs) = (
        &rows[1]["ttft_ms"]["mean"],
        rows[1]["runs"].as_array().unwrap(),
    );
    let sum: f64 = runs
        .iter()
        .map(|run| run["ttft_ms"]["mean"].as_f64().unwrap())
        .sum();
    assert!((mean.as_f64().unwrap() - sum / 3.0).abs() < 1e-9);
    assert_eq!(rows[1]["seeds"], serde_json::json!([1, 2, 3]));
    assert_eq!(runs[2]["seed"], 3);
}

#[test]
fn numbers_of_gateways_are_compared() {
    let args = args(&["--policy", "least_requests", "--gateways", "1,4"]);
    let (text, table, page) = compared(&args, &PEERS, |comparison| {
        let text = output::for_machines(comparison, &args.policy);
        let page = report::page(comparison).unwrap();
        (text, output::for_people(comparison), page)
    });
    let document = parsed(&text);
    let rows = document["policies"].as_array().unwrap();
    let counts: Vec<&Value> = rows.iter().map(|row| &row["gateways"]).collect();
    assert_eq!(counts, [1, 4, 1, 4]);
    assert_ne!(rows[0]["ttft_ms"], rows[1]["ttft_ms"]);
    assert_eq!(rows[0]["parameters"]["metrics_interval_ms"], 1000);
    let words = "1, 4 gateways with the engines' figures every 1000 ms";
    assert!(table.contains(words) && page.contains(words), "{table}");
    for name in [
        "sglang_threshold, 1 gateway<",
        "least_requests, 4 gateways<",
    ] {
        assert!(page.contains(name), "{name} is missing");
    }
}

#[test]
fn the_engines_figures_are_heard_or_not() {
    let run = |ms: &str| {
        let args = args(&["--gateways", "4", "--metrics-interval-ms", ms]);
        compared(
            &args,
            &[ReplayContender::Own("least_loaded")],
            |comparison| comparison.rows[0].figures.ttft_ms.mean,
        )
    };
    assert!(run("500") < run("0"));
}

#[test]
fn one_seed_gives_one_result() {
    for model in [Model::Fcfs, Model::Batched] {
        let parameters = Parameters {
            model,
            ..args(&["--prefill", "3"]).parameters()
        };
        let trace = conversations();
        for contender in contender::ALL {
            let run = |seed| {
                let mut gateways = Gateways::new(contender, 3, &parameters, seed).unwrap();
                let outcome = engine::replay(&trace, &parameters, &mut gateways, &mut || {});
                (outcome.served, outcome.gaps)
            };
            assert_eq!(run(1), run(1), "{contender:?}");
        }
        let run = |seed| {
            let mut router = ReplayContender::LeastRequests
                .router(&parameters, seed)
                .unwrap();
            engine::replay(&trace, &parameters, router.as_mut(), &mut || {}).served
        };
        assert_ne!(run(1), run(2));
    }
}

#[test]
fn people_get_aligned_columns() {
    let args = args(&[]);
    let text = compared(&args, &PEERS, output::for_people);
    let table: Vec<&str> = text.lines().skip(3).collect();
    assert_eq!(table.len(), 4, "{text}");
    assert!(
        text.contains("96 requests in 4 min, on 8 prefill and 8 decode workers"),
        "{text}"
    );
    let ends = |line: &str| line.trim_end().len();
    assert!(
        table.iter().all(|line| ends(line) == ends(table[1])),
        "{text}"
    );
    assert!(table[2].starts_with("sglang_threshold  "), "{text}");
}

#[test]
fn the_report_is_one_page_with_its_plots() {
    let args = args(&[]);
    let page = compared(&args, &PEERS, |comparison| {
        report::page(comparison).unwrap()
    });
    assert!(page.matches("<svg").count() >= 6, "plots");
    assert!(page.contains("a &lt;trace&gt;") && !page.contains("a <trace>"));
    for part in [
        "TTFT, median",
        "99th",
        "Wait",
        "Prefix hits",
        "Each prefill worker",
        "sglang_threshold",
    ] {
        assert!(page.contains(part), "{part} is missing");
    }
    let outside = ["<script src", "<link", "@import", "src=\"http"];
    assert!(
        outside.iter().all(|part| !page.contains(part)),
        "the page stands alone"
    );
}

#[test]
fn arguments_are_checked() {
    for (wrong, why) in [
        (["--policy", "direct"], "kv, round_robin"),
        (["--prefill", "0"], "0"),
        (["--prefill-rate", "0"], "above zero"),
        (["--seed", "9-1"], "1-10"),
        (["--gateways", "2,0"], "0"),
        (["--gateways", ""], "--gateways"),
    ] {
        let given = ["replay", "--trace", "t"].iter().chain(&wrong);
        let error = Cli::try_parse_from(given).err().unwrap().to_string();
        assert!(error.contains(why), "{error}");
    }
    assert_eq!(args(&[]).report_path(), Some("target/replay.html".into()));
    assert_eq!(args(&["--json"]).report_path(), None);
    assert_eq!(
        args(&["--json", "--report", "r.html"]).report_path(),
        Some("r.html".into())
    );
}
