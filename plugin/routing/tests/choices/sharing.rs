//! Tests of two routers of one proxy, each in a VM of its own: bookings and decisions of one count for the other as soon as
//! they are shared, and not before.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use routing::load::Load;
use routing::prefix::RunLength;
use routing::route::{Assignment, Refusal, Router};
use routing::sharing::{PoolShares, SharedStore, ThreadSync, Totals, WriteResult};
use serde_json::{Value, json};

use crate::support::*;

/// A shared store in memory.
#[derive(Default)]
struct Map(RefCell<HashMap<String, (Vec<u8>, u32)>>, Cell<u32>);

impl SharedStore for Map {
    fn read(&self, key: &str) -> Option<(Vec<u8>, u32)> {
        self.0.borrow().get(key).cloned()
    }

    fn write(&self, key: &str, value: &[u8], version: Option<u32>) -> WriteResult {
        let mut values = self.0.borrow_mut();
        let there = values.get(key).map(|(_, version)| *version);
        if version.is_some() && there.is_some() && there != version {
            return WriteResult::Stale;
        }
        self.1.set(self.1.get() + 1);
        values.insert(key.to_owned(), (value.to_vec(), self.1.get()));
        WriteResult::Done
    }
}

/// A router and its thread sync.
struct Vm {
    router: Router,
    sync: ThreadSync,
    tick: u64,
}

impl Vm {
    fn new(owner: u64, workers: &[Value], fields: &Value) -> Self {
        let mut router = router(workers, fields.clone(), owner);
        router.keep_decisions();
        Self {
            router,
            sync: ThreadSync::new(owner),
            tick: 0,
        }
    }

    fn tell(&mut self, store: &Map) {
        let shares = [PoolShares {
            pool: 1,
            shares: self.router.shares(),
        }];
        let decisions = self.router.take_decisions();
        let decisions: Vec<_> = decisions.into_iter().map(|it| (1, it)).collect();
        let totals = Totals::default();
        self.sync.publish(store, &totals, &shares, &decisions);
    }

    fn hear(&mut self, store: &Map) {
        self.tick += 1;
        let update = self.sync.listen(store, self.tick);
        let shares = update.shares.iter().find(|pool| pool.pool == 1);
        let shares = shares.map(|pool| pool.shares.as_slice());
        self.router.apply_shares(shares.unwrap_or_default());
        for (_, decision) in &update.decisions {
            self.router.apply_decision(decision);
        }
    }
}

/// Whether the two routers share anything.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Sharing {
    On,
    Off,
}

struct Two {
    a: Vm,
    b: Vm,
    store: Map,
    sharing: Sharing,
}

impl Two {
    fn new(sharing: Sharing, workers: &[Value], fields: &Value) -> Self {
        Self {
            a: Vm::new(1, workers, fields),
            b: Vm::new(2, workers, fields),
            store: Map::default(),
            sharing,
        }
    }

    /// One tick of each VM.
    fn tick(&mut self) {
        if self.sharing == Sharing::Off {
            return;
        }
        for vm in [&mut self.a, &mut self.b] {
            vm.tell(&self.store);
            vm.hear(&self.store);
        }
    }

    fn ticks(&mut self, count: u32) {
        (0..count).for_each(|_| self.tick());
    }
}

fn least_loaded() -> Value {
    json!({"selection": {"prefill": "kv", "decode": "least_loaded"}})
}

/// How many of B's next 16 requests decode on the half of the workers where A has 32 answers.
fn met(sharing: Sharing, fields: &Value) -> usize {
    let mut two = Two::new(sharing, &pairs(2, 4), fields);
    two.ticks(3);
    let long = |nth: u64| wish(nth, 512).decoded_by(101 + nth % 2);
    let held: Vec<_> = (0..32)
        .map(|nth| long(nth).prefill(&mut two.a.router))
        .collect();
    two.tick();
    let assignments: Vec<Assignment> = (100..116)
        .map(|nth| wish(nth, 64).prefill(&mut two.b.router).1)
        .collect();
    drop(held);
    let on_its_half = |assignment: &&Assignment| [101, 102].contains(&decode_id(assignment));
    assignments.iter().filter(on_its_half).count()
}

#[test]
fn one_avoids_what_the_other_has_made_busy() {
    for fields in [policy("kv"), least_loaded()] {
        assert_eq!(met(Sharing::On, &fields), 0, "{fields}");
        assert_eq!(met(Sharing::Off, &fields), 8, "{fields}");
    }
}

/// How many of eight conversations that A began go to the same prefill worker in B.
fn stuck(sharing: Sharing) -> usize {
    let mut two = Two::new(sharing, &pairs(8, 2), &policy("kv"));
    two.ticks(3);
    let begun: Vec<u64> = (0..8)
        .map(|nth| wish(nth, 4096).served(&mut two.a.router))
        .collect();
    two.ticks(2);
    let same = |nth: &usize| {
        let next = wish(*nth as u64, 4600).at(60_000);
        next.served(&mut two.b.router) == begun[*nth]
    };
    let count = (0..8).filter(same).count();
    // Decisions read from another VM are not published again: A would read its own.
    let decisions = two.b.router.take_decisions();
    assert!(
        decisions
            .iter()
            .all(|it| it.path.len() > RunLength::Graded.hashes(4096 / 16))
    );
    count
}

#[test]
fn a_conversation_that_one_has_begun_sticks_in_the_other() {
    assert_eq!(stuck(Sharing::On), 8);
    assert!(stuck(Sharing::Off) < 6);
}

#[test]
fn what_is_heard_counts_until_it_is_heard_to_be_gone_and_is_nobodys_booking() {
    let mut two = Two::new(Sharing::On, &pairs(1, 1), &policy("kv"));
    two.ticks(3);
    let worker = |router: &Router, id| router.fleet().get(routing::fleet::WorkerId(id)).cloned();
    let held = wish(1, 160).prefill(&mut two.a.router);
    two.tick();
    let b = &two.b.router;
    let prefill = worker(b, 1).unwrap();
    let decode = worker(b, 101).unwrap();
    let elsewhere = b.worker_load_elsewhere(&prefill);
    assert_eq!((elsewhere.prefill_tokens, elsewhere.prefills), (160, 1));
    let elsewhere = b.worker_load_elsewhere(&decode);
    assert_eq!((elsewhere.decode_blocks, elsewhere.decodes), (10, 1));
    assert!(b.worker_load(&prefill).is_idle() && b.total_load().is_idle());
    assert!(b.shares().is_empty());
    drop(held);
    two.tick();
    let b = &two.b.router;
    assert!(b.worker_load_elsewhere(&prefill).is_idle());
    assert_eq!(b.worker_load_elsewhere(&decode), Load::default());
}

#[test]
fn thresholds_and_back_pressure_count_what_others_have_booked() {
    let busy = json!({"admission": {"decode": {"blocks": 5}}});
    let full = json!({"prefill": {"max_queued_tokens": 1000}});
    for sharing in [Sharing::On, Sharing::Off] {
        let mut two = Two::new(sharing, &pairs(1, 1), &busy);
        two.ticks(3);
        let held = wish(1, 160).prefill(&mut two.a.router);
        two.tick();
        let outcome = wish(2, 160).plan(&mut two.b.router);
        let is_refused = matches!(outcome, Err(Refusal::Overloaded { .. }));
        assert_eq!(is_refused, sharing == Sharing::On);
        drop(held);

        let mut two = Two::new(sharing, &pairs(1, 1), &full);
        two.ticks(3);
        let held = wish(1, 900).prefill(&mut two.a.router);
        two.tick();
        let outcome = wish(2, 160).plan(&mut two.b.router);
        let is_refused = matches!(outcome, Err(Refusal::Backpressure { .. }));
        assert_eq!(is_refused, sharing == Sharing::On);
        drop(held);
    }
}

#[test]
fn ranks_and_workers_that_are_not_known_are_passed_over() {
    let mut a = Vm::new(1, &pairs(2, 2), &policy("kv"));
    let mut b = Vm::new(2, &pairs(1, 1), &policy("kv"));
    let store = Map::default();
    let held: Vec<_> = (1..=2)
        .map(|id| {
            let wish = wish(id, 160).prefilled_by(id).decoded_by(100 + id);
            wish.prefill(&mut a.router)
        })
        .collect();
    for _ in 0..3 {
        a.tell(&store);
        b.hear(&store);
    }
    assert_eq!(a.router.shares().len(), 4);
    let elsewhere = |router: &Router| {
        let workers = router.fleet().workers();
        let loads = workers.map(|worker| router.worker_load_elsewhere(worker));
        loads.fold(Load::default(), Load::plus)
    };
    let one = elsewhere(&b.router);
    assert_eq!((one.prefills, one.decodes), (1, 1));
    assert_eq!(remembered(&b.router, 1), 10);
    // A new worker is not charged with its predecessor's shares.
    adopt(&mut b.router, &pairs(0, 2));
    assert_eq!(elsewhere(&b.router).decodes, 1);
    b.hear(&store);
    assert_eq!(elsewhere(&b.router).decodes, 2);
    drop(held);
}

#[test]
fn only_decisions_that_were_new_to_the_worker_are_kept_and_only_if_asked_for() {
    let mut router = router(&pairs(1, 1), policy("kv"), 1);
    wish(1, 160).served(&mut router);
    assert!(router.take_decisions().is_empty());
    router.keep_decisions();
    wish(1, 160).served(&mut router);
    assert!(router.take_decisions().is_empty());
    wish(1, 192).served(&mut router);
    let decisions = router.take_decisions();
    assert_eq!(decisions.len(), 1);
    assert_eq!(
        (decisions[0].key.worker.0, decisions[0].path.len()),
        (1, 12)
    );
    assert!(router.take_decisions().is_empty());
    for nth in 0..5000 {
        wish(nth + 10, 16).served(&mut router);
    }
    assert_eq!(router.take_decisions().len(), 4096);
}

#[test]
fn what_is_left_of_a_prompt_is_told_as_it_is_thought_to_be() {
    let mut router = router(&pairs(1, 1), policy("kv"), 1);
    wish(1, 8000).served(&mut router);
    wish(2, 8000).at(10_000).served(&mut router);
    let held = wish(3, 8000).at(20_000).prefill(&mut router);
    router.advance(at(20_500));
    let shares = router.shares();
    let share = shares.iter().find(|share| share.prefills == 1).unwrap();
    assert_eq!(share.booked_tokens, 8000);
    assert!((3900..4100).contains(&share.queued_tokens), "{share:?}");
    drop(held);
}
