//! Owns what of a request matters to a choice.

use std::rc::Rc;

use super::roster::Roster;
use crate::config::KvWeights;
use crate::load::Answer;
use crate::prefill_router::Place;
use crate::prefix::Blocks;
use crate::request::Steering;
use crate::selection::cost::Tracking;
use crate::selection::eligibility::Subset;

/// A request that has been read already: by a body's reader, a trace's or a benchmark's.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// The model, or an adapter of one.
    pub model: &'a str,
    /// The prompt's length in tokens.
    pub prompt_tokens: u64,
    /// The prompt's full blocks; none: nothing is known of it.
    pub blocks: &'a Blocks,
    /// Tokens that the answer is expected to have, where something says so.
    pub expected_tokens: Option<u64>,
    /// The session it belongs to.
    pub session: Option<&'a [u8]>,
}

static NO_BLOCKS: Blocks = Blocks {
    scope: 0,
    sequence: Vec::new(),
};

impl Default for Ask<'_> {
    fn default() -> Self {
        Self {
            model: "",
            prompt_tokens: 1,
            blocks: &NO_BLOCKS,
            expected_tokens: None,
            session: None,
        }
    }
}

/// The same, to be kept: a request may have to be placed again after its body is gone.
#[derive(Debug, Clone)]
pub(super) struct Asked {
    pub(super) prompt_tokens: u64,
    pub(super) blocks: Rc<Blocks>,
    pub(super) expected_tokens: Option<u64>,
    pub(super) session: Option<Rc<[u8]>>,
    pub(super) adapter: Option<Rc<str>>,
    pub(super) subset: Option<Rc<Subset>>,
    pub(super) weights: KvWeights,
    pub(super) tracking: Tracking,
}

impl Asked {
    /// What is asked by one of whom nothing is known.
    pub(super) fn nothing(weights: KvWeights) -> Self {
        Self::of(&Ask::default(), weights)
    }

    pub(super) fn of(ask: &Ask<'_>, weights: KvWeights) -> Self {
        Self {
            prompt_tokens: ask.prompt_tokens,
            blocks: Rc::new(ask.blocks.clone()),
            expected_tokens: ask.expected_tokens,
            session: ask.session.map(Rc::from),
            adapter: None,
            subset: None,
            weights,
            tracking: Tracking::Prefill,
        }
    }

    /// What is booked for its answer.
    pub(super) fn answer(&self, block_tokens: u32) -> Answer {
        Answer {
            prompt_tokens: self.prompt_tokens,
            block_tokens,
            expected_tokens: self.expected_tokens,
        }
    }
}

/// One request at one place: what every step of a choice needs.
#[derive(Debug, Clone)]
pub(super) struct Case<'a> {
    pub(super) place: &'a Place,
    pub(super) roster: Rc<Roster>,
    pub(super) steering: &'a Steering,
    pub(super) asked: &'a Asked,
}
