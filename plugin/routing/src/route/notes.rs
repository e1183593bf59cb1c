//! Owns what is noted until it is taken: picks of each worker, the possible and chosen overlap of prompts' prefixes,
//! unexpected hosts in hand-offs, and hand-offs that no worker will fetch.

use std::collections::BTreeMap;
use std::mem::take;
use std::sync::Arc;

use hashbrown::{HashMap, HashSet};

use super::choice::Chosen;
use super::selection_request::Demand;
use crate::excerpt::{NAME, excerpt};
use crate::fleet::{Fleet, Role, Worker, WorkerId};
use crate::handoff::hosts::{self, Oddity};
use crate::model_state::ModelKey;
use crate::network::Network;
use crate::prefix::Blocks;

/// Remarks kept until they are taken; further ones are dropped.
const MOST_REMARKS: usize = 64;

/// Counts of decisions.
#[derive(Debug, Default)]
pub struct Tally {
    /// Full KV blocks of the prompts for which a worker that reads prompts was picked.
    pub prompt_blocks: u64,
    /// Leading blocks of these prompts that some eligible worker was estimated to hold.
    pub possible_blocks: u64,
    /// Leading blocks of these prompts that the picked worker was estimated to hold.
    pub chosen_blocks: u64,
    /// Bytes of request bodies read.
    pub body_bytes: u64,
    /// Number of these prompts by the part of their blocks that the picked worker was estimated to hold, in whole percents.
    pub hits: BTreeMap<u8, u64>,
    /// How often each worker was picked.
    pub picks: HashMap<(WorkerId, Role), Picks>,
}

/// Picks of one worker.
#[derive(Debug)]
pub struct Picks {
    /// The worker.
    pub worker: Arc<Worker>,
    /// Number of picks.
    pub count: u64,
}

/// What a request is counted under when it ends.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    /// The model that it was routed to, as served by workers; none: not routed, or its API names no model.
    pub model: Option<Arc<str>>,
    /// Tokens of its prompt, as the router counts them: exact if they came as ids.
    pub prompt_tokens: u64,
}

impl Facts {
    /// The facts of a request. The model is that of the model key, not the client's, so that its values are bounded.
    pub(super) fn of(key: &ModelKey, demand: &Demand) -> Self {
        Self {
            model: key.model.as_deref().map(Arc::from),
            prompt_tokens: demand.prompt_tokens,
        }
    }
}

/// Hand-offs that no worker will fetch: their blocks stay until their lease ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Lost {
    /// Hand-offs.
    pub handoffs: u64,
    /// KV blocks in them.
    pub blocks: u64,
}

/// Notes until they are taken.
#[derive(Debug, Default)]
pub(super) struct Notes {
    tally: Tally,
    remarks: Vec<String>,
    /// Workers already reported for hand-offs that name a host other than their own.
    warned: HashSet<WorkerId>,
    lost: Lost,
}

impl Notes {
    /// Counts a body that was read.
    pub(super) fn read(&mut self, bytes: usize) {
        self.tally.body_bytes = self.tally.body_bytes.saturating_add(bytes as u64);
    }

    /// Counts a worker taken for a prompt of these blocks.
    pub(super) fn count(&mut self, role: Role, blocks: &Blocks, chosen: &Chosen) {
        let Tally {
            prompt_blocks,
            possible_blocks,
            chosen_blocks,
            hits,
            picks,
            ..
        } = &mut self.tally;
        let worker = &chosen.target.worker;
        let picks = picks.entry((worker.id, role)).or_insert_with(|| Picks {
            worker: Arc::clone(worker),
            count: 0,
        });
        picks.count = picks.count.saturating_add(1);
        // The prompt is read once, by the worker that prefills.
        if role == Role::Decode || blocks.sequence.is_empty() {
            return;
        }
        let count = u64::from(blocks.count());
        let percent = u64::from(chosen.overlap).saturating_mul(100) / count.max(1);
        let hit = hits.entry(percent.min(100) as u8).or_default();
        *hit = hit.saturating_add(1);
        *prompt_blocks = prompt_blocks.saturating_add(count);
        *possible_blocks = possible_blocks.saturating_add(u64::from(chosen.possible));
        *chosen_blocks = chosen_blocks.saturating_add(u64::from(chosen.overlap));
    }

    /// Whether decode may fetch from the hosts that this worker's hand-off names, by the pool's networks.
    pub(super) fn allow_hosts(
        &mut self,
        worker: &Worker,
        named: &[String],
        networks: &[Network],
    ) -> bool {
        let own = worker.address.map(|address| address.ip());
        let name = &worker.name;
        match hosts::look(named, own, networks) {
            None => true,
            Some(Oddity::Elsewhere(host)) => {
                let host = excerpt(host, NAME);
                if self.warned.insert(worker.id) {
                    self.remark(format!(
                        "the hand-offs of prefill worker {name} name the host {host}, which is not its own address"
                    ));
                }
                true
            }
            Some(Oddity::Outside(host)) => {
                let host = excerpt(host, NAME);
                self.remark(format!(
                    "a hand-off of prefill worker {name} names the host {host}, which lies in none of handoff.networks"
                ));
                false
            }
        }
    }

    fn remark(&mut self, remark: String) {
        if self.remarks.len() < MOST_REMARKS {
            self.remarks.push(remark);
        }
    }

    /// Counts a hand-off whose blocks no worker will fetch.
    pub(super) fn lose(&mut self, blocks: u64) {
        self.lost.handoffs = self.lost.handoffs.saturating_add(1);
        self.lost.blocks = self.lost.blocks.saturating_add(blocks);
    }

    /// Forgets workers that are not in the fleet.
    pub(super) fn keep(&mut self, fleet: &Fleet) {
        self.warned.retain(|id| fleet.contains(*id));
    }

    pub(super) fn take_tally(&mut self) -> Tally {
        take(&mut self.tally)
    }

    pub(super) fn take_lost(&mut self) -> Lost {
        take(&mut self.lost)
    }

    pub(super) fn take_remarks(&mut self) -> Vec<String> {
        take(&mut self.remarks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::Target;

    fn worker(address: &str) -> Arc<Worker> {
        let address = address.parse().unwrap();
        Arc::new(Worker::new(WorkerId(1), Role::Prefill, Some(address)))
    }

    #[test]
    fn the_prompt_counts_once_for_a_pair() {
        let worker = worker("10.0.0.1:80");
        let chosen = Chosen {
            target: Target::whole(&worker),
            slot: 0,
            overlap: 1,
            possible: 2,
        };
        let blocks = Blocks {
            sequence: vec![1, 2, 3, 4],
            ..Blocks::default()
        };
        let mut notes = Notes::default();
        notes.count(Role::Prefill, &blocks, &chosen);
        notes.count(Role::Decode, &blocks, &chosen);
        let tally = notes.take_tally();
        assert_eq!(tally.picks.len(), 2);
        let Tally {
            prompt_blocks,
            possible_blocks,
            chosen_blocks,
            ..
        } = tally;
        assert_eq!((prompt_blocks, possible_blocks, chosen_blocks), (4, 2, 1));
        assert_eq!(tally.hits, BTreeMap::from([(25, 1)]));
        assert!(notes.take_tally().picks.is_empty());
    }

    #[test]
    fn a_foreign_host_is_remarked_once_and_a_forbidden_one_each_time_up_to_a_number() {
        let (worker, mut notes) = (worker("10.0.0.1:80"), Notes::default());
        let foreign = ["10.0.0.2".to_owned()];
        for _ in 0..2 {
            assert!(notes.allow_hosts(&worker, &foreign, &[]));
        }
        assert_eq!(notes.take_remarks().len(), 1);
        notes.keep(&Fleet::default());
        assert!(notes.allow_hosts(&worker, &foreign, &[]));
        assert_eq!(notes.take_remarks().len(), 1);

        let networks = ["10.0.1.0/24".parse().unwrap()];
        for _ in 0..100 {
            assert!(!notes.allow_hosts(&worker, &foreign, &networks));
        }
        assert_eq!(notes.take_remarks().len(), MOST_REMARKS);
    }
}
