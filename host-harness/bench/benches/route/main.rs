//! Measures one routing decision: ours natively, ours inside wasm, and NVIDIA Dynamo's for comparison.
//!
//! One benchmark per situation and work: `route` is complete (hash, select, book, free), `select` starts with the hashes. The
//! name gives prompt and block tokens; the function gives the subject: `native`, `wasm`, `dynamo`, and `dynamo-1`, whose index
//! has one thread; the parameter is the number of workers. Times are CPU times of one decision. The guest is called once for many
//! decisions, so that the crossing into wasm is not included: the cost of a proxy's callbacks belongs to the plugin as a whole.

#[cfg(feature = "dynamo")]
mod dynamo;
#[path = "../support/guest.rs"]
mod guest;
#[path = "../support/measure.rs"]
mod measure;

use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, criterion_group, criterion_main};

#[cfg(feature = "dynamo")]
use dynamo::{Dynamo, IndexThreads};
use guest::Guest;
use measure::{timed, times};
use pd_router_bench::ours::{Ours, Work};
use pd_router_bench::situation::{Fleet, Holders, Situation};

const WORKERS: [u32; 4] = [8, 64, 512, 1_000];

/// A row of situations, which differ in the number of workers.
struct Row {
    work: Work,
    fleet: Fleet,
    holders: Holders,
    prompt_tokens: u32,
    block_tokens: u32,
}

impl Row {
    /// A complete route to one worker, where few hold the prompt's prefix.
    const fn of(prompt_tokens: u32, block_tokens: u32) -> Self {
        Self {
            work: Work::Route,
            fleet: Fleet::Whole,
            holders: Holders::Few,
            prompt_tokens,
            block_tokens,
        }
    }

    const fn held_by_all(self) -> Self {
        Self {
            holders: Holders::All,
            ..self
        }
    }

    const fn picking_pairs(self) -> Self {
        Self {
            fleet: Fleet::Pairs,
            ..self
        }
    }

    const fn select(self) -> Self {
        Self {
            work: Work::Select,
            ..self
        }
    }

    fn name(&self) -> String {
        let work = match self.work {
            Work::Route => "route",
            Work::Select => "select",
        };
        let fleet = match self.fleet {
            Fleet::Whole => "",
            Fleet::Pairs => ", a pair",
        };
        let holders = match self.holders {
            Holders::Few => "",
            Holders::All => ", held by all",
        };
        format!(
            "{work} {} by {}{fleet}{holders}",
            self.prompt_tokens, self.block_tokens
        )
    }

    fn with(&self, workers: u32) -> Situation {
        Situation {
            fleet: self.fleet,
            workers,
            block_tokens: self.block_tokens,
            prompt_tokens: self.prompt_tokens,
            holders: self.holders,
        }
    }

    /// Dynamo's core selects one worker, and takes ids.
    #[cfg(feature = "dynamo")]
    fn has_a_peer(&self) -> bool {
        self.work == Work::Route && self.fleet == Fleet::Whole
    }
}

const ROWS: [Row; 11] = [
    Row::of(256, 16),
    Row::of(256, 512),
    Row::of(16_000, 16),
    Row::of(16_000, 512),
    Row::of(256, 16).held_by_all(),
    Row::of(16_000, 16).held_by_all(),
    Row::of(256, 16).picking_pairs(),
    Row::of(16_000, 16).picking_pairs(),
    Row::of(256, 16).select(),
    Row::of(16_000, 16).select(),
    Row::of(16_000, 512).select(),
];

fn route(criterion: &mut Criterion) {
    let guest = Guest::compile();
    for row in &ROWS {
        let mut group = criterion.benchmark_group(row.name());
        for workers in WORKERS {
            let situation = row.with(workers);
            measure(&mut group, "native", workers, || {
                let mut ours = Ours::put_in(&situation);
                move |times| timed(|| ours.run(row.work, times))
            });
            measure(&mut group, "wasm", workers, || {
                let mut inside = guest.put_in(&situation);
                move |times| timed(|| inside.run(row.work, times))
            });
            #[cfg(feature = "dynamo")]
            if row.has_a_peer() {
                for (who, threads) in [
                    ("dynamo", IndexThreads::Four),
                    ("dynamo-1", IndexThreads::One),
                ] {
                    measure(&mut group, who, workers, || {
                        let mut dynamo = Dynamo::put_in(&situation, threads);
                        move |times| dynamo.route(times)
                    });
                }
            }
        }
        group.finish();
    }
}

/// One benchmark. Preparing a router takes seconds, so only selected benchmarks do it.
fn measure<Run: FnMut(u64) -> Duration>(
    group: &mut BenchmarkGroup<'_, WallTime>,
    who: &str,
    workers: u32,
    put_in_situation: impl FnOnce() -> Run,
) {
    let mut put_in_situation = Some(put_in_situation);
    let mut run = None;
    group.bench_function(BenchmarkId::new(who, workers), |bencher| {
        let run = run.get_or_insert_with(|| {
            put_in_situation
                .take()
                .expect("a router is put in its situation once")()
        });
        bencher.iter_custom(run);
    });
}

criterion_group! { name = benches; config = times(); targets = route }
criterion_main!(benches);
