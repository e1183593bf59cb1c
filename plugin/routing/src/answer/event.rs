//! Owns what one event of a stream says, in the shapes that are known: chat completions, completions, responses, SGLang's
//! `/generate`, errors.

use std::borrow::Cow;
use std::fmt;

use serde::de::{IgnoredAny, Visitor};
use serde::{Deserialize, Deserializer};

/// A text that stays where it is, unless it holds an escape: serde copies what is optional.
struct Text<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_str(Reader)
    }
}

struct Reader;

impl<'de> Visitor<'de> for Reader {
    type Value = Text<'de>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a string")
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Text(Cow::Borrowed(text)))
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Text(Cow::Owned(text.to_owned())))
    }
}

/// An event, as far as it counts.
#[derive(Deserialize)]
pub(super) struct Event<'a> {
    #[serde(borrow, default)]
    choices: Option<Vec<Choice<'a>>>,
    #[serde(borrow, default, rename = "type")]
    kind: Option<Text<'a>>,
    #[serde(borrow, default)]
    object: Option<Text<'a>>,
    #[serde(default)]
    usage: Option<Usage>,
    #[serde(default)]
    response: Option<Response>,
    #[serde(borrow, default)]
    text: Option<Text<'a>>,
    #[serde(default)]
    output_ids: Option<Vec<IgnoredAny>>,
    #[serde(default)]
    meta_info: Option<Meta>,
    #[serde(default)]
    error: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow, default)]
    delta: Option<Delta<'a>>,
    #[serde(borrow, default)]
    text: Option<Text<'a>>,
    #[serde(default)]
    finish_reason: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(borrow, default)]
    content: Option<Text<'a>>,
    #[serde(borrow, default)]
    reasoning_content: Option<Text<'a>>,
    #[serde(borrow, default)]
    reasoning: Option<Text<'a>>,
    #[serde(borrow, default)]
    refusal: Option<Text<'a>>,
    #[serde(default)]
    tool_calls: Option<Vec<IgnoredAny>>,
}

#[derive(Deserialize)]
struct Response {
    #[serde(default)]
    usage: Option<Usage>,
}

#[derive(Deserialize)]
struct Usage {
    #[serde(default)]
    completion_tokens: Option<u64>,
    #[serde(default)]
    output_tokens: Option<u64>,
}

/// What `/generate` says of its answer so far.
#[derive(Deserialize)]
struct Meta {
    #[serde(default)]
    completion_tokens: Option<u64>,
    #[serde(default)]
    finish_reason: Option<IgnoredAny>,
}

/// Events of the Responses interface that end it, in whatever way.
const ENDS: [&str; 4] = [
    "response.completed",
    "response.incomplete",
    "response.failed",
    "response.cancelled",
];

fn says(text: &Option<Text<'_>>) -> bool {
    text.as_ref().is_some_and(|text| !text.0.is_empty())
}

impl Choice<'_> {
    fn carries_a_token(&self) -> bool {
        let delta = self.delta.as_ref();
        says(&self.text) || delta.is_some_and(Delta::carries_a_token)
    }
}

impl Delta<'_> {
    fn carries_a_token(&self) -> bool {
        let calls = self.tool_calls.as_deref().unwrap_or_default();
        says(&self.content)
            || says(&self.reasoning_content)
            || says(&self.reasoning)
            || says(&self.refusal)
            || !calls.is_empty()
    }
}

impl Event<'_> {
    /// Tokens that it carries, at least. One of a shape that is not known counts as one.
    pub(super) fn tokens(&self) -> u64 {
        if !self.is_known() {
            return 1;
        }
        let choices = self.choices.as_deref().unwrap_or_default();
        let carrying = choices.iter().filter(|choice| choice.carries_a_token());
        let carrying = carrying.count() as u64;
        let other = self.is_delta() || self.generates();
        carrying.saturating_add(u64::from(other))
    }

    /// Whether it says why the answer ended, or what went wrong.
    pub(super) fn is_last_word(&self) -> bool {
        let choices = self.choices.as_deref().unwrap_or_default();
        let meta = self.meta_info.as_ref();
        self.is_error()
            || ENDS.contains(&self.kind())
            || choices.iter().any(|choice| choice.finish_reason.is_some())
            || meta.is_some_and(|meta| meta.finish_reason.is_some())
    }

    /// Whether it is the one that ends responses well.
    pub(super) fn ends_responses(&self) -> bool {
        matches!(self.kind(), "response.completed" | "response.incomplete")
    }

    /// The tokens so far, where they are counted.
    pub(super) fn usage(&self) -> Option<u64> {
        let inner = self
            .response
            .as_ref()
            .and_then(|inner| inner.usage.as_ref());
        let usage = self.usage.as_ref().or(inner);
        let told = usage.and_then(|usage| usage.completion_tokens.or(usage.output_tokens));
        let meta = self.meta_info.as_ref();
        told.or_else(|| meta?.completion_tokens)
    }

    fn is_known(&self) -> bool {
        self.choices.is_some()
            || self.usage.is_some()
            || self.meta_info.is_some()
            || self.is_error()
            || self.kind().starts_with("response.")
    }

    /// Whether it says that something went wrong.
    pub fn is_error(&self) -> bool {
        self.error.is_some()
            || self.kind() == "error"
            || self
                .object
                .as_ref()
                .is_some_and(|object| object.0 == "error")
    }

    fn is_delta(&self) -> bool {
        self.kind().starts_with("response.") && self.kind().ends_with(".delta")
    }

    /// Whether it is one of `/generate`, and there is something generated in it.
    fn generates(&self) -> bool {
        let ids = self.output_ids.as_deref().unwrap_or_default();
        self.meta_info.as_ref().is_some_and(|meta| {
            says(&self.text)
                || !ids.is_empty()
                || meta.completion_tokens.is_some_and(|tokens| tokens > 0)
        })
    }

    fn kind(&self) -> &str {
        self.kind.as_ref().map_or("", |kind| &kind.0)
    }
}
