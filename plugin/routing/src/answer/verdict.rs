//! Owns what an answer comes to: what it has said so far, and how it ended.

use super::event::{Ends, Facts};
use crate::handoff::usage;

/// What an answer has said so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing yet: a role alone, comments, the place for a text to come.
    Nothing,
    /// Something generated; or something that is not understood here, which may be that.
    Content,
    /// It has come to an end that it gives a reason for, with or without content before.
    Ended(End),
    /// It is over, and nothing was generated: no choices, no reason why it ended, or the engine gave up before the first token.
    Empty,
    /// It says that it failed, whatever came before.
    Failed(Why),
}

/// Where an answer has its end from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Generation itself: a stop, a call of a tool, a filter.
    Itself,
    /// The limit of tokens.
    Limit,
}

/// How an answer says that it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// An error is told in it.
    Error,
    /// The engine gave up in the middle of it.
    GaveUp,
}

/// Whether an answer may go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// More may come.
    Open,
    /// Nothing comes any more that counts.
    Over,
}

/// All that the documents of one answer say.
#[derive(Debug, Default)]
pub(super) struct Said {
    /// Events that carried tokens, each choice of them for itself.
    counted: u64,
    told: Option<u64>,
    says: bool,
    error: bool,
    ends: Ends,
    is_last: bool,
    is_unknown: bool,
}

impl Said {
    pub(super) fn take(&mut self, facts: &Facts) {
        self.counted = self.counted.saturating_add(facts.tokens);
        self.told = facts.told.or(self.told);
        self.says |= facts.says;
        self.error |= facts.error;
        self.ends.merge(facts.ends);
        self.is_last |= facts.is_last;
        self.is_unknown |= facts.is_unknown;
    }

    /// The stream's own last word.
    pub(super) fn take_done(&mut self) {
        self.is_last = true;
    }

    pub(super) fn take_count(&mut self, tokens: u64) {
        self.told = Some(tokens);
    }

    /// Tokens so far: what `usage` says, else the events that carried any.
    pub(super) fn tokens(&self) -> u64 {
        self.told().max(self.counted)
    }

    /// Tokens so far, as `usage` says; 0 where it does not.
    pub(super) fn told(&self) -> u64 {
        self.told.unwrap_or(0)
    }

    /// Whether anything was generated. What is counted may be hidden: a thought that is not shown.
    pub(super) fn has_content(&self) -> bool {
        self.says || self.tokens() > 0
    }

    /// Whether nothing comes behind it.
    pub(super) fn is_last(&self) -> bool {
        self.is_last
    }

    /// Whether it says that it ended, in any of its choices.
    pub(super) fn tells_end(&self) -> bool {
        let Ends { itself, limit, .. } = self.ends;
        self.is_last || itself || limit
    }

    /// Takes a whole answer in one piece.
    pub(super) fn take_document(&mut self, answer: &[u8]) -> Verdict {
        if answer.trim_ascii().is_empty() {
            return Verdict::Empty;
        }
        self.take(&Facts::read(answer, ""));
        self.of_document()
    }

    /// Takes the end of an answer in one piece that is too long to be read: what its tail counts.
    pub(super) fn take_tail(&mut self, tail: &[u8]) {
        self.take_count(usage::output_tokens(tail));
    }

    /// What a stream of events has come to.
    pub(super) fn verdict(&self, progress: Progress) -> Verdict {
        let is_over = progress == Progress::Over || self.is_last;
        match self.end() {
            Some(verdict) => verdict,
            None if self.has_content() => Verdict::Content,
            None if is_over => Verdict::Empty,
            None => Verdict::Nothing,
        }
    }

    /// What an answer in one piece comes to, which has all of its choices.
    fn of_document(&self) -> Verdict {
        match self.end() {
            None if self.is_unknown => Verdict::Content,
            Some(Verdict::Ended(_)) | None if self.ends.untold => match self.has_content() {
                true => Verdict::Content,
                false => Verdict::Empty,
            },
            Some(verdict) => verdict,
            None => self.verdict(Progress::Over),
        }
    }

    fn end(&self) -> Option<Verdict> {
        let Ends {
            itself,
            limit,
            gave_up,
            ..
        } = self.ends;
        if self.error {
            return Some(Verdict::Failed(Why::Error));
        }
        if gave_up {
            let is_alone = !(self.says || itself || limit);
            return Some(match is_alone {
                true => Verdict::Empty,
                false => Verdict::Failed(Why::GaveUp),
            });
        }
        match (limit, itself) {
            (true, _) => Some(Verdict::Ended(End::Limit)),
            (_, true) => Some(Verdict::Ended(End::Itself)),
            _ => None,
        }
    }
}

impl Verdict {
    /// What a JSON answer in one piece comes to.
    pub fn of_document(answer: &[u8]) -> Self {
        let mut said = Said::default();
        said.take_document(answer)
    }

    /// What a prefill worker's answer comes to, which was allowed one token. The Responses interface calls complete what other
    /// interfaces call cut off: one that used up its token is at its limit, whatever it says. An engine that gave up has failed.
    pub fn of_prefill(answer: &[u8]) -> Self {
        let facts = Facts::read(answer, "");
        let mut said = Said::default();
        said.take(&facts);
        match said.of_document() {
            Self::Ended(End::Itself) if facts.is_called_complete && facts.told == Some(1) => {
                Self::Ended(End::Limit)
            }
            Self::Empty if facts.ends.gave_up => Self::Failed(Why::GaveUp),
            verdict => verdict,
        }
    }
}
