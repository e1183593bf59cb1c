//! Owns an answer's verdict: its content so far, and how it ended.

use super::event::{DocumentFacts, Ends};
use super::usage;

/// State of an answer so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// No content yet: a role alone, comments, the placeholder for a text to come.
    Nothing,
    /// Generated content, or something not understood here, which may be content.
    Content,
    /// Ended with a reason, with or without content before.
    Ended(End),
    /// Over without content: no choices, no reason for the end, or the engine gave up before the first token.
    Empty,
    /// Reports a failure, whatever came before.
    Failed(Why),
}

/// What ended an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Generation itself: a stop, a tool call, a filter.
    Itself,
    /// The token limit.
    Limit,
}

/// How an answer reports a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// An error in the answer.
    Error,
    /// The engine gave up midway.
    GaveUp,
}

/// Whether an answer may go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// More may come.
    Open,
    /// Nothing more that counts.
    Over,
}

/// Sum of the documents of one answer.
#[derive(Debug, Default)]
pub(super) struct DocumentTotals {
    /// Events that carried tokens, counted per choice.
    counted: u64,
    reported_tokens: Option<u64>,
    says: bool,
    error: bool,
    ends: Ends,
    is_last: bool,
    is_unknown: bool,
}

impl DocumentTotals {
    pub(super) fn take(&mut self, facts: &DocumentFacts) {
        self.counted = self.counted.saturating_add(facts.tokens);
        self.reported_tokens = facts.reported_tokens.or(self.reported_tokens);
        self.says |= facts.says;
        self.error |= facts.error;
        self.ends.merge(facts.ends);
        self.is_last |= facts.is_last;
        self.is_unknown |= facts.is_unknown;
    }

    /// Ends the stream: its last event.
    pub(super) fn take_done(&mut self) {
        self.is_last = true;
    }

    /// Tokens so far: the count in `usage`, else the events that carried any.
    pub(super) fn tokens(&self) -> u64 {
        self.reported_tokens().max(self.counted)
    }

    /// Tokens so far, according to `usage`; 0 without one.
    pub(super) fn reported_tokens(&self) -> u64 {
        self.reported_tokens.unwrap_or(0)
    }

    /// Whether anything was generated. Counted tokens may be hidden, such as reasoning that is not shown.
    pub(super) fn has_content(&self) -> bool {
        self.says || self.tokens() > 0
    }

    /// Whether the last event is there.
    pub(super) fn is_last(&self) -> bool {
        self.is_last
    }

    /// Whether any choice gives a reason for the end.
    pub(super) fn tells_end(&self) -> bool {
        let Ends { itself, limit, .. } = self.ends;
        self.is_last || itself || limit
    }

    /// Reads an unstreamed answer.
    pub(super) fn take_document(&mut self, answer: &[u8]) -> Verdict {
        if answer.trim_ascii().is_empty() {
            return Verdict::Empty;
        }
        self.take(&DocumentFacts::read(answer, ""));
        self.of_document()
    }

    /// Reads the end of an unstreamed answer that is too long to be read: only its token count.
    pub(super) fn take_tail(&mut self, tail: &[u8]) {
        self.reported_tokens = Some(usage::output_tokens(tail));
    }

    /// Verdict of a stream of events.
    pub(super) fn verdict(&self, progress: Progress) -> Verdict {
        let is_over = progress == Progress::Over || self.is_last;
        match self.end() {
            Some(verdict) => verdict,
            None if self.has_content() => Verdict::Content,
            None if is_over => Verdict::Empty,
            None => Verdict::Nothing,
        }
    }

    /// Verdict of an unstreamed answer, which has all of its choices.
    fn of_document(&self) -> Verdict {
        match self.end() {
            None if self.is_unknown => Verdict::Content,
            Some(Verdict::Ended(_)) | None if self.ends.unreported => match self.has_content() {
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
    /// Verdict of an unstreamed JSON answer.
    pub fn of_document(answer: &[u8]) -> Self {
        let mut said = DocumentTotals::default();
        said.take_document(answer)
    }

    /// Verdict of a prefill worker's answer, which was allowed one token. The Responses interface calls complete what other
    /// interfaces call cut off: an answer that used up its token is at its limit, whatever its status. An engine that gave
    /// up has failed.
    pub fn of_prefill(answer: &[u8]) -> Self {
        let facts = DocumentFacts::read(answer, "");
        let mut said = DocumentTotals::default();
        said.take(&facts);
        match said.of_document() {
            Self::Ended(End::Itself)
                if facts.is_called_complete && facts.reported_tokens == Some(1) =>
            {
                Self::Ended(End::Limit)
            }
            Self::Empty if facts.ends.gave_up => Self::Failed(Why::GaveUp),
            verdict => verdict,
        }
    }
}
