//! Owns prefix knowledge: how blocks are hashed, and which blocks each worker's cache holds.
//!
//! Knowledge comes from the router's own decisions alone. Engines publish what they really cache as events over ZMQ or
//! NATS, which are out of a proxy filter's reach.

pub mod hash;
pub mod index;

use crate::fleet::TargetKey;

/// Leading sequence hashes of a prompt that are shared with other VMs; those after them stay in this VM.
pub const MOST_BLOCKS_TOLD: usize = 8192;

/// A prompt sent to a worker rank, as shared with other VMs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// The rank.
    pub key: TargetKey,
    /// The index tags of the prompt's leading blocks, from the first on; some are new to that rank.
    pub path: Vec<u32>,
}

/// The sequence hashes of a prompt's full blocks, each covering all blocks before it.
///
/// With graded hashing, not every block of a long prompt has a hash of its own: see [`RunLength`]. A hash covers the prompt
/// up to the end of its run of blocks, so that two prompts that share a hash share all before that end.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Blocks {
    /// Separates prompts that must not share: of different models, and hashed by text or by token ids.
    pub scope: u64,
    /// One sequence hash for each run of full blocks; a partial run at the end has none.
    pub sequence: Vec<u64>,
    /// Length of the runs, in blocks.
    pub run_length: RunLength,
}

/// How many blocks each sequence hash of a prompt stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RunLength {
    /// One block.
    #[default]
    Even,
    /// One block at the beginning, and more further back: 4 from block 16 on, 16 from block 128, 64 from block 512, 256 from
    /// block 2,048. So the shared length is known to a sixth or better, a sixteenth on average, and a prompt of 3,500 blocks
    /// takes 97 hashes to compute, look up, store and share.
    Graded,
}

/// Number of kinds of run, as many as fit into three bits: a run of kind `k` has `4^k` blocks.
pub(crate) const KINDS: u32 = 8;

/// The kind of all runs after those of [`HASHES_BEFORE`].
const LAST: u32 = 4;

/// For each kind, the number of hashes after which its runs end.
const HASHES_BEFORE: [(usize, u32); 4] = [(16, 0), (44, 1), (68, 2), (92, 3)];

/// Blocks of a run of this kind.
#[inline]
pub(crate) fn blocks_of(kind: u32) -> u32 {
    1 << (2 * kind)
}

/// Blocks of at least this many tokens have a hash each: a prompt has few of them.
const LARGE_BLOCK: u32 = 128;

impl RunLength {
    /// The run length for blocks of `block_tokens`.
    pub fn of(block_tokens: u32) -> Self {
        match block_tokens < LARGE_BLOCK {
            true => Self::Graded,
            false => Self::Even,
        }
    }

    /// The kind of the run that hash number `nth` (from 0) stands for.
    #[inline]
    pub(crate) fn kind(self, nth: usize) -> u32 {
        match self {
            Self::Even => 0,
            Self::Graded => {
                let found = HASHES_BEFORE.iter().find(|(before, _)| nth < *before);
                found.map_or(LAST, |(_, kind)| *kind)
            }
        }
    }

    /// Blocks that the first `hashes` hashes stand for.
    pub fn blocks(self, hashes: usize) -> u32 {
        let mut blocks = 0_u64;
        let mut from = 0;
        for (before, kind) in HASHES_BEFORE {
            let of_kind = hashes.min(before).saturating_sub(from) as u64;
            blocks = blocks.saturating_add(of_kind.saturating_mul(self.run(kind)));
            from = before;
        }
        let rest = hashes.saturating_sub(from) as u64;
        blocks = blocks.saturating_add(rest.saturating_mul(self.run(LAST)));
        u32::try_from(blocks).unwrap_or(u32::MAX)
    }

    /// Number of hashes that stand for at most the first `blocks`.
    pub fn hashes(self, blocks: u32) -> usize {
        let mut left = u64::from(blocks);
        let mut from = 0_usize;
        for (before, kind) in HASHES_BEFORE {
            let fitting = usize::try_from(left / self.run(kind)).unwrap_or(usize::MAX);
            if fitting < before.saturating_sub(from) {
                return from.saturating_add(fitting);
            }
            left = left.saturating_sub(
                self.run(kind)
                    .saturating_mul((before.saturating_sub(from)) as u64),
            );
            from = before;
        }
        let rest = usize::try_from(left / self.run(LAST));
        from.saturating_add(rest.unwrap_or(usize::MAX))
    }

    fn run(self, kind: u32) -> u64 {
        match self {
            Self::Even => 1,
            Self::Graded => u64::from(blocks_of(kind)),
        }
    }
}

impl Blocks {
    /// From `hashes`, the sequence hash of every block, keeps those of the runs of length `run_length`.
    pub fn of_hashes(scope: u64, hashes: Vec<u64>, run_length: RunLength) -> Self {
        let sequence = match run_length {
            RunLength::Even => hashes,
            RunLength::Graded => ends_of_runs(&hashes),
        };
        Self {
            scope,
            sequence,
            run_length,
        }
    }

    /// The hash of the first `blocks` together; none where no run ends there.
    pub fn beginning(&self, blocks: u32) -> Option<u64> {
        let hashes = self.run_length.hashes(blocks);
        let ends_there = self.run_length.blocks(hashes) == blocks;
        let last = hashes.checked_sub(1).filter(|_| ends_there)?;
        self.sequence.get(last).copied()
    }

    /// Number of full blocks that the hashes stand for.
    pub fn count(&self) -> u32 {
        self.run_length.blocks(self.sequence.len())
    }
}

fn ends_of_runs(hashes: &[u64]) -> Vec<u64> {
    let mut ends = Vec::new();
    let mut end = 0_usize;
    loop {
        let kind = RunLength::Graded.kind(ends.len());
        end = end.saturating_add(blocks_of(kind) as usize);
        match end.checked_sub(1).and_then(|last| hashes.get(last)) {
            Some(name) => ends.push(*name),
            None => return ends,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graded(hashes: &[u64]) -> Blocks {
        Blocks::of_hashes(1, hashes.to_vec(), RunLength::Graded)
    }

    #[test]
    fn a_graded_prompt_has_few_names_and_loses_little() {
        let hashes: Vec<u64> = (1..=10_000).collect();
        for blocks in [
            0, 1, 15, 16, 17, 19, 20, 127, 128, 143, 144, 511, 512, 575, 576, 2047, 2048, 2303,
            2304, 3500, 10_000,
        ] {
            let found = graded(&hashes[..blocks]);
            let count = found.count() as usize;
            assert!(
                count <= blocks && blocks - count <= blocks / 6,
                "{count} of {blocks}"
            );
            assert_eq!(found.sequence.last().copied().unwrap_or(0), count as u64);
        }
        assert_eq!(graded(&hashes[..3500]).sequence.len(), 97);
        assert_eq!(graded(&hashes[..16]).sequence, hashes[..16]);
    }

    #[test]
    fn what_one_prompt_shares_with_a_longer_one_is_known_under_the_same_names() {
        let hashes: Vec<u64> = (1..=5000).collect();
        let long = graded(&hashes);
        for blocks in (0..5000).step_by(37) {
            let short = graded(&hashes[..blocks]);
            assert!(long.sequence.starts_with(&short.sequence));
        }
    }

    #[test]
    fn names_and_blocks_are_counted_alike() {
        for run_length in [RunLength::Even, RunLength::Graded] {
            for hashes in [0, 1, 15, 16, 17, 43, 44, 45, 67, 68, 69, 91, 92, 93, 400] {
                let blocks = run_length.blocks(hashes);
                assert_eq!(run_length.hashes(blocks), hashes, "{run_length:?}");
                assert_eq!(
                    run_length.hashes(blocks.saturating_sub(1)),
                    hashes.saturating_sub(1)
                );
            }
        }
        let hashes: Vec<u64> = (1..=3000).collect();
        let found = graded(&hashes);
        for power in 0..12 {
            assert_eq!(found.beginning(1 << power), Some(1 << power));
        }
        assert_eq!(
            (
                found.beginning(0),
                found.beginning(17),
                found.beginning(4096)
            ),
            (None, None, None)
        );
    }

    #[test]
    fn even_names_stand_for_a_block_each() {
        assert_eq!(RunLength::Even.blocks(5000), 5000);
        assert_eq!(RunLength::Graded.blocks(92), 2048);
        assert_eq!(RunLength::Graded.blocks(usize::MAX), u32::MAX);
    }
}
