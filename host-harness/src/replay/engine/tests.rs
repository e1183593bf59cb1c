//! Tests of the engines on traces computed by hand, with a scripted router.

use std::cell::RefCell;
use std::rc::Rc;

use super::*;
use crate::replay::figures::PolicyFigures;
use crate::replay::peers::LeastRequests;
use crate::replay::peers::plain_cost::PlainCost;
use crate::replay::router_model::{Reservation, WorkerPair};
use crate::replay::trace::Request;

fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

fn parameters(model: Model) -> Parameters {
    Parameters {
        model,
        workers: WorkerCounts {
            prefill: 2,
            decode: 1,
        },
        kv_blocks: 100,
        block_tokens: 100,
        prefill_rate: 1000.0,
        token_ms: 10.0,
        metrics_interval: None,
    }
}

fn trace(lines: &str, block_tokens: u32) -> Trace {
    Trace::read(lines.as_bytes(), block_tokens, Some(block_tokens)).unwrap()
}

/// Sends requests to these prefill workers in turn; `None`: refuses. Records its calls.
struct Script {
    workers: Vec<Option<usize>>,
    calls: Rc<RefCell<Vec<String>>>,
}

struct ScriptedReservation {
    name: usize,
    pair: WorkerPair,
    calls: Rc<RefCell<Vec<String>>>,
}

impl Script {
    fn new(mut workers: Vec<Option<usize>>) -> Self {
        workers.reverse();
        Self {
            workers,
            calls: Rc::default(),
        }
    }
}

impl RouterModel for Script {
    fn reserve(
        &mut self,
        _request: &Request,
        _now: Duration,
    ) -> Result<Box<dyn Reservation>, String> {
        let name = self.workers.len();
        let prefill = self
            .workers
            .pop()
            .unwrap()
            .ok_or_else(|| "busy".to_owned())?;
        let pair = WorkerPair { prefill, decode: 2 };
        let calls = Rc::clone(&self.calls);
        Ok(Box::new(ScriptedReservation { name, pair, calls }))
    }
}

impl ScriptedReservation {
    fn write(&self, what: &str) {
        self.calls
            .borrow_mut()
            .push(format!("{} {what}", self.name));
    }
}

impl Reservation for ScriptedReservation {
    fn pair(&self) -> WorkerPair {
        self.pair
    }

    fn first_token(&mut self, now: Duration) {
        self.write(&format!("first at {:?}", now - START));
    }

    fn generated(&mut self, tokens: u64) {
        self.write(&format!("has {tokens}"));
    }
}

impl Drop for ScriptedReservation {
    fn drop(&mut self) {
        self.write("ends");
    }
}

const THREE: &str = r#"
{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1,2,3,4,5,6,7,8,9,10]}
{"timestamp": 500, "input_length": 1550, "output_length": 1, "hash_ids": [1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]}
{"timestamp": 600, "input_length": 250, "output_length": 8, "hash_ids": [1,2,17]}
{"timestamp": 2000, "input_length": 1000, "output_length": 1, "hash_ids": [1,2,3,4,5,6,7,8,9,10]}
"#;

#[test]
fn fcfs_gives_the_times_worked_out_by_hand() {
    let mut script = Script::new(vec![Some(0), Some(0), Some(1), Some(0)]);
    let calls = Rc::clone(&script.calls);
    let mut arrived = 0;
    let outcome = replay(
        &trace(THREE, 100),
        &parameters(Model::Fcfs),
        &mut script,
        &mut || arrived += 1,
    );
    let got: Vec<_> = outcome
        .served
        .iter()
        .map(|one| (one.wait, one.ttft, one.cached_tokens, one.computed_tokens))
        .collect();
    let expected = [
        (ms(0), ms(1000), 0, 1000),
        // Queued behind the first one, whose blocks count as cached although they are not computed yet.
        (ms(500), ms(1050), 1000, 550),
        // Another worker's cache does not count.
        (ms(0), ms(250), 0, 250),
        // All is cached, and 64 tokens are computed nevertheless.
        (ms(0), ms(64), 1000, 64),
    ];
    assert_eq!(got, expected);
    assert_eq!((arrived, outcome.refused), (4, 0));
    let itl: Vec<_> = outcome.served.iter().map(|one| one.itl).collect();
    assert_eq!(itl, [Some(ms(10)), None, Some(ms(10)), None]);
    assert_eq!(outcome.gaps, [(10.0, 7 + 4)]);
    // Of four requests the first has number 4.
    let expected = [
        "2 first at 850ms",
        "2 has 2",
        "2 has 4",
        "2 has 6",
        "2 has 8",
        "2 ends",
        "4 first at 1s",
        "4 has 1",
        "4 has 2",
        "4 has 3",
        "4 has 5",
        "4 ends",
        "3 first at 1.55s",
        "3 has 0",
        "3 has 0",
        "3 has 0",
        "3 has 1",
        "3 ends",
        "1 first at 2.064s",
        "1 has 0",
        "1 has 0",
        "1 has 0",
        "1 has 1",
        "1 ends",
    ];
    assert_eq!(*calls.borrow(), expected);
}

#[test]
fn what_a_router_refuses_is_counted_and_not_served() {
    let mut script = Script::new(vec![Some(0), None, None, Some(1)]);
    let outcome = replay(
        &trace(THREE, 100),
        &parameters(Model::Fcfs),
        &mut script,
        &mut || {},
    );
    assert_eq!((outcome.served.len(), outcome.refused), (2, 2));
    assert_eq!(outcome.refusal.as_deref(), Some("busy"));
}

#[test]
fn batched_prompts_share_steps_up_to_a_budget() {
    let lines = r#"
{"timestamp": 0, "input_length": 4000, "output_length": 1}
{"timestamp": 0, "input_length": 5000, "output_length": 1}
{"timestamp": 0, "input_length": 5000, "output_length": 1}
"#;
    let mut script = Script::new(vec![Some(0); 3]);
    let parameters = Parameters {
        prefill_rate: 8000.0,
        ..parameters(Model::Batched)
    };
    let outcome = replay(&trace(lines, 512), &parameters, &mut script, &mut || {});
    let got: Vec<_> = outcome
        .served
        .iter()
        .map(|one| (one.wait, one.ttft))
        .collect();
    // 4000; then 5000 and 3192; then 1808 tokens. Each step costs 12 ms more.
    let expected = [(ms(0), ms(512)), (ms(512), ms(1548)), (ms(512), ms(1786))];
    assert_eq!(got, expected);
}

#[test]
fn batched_answers_slow_each_other_down() {
    let line = r#"{"timestamp": 0, "input_length": 1000, "output_length": 3}"#;
    let run = |lines: &str, workers: &[usize]| {
        let mut script = Script::new(workers.iter().copied().map(Some).collect());
        let calls = Rc::clone(&script.calls);
        let outcome = replay(
            &trace(lines, 512),
            &parameters(Model::Batched),
            &mut script,
            &mut || {},
        );
        assert_eq!(
            calls
                .borrow()
                .iter()
                .filter(|what| what.ends_with("ends"))
                .count(),
            workers.len()
        );
        outcome.gaps
    };
    // 12 ms per step, 0.1 for the answer, and 0.05 per 1000 tokens held.
    let near = |got: f64, expected: f64| {
        assert!((got - expected).abs() < 1e-5, "{got} ms, not {expected}")
    };
    let alone = run(line, &[0]);
    near(alone[0].0, 12.0 + 0.1 + 0.05 * 1.001);
    near(alone[1].0, 12.0 + 0.1 + 0.05 * 1.002);
    // The second one's first token comes at the same time, but the first one's step has begun by then.
    let together = run(&format!("{line}\n{line}"), &[0, 1]);
    near(together[1].0, 12.0 + 0.2 + 0.05 * (1.002 + 1.001));
    near(together[2].0, together[0].0 + together[1].0);
    assert_eq!(together.iter().map(|(_, times)| times).sum::<u64>(), 4);
}

#[test]
fn batched_answers_wait_for_room() {
    let line = r#"{"timestamp": 0, "input_length": 6000, "output_length": 3}"#;
    let mut script = Script::new(vec![Some(0), Some(1)]);
    // 10,000 tokens of KV: two such requests do not fit.
    let outcome = replay(
        &trace(&format!("{line}\n{line}"), 512),
        &parameters(Model::Batched),
        &mut script,
        &mut || {},
    );
    let longest = outcome.gaps.iter().map(|(ms, _)| *ms).fold(0.0, f64::max);
    assert!(
        (36.0..38.0).contains(&longest),
        "{longest} ms: two steps of the other one, and its own"
    );
}

#[test]
fn a_cost_that_knows_all_beats_counting_requests() {
    let mut lines = String::new();
    for at in 0u64..200 {
        let (who, turn) = (at % 10, at / 10);
        let ids: Vec<u64> = (0..=turn).map(|block| who * 100 + block).collect();
        lines += &format!(
            "{{\"timestamp\": {}, \"input_length\": {}, \"output_length\": 9, \"hash_ids\": {ids:?}}}\n",
            at * 300,
            ids.len() * 100
        );
    }
    let (trace, parameters) = (trace(&lines, 100), parameters(Model::Fcfs));
    let mean = |router: &mut dyn RouterModel| {
        let outcome = replay(&trace, &parameters, router, &mut || {});
        PolicyFigures::of(&outcome, 2).ttft_ms.mean
    };
    let cost = mean(&mut PlainCost::new(&parameters, 1));
    let count = mean(&mut LeastRequests::new(parameters.workers, 1));
    assert!(cost * 1.5 < count, "{cost} ms and {count} ms");
}

/// Asks for reports at these times, and records them.
struct Listener {
    script: Script,
    at: Vec<Duration>,
    reports: Vec<Vec<(u32, u32, f32)>>,
}

impl RouterModel for Listener {
    fn reserve(
        &mut self,
        request: &Request,
        now: Duration,
    ) -> Result<Box<dyn Reservation>, String> {
        self.script.reserve(request, now)
    }

    fn next_report(&self) -> Option<Duration> {
        self.at.get(self.reports.len()).map(|at| START + *at)
    }

    fn on_engine_metrics(&mut self, engines: &[EngineMetrics], now: Duration) {
        assert_eq!(Some(now), self.next_report());
        let metrics = engines
            .iter()
            .map(|one| (one.waiting, one.running, one.kv_use));
        self.reports.push(metrics.collect());
    }
}

#[test]
fn engines_tell_what_they_have() {
    let idle = (0, 0, 0.0);
    let early = vec![idle; 3];
    let one = vec![(0, 1, 0.1), idle, idle];
    let two = vec![(1, 1, 0.1), idle, idle];
    // At 1.02 s the first answer is being written. Under `fcfs` the second prompt is computed, under `batched` both are.
    for (model, late) in [
        (Model::Fcfs, [(1, 1, 0.155), idle, (0, 1, 0.1003)]),
        (Model::Batched, [(0, 2, 0.18), idle, (0, 1, 0.1001)]),
    ] {
        let last =
            r#"{"timestamp": 1020, "input_length": 100, "output_length": 1, "hash_ids": [9]}"#;
        let mut listener = Listener {
            script: Script::new(vec![Some(0), Some(0), Some(0), Some(1)]),
            at: [0, 400, 600, 1020, 9000].map(ms).to_vec(),
            reports: Vec::new(),
        };
        let lines: Vec<&str> = THREE.trim().lines().take(3).chain([last]).collect();
        replay(
            &trace(&lines.join("\n"), 100),
            &parameters(model),
            &mut listener,
            &mut || {},
        );
        let expected = [early.clone(), one.clone(), two.clone(), late.to_vec()];
        // The report due after the last request is never delivered.
        assert_eq!(listener.reports, expected, "{}", model.name());
    }
}
