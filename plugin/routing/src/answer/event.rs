//! Owns the reading of one document, in the known shapes: an unstreamed answer, or the data of one event, of chat
//! completions, completions, responses, messages and SGLang's `/generate`; errors.
//!
//! A document of an unknown shape is content: a worker must not be blamed for what is not understood here.

use std::fmt;

use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::value::{AnswerPart, Parts, Reason, Says, Word};
use crate::transfer::IN_ANSWERS;

/// Contents of a document.
#[derive(Debug, Default)]
pub(super) struct DocumentFacts {
    /// Minimum number of tokens in the document.
    pub(super) tokens: u64,
    /// Whether the document carries generated content, even without a token.
    pub(super) says: bool,
    /// Whether the document reports an error.
    pub(super) error: bool,
    /// How the answer, or parts of it, ended.
    pub(super) ends: Ends,
    /// Whether the document is the last event of its stream.
    pub(super) is_last: bool,
    /// Whether the document has an unknown shape: its content may be in fields that are not read here.
    pub(super) is_unknown: bool,
    /// Whether the document's status is complete, as for all answers of some engines, without a reason for the end.
    pub(super) is_called_complete: bool,
    /// Tokens so far, where the document counts them.
    pub(super) reported_tokens: Option<u64>,
}

/// How the choices of an answer ended.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Ends {
    pub(super) itself: bool,
    pub(super) limit: bool,
    pub(super) gave_up: bool,
    /// A choice gives no reason for its end, or has not ended.
    pub(super) unreported: bool,
}

impl Ends {
    fn of(reason: Reason) -> Self {
        let mut ends = Self::default();
        ends.add(reason);
        ends
    }

    fn add(&mut self, reason: Reason) {
        match reason {
            Reason::Unreported => self.unreported = true,
            Reason::Itself => self.itself = true,
            Reason::Limit => self.limit = true,
            Reason::GaveUp => self.gave_up = true,
        }
    }

    pub(super) fn merge(&mut self, other: Self) {
        self.itself |= other.itself;
        self.limit |= other.limit;
        self.gave_up |= other.gave_up;
        self.unreported |= other.unreported;
    }
}

impl DocumentFacts {
    /// Reads `data` of an event of this name; an unstreamed answer has no name.
    pub(super) fn read(data: &[u8], name: &str) -> Self {
        Self::of(data, name).unwrap_or_else(Self::unknown)
    }

    /// Like `read`, but none where the data cannot be read.
    pub(super) fn of(data: &[u8], name: &str) -> Option<Self> {
        let mut json = serde_json::Deserializer::from_slice(data);
        let facts = Named(name).deserialize(&mut json).ok()?;
        json.end().ok().map(|()| facts)
    }

    /// Facts of data that cannot be read.
    pub(super) fn unknown() -> Self {
        Self::token(true)
    }

    /// Facts of an event that is too long to be read.
    pub(super) fn too_long(name: &str) -> Self {
        let known = Fields::default().facts(name);
        match known.error || known.is_last {
            true => known,
            false => Self::unknown(),
        }
    }

    fn token(says: bool) -> Self {
        Self {
            tokens: u64::from(says),
            says,
            ..Self::default()
        }
    }

    fn content(says: bool) -> Self {
        Self {
            says,
            ..Self::default()
        }
    }

    /// Facts of an error.
    pub(super) fn failure() -> Self {
        Self {
            error: true,
            ..Self::default()
        }
    }

    fn ended(ends: Ends) -> Self {
        Self {
            ends,
            ..Self::default()
        }
    }

    fn last(ends: Ends) -> Self {
        Self {
            is_last: true,
            ..Self::ended(ends)
        }
    }

    fn merge(&mut self, other: Self) {
        self.tokens = self.tokens.saturating_add(other.tokens);
        self.says |= other.says;
        self.error |= other.error;
        self.ends.merge(other.ends);
        self.is_last |= other.is_last;
        self.reported_tokens = match (self.reported_tokens, other.reported_tokens) {
            (Some(one), Some(two)) => Some(one.saturating_add(two)),
            (one, two) => one.or(two),
        };
    }
}

/// Whether an event of this name ends its stream normally.
pub(super) fn is_clean_end(name: &str) -> bool {
    matches!(
        name,
        "response.completed" | "response.incomplete" | "message_stop"
    )
}

/// The fields of a document that count.
#[derive(Default)]
struct Fields<'a> {
    kind: Word<'a>,
    object: Word<'a>,
    choices: Option<DocumentFacts>,
    usage: Option<Usage>,
    response: Option<Box<Fields<'a>>>,
    meta: Option<Meta>,
    error: bool,
    status: Word<'a>,
    incomplete: Option<Details<'a>>,
    output: Option<Says>,
    content: Option<Parts>,
    reason: Reason,
    delta: Option<AnswerPart<'a>>,
    block: Option<AnswerPart<'a>>,
    item: Option<AnswerPart<'a>>,
    /// Whether there is text, or ids, at the top level.
    text: bool,
    /// Whether any field of an unknown name has content.
    other: bool,
}

#[derive(Deserialize)]
struct Usage {
    #[serde(default)]
    completion_tokens: Option<u64>,
    #[serde(default)]
    output_tokens: Option<u64>,
}

/// Metadata in a `/generate` answer.
#[derive(Deserialize)]
struct Meta {
    #[serde(default)]
    completion_tokens: Option<u64>,
    #[serde(default)]
    finish_reason: Reason,
}

/// Why a response is incomplete.
#[derive(Deserialize)]
struct Details<'a> {
    #[serde(borrow, default)]
    reason: Word<'a>,
}

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(FieldsVisitor)
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields<'de>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Self::Value, A::Error> {
        let mut fields = Fields::default();
        while let Some(Word(key)) = object.next_key()? {
            fields.take(&key, &mut object)?;
        }
        Ok(fields)
    }
}

impl<'de> Fields<'de> {
    fn take<A: MapAccess<'de>>(&mut self, key: &str, object: &mut A) -> Result<(), A::Error> {
        match key {
            "choices" => self.choices = object.next_value::<Option<Choices>>()?.map(|all| all.0),
            "type" => self.kind = object.next_value()?,
            "object" => self.object = object.next_value()?,
            "usage" => self.usage = object.next_value()?,
            "response" => self.response = object.next_value()?,
            "meta_info" => self.meta = object.next_value()?,
            "error" => self.error |= object.next_value::<Says>()?.0,
            "status" => self.status = object.next_value()?,
            "incomplete_details" => self.incomplete = object.next_value()?,
            "output" => self.output = object.next_value()?,
            "content" => self.content = object.next_value()?,
            "stop_reason" => self.reason = object.next_value()?,
            "delta" => self.delta = object.next_value()?,
            "content_block" => self.block = object.next_value()?,
            "item" => self.item = object.next_value()?,
            "text" | "output_ids" | "token_ids" => self.text |= object.next_value::<Says>()?.0,
            // Fields without content.
            "id" | "created" | "created_at" | "model" | "system_fingerprint" | "service_tier"
            | "index" | "sequence_number" | "item_id" | "output_index" | "content_index"
            | "role" | "stop_sequence" => {
                object.next_value::<IgnoredAny>()?;
            }
            _ => self.other |= object.next_value::<Says>()?.0,
        }
        Ok(())
    }

    fn facts(self, name: &str) -> DocumentFacts {
        let reported_tokens = self.reported_tokens();
        DocumentFacts {
            reported_tokens,
            ..self.without_count(name)
        }
    }

    fn reported_tokens(&self) -> Option<u64> {
        let inner = self.response.as_ref();
        let usage = self
            .usage
            .as_ref()
            .or_else(|| inner.and_then(|inner| inner.usage.as_ref()));
        let reported_tokens =
            usage.and_then(|usage| usage.completion_tokens.or(usage.output_tokens));
        reported_tokens.or_else(|| self.meta.as_ref()?.completion_tokens)
    }

    fn without_count(self, name: &str) -> DocumentFacts {
        let kind = match &*self.kind.0 {
            "" => name,
            kind => kind,
        };
        if self.error || self.object.0 == "error" || kind == "error" || name == "error" {
            return DocumentFacts::failure();
        }
        if let Some(choices) = self.choices {
            return choices;
        }
        if let Some(meta) = &self.meta {
            let counted = meta.completion_tokens.is_some_and(|tokens| tokens > 0);
            return DocumentFacts {
                tokens: u64::from(self.text || counted),
                says: self.text,
                ..DocumentFacts::ended(Ends::of(meta.finish_reason))
            };
        }
        if let Some(step) = kind.strip_prefix("response.") {
            return self.of_response_event(step);
        }
        if self.object.0 == "response" || self.output.is_some() && !self.status.0.is_empty() {
            return self.of_response();
        }
        self.of_message(kind)
    }

    /// Facts of an event of the Responses interface.
    fn of_response_event(&self, step: &str) -> DocumentFacts {
        match step {
            "completed" => DocumentFacts::last(Ends::of(Reason::Itself)),
            "incomplete" => {
                let response = self.response.as_ref();
                let reason = response.map_or(Reason::Unreported, |inner| inner.why_incomplete());
                DocumentFacts::last(Ends::of(reason))
            }
            "failed" => DocumentFacts::failure(),
            "cancelled" => DocumentFacts::ended(Ends::of(Reason::GaveUp)),
            "created" | "queued" | "in_progress" => DocumentFacts::default(),
            "output_item.added" => {
                let kind = self.item.as_ref().map_or("", |item| &item.kind.0);
                DocumentFacts::content(!matches!(kind, "" | "message" | "reasoning"))
            }
            _ if step.ends_with(".added") => DocumentFacts::default(),
            _ if step.ends_with(".delta") => DocumentFacts::token(self.carries()),
            _ => DocumentFacts::content(true),
        }
    }

    /// Facts of an answer of the Responses interface.
    fn of_response(&self) -> DocumentFacts {
        let reason = match &*self.status.0 {
            "completed" => Reason::Itself,
            "incomplete" => self.why_incomplete(),
            "failed" => return DocumentFacts::failure(),
            "cancelled" => Reason::GaveUp,
            // Runs in the background.
            _ => return DocumentFacts::content(true),
        };
        DocumentFacts {
            says: self.output.as_ref().is_some_and(|output| output.0),
            is_called_complete: reason == Reason::Itself && self.incomplete.is_none(),
            ..DocumentFacts::ended(Ends::of(reason))
        }
    }

    fn why_incomplete(&self) -> Reason {
        let details = self.incomplete.as_ref();
        details.map_or(Reason::Unreported, |details| Reason::of(&details.reason.0))
    }

    /// Facts of an event or an answer of the Messages interface, or of an unknown one.
    fn of_message(&self, kind: &str) -> DocumentFacts {
        match kind {
            "message" => DocumentFacts {
                says: self.content.as_ref().is_some_and(|content| content.0),
                ..DocumentFacts::ended(Ends::of(self.reason))
            },
            "ping" | "message_start" | "content_block_stop" => DocumentFacts::default(),
            "content_block_start" => DocumentFacts::content(self.block.as_ref().is_none_or(begins)),
            "content_block_delta" => DocumentFacts::token(self.carries()),
            "message_delta" => {
                let reason = self.delta.as_ref().map(|delta| delta.reason);
                let reported = reason.filter(|reason| *reason != Reason::Unreported);
                reported.map_or_else(DocumentFacts::default, |reason| {
                    DocumentFacts::ended(Ends::of(reason))
                })
            }
            "message_stop" => DocumentFacts::last(Ends::default()),
            "" => DocumentFacts {
                is_unknown: self.object.0.is_empty() && self.usage.is_none(),
                ..DocumentFacts::token(self.says_anything())
            },
            _ => DocumentFacts::unknown(),
        }
    }

    /// Whether a delta or a field beside it has content; an event without a delta may carry content in an unknown field.
    fn carries(&self) -> bool {
        self.other || self.text || self.delta.as_ref().is_none_or(|delta| delta.says)
    }

    fn says_anything(&self) -> bool {
        let content = self.content.as_ref().is_some_and(|content| content.0);
        let output = self.output.as_ref().is_some_and(|output| output.0);
        let parts = [&self.delta, &self.block, &self.item];
        let parts = parts.into_iter().flatten().any(|part| part.says);
        self.other || self.text || content || output || parts || self.response.is_some()
    }
}

/// Whether a block is more than a placeholder for text: a tool call has a name.
fn begins(block: &AnswerPart<'_>) -> bool {
    block.says || !matches!(&*block.kind.0, "text" | "thinking")
}

/// A document in an event of this name; a list of documents counts as their sum.
struct Named<'n>(&'n str);

impl<'de> DeserializeSeed<'de> for Named<'_> {
    type Value = DocumentFacts;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<DocumentFacts, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Named<'_> {
    type Value = DocumentFacts;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an object, or a list of them")
    }

    fn visit_map<A: MapAccess<'de>>(self, object: A) -> Result<DocumentFacts, A::Error> {
        let fields = FieldsVisitor.visit_map(object)?;
        Ok(fields.facts(self.0))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<DocumentFacts, A::Error> {
        let mut all = DocumentFacts {
            is_unknown: true,
            ..DocumentFacts::default()
        };
        while let Some(facts) = list.next_element_seed(Named(self.0))? {
            all.is_unknown &= facts.is_unknown;
            all.merge(facts);
        }
        Ok(all)
    }
}

/// All choices of an answer, or of a chunk.
struct Choices(DocumentFacts);

impl<'de> Deserialize<'de> for Choices {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_seq(ChoicesVisitor).map(Self)
    }
}

struct ChoicesVisitor;

impl<'de> Visitor<'de> for ChoicesVisitor {
    type Value = DocumentFacts;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a list of choices")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<DocumentFacts, A::Error> {
        let mut all = DocumentFacts::default();
        while let Some(Choice(facts)) = list.next_element()? {
            all.merge(facts);
        }
        Ok(all)
    }
}

struct Choice(DocumentFacts);

impl<'de> Deserialize<'de> for Choice {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(ChoiceVisitor)
    }
}

struct ChoiceVisitor;

impl<'de> Visitor<'de> for ChoiceVisitor {
    type Value = Choice;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a choice")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Choice, A::Error> {
        let (mut says, mut error, mut reason) = (false, false, Reason::Unreported);
        while let Some(Word(key)) = object.next_key()? {
            match &*key {
                "delta" | "message" => says |= object.next_value::<AnswerPart<'_>>()?.says,
                "finish_reason" => reason = object.next_value()?,
                "error" => error |= object.next_value::<Says>()?.0,
                "index" | "stop_reason" | "matched_stop" | "prompt_token_ids"
                | "prompt_logprobs" => {
                    object.next_value::<IgnoredAny>()?;
                }
                key if IN_ANSWERS.contains(&key) => {
                    object.next_value::<IgnoredAny>()?;
                }
                _ => says |= object.next_value::<Says>()?.0,
            }
        }
        Ok(Choice(DocumentFacts {
            tokens: u64::from(says),
            says,
            error,
            ..DocumentFacts::ended(Ends::of(reason))
        }))
    }
}
