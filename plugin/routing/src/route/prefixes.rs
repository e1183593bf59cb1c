//! Owns what workers are estimated to hold of prompts: the prefix index, the ranks with a slot in it, and the decisions to
//! be shared with other VMs.

use std::mem::take;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;

use super::choice::Chosen;
use crate::config::Pool;
use crate::fleet::{TargetKey, Worker};
use crate::load::Ledger;
use crate::prefix::index::{Bounds, Index};
use crate::prefix::{Blocks, Decision, MOST_BLOCKS_TOLD};

/// Decisions pending at most: those of a second of one busy thread.
const MOST_PENDING: usize = 4096;

/// A rank's entry in the prefix index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Opened {
    slot: usize,
    capacity: Option<u32>,
}

/// The prefixes that workers are estimated to hold.
#[derive(Debug)]
pub(super) struct Prefixes {
    index: Index,
    /// The ranks with a slot in the index.
    opened: HashMap<TargetKey, Opened>,
    /// The decisions to be shared with other VMs. None: they are not shared.
    pending: Option<Vec<Decision>>,
    /// Leading blocks of the prompt last looked up that each slot holds, kept to reuse its memory; empty: not looked up.
    depths: Vec<u32>,
}

impl Prefixes {
    /// An empty index, as large as the pool allows.
    pub(super) fn new(pool: &Pool) -> Self {
        Self {
            index: Index::new(Bounds {
                max_pairs: pool.prefixes.max_blocks,
                ttl: Duration::from_millis(pool.prefixes.ttl_ms),
            }),
            opened: HashMap::new(),
            pending: None,
            depths: Vec::new(),
        }
    }

    /// Starts over if the block size or the index's bounds have changed.
    pub(super) fn reconfigure(&mut self, before: &Pool, pool: &Pool) {
        if before.block_tokens != pool.block_tokens || before.prefixes != pool.prefixes {
            let Self { index, opened, .. } = Self::new(pool);
            (self.index, self.opened) = (index, opened);
        }
    }

    /// Forgets the ranks that do not stay.
    pub(super) fn keep(&mut self, stays: impl Fn(&TargetKey) -> bool) {
        let Self { index, opened, .. } = self;
        opened.retain(|key, known| {
            let stays = stays(key);
            if !stays {
                index.forget(known.slot);
            }
            stays
        });
    }

    /// Opens slots for new ranks, each with its capacity in blocks. Ranks with a changed capacity keep their blocks, as far
    /// as they fit.
    pub(super) fn open(
        &mut self,
        ranks: impl Iterator<Item = (TargetKey, Option<u32>)>,
        ledger: &mut Ledger,
    ) {
        for (key, capacity) in ranks {
            let now = Opened {
                slot: ledger.slot(key),
                capacity,
            };
            if self.opened.insert(key, now) != Some(now) {
                self.index.open(now.slot, capacity);
            }
        }
    }

    /// Forgets the blocks of a worker that has presumably lost its cache.
    pub(super) fn forget_cache(&mut self, worker: &Arc<Worker>) {
        for target in worker.targets() {
            if let Some(opened) = self.opened.get(&target.key()) {
                self.index.forget(opened.slot);
                self.index.open(opened.slot, opened.capacity);
            }
        }
    }

    /// KV blocks that a worker is estimated to hold, over all its ranks.
    pub(super) fn held(&self, worker: &Arc<Worker>) -> usize {
        let opened = |target| self.opened.get(&target);
        let slots = worker.targets().filter_map(|target| opened(target.key()));
        slots.map(|opened| self.index.held(opened.slot)).sum()
    }

    /// Looks up how much of a prompt each rank holds; none: it matters to no choice.
    pub(super) fn look_up(&mut self, blocks: Option<&Blocks>, now: Duration) {
        match blocks {
            Some(blocks) => self.index.depths(blocks, now, &mut self.depths),
            None => self.depths.clear(),
        }
    }

    /// Leading blocks of the prompt last looked up that each slot holds.
    pub(super) fn depths(&self) -> &[u32] {
        &self.depths
    }

    /// Leading blocks of the prompt last looked up that a slot holds.
    pub(super) fn depth(&self, slot: usize) -> u32 {
        self.depths.get(slot).copied().unwrap_or(0)
    }

    /// The most of the prompt last looked up that any of these slots holds.
    pub(super) fn deepest(&self, slots: impl Iterator<Item = usize>) -> u32 {
        match self.depths.is_empty() {
            true => 0,
            false => slots.map(|slot| self.depth(slot)).max().unwrap_or(0),
        }
    }

    /// Records that the chosen rank will hold these blocks, and keeps the decision if it was new to the rank.
    pub(super) fn remember(&mut self, chosen: &Chosen, blocks: &Blocks, now: Duration) {
        let added = self.index.learn(chosen.slot, blocks, now);
        let known = blocks.sequence.len().saturating_sub(added as usize);
        if let Some(pending) = &mut self.pending
            && added > 0
            && known < MOST_BLOCKS_TOLD
            && pending.len() < MOST_PENDING
        {
            pending.push(Decision {
                key: chosen.key(),
                path: Index::path(blocks, MOST_BLOCKS_TOLD),
            });
        }
    }

    /// Records a decision of another VM, without sharing it again. A rank unknown here is skipped.
    pub(super) fn apply(&mut self, decision: &Decision, now: Duration) {
        if let Some(opened) = self.opened.get(&decision.key) {
            self.index.learn_path(opened.slot, &decision.path, now);
        }
    }

    pub(super) fn keep_decisions(&mut self) {
        self.pending.get_or_insert_default();
    }

    pub(super) fn take_decisions(&mut self) -> Vec<Decision> {
        self.pending.as_mut().map(take).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::fleet::{Role, Target, WorkerId};

    const NOW: Duration = Duration::from_secs(1);

    /// The prefixes of one worker with one open rank, and that rank as chosen.
    fn one_rank() -> (Prefixes, Ledger, Chosen) {
        let document =
            br#"{"pools":[{"name":"p","protocol":"nixl","discovery":{"static":{"workers":[]}}}]}"#;
        let pool = Config::parse(document).unwrap().pools.remove(0);
        let (mut prefixes, mut ledger) = (Prefixes::new(&pool), Ledger::default());
        let worker = Arc::new(Worker::new(WorkerId(1), Role::Prefill, None));
        let target = Target::whole(&worker);
        prefixes.open([(target.key(), None)].into_iter(), &mut ledger);
        let chosen = Chosen {
            slot: ledger.slot(target.key()),
            target,
            overlap: 0,
            possible: 0,
        };
        (prefixes, ledger, chosen)
    }

    fn blocks(sequence: &[u64]) -> Blocks {
        Blocks {
            sequence: sequence.to_vec(),
            ..Blocks::default()
        }
    }

    fn depth(prefixes: &mut Prefixes, slot: usize, sequence: &[u64]) -> u32 {
        prefixes.look_up(Some(&blocks(sequence)), NOW);
        prefixes.depth(slot)
    }

    #[test]
    fn a_rank_holds_what_it_was_sent_until_its_cache_is_lost_or_it_leaves() {
        let (mut prefixes, mut ledger, chosen) = one_rank();
        prefixes.remember(&chosen, &blocks(&[1, 2]), NOW);
        assert_eq!(depth(&mut prefixes, chosen.slot, &[1, 2, 3]), 2);
        assert_eq!(prefixes.deepest([chosen.slot].into_iter()), 2);
        // An unchanged capacity forgets nothing.
        prefixes.open([(chosen.key(), None)].into_iter(), &mut ledger);
        assert_eq!(prefixes.held(&chosen.target.worker), 2);
        prefixes.forget_cache(&chosen.target.worker);
        assert_eq!(depth(&mut prefixes, chosen.slot, &[1, 2, 3]), 0);

        prefixes.remember(&chosen, &blocks(&[1, 2]), NOW);
        prefixes.keep(|_| false);
        assert_eq!(prefixes.held(&chosen.target.worker), 0);
    }

    #[test]
    fn nothing_is_held_of_a_prompt_that_is_not_looked_up() {
        let (mut prefixes, _, chosen) = one_rank();
        prefixes.remember(&chosen, &blocks(&[1]), NOW);
        assert_eq!(depth(&mut prefixes, chosen.slot, &[1]), 1);
        prefixes.look_up(None, NOW);
        assert_eq!(prefixes.depth(chosen.slot), 0);
        assert_eq!(prefixes.deepest([chosen.slot].into_iter()), 0);
    }

    #[test]
    fn a_decision_is_kept_if_asked_for_and_applied_without_being_kept_again() {
        let (mut prefixes, _, chosen) = one_rank();
        prefixes.remember(&chosen, &blocks(&[1]), NOW);
        assert!(prefixes.take_decisions().is_empty());
        prefixes.keep_decisions();
        prefixes.remember(&chosen, &blocks(&[1]), NOW);
        assert!(prefixes.take_decisions().is_empty());
        prefixes.remember(&chosen, &blocks(&[1, 2]), NOW);
        let [decision] = prefixes.take_decisions().try_into().unwrap();
        assert_eq!(decision.key, chosen.key());

        let (mut others, _, chosen) = one_rank();
        others.keep_decisions();
        others.apply(&decision, NOW);
        assert_eq!(depth(&mut others, chosen.slot, &[1, 2]), 2);
        assert!(others.take_decisions().is_empty());
    }
}
