//! Tests of blame: many requests to a fleet in which one worker is at fault.

use std::time::Duration;

use routing::fleet::WorkerId;
use routing::outcome::{Came, Follows};
use routing::request::Generation;
use routing::route::{
    AfterPrefill, Assignment, CallEnd, Client, Dispatch, Failed, Plan, PlanInput, Router,
};
use serde_json::{Value, json};

use crate::support::*;

/// Simulated workers: the answers to prefill, and to decode after that prefill.
struct World {
    prefill: fn(u64) -> CallEnd<'static>,
    decode: fn(Option<u64>, u64) -> Came,
    asked: Vec<(Option<u64>, Option<u64>)>,
}

fn good(_: u64) -> CallEnd<'static> {
    GOOD
}

impl World {
    fn new(prefill: fn(u64) -> CallEnd<'static>, decode: fn(Option<u64>, u64) -> Came) -> Self {
        Self {
            prefill,
            decode,
            asked: Vec::new(),
        }
    }

    /// Runs one request to its end and returns whether it was answered.
    fn serves(&mut self, router: &mut Router, body: &Value, now: Duration) -> bool {
        let body = body.to_string().into_bytes();
        let input = PlanInput {
            now,
            ..PlanInput::default()
        };
        let mut plan = router.plan(Generation::Chat, &body, input).ok();
        while let Some(next) = plan {
            let (mut assignment, came) = self.run(router, next);
            let Some(came) = came else {
                router.request_ended(&assignment);
                return false;
            };
            let leg = assignment.leg(router.pool().rules());
            let meaning = router.leg_ended(&mut assignment, came);
            if came == Came::Good {
                router.answer_begins(&mut assignment);
                router.request_ended(&assignment);
                return true;
            }
            if meaning.follows == Follows::PassedOn {
                router.request_ended(&assignment);
                return false;
            }
            let worker = assignment.decode.as_ref().map(|worker| worker.id);
            let failed = Failed {
                leg,
                meaning,
                workers: worker.as_slice(),
                frontends: &[],
            };
            plan = router.recover(&mut assignment, &failed, &body, now);
            if plan.is_none() {
                router.request_ended(&assignment);
            }
        }
        false
    }

    /// Runs both legs of one try and returns how decode ended; none where prefill ended the try.
    fn run(&mut self, router: &mut Router, plan: Plan) -> (Assignment, Option<Came>) {
        match plan {
            Plan::Forward(dispatch, assignment) => self.decoded(dispatch, assignment),
            Plan::Prefill(mut phase, mut assignment) => loop {
                let worker = phase.worker().id.0;
                self.asked.push((Some(worker), None));
                match phase.answered((self.prefill)(worker), Client::Waits, router) {
                    AfterPrefill::Again(next) => phase = next,
                    AfterPrefill::Decode {
                        dispatch,
                        target: (decode, key),
                        staged,
                        ..
                    } => {
                        assignment.prefill = router.fleet().get(WorkerId(worker)).cloned();
                        router.assign_decode(&mut assignment, &decode, key, staged);
                        return self.decoded(dispatch, assignment);
                    }
                    _ => return (assignment, None),
                }
            },
            _ => panic!("neither forwarded nor prefilled"),
        }
    }

    fn decoded(
        &mut self,
        dispatch: Dispatch,
        assignment: Assignment,
    ) -> (Assignment, Option<Came>) {
        assert!(!dispatch.destinations.is_empty());
        let prefill = assignment.prefill.as_ref().map(|worker| worker.id.0);
        let decode = assignment.decode.as_ref().expect("who decodes").id.0;
        self.asked.push((prefill, Some(decode)));
        let came = (self.decode)(prefill, decode);
        (assignment, Some(came))
    }

    /// Number of calls of the prefill worker, direct or behind a sidecar.
    fn prefills(&self, id: u64) -> usize {
        let is_call = |(prefill, decode): &&(Option<u64>, Option<u64>)| {
            *prefill == Some(id) && (decode.is_none() || self.is_behind_a_sidecar())
        };
        self.asked.iter().filter(is_call).count()
    }

    fn is_behind_a_sidecar(&self) -> bool {
        self.asked.iter().all(|(_, decode)| decode.is_some())
    }
}

fn chat(number: usize) -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": format!("{number}: {}", "x".repeat(400))}]})
}

/// Sends `count` different requests, ten a second, and returns how many were answered.
fn served(world: &mut World, router: &mut Router, count: usize) -> usize {
    let answered = (0..count).filter(|number| {
        let now = Duration::from_millis(1_000 + *number as u64 * 100);
        router.advance(now);
        world.serves(router, &chat(*number), now)
    });
    answered.count()
}

fn ejected(router: &Router) -> Vec<u64> {
    let all = router.fleet().workers().map(|worker| worker.id);
    all.filter(|id| router.is_ejected(*id))
        .map(|id| id.0)
        .collect()
}

/// A prefill worker that cannot be reached, behind sidecars that answer 502 for it.
#[test]
fn found_l1_behind_sidecars_the_dead_prefill_worker_is_blamed_and_no_decode_worker() {
    for status in [502, 503, 500] {
        let mut router = router("llmd", &two_by_two(), json!({}));
        let decode: fn(Option<u64>, u64) -> Came = match status {
            502 => |prefill, _| failing(prefill, Came::Status(502)),
            503 => |prefill, _| failing(prefill, Came::Status(503)),
            _ => |prefill, _| failing(prefill, Came::Status(500)),
        };
        let mut world = World::new(good, decode);
        assert_eq!(served(&mut world, &mut router, 64), 64, "{status}");
        let out = ejected(&router);
        match status {
            // A full worker is passed over for a while each time.
            503 => assert!(out.is_empty(), "{out:?}"),
            _ => {
                assert!(out.is_empty() || out == [1], "{status}: {out:?}");
                assert!(world.prefills(1) <= 8, "{status}: {}", world.prefills(1));
            }
        }
    }
}

fn failing(prefill: Option<u64>, came: Came) -> Came {
    match prefill {
        Some(1) => came,
        _ => Came::Good,
    }
}

/// Its hand-off cannot be fetched: decode answers 500, or an error event, or nothing.
#[test]
fn found_v8_a_prefill_worker_whose_kv_nobody_can_fetch_is_ejected_and_no_decode_worker() {
    let ends: [fn(Option<u64>, u64) -> Came; 3] = [
        |prefill, _| failing(prefill, Came::Status(500)),
        |prefill, _| failing(prefill, Came::FailedInside),
        |prefill, _| failing(prefill, Came::TimedOut),
    ];
    for decode in ends {
        let mut router = router("nixl", &two_by_two(), json!({}));
        let mut world = World::new(good, decode);
        assert_eq!(served(&mut world, &mut router, 64), 64);
        assert_eq!(ejected(&router), [1]);
        assert!(world.prefills(1) <= 8, "{}", world.prefills(1));
    }
}

/// The same fault on the other side: the decode worker fails after every prefill worker.
#[test]
fn found_v8_a_decode_worker_that_fails_behind_all_prefill_workers_is_ejected_and_no_prefill_worker()
{
    let mut router = router("nixl", &two_by_two(), json!({}));
    let decode = |_, decode| match decode {
        11 => Came::Status(500),
        _ => Came::Good,
    };
    let mut world = World::new(good, decode);
    assert_eq!(served(&mut world, &mut router, 64), 64);
    assert_eq!(ejected(&router), [11]);
}

/// A wrong key, or another model's name: not busy, and not to blame until other workers are known to take the request.
#[test]
fn found_b3_a_prefill_worker_that_refuses_everything_loses_no_request() {
    let answers: [fn(u64) -> CallEnd<'static>; 6] = [
        |id| refusing(id, 401),
        |id| refusing(id, 403),
        |id| refusing(id, 404),
        |id| refusing(id, 405),
        |id| refusing(id, 408),
        |id| refusing(id, 429),
    ];
    for (at, prefill) in answers.into_iter().enumerate() {
        let mut router = router("nixl", &two_by_two(), json!({}));
        let mut world = World::new(prefill, |_, _| Came::Good);
        assert_eq!(served(&mut world, &mut router, 64), 64, "{at}");
        let out = ejected(&router);
        match at {
            5 => assert!(out.is_empty(), "too much to do: {out:?}"),
            _ => assert_eq!(out, [1], "{at}"),
        }
    }
}

fn refusing(id: u64, answer: u16) -> CallEnd<'static> {
    match id {
        1 => status(answer),
        _ => GOOD,
    }
}

#[test]
fn found_b3_a_decode_worker_that_refuses_everything_costs_no_second_prefill() {
    let mut router = router("nixl", &two_by_two(), json!({}));
    let decode = |_, decode| match decode {
        11 => Came::Status(401),
        _ => Came::Good,
    };
    let mut world = World::new(good, decode);
    assert_eq!(served(&mut world, &mut router, 64), 64);
    let prefills = world.asked.iter().filter(|(_, decode)| decode.is_none());
    assert_eq!(prefills.count(), 64);
    assert_eq!(ejected(&router), [11]);
}

/// One worker of each role is full: where decode is full after the other prefill worker, that prefill worker is asked again
/// before the full one's refusal is passed on.
#[test]
fn one_full_worker_of_each_role_loses_no_request() {
    let full = [
        World::new(|id| refusing(id, 429), |_, id| full_decode(id, 503)),
        World::new(|id| refusing(id, 503), |_, id| full_decode(id, 429)),
    ];
    for mut world in full {
        let mut router = router("nixl", &two_by_two(), json!({}));
        assert_eq!(served(&mut world, &mut router, 64), 64);
        assert_eq!(ejected(&router), [0; 0]);
    }
}

fn full_decode(id: u64, answer: u16) -> Came {
    match id {
        11 => Came::Status(answer),
        _ => Came::Good,
    }
}

/// A refusal because of the request's content would be the same at other workers.
#[test]
fn a_400_is_asked_of_no_other_worker_and_two_404_are_the_answer() {
    for (answer, calls) in [(400, 1), (422, 1), (404, 2)] {
        let mut router = router("nixl", &two_by_two(), json!({}));
        let prefill: fn(u64) -> CallEnd<'static> = match answer {
            400 => |_| status(400),
            422 => |_| status(422),
            _ => |_| status(404),
        };
        let mut world = World::new(prefill, |_, _| Came::Good);
        assert_eq!(served(&mut world, &mut router, 20), 0);
        assert_eq!(world.asked.len(), 20 * calls, "{answer}");
        assert_eq!(router.ejected(), 0);
    }
}

/// A prompt that every engine answers with 500, among others that are all served.
#[test]
fn found_b4_poison_ejects_nobody() {
    let workers: Vec<Value> = (1..=4)
        .map(|id| worker("prefill", id))
        .chain((11..=14).map(|id| worker("decode", id)))
        .collect();
    for protocol in ["nixl", "aggregated"] {
        let whole: Vec<Value> = (21..=24).map(|id| worker("aggregated", id)).collect();
        let workers = match protocol {
            "nixl" => &workers,
            _ => &whole,
        };
        let mut router = router(protocol, workers, json!({}));
        let mut poison = World::new(|_| status(500), |_, _| Came::Status(500));
        let mut well = World::new(good, |_, _| Came::Good);
        for number in 0..400 {
            let now = Duration::from_millis(1_000 + number as u64 * 50);
            router.advance(now);
            assert!(!poison.serves(&mut router, &chat(number), now));
            assert!(well.serves(&mut router, &chat(number + 1_000), now));
        }
        assert_eq!(ejected(&router), [0; 0], "{protocol}");
    }
}

/// The request kills the engine that reads it: no third one is asked.
#[test]
fn found_w4_a_request_after_which_two_workers_died_is_not_sent_to_a_third() {
    let whole: Vec<Value> = (21..=26).map(|id| worker("aggregated", id)).collect();
    let fields = json!({"decode": {"recoveries": 5, "attempts": 5}});
    let mut router = router("aggregated", &whole, fields);
    let mut world = World::new(good, |_, _| Came::Cut);
    assert!(!world.serves(&mut router, &chat(1), Duration::from_secs(2)));
    let mut asked: Vec<_> = world.asked.iter().map(|(_, decode)| *decode).collect();
    asked.sort_unstable();
    asked.dedup();
    assert_eq!(asked.len(), 2, "{asked:?}");
}

/// A kept-alive connection that the worker has closed resets the next request on it.
#[test]
fn found_w3_where_one_worker_of_a_role_is_left_a_first_reset_is_tried_there_again() {
    use std::cell::Cell;
    thread_local!(static CALLS: Cell<u32> = const { Cell::new(0) });
    let pair = [worker("prefill", 1), worker("decode", 11)];
    let mut nixl = router("nixl", &pair, json!({}));
    let reset = CallEnd::Whole {
        status: 503,
        body: b"upstream connect error or disconnect/reset before headers. reset reason: connection termination",
    };
    fn resets(_: u64) -> CallEnd<'static> {
        CALLS.set(CALLS.get() + 1);
        match CALLS.get() % 2 {
            0 => CallEnd::Whole {
                status: 503,
                body: b"upstream connect error or disconnect/reset before headers. reset reason: connection termination",
            },
            _ => GOOD,
        }
    }
    assert_eq!(reset.came(), Some(Came::Reset));
    let mut world = World::new(resets, |_, _| Came::Good);
    assert_eq!(served(&mut world, &mut nixl, 20), 20);
    assert_eq!(nixl.ejected(), 0);

    // A reset of the decode leg runs again from a new prefill.
    CALLS.set(0);
    let decode = |_, _| {
        CALLS.set(CALLS.get() + 1);
        match CALLS.get() % 2 {
            0 => Came::Reset,
            _ => Came::Good,
        }
    };
    let mut nixl = router("nixl", &pair, json!({}));
    let mut world = World::new(good, decode);
    assert_eq!(served(&mut world, &mut nixl, 20), 20);
    let count =
        |of: fn(&&(Option<u64>, Option<u64>)) -> bool| world.asked.iter().filter(of).count();
    let prefills = count(|(_, decode)| decode.is_none());
    let decodes = count(|(_, decode)| decode.is_some());
    assert_eq!(prefills, decodes);
    assert!(decodes > 20);

    CALLS.set(0);
    let mut whole = router("aggregated", &[worker("aggregated", 21)], json!({}));
    let mut world = World::new(good, decode);
    assert_eq!(served(&mut world, &mut whole, 20), 20);
}

/// Where all decode workers are full, no prefill is computed for nothing.
#[test]
fn found_b19_while_all_decode_workers_are_full_nothing_is_prefilled() {
    let mut router = router("nixl", &two_by_two(), json!({}));
    let mut world = World::new(good, |_, _| Came::Status(503));
    let now = Duration::from_secs(1);
    for number in 0..20 {
        assert!(!world.serves(&mut router, &chat(number), now));
    }
    let prefills = world
        .asked
        .iter()
        .filter(|(_, decode)| decode.is_none())
        .count();
    assert!(
        prefills <= 4,
        "{prefills} prefills for 20 requests in one moment"
    );
    assert_eq!(router.ejected(), 0);
}

/// A worker is asked to abort prefill for a client that has left, and answers 500 "aborted".
#[test]
fn found_c3_clients_that_leave_eject_no_prefill_worker() {
    let workers = two_by_two()
        .into_iter()
        .map(|one| with(one, json!({"bootstrap_port": 9000})));
    let workers: Vec<Value> = workers.collect();
    let mut router = router("sglang", &workers, json!({}));
    for number in 0..12 {
        let (phase, assignment) = prefill(ask(&mut router, json!({"prefill_worker_id": 1})));
        drop(phase.answered(status(500), Client::Left, &mut router));
        router.request_ended(&assignment);
        let (phase, mut assignment) = prefill(ask(&mut router, json!({"prefill_worker_id": 2})));
        drop(phase.answered(GOOD, Client::Waits, &mut router));
        router.answer_begins(&mut assignment);
        router.request_ended(&assignment);
        assert_eq!(router.ejected(), 0, "{number}");
    }
}
