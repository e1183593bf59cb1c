//! Tests of all of it in any order: VMs that book, decide, publish, read, die and come back, on a store that fails at times.

use std::cell::RefCell;

use hashbrown::HashMap;
use proptest::collection::vec;
use proptest::prelude::*;

use super::world::{Interrupted, Map, decision, in_pool, share, sorted};
use crate::sharing::{DEAD_TICKS, SharedStore, ThreadLoad, ThreadSync, Totals};

const VMS: usize = 4;

#[derive(Debug, Clone)]
enum Step {
    Book(usize, u64),
    Decide(usize, u8),
    Publish(usize),
    /// Decides and publishes over and over, faster than others read.
    Chatter(usize, u8),
    /// Another VM publishes between this VM's read and its write.
    PublishLate(usize, usize),
    Listen(usize),
    Fail(u32),
    Restart(usize),
    /// All other VMs go on for a while: at times so long that this VM counts as dead.
    GoOn(usize, u8),
}

fn step(may_restart: u32) -> impl Strategy<Value = Step> {
    let vm = || 0..VMS;
    prop_oneof![
        3 => (vm(), 0..1000_u64).prop_map(|(vm, tokens)| Step::Book(vm, tokens)),
        3 => (vm(), 1..20_u8).prop_map(|(vm, count)| Step::Decide(vm, count)),
        6 => vm().prop_map(Step::Publish),
        1 => (vm(), 0..40_u8).prop_map(|(vm, times)| Step::Chatter(vm, times)),
        3 => (vm(), vm()).prop_map(|(late, early)| Step::PublishLate(late, early)),
        8 => vm().prop_map(Step::Listen),
        1 => (1..4_u32).prop_map(Step::Fail),
        may_restart => vm().prop_map(Step::Restart),
        1 => (vm(), 0..90_u8).prop_map(|(vm, rounds)| Step::GoOn(vm, rounds)),
    ]
}

/// One VM from its start to its end.
struct Vm {
    owner: u64,
    sync: ThreadSync,
    booked: Option<u64>,
    tick: u64,
    to_tell: Vec<u32>,
    decided: Vec<u32>,
    update: HashMap<u32, u32>,
}

impl Vm {
    fn new(owner: u64) -> Self {
        Self {
            owner,
            sync: ThreadSync::new(owner),
            booked: None,
            tick: 0,
            to_tell: Vec::new(),
            decided: Vec::new(),
            update: HashMap::new(),
        }
    }

    /// Each VM books on a worker of its own, so that a share shows its VM.
    fn share(&self) -> Option<ThreadLoad> {
        self.booked.map(|tokens| share(self.owner, tokens))
    }

    fn totals(&self) -> Totals {
        Totals {
            streams: self.booked.unwrap_or(0),
            ..Totals::default()
        }
    }

    fn publish(&mut self, store: &dyn SharedStore) {
        let shares: Vec<ThreadLoad> = self.share().into_iter().collect();
        let decisions: Vec<_> = self.to_tell.drain(..).map(decision).collect();
        let totals = self.totals();
        self.sync
            .publish(store, &totals, &in_pool(1, &shares), &decisions);
    }
}

struct World {
    store: Map,
    vms: Vec<RefCell<Vm>>,
    owners: u64,
    decisions: u32,
}

impl World {
    fn new() -> Self {
        let vms = (0..VMS).map(|vm| RefCell::new(Vm::new(vm as u64)));
        Self {
            store: Map::default(),
            vms: vms.collect(),
            owners: VMS as u64,
            decisions: 0,
        }
    }

    fn take(&mut self, step: &Step) {
        match *step {
            Step::Book(vm, tokens) => {
                self.vms[vm].borrow_mut().booked = Some(tokens).filter(|tokens| *tokens > 0);
            }
            Step::Decide(vm, count) => (0..count).for_each(|_| self.decide(vm)),
            Step::Chatter(vm, times) => {
                for _ in 0..times {
                    self.decide(vm);
                    self.vms[vm].borrow_mut().publish(&self.store);
                }
            }
            Step::Publish(vm) => self.vms[vm].borrow_mut().publish(&self.store),
            Step::PublishLate(late, early) if late != early => {
                let early = &self.vms[early];
                let store = &self.store;
                let meanwhile = Interrupted::new(store, || early.borrow_mut().publish(store));
                self.vms[late].borrow_mut().publish(&meanwhile);
            }
            Step::PublishLate(vm, _) => self.vms[vm].borrow_mut().publish(&self.store),
            Step::Listen(vm) => self.listen(vm),
            Step::Fail(writes) => self.store.failing.set(writes),
            Step::Restart(vm) => {
                self.vms[vm] = RefCell::new(Vm::new(self.owners));
                self.owners += 1;
            }
            Step::GoOn(but, rounds) => {
                for _ in 0..rounds {
                    self.round(Some(but));
                }
            }
        }
    }

    fn decide(&mut self, vm: usize) {
        let mut vm = self.vms[vm].borrow_mut();
        vm.to_tell.push(self.decisions);
        vm.decided.push(self.decisions);
        self.decisions += 1;
    }

    /// In any order, nothing is counted twice and no decision is read twice.
    fn listen(&self, vm: usize) {
        let mut vm = self.vms[vm].borrow_mut();
        vm.tick += 1;
        let tick = vm.tick;
        let update = vm.sync.listen(&self.store, tick);
        for share in update.shares.iter().flat_map(|pool| &pool.shares) {
            assert_eq!(share.decodes, 1, "counted twice");
            assert_ne!(share.key.worker.0, vm.owner, "one's own was heard");
        }
        for (_, decision) in update.decisions {
            let times = vm.update.entry(decision.path[0]).or_insert(0);
            *times += 1;
            assert_eq!(*times, 1, "heard twice");
        }
    }

    fn round(&self, but: Option<usize>) {
        for vm in (0..VMS).filter(|vm| Some(*vm) != but) {
            self.vms[vm].borrow_mut().publish(&self.store);
            self.listen(vm);
        }
    }

    /// After a while without failures every VM knows the bookings of all others, and none of dead ones.
    fn settle(&self) {
        self.store.failing.set(0);
        for _ in 0..DEAD_TICKS + 20 {
            self.round(None);
        }
        let all: Vec<(u64, Option<ThreadLoad>, u64)> = self
            .vms
            .iter()
            .map(|vm| {
                let vm = vm.borrow();
                (vm.owner, vm.share(), vm.totals().streams)
            })
            .collect();
        for vm in &self.vms {
            let mut vm = vm.borrow_mut();
            let tick = vm.tick + 1;
            let update = vm.sync.listen(&self.store, tick);
            let others = all.iter().filter(|(owner, ..)| *owner != vm.owner);
            let shares: Vec<ThreadLoad> = others.filter_map(|(_, share, _)| *share).collect();
            assert_eq!(sorted(update.shares), sorted(in_pool(1, &shares)));
            assert_eq!(update.vms, VMS);
            assert_eq!(
                update.totals.streams,
                all.iter().map(|(_, _, streams)| streams).sum::<u64>()
            );
        }
    }

    /// A reader that was never lapped has all decisions of all others.
    fn check_everything_was_heard(&self) {
        for (nth, reader) in self.vms.iter().enumerate() {
            let reader = reader.borrow();
            assert_eq!(reader.sync.dropped(), 0);
            let others = self.vms.iter().enumerate().filter(|(at, _)| *at != nth);
            let mut decided: Vec<u32> = others
                .flat_map(|(_, writer)| writer.borrow().decided.clone())
                .collect();
            let mut update: Vec<u32> = reader.update.keys().copied().collect();
            if reader.sync.lapped() == 0 {
                decided.sort_unstable();
                update.sort_unstable();
                assert_eq!(update, decided);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn nothing_is_counted_or_heard_twice_and_at_rest_the_sums_are_right(
        steps in vec(step(1), 0..250),
    ) {
        let mut world = World::new();
        steps.iter().for_each(|step| world.take(step));
        world.settle();
    }

    #[test]
    fn where_nobody_is_lapped_everything_is_heard_exactly_once(steps in vec(step(0), 0..250)) {
        let mut world = World::new();
        (0..10).for_each(|_| world.round(None));
        steps.iter().for_each(|step| world.take(step));
        world.settle();
        world.check_everything_was_heard();
    }

    #[test]
    fn the_first_moments_are_right_too(steps in vec(step(1), 0..30)) {
        let mut world = World::new();
        steps.iter().for_each(|step| world.take(step));
        world.settle();
    }
}
