//! Owns the notes on hand-offs: unexpected hosts, and hand-offs that no worker will fetch.

use hashbrown::HashSet;

use super::Router;
use crate::excerpt::{NAME, excerpt};
use crate::fleet::{Worker, WorkerId};
use crate::handoff::hosts::{self, Oddity};

/// Remarks kept until they are taken; further ones are dropped.
const MOST_REMARKS: usize = 64;

/// Hand-offs that no worker will fetch: their blocks stay until their lease ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Lost {
    /// Hand-offs.
    pub handoffs: u64,
    /// KV blocks in them.
    pub blocks: u64,
}

/// Notes on hand-offs until they are taken.
#[derive(Debug, Default)]
pub(super) struct Noted {
    remarks: Vec<String>,
    /// Workers already reported for hand-offs that name a host other than their own.
    warned: HashSet<WorkerId>,
    lost: Lost,
}

impl Noted {
    /// Forgets workers that left.
    pub(super) fn keep(&mut self, is_there: impl Fn(WorkerId) -> bool) {
        self.warned.retain(|id| is_there(*id));
    }

    fn remark(&mut self, remark: String) {
        if self.remarks.len() < MOST_REMARKS {
            self.remarks.push(remark);
        }
    }
}

/// Whether decode may be sent to the hosts of a hand-off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Allowed {
    Yes,
    No,
}

impl Router {
    /// Checks the hosts that this worker's hand-off names for decode to fetch from.
    pub(super) fn allow_hosts(&mut self, worker: &Worker, named: &[String]) -> Allowed {
        let own = worker.address.map(|address| address.ip());
        let name = &worker.name;
        match hosts::look(named, own, &self.pool.handoff.networks) {
            None => Allowed::Yes,
            Some(Oddity::Elsewhere(host)) => {
                let host = excerpt(host, NAME);
                if self.noted.warned.insert(worker.id) {
                    self.noted.remark(format!(
                        "the hand-offs of prefill worker {name} name the host {host}, which is not its own address"
                    ));
                }
                Allowed::Yes
            }
            Some(Oddity::Outside(host)) => {
                let host = excerpt(host, NAME);
                self.noted.remark(format!(
                    "a hand-off of prefill worker {name} names the host {host}, which lies in none of handoff.networks"
                ));
                Allowed::No
            }
        }
    }

    /// Counts a hand-off whose blocks no worker will fetch.
    pub(super) fn lose(&mut self, blocks: u64) {
        let lost = &mut self.noted.lost;
        lost.handoffs = lost.handoffs.saturating_add(1);
        lost.blocks = lost.blocks.saturating_add(blocks);
    }

    /// Takes the hand-offs lost since the last call.
    pub fn take_lost(&mut self) -> Lost {
        std::mem::take(&mut self.noted.lost)
    }

    /// Takes the remarks on hand-offs since the last call.
    pub fn take_remarks(&mut self) -> Vec<String> {
        std::mem::take(&mut self.noted.remarks)
    }
}
