//! The metrics, as `docs/metrics.md` lists them.

use std::collections::BTreeSet;

use pd_router_e2e::client::{self, Ask, chat_body};
use pd_router_e2e::engine_set::EngineSet;
use pd_router_e2e::engines::{FAST, Fleet, MODEL, Role, with};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::metrics::Metrics;
use pd_router_e2e::wait::{GENEROUS, eventually};
use pd_router_e2e::{Proxy, paths};
use serde_json::{Value, json};

fn chat_with(content: &str, more: Value) -> Ask {
    let body = with(chat_body(content), more);
    Ask::post("/v1/chat/completions", body.to_string())
}

/// The rows of the table: name, kind, labels.
fn documented() -> Vec<(String, String, Vec<String>)> {
    let text =
        std::fs::read_to_string(paths::workspace().join("docs/metrics.md")).expect("the page");
    let rows = text
        .lines()
        .filter(|line| line.starts_with("| `pd_router_"));
    let row = |line: &str| {
        let mut cells = line.split('|').map(str::trim).skip(1);
        let mut next = || cells.next().unwrap_or_default().to_owned();
        let (name, kind, labels) = (next(), next(), next());
        let labels = labels
            .split(',')
            .map(|label| label.trim().trim_matches('`').to_owned());
        (
            name.trim_matches('`').to_owned(),
            kind,
            labels.filter(|label| !label.is_empty()).collect(),
        )
    };
    rows.map(row).collect()
}

pub async fn every_documented_metric_is_there_from_the_start_and_no_other(proxy: Proxy) {
    let fleet = Fleet::start(1, 1, FAST).await;
    let gateway = Gateway::over(proxy, &fleet).await;
    let documented = documented();
    assert!(documented.len() > 30, "{documented:?}");
    // The leading VM publishes the fleet's metrics within a round; Envoy merges histograms every five seconds.
    let missing = |metrics: &Metrics| {
        let there: BTreeSet<&str> = metrics
            .samples()
            .map(|sample| sample.name.as_str())
            .collect();
        let is_missing = |name: &str, kind: &str| match kind {
            // An empty histogram is present with a sum of 0, or absent: that depends on Envoy.
            "histogram" => false,
            _ => !there.contains(name),
        };
        let missing = documented
            .iter()
            .filter(|(name, kind, _)| is_missing(name, kind));
        missing.map(|(name, ..)| name.clone()).collect::<Vec<_>>()
    };
    let metrics = eventually("every metric is there", GENEROUS, || async {
        let metrics = gateway.metrics().await;
        match missing(&metrics) {
            none if none.is_empty() => Ok(metrics),
            some => Err(format!("{some:?}")),
        }
    })
    .await;
    for sample in metrics
        .samples()
        .filter(|sample| sample.name.starts_with("pd_router_"))
    {
        let base = ["_bucket", "_sum", "_count"]
            .iter()
            .find_map(|end| sample.name.strip_suffix(end));
        let row = documented
            .iter()
            .find(|(name, ..)| *name == sample.name || Some(name.as_str()) == base);
        let (name, kind, labels) =
            row.unwrap_or_else(|| panic!("docs/metrics.md lacks {}", sample.name));
        let has: BTreeSet<&str> = sample
            .labels
            .keys()
            .map(String::as_str)
            .filter(|label| *label != "le")
            .collect();
        let wanted: BTreeSet<&str> = labels.iter().map(String::as_str).collect();
        assert_eq!(has, wanted, "the labels of {name}");
        let is_gauge = kind == "gauge";
        assert!(
            is_gauge || sample.value == 0.0 || name.contains("transitions"),
            "{name} does not begin with 0: {sample:?}"
        );
    }
}

pub async fn requests_answers_and_tokens_are_counted_by_pool_and_model(proxy: Proxy) {
    let fleet = Fleet::start(1, 1, FAST).await;
    let gateway = Gateway::over(proxy, &fleet).await;
    let tokens = [3_u64, 5];
    for count in tokens {
        for stream in [false, true] {
            let more = json!({"max_tokens": count, "stream": stream});
            gateway.send(chat_with("hello", more)).await.expect(200);
        }
    }
    let unknown = chat_with("hello", json!({"model": "nobody's"}));
    gateway.send(unknown).await.expect_error(404);
    gateway.assert_comes_to_rest().await;
    let metrics = gateway.metrics().await;
    let of_model = |name: &str, model: &str| metrics.sum_where(name, &[("model", model)]);
    assert_eq!(of_model("pd_router_requests_total", MODEL), Some(4.0));
    assert_eq!(of_model("pd_router_requests_total", "none"), Some(1.0));
    let all = 2.0 * tokens.iter().sum::<u64>() as f64;
    assert_eq!(of_model("pd_router_output_tokens_total", MODEL), Some(all));
    assert!(of_model("pd_router_input_tokens_total", MODEL) > Some(0.0));
    let of_code = |code: &str| metrics.sum_where("pd_router_answers_total", &[("code", code)]);
    assert_eq!(
        (of_code("2xx"), of_code("4xx"), of_code("5xx")),
        (Some(4.0), Some(1.0), Some(0.0))
    );
    let refused = metrics.sum_where("pd_router_refused_total", &[("reason", "model_not_found")]);
    assert_eq!(refused, Some(1.0));
}

pub async fn pieces_pass_unread_where_nobody_counts_them(proxy: Proxy) {
    let fleet = Fleet::start(1, 1, FAST).await;
    let config = fleet.config_with(json!({"output": {"accounting": false}}));
    let gateway = Gateway::start(proxy, &config, &[]).await;
    let streamed = chat_with("hello", json!({"max_tokens": 40, "stream": true}));
    let reply = gateway.send(streamed).await.expect(200);
    let pieces = reply.text().matches("\"content\":\" token").count();
    assert_eq!(pieces, 39, "all but the first: {}", reply.text());
    assert!(reply.text().ends_with("data: [DONE]\n\n"));
    let whole = chat_with("hello", json!({"max_tokens": 7}));
    gateway.send(whole).await.expect(200);
    gateway.assert_comes_to_rest().await;
    let metrics = gateway.metrics().await;
    let counted = metrics.sum_where("pd_router_output_tokens_total", &[("model", MODEL)]);
    // Tokens in one piece with the first token are counted with it.
    assert!(
        counted.is_some_and(|tokens| (8.0..40.0).contains(&tokens)),
        "{counted:?}"
    );
}

pub async fn what_of_a_prefix_was_possible_and_chosen_is_counted(proxy: Proxy) {
    let fleet = Fleet::start(2, 1, FAST).await;
    let gateway = Gateway::over(proxy, &fleet).await;
    let long = "a sentence that repeats itself. ".repeat(40);
    for _ in 0..4 {
        gateway.send(Ask::chat(&long)).await.expect(200);
        gateway.assert_comes_to_rest().await;
    }
    let metrics = eventually("picks are counted", GENEROUS, || async {
        let metrics = gateway.metrics().await;
        match metrics.sum_where("pd_router_picks_total", &[("role", "prefill")]) {
            Some(4.0) => Ok(metrics),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    let blocks = metrics.expect("pd_router_prompt_blocks_total");
    let possible = metrics.expect("pd_router_prefix_blocks_possible_total");
    let chosen = metrics.expect("pd_router_prefix_blocks_chosen_total");
    assert!(blocks > 0.0 && possible <= blocks, "{possible} of {blocks}");
    // The first prompt is new, possibly once on each of two threads, before the other thread's decision arrives.
    assert!(
        chosen >= blocks / 2.0 && chosen <= possible,
        "{chosen}, {possible} of {blocks}"
    );
    assert_eq!(
        metrics.sum_where("pd_router_picks_total", &[("role", "decode")]),
        Some(4.0)
    );
}

pub async fn first_tokens_and_those_that_follow_are_timed(proxy: Proxy) {
    let fleet = Fleet::start(1, 1, FAST).await;
    let gateway = Gateway::over(proxy, &fleet).await;
    let stream = chat_with("hello", json!({"max_tokens": 8, "stream": true}));
    for _ in 0..3 {
        gateway.send(stream.clone()).await.expect(200);
    }
    for name in ["time_to_first_token_ms", "inter_token_latency_ms"] {
        let count = format!("pd_router_{name}_count");
        eventually("a histogram is published", GENEROUS, || async {
            match gateway.metrics().await.sum(&count) {
                Some(3.0) => Ok(()),
                other => Err(format!("{count}: {other:?}")),
            }
        })
        .await;
    }
}

pub async fn found_lengths_and_hits_are_distributions(proxy: Proxy) {
    let fleet = Fleet::start(1, 1, FAST).await;
    let gateway = Gateway::over(proxy, &fleet).await;
    let long = "a sentence that repeats itself. ".repeat(40);
    for count in [3, 5, 8] {
        let ask = chat_with(&long, json!({"max_tokens": count}));
        gateway.send(ask).await.expect(200);
        gateway.assert_comes_to_rest().await;
    }
    let of = |name: &str, what: &str| format!("pd_router_{name}_{what}");
    let [input, output, hits] = [
        "request_input_tokens",
        "request_output_tokens",
        "prefix_hit_percent",
    ];
    eventually("the histograms are published", GENEROUS, || async {
        let metrics = gateway.metrics().await;
        let counts = [input, output, hits].map(|name| metrics.sum(&of(name, "count")));
        let sums = [input, output, hits].map(|name| metrics.sum(&of(name, "sum")).unwrap_or(0.0));
        // No block of the first prompt is known, and nearly all of the others'. In Envoy's buckets 100 counts as up to 110.
        let is_right = counts == [Some(3.0); 3]
            && sums[0] > 3.0 * 300.0
            && (15.0..18.0).contains(&sums[1])
            && (100.0..=220.0).contains(&sums[2]);
        match is_right {
            true => Ok(()),
            false => Err(format!("{counts:?} {sums:?}")),
        }
    })
    .await;
}

pub async fn a_worker_that_left_shows_no_stale_figure(proxy: Proxy) {
    let mut engines = EngineSet::with_slots(1, 2, FAST).await;
    engines.start_and_list(Role::Prefill).await;
    engines.start_and_list(Role::Decode).await;
    let gateway = engines.gateway(proxy, json!({})).await;
    gateway.answers().await;
    let leaver = engines.slots(Role::Decode)[0].name();
    let of_leaver = [("worker", leaver.as_str())];
    let blocks =
        |metrics: &Metrics| metrics.sum_where("pd_router_worker_decode_blocks", &of_leaver);
    let stream = chat_with("hello", json!({"max_tokens": 4000, "stream": true}));
    let listen = gateway.listen;
    // One stream after the other until they are stopped: some engine is always busy.
    let streams = (0..8).map(|_| {
        let stream = stream.clone();
        tokio::spawn(async move {
            loop {
                client::send(listen, stream.clone()).await;
            }
        })
    });
    let streams: Vec<_> = streams.collect();
    eventually("the worker is busy", GENEROUS, || async {
        match blocks(&gateway.metrics().await) {
            Some(blocks) if blocks > 0.0 => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    engines.unlist_one(Role::Decode, 0);
    eventually("its figure is 0", GENEROUS, || async {
        let metrics = gateway.metrics().await;
        let listed = metrics.sum_where("pd_router_fleet_workers", &[("role", "decode")]);
        match (blocks(&metrics), listed) {
            (Some(0.0), Some(1.0)) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    streams.iter().for_each(tokio::task::JoinHandle::abort);
}
