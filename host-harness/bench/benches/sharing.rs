//! Measures the exchange between the threads of a proxy: per tick, per decision of another thread, and per request.
//!
//! Four threads; every worker is busy in each of them, and everything has changed since the last tick, which is the most
//! expensive case. The shared store is in memory: the cost of a host's calls is not included. Times are CPU times.

#[path = "support/measure.rs"]
mod measure;

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};

use measure::{timed, times};
use pd_router_bench::ours::{Ours, Work};
use pd_router_bench::sharing::{DECISION_BLOCKS, Threads};
use pd_router_bench::situation::{Fleet, Holders, Situation};

const WORKERS: [u32; 2] = [16, 1_000];

/// A part of a thread's work in one tick.
type Part = fn(&mut Threads);

/// A thread's work in a tick, and its parts.
fn tick(criterion: &mut Criterion) {
    let parts: [(&str, Part); 4] = [
        ("publish", Threads::publish),
        ("listen", |threads| drop(black_box(threads.listen()))),
        ("hear_shares", Threads::hear),
        ("whole tick", Threads::tick),
    ];
    for (name, part) in parts {
        let mut group = criterion.benchmark_group(format!("sharing {name}"));
        for workers in WORKERS {
            let mut threads = Threads::over(workers);
            group.bench_function(BenchmarkId::new("native", workers), |bencher| {
                bencher.iter_custom(|times| {
                    let each = |_| {
                        threads.others_publish();
                        timed(|| part(&mut threads))
                    };
                    (0..times).map(each).sum()
                });
            });
        }
        group.finish();
    }
}

/// A decision of another thread, for workers with full caches.
fn decision(criterion: &mut Criterion) {
    let name = format!("sharing hear_decision {DECISION_BLOCKS}");
    let mut group = criterion.benchmark_group(name);
    for workers in WORKERS {
        let mut threads = None;
        group.bench_function(BenchmarkId::new("native", workers), |bencher| {
            let threads = threads.get_or_insert_with(|| {
                let mut threads = Threads::over(workers);
                threads.fill_caches();
                threads
            });
            bencher.iter_custom(|times| {
                let each = |_| {
                    let decision = threads.next_decision();
                    timed(|| threads.hear_decision(&decision))
                };
                (0..times).map(each).sum()
            });
        });
    }
    group.finish();
}

/// A request of this thread, with and without other threads.
fn request(criterion: &mut Criterion) {
    for prompt_tokens in [256, 16_000] {
        let mut group = criterion.benchmark_group(format!("sharing request {prompt_tokens}"));
        for workers in WORKERS {
            let situation = Situation {
                fleet: Fleet::Whole,
                workers,
                block_tokens: 16,
                prompt_tokens,
                holders: Holders::Few,
            };
            for (who, is_shared) in [("alone", false), ("shared", true)] {
                let mut ours = None;
                group.bench_function(BenchmarkId::new(who, workers), |bencher| {
                    let ours = ours.get_or_insert_with(|| {
                        let mut ours = Ours::put_in(&situation);
                        if is_shared {
                            ours.share();
                        }
                        ours
                    });
                    bencher.iter_custom(|times| timed(|| ours.run(Work::Select, times)));
                });
            }
        }
        group.finish();
    }
}

criterion_group! { name = benches; config = times(); targets = tick, decision, request }
criterion_main!(benches);
