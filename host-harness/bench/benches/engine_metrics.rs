//! Measures the parsing of one worker's `/metrics`: 60 KB of text, most of it histograms, as engines serve it.

use std::fmt::Write;
use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use routing::engine_metrics::parse;

/// Bytes of an engine's page after some time with several finish reasons, adapters and engines.
const BYTES: usize = 60_000;

fn text() -> String {
    let mut text =
        include_str!("../../../plugin/routing/src/engine_metrics/samples/vllm.txt").to_owned();
    let histograms = [
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
    ];
    for line in 0.. {
        if text.len() >= BYTES {
            break;
        }
        let name = histograms[line % histograms.len()];
        let _ = writeln!(
            text,
            "vllm:{name}_bucket{{engine=\"0\",le=\"{line}.0\",model_name=\"org/model-8b\"}} {}.0",
            line * 17
        );
    }
    text
}

fn engine_metrics(criterion: &mut Criterion) {
    let text = text();
    let mut group = criterion.benchmark_group("engine_metrics");
    group.throughput(Throughput::Bytes(text.len() as u64));
    group.bench_function("60 KB", |bencher| {
        bencher.iter(|| parse(black_box(text.as_bytes())));
    });
    group.finish();
}

criterion_group!(benches, engine_metrics);
criterion_main!(benches);
