use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::holders::NodeHolders;
use super::*;
use crate::prefix::RunLength;

const TTL: Duration = Duration::from_secs(120);
const NOW: Duration = Duration::from_secs(1_800_000_000);

fn index(max_pairs: usize) -> Index {
    Index::new(Bounds {
        max_pairs,
        ttl: TTL,
    })
}

fn blocks(sequence: impl IntoIterator<Item = u64>) -> Blocks {
    Blocks {
        scope: 7,
        sequence: sequence.into_iter().collect(),
        run_length: RunLength::Even,
    }
}

/// A prompt of `count` blocks that no other seed has.
fn prompt(seed: u64, count: u64) -> Blocks {
    blocks((0..count).map(|at| (seed << 20 | at).wrapping_mul(0x9E37_79B9_7F4A_7C15)))
}

fn depths(index: &mut Index, blocks: &Blocks, now: Duration) -> Vec<u32> {
    // The result of an earlier look-up must not matter.
    let mut depths = vec![99; 3];
    index.depths(blocks, now, &mut depths);
    depths
}

impl Index {
    fn members(&self, node: u32) -> Vec<(u16, u32)> {
        match self.held.of(self.tree.node(node)) {
            NodeHolders::List(list) => list.collect(),
            NodeHolders::Crowd(crowd) => (0..self.holders.len() as u16)
                .map(|id| (id, crowd.path(id)))
                .filter(|pair| pair.1 != NONE)
                .collect(),
        }
    }

    /// Checks the invariants.
    fn check(&self) {
        let mut held = HashMap::<u16, u32>::new();
        let mut blocks = HashMap::<u16, u32>::new();
        let mut ended = HashSet::new();
        for at in self.tree.all() {
            let node = *self.tree.node(at);
            let members = self.members(at);
            assert_eq!(members.len(), usize::from(node.count));
            let before: HashMap<_, _> = match node.parent {
                ROOT => members.iter().copied().collect(),
                parent => self.members(parent).into_iter().collect(),
            };
            for (id, path) in members {
                *held.entry(id).or_default() += 1;
                *blocks.entry(id).or_default() += node.blocks();
                assert!(
                    before.contains_key(&id),
                    "who holds a block holds the one before it"
                );
                if self.paths.get(path).end == at {
                    ended.insert(path);
                }
            }
        }
        assert_eq!(held.values().sum::<u32>() as usize, self.pairs);
        for (id, holder) in (0_u16..).zip(&self.holders) {
            assert_eq!(held.get(&id).copied().unwrap_or(0), holder.pairs);
            assert_eq!(blocks.get(&id).copied().unwrap_or(0), holder.blocks);
        }
        // The only path without blocks is one being shortened.
        let oldest = self.holders.iter().map(Holder::oldest);
        let empty = oldest.filter(|path| *path != NONE && !ended.contains(path));
        assert_eq!(self.paths.count() as usize, ended.len() + empty.count());
    }

    fn sweep_all(&mut self) {
        let unused = self.slots.len();
        self.open(unused, Some(0));
        while !self.gone.is_empty() {
            self.learn(unused, &Blocks::default(), NOW);
        }
        assert_eq!(self.held(unused), 0);
        self.forget(unused);
    }

    fn assert_empty(&self) {
        assert_eq!(self.pairs(), 0);
        assert_eq!(self.tree.count(), 0);
        assert_eq!(self.held.count(), (0, 0));
        assert_eq!(self.paths.count(), 0);
    }
}

#[test]
fn a_worker_holds_what_it_was_given_and_its_prefixes() {
    let mut index = index(1000);
    index.open(0, Some(100));
    index.open(2, Some(100));
    index.learn(0, &blocks([1, 2, 3]), NOW);
    index.learn(2, &blocks([1, 2, 4, 5]), NOW);
    assert_eq!(depths(&mut index, &blocks([1, 2, 3, 9]), NOW), [3, 0, 2]);
    assert_eq!(depths(&mut index, &blocks([1, 2]), NOW), [2, 0, 2]);
    assert_eq!(depths(&mut index, &blocks([2, 3]), NOW), [0, 0, 0]);
    assert_eq!(depths(&mut index, &blocks([]), NOW), [0, 0, 0]);
    assert_eq!(
        (index.held(0), index.held(1), index.held(2), index.pairs()),
        (3, 0, 4, 7)
    );
}

/// A prompt of `count` blocks: the first `shared` ones common to all seeds, the rest of this seed only.
fn long_prompt(seed: u64, count: usize, shared: usize) -> Blocks {
    let own = prompt(seed, count as u64).sequence;
    let all = prompt(0, shared as u64).sequence.into_iter().chain(own);
    Blocks::of_hashes(7, all.take(count).collect(), RunLength::Graded)
}

#[test]
fn runs_of_a_long_prompt_are_counted_in_blocks() {
    let mut index = index(10_000);
    index.open(0, Some(10_000));
    index.open(1, None);
    let long = long_prompt(1, 4000, 3000);
    assert_eq!(index.learn(0, &long, NOW) as usize, long.sequence.len());
    index.learn(1, &long, NOW);
    index.check();
    assert_eq!((index.held(0), index.held(1)), (3840, 3840));
    // 2,048 and three runs of 256 are common to both.
    let other = long_prompt(2, 4000, 3000);
    assert_eq!(depths(&mut index, &other, NOW), [2816, 2816]);
    assert_eq!(
        depths(&mut index, &long_prompt(2, 600, 600), NOW),
        [576, 576]
    );
    index.learn(0, &other, NOW);
    index.check();
    assert_eq!(index.held(0), 3840 + 3840 - 2816);
    index.forget(0);
    index.forget(1);
    index.sweep_all();
    index.assert_empty();
}

#[test]
fn a_full_worker_loses_whole_runs() {
    let mut index = index(100_000);
    index.open(0, Some(5000));
    for seed in 1..40 {
        index.learn(0, &long_prompt(seed, 1000 + 61 * seed as usize, 300), NOW);
        index.check();
        // A run is evicted as one: up to a run's blocks too many may have gone with the last.
        assert!(
            index.held(0) <= 5000 && (seed < 10 || index.held(0) > 5000 - 256),
            "{}",
            index.held(0)
        );
    }
    // As many blocks as fit, and no more.
    index.learn(0, &long_prompt(77, 9000, 0), NOW);
    index.check();
    let held = index.held(0);
    assert!((2048 + 11 * 256..=5000).contains(&held), "{held}");
    index.open(0, Some(100));
    index.check();
    assert_eq!(index.held(0), 100);
}

#[test]
fn what_another_thread_tells_of_a_long_prompt_weighs_the_same() {
    let (mut one, mut other) = (index(10_000), index(10_000));
    one.open(0, None);
    other.open(0, None);
    let long = long_prompt(1, 4000, 0);
    one.learn(0, &long, NOW);
    other.learn_path(0, &Index::path(&long, usize::MAX), NOW);
    assert_eq!(one.held(0), other.held(0));
    assert_eq!(depths(&mut other, &long, NOW), [3840]);
}

#[test]
fn scopes_share_nothing() {
    let mut index = index(1000);
    index.open(0, None);
    index.learn(0, &blocks([1, 2, 3]), NOW);
    let other = Blocks {
        scope: 8,
        ..blocks([1, 2, 3])
    };
    assert_eq!(depths(&mut index, &other, NOW), [0]);
}

#[test]
fn a_slot_that_is_not_open_learns_nothing() {
    let mut index = index(1000);
    index.learn(5, &blocks([1]), NOW);
    index.open(usize::MAX, None);
    index.learn(usize::MAX, &blocks([1]), NOW);
    index.forget(usize::MAX);
    assert_eq!((index.pairs(), index.held(5)), (0, 0));
    assert_eq!(depths(&mut index, &blocks([1]), NOW), [] as [u32; 0]);
}

#[test]
fn a_full_worker_loses_the_least_recently_used_last_block_first() {
    let mut index = index(1000);
    index.open(0, Some(6));
    index.learn(0, &blocks([1, 2, 3]), NOW);
    index.learn(0, &blocks([1, 4, 5]), NOW);
    assert_eq!(index.held(0), 5);
    index.learn(0, &blocks([6, 7]), NOW);
    assert_eq!(index.held(0), 6);
    assert_eq!(depths(&mut index, &blocks([1, 2, 3]), NOW), [2]);
    index.learn(0, &blocks([6, 7, 8]), NOW);
    assert_eq!(depths(&mut index, &blocks([1, 2, 3]), NOW), [1]);
    assert_eq!(depths(&mut index, &blocks([1, 4, 5]), NOW), [3]);
    assert_eq!(depths(&mut index, &blocks([6, 7, 8]), NOW), [3]);
}

#[test]
fn of_a_prompt_longer_than_the_cache_the_first_blocks_stay() {
    let mut index = index(1000);
    index.open(0, Some(3));
    index.learn(0, &blocks([9, 8]), NOW);
    index.learn(0, &blocks([1, 2, 3, 4, 5]), NOW);
    assert_eq!(depths(&mut index, &blocks([1, 2, 3, 4, 5]), NOW), [3]);
    assert_eq!(index.held(0), 3);
}

#[test]
fn blocks_of_a_worker_of_unknown_capacity_count_for_a_time() {
    let mut index = index(1000);
    index.open(0, None);
    index.open(1, Some(100));
    for slot in [0, 1] {
        index.learn(slot, &blocks([1, 2, 3]), NOW);
        index.learn(slot, &blocks([1]), NOW + Duration::from_secs(60));
    }
    assert_eq!(depths(&mut index, &blocks([1, 2, 3]), NOW + TTL), [3, 3]);
    let later = NOW + TTL + Duration::from_millis(100);
    assert_eq!(depths(&mut index, &blocks([1, 2, 3]), later), [1, 3]);
    let latest = later + Duration::from_secs(60);
    assert_eq!(depths(&mut index, &blocks([1, 2, 3]), latest), [0, 3]);
    // The clock steps back: nothing expires.
    assert_eq!(
        depths(&mut index, &blocks([1, 2, 3]), NOW - TTL * 2),
        [3, 3]
    );
    // Expired blocks are swept while others learn.
    index.learn(1, &blocks([4]), latest);
    index.learn(1, &blocks([4]), latest);
    assert_eq!((index.held(0), index.held(1)), (0, 4));
}

#[test]
fn a_slot_opened_anew_knows_nothing_of_its_former_worker() {
    let mut index = index(1000);
    index.open(0, Some(10));
    index.learn(0, &blocks([1, 2, 3]), NOW);
    index.forget(0);
    assert_eq!((index.held(0), index.pairs()), (0, 3));
    assert_eq!(depths(&mut index, &blocks([1, 2, 3]), NOW), [0]);
    index.open(0, Some(10));
    assert_eq!(depths(&mut index, &blocks([1, 2, 3]), NOW), [0]);
    index.learn(0, &blocks([1, 2]), NOW);
    assert_eq!(depths(&mut index, &blocks([1, 2, 3]), NOW), [2]);
    assert_eq!((index.held(0), index.pairs()), (2, 2));
}

#[test]
fn an_open_slot_that_is_opened_again_keeps_what_its_new_capacity_allows() {
    let mut index = index(1000);
    index.open(0, None);
    index.learn(0, &blocks([1, 2, 3, 4]), NOW);
    index.open(0, Some(2));
    assert_eq!(index.held(0), 2);
    assert_eq!(depths(&mut index, &blocks([1, 2, 3, 4]), NOW), [2]);
}

#[test]
fn at_the_bound_forgotten_workers_give_way_first_and_then_the_fullest() {
    let mut index = index(100);
    index.open(0, None);
    index.open(1, None);
    index.open(2, None);
    index.learn(0, &prompt(1, 60), NOW);
    index.learn(1, &prompt(2, 40), NOW);
    index.forget(0);
    index.learn(2, &prompt(3, 30), NOW);
    assert_eq!((index.pairs(), index.held(1), index.held(2)), (84, 40, 30));
    index.learn(2, &prompt(4, 30), NOW);
    assert_eq!((index.pairs(), index.held(1), index.held(2)), (100, 40, 60));
    index.learn(1, &prompt(5, 5), NOW);
    assert_eq!((index.pairs(), index.held(1), index.held(2)), (100, 45, 55));
    assert_eq!(depths(&mut index, &prompt(3, 30), NOW), [0, 0, 25]);
    // One prompt alone stays within the bound.
    index.learn(1, &prompt(6, 1000), NOW);
    assert_eq!(index.pairs(), 100);
    index.check();
}

#[test]
fn a_thousand_workers_may_hold_the_same_prompt() {
    let mut index = index(1_000_000);
    let system = prompt(1, 16);
    for slot in 0..1000 {
        index.open(slot, Some(64));
        index.learn(slot, &prompt(slot as u64 + 2, 10), NOW);
        index.learn(slot, &system, NOW);
    }
    assert_eq!(depths(&mut index, &system, NOW), [16; 1000]);
    // Each worker loses a different part of the prompt, and one in seven all of it.
    for slot in 0..1000 {
        if slot % 7 == 0 {
            index.forget(slot);
            continue;
        }
        let room = 64 - 16 + slot as u64 % 17;
        index.learn(slot, &prompt(5000 + slot as u64, room), NOW);
    }
    let expected: Vec<u32> = (0..1000)
        .map(|slot| if slot % 7 == 0 { 0 } else { 16 - slot % 17 })
        .collect();
    assert_eq!(depths(&mut index, &system, NOW), expected);
    index.check();
    // Few remaining holders form a list again.
    (0..1000)
        .filter(|slot| ![1, 20, 300, 998].contains(slot))
        .for_each(|slot| index.forget(slot));
    index.sweep_all();
    assert_eq!(index.held.count().1, 0);
    index.check();
    (0..1000).for_each(|slot| index.forget(slot));
    index.sweep_all();
    index.assert_empty();
}

#[test]
fn time_runs_out_for_each_of_a_crowd_by_itself() {
    let mut index = index(1_000_000);
    let system = prompt(1, 4);
    let at = |slot: usize| NOW + Duration::from_secs(slot as u64);
    for slot in 0..100 {
        index.open(slot, None);
        index.learn(slot, &system, NOW);
        index.learn(slot, &prompt(1, 2), at(slot));
    }
    let expected = |seconds: u64| -> Vec<u32> {
        (0..100)
            .map(|slot| {
                if seconds == 0 {
                    4
                } else {
                    u32::from(slot >= seconds) * 2
                }
            })
            .collect()
    };
    for seconds in [0, 1, 50, 99, 100] {
        assert_eq!(
            depths(
                &mut index,
                &system,
                NOW + TTL + Duration::from_secs(seconds)
            ),
            expected(seconds)
        );
    }
}

#[test]
fn numbers_of_holders_run_out_and_come_back() {
    let mut index = index(1_000_000);
    for slot in 0..MOST_HOLDERS {
        index.open(slot, None);
        index.learn(slot, &blocks([1]), NOW);
    }
    index.forget(3);
    index.open(3, None);
    index.learn(3, &blocks([1]), NOW);
    assert_eq!(
        (index.held(3), index.held(MOST_HOLDERS - 1), index.pairs()),
        (0, 1, MOST_HOLDERS)
    );
    index.learn(4, &blocks([1]), NOW);
    index.learn(3, &blocks([1]), NOW);
    assert_eq!((index.held(3), index.pairs()), (1, MOST_HOLDERS));
}

#[test]
fn a_pair_takes_at_most_32_bytes() {
    let mut index = index(1_000_000);
    (0..8).for_each(|slot| index.open(slot, Some(20_000)));
    for seed in 0..100_000 / 24 {
        index.learn(seed as usize % 8, &prompt(seed, 24), NOW);
    }
    let (bytes, pairs) = (index.bytes(), index.pairs());
    assert!(bytes <= pairs * 32, "{bytes} bytes for {pairs} pairs");
    // Repeated use does not grow the index.
    for seed in 0..100_000 / 24 {
        index.learn(seed as usize % 8, &prompt(seed, 24), NOW);
    }
    assert!(index.bytes() <= bytes + 1024);
    // With every block held by all workers, a pair takes no more.
    for seed in 0..100_000 / 24 / 8 {
        for slot in 0..8 {
            index.learn(slot, &prompt(seed, 24), NOW);
        }
    }
    assert!(index.bytes() <= index.pairs() * 32);
}

/// A reference model of the index, as simple as possible.
struct Model {
    slots: Vec<Option<Worker>>,
    max_pairs: usize,
    gone: usize,
    uses: usize,
}

#[derive(Default)]
struct Worker {
    capacity: Option<u32>,
    /// The last use of a block, in uses and in time, by the block and all before it.
    blocks: HashMap<(u64, Vec<u64>), (usize, Duration)>,
}

impl Worker {
    fn lose(&mut self, count: usize) {
        for _ in 0..count {
            let first = self
                .blocks
                .iter()
                .min_by_key(|((_, key), (used, _))| (*used, usize::MAX - key.len()));
            let key = first.map(|(key, _)| key.clone()).unwrap();
            self.blocks.remove(&key);
        }
    }

    fn depth(&self, blocks: &Blocks, now: Duration) -> u32 {
        let key = |depth: usize| (blocks.scope, blocks.sequence[..depth].to_vec());
        let counts = |depth: &usize| {
            let used = self.blocks.get(&key(*depth));
            used.is_some_and(|(_, at)| self.capacity.is_some() || now <= *at + TTL)
        };
        (1..=blocks.sequence.len()).take_while(counts).count() as u32
    }
}

impl Model {
    fn open(&mut self, slot: usize, capacity: Option<u32>) {
        let worker = self.slots[slot].get_or_insert_default();
        worker.capacity = capacity;
        let room = capacity.map_or(usize::MAX, |capacity| capacity as usize);
        worker.lose(worker.blocks.len().saturating_sub(room));
    }

    fn forget(&mut self, slot: usize) {
        self.gone += self.slots[slot]
            .take()
            .map_or(0, |worker| worker.blocks.len());
    }

    fn learn(&mut self, slot: usize, blocks: &Blocks, now: Duration) {
        let Some(worker) = &mut self.slots[slot] else {
            return;
        };
        self.uses += 1;
        let room = worker
            .capacity
            .map_or(usize::MAX, |capacity| capacity as usize);
        let count = blocks.sequence.len().min(room).min(self.max_pairs);
        for depth in 1..=count {
            let key = (blocks.scope, blocks.sequence[..depth].to_vec());
            worker.blocks.insert(key, (self.uses, now));
        }
        worker.lose(worker.blocks.len().saturating_sub(room));
        self.gone = self.gone.saturating_sub(count + SWEPT_BESIDES);
        while self.pairs() > self.max_pairs {
            let excess = self.pairs() - self.max_pairs;
            if self.gone > 0 {
                self.gone = self.gone.saturating_sub(excess);
                continue;
            }
            let workers = self.slots.iter_mut().flatten().rev();
            let fullest = workers.max_by_key(|worker| worker.blocks.len()).unwrap();
            fullest.lose(excess.min(fullest.blocks.len().div_ceil(8)));
        }
    }

    fn pairs(&self) -> usize {
        let held = self
            .slots
            .iter()
            .flatten()
            .map(|worker| worker.blocks.len());
        held.sum::<usize>() + self.gone
    }
}

#[derive(Debug, Clone)]
enum Step {
    Open(usize, Option<u32>),
    Forget(usize),
    /// A number of workers in a row, from a slot on, are sent the same prompt.
    Learn(usize, usize, Blocks),
    Look(Blocks),
    Wait(u64),
}

fn a_prompt() -> impl Strategy<Value = Blocks> {
    let sequence = prop::collection::vec(0..3_u64, 0..8);
    (0..2_u64, sequence).prop_map(|(scope, sequence)| Blocks {
        scope,
        sequence,
        run_length: RunLength::Even,
    })
}

fn a_step(slots: usize) -> impl Strategy<Value = Step> {
    let capacity = prop_oneof![Just(None), (0..20_u32).prop_map(Some)];
    prop_oneof![
        2 => (0..slots, capacity).prop_map(|(slot, capacity)| Step::Open(slot, capacity)),
        2 => (0..slots).prop_map(Step::Forget),
        6 => (0..slots, 1..4_usize, a_prompt()).prop_map(|(slot, count, blocks)| Step::Learn(slot, count, blocks)),
        1 => (0..slots, 1..slots + 1, a_prompt()).prop_map(|(slot, count, blocks)| Step::Learn(slot, count, blocks)),
        2 => a_prompt().prop_map(Step::Look),
        1 => (1..900_u64).prop_map(Step::Wait),
    ]
}

/// Decides what can be compared: with a running clock, expired blocks may linger.
#[derive(Clone, Copy, PartialEq)]
enum Clock {
    Stands,
    Runs,
}

fn same_as_model(slots: usize, max_pairs: usize, clock: Clock, steps: Vec<Step>) {
    let mut index = index(max_pairs);
    let mut model = Model {
        slots: (0..slots).map(|_| Some(Worker::default())).collect(),
        max_pairs,
        gone: 0,
        uses: 0,
    };
    (0..slots).for_each(|slot| index.open(slot, None));
    let mut now = NOW;
    let mut asked = Blocks::default();
    for step in steps {
        match step {
            // A new capacity may revive expired blocks that are not swept yet.
            Step::Open(slot, _) if clock == Clock::Runs && model.slots[slot].is_some() => {}
            Step::Open(slot, capacity) => {
                index.open(slot, capacity);
                model.open(slot, capacity);
            }
            Step::Forget(slot) => {
                index.forget(slot);
                model.forget(slot);
            }
            Step::Learn(slot, count, blocks) => {
                for slot in slot..(slot + count).min(slots) {
                    index.learn(slot, &blocks, now);
                    model.learn(slot, &blocks, now);
                }
                asked = blocks;
            }
            Step::Look(blocks) => asked = blocks,
            Step::Wait(tenths) if clock == Clock::Runs => {
                now += Duration::from_millis(tenths * 100)
            }
            Step::Wait(_) => {}
        }
        let workers = model.slots.iter().map(Option::as_ref);
        let expected: Vec<u32> = workers
            .clone()
            .map(|worker| worker.map_or(0, |worker| worker.depth(&asked, now)))
            .collect();
        assert_eq!(depths(&mut index, &asked, now), expected);
        if clock == Clock::Stands {
            let held: Vec<usize> = (0..slots).map(|slot| index.held(slot)).collect();
            let expected: Vec<usize> = workers
                .map(|worker| worker.map_or(0, |worker| worker.blocks.len()))
                .collect();
            assert_eq!(held, expected);
            assert_eq!(index.pairs(), model.pairs());
        }
        assert!(index.pairs() <= max_pairs);
        index.check();
    }
    (0..slots).for_each(|slot| index.forget(slot));
    index.sweep_all();
    index.assert_empty();
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

    #[test]
    fn few_workers_hold_what_the_model_says(steps in prop::collection::vec(a_step(5), 0..300)) {
        same_as_model(5, 60, Clock::Stands, steps);
    }

    #[test]
    fn many_workers_hold_what_the_model_says(steps in prop::collection::vec(a_step(150), 0..200)) {
        same_as_model(150, 1500, Clock::Stands, steps);
    }

    #[test]
    fn time_runs_out_as_the_model_says(steps in prop::collection::vec(a_step(30), 0..300)) {
        same_as_model(30, 1_000_000, Clock::Runs, steps);
    }
}
