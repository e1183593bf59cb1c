//! Owns whether a request asks for features that not every hand-off can serve.

use super::{Generation, Request};

/// A feature that a request may ask for, beside its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The logprobs of the prompt's tokens.
    PromptLogprobs,
    /// The prompt in the answer, with logprobs: including those of the prompt.
    EchoedLogprobs,
    /// The logits of the prompt's tokens.
    ContextLogits,
    /// Several beams, of which the best is the answer.
    BeamSearch,
    /// An answer that is fetched later.
    Background,
    /// A continuation of an answer that a worker has stored.
    PreviousResponse,
}

impl Request<'_> {
    /// Whether the request asks for this feature. Each value of a repeated member counts: engines differ in which one they
    /// read.
    pub fn asks(&self, part: Part) -> bool {
        match part {
            Part::PromptLogprobs => self.says("prompt_logprobs"),
            Part::EchoedLogprobs => self.is_true("echo") && self.wants_logprobs(),
            Part::ContextLogits => self.is_true("return_context_logits"),
            Part::BeamSearch => self.is_true("use_beam_search"),
            Part::Background => self.responds() && self.is_true("background"),
            Part::PreviousResponse => self.responds() && self.says("previous_response_id"),
        }
    }

    fn responds(&self) -> bool {
        self.generation == Generation::Responses
    }

    /// `logprobs: 0` asks for the logprobs of the tokens themselves, without alternatives.
    fn wants_logprobs(&self) -> bool {
        let mut members = ["logprobs", "top_logprobs"]
            .into_iter()
            .flat_map(|name| self.body.all(name));
        members.any(|member| !matches!(member.value, "null" | "false"))
    }

    fn says(&self, name: &str) -> bool {
        self.body.all(name).any(|member| member.value != "null")
    }

    fn is_true(&self, name: &str) -> bool {
        self.body.all(name).any(|member| is_true(member.value))
    }
}

/// Values that engines accept as true: their readers know more words for it than JSON.
pub(super) fn is_true(value: &str) -> bool {
    let word = value.trim_matches('"');
    let words = ["true", "1", "1.0", "yes", "y", "on", "t"];
    words.iter().any(|known| word.eq_ignore_ascii_case(known))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asks(generation: Generation, part: Part, members: &str) -> bool {
        let body = format!(r#"{{"model":"m","prompt":"p","messages":[],"input":"p",{members}}}"#);
        let request = Request::parse(generation, body.as_bytes()).unwrap();
        request.asks(part)
    }

    #[test]
    fn found_w4_what_is_asked_of_the_prompt_is_seen_in_all_spellings() {
        for (generation, part, members, expected) in [
            (
                Generation::Chat,
                Part::PromptLogprobs,
                r#""prompt_logprobs":0"#,
                true,
            ),
            (
                Generation::Chat,
                Part::PromptLogprobs,
                r#""prompt_logprobs":null"#,
                false,
            ),
            (
                Generation::Completions,
                Part::PromptLogprobs,
                r#""prompt_logprobs":1,"prompt_logprobs":null"#,
                true,
            ),
            (
                Generation::Completions,
                Part::EchoedLogprobs,
                r#""echo":true,"logprobs":0"#,
                true,
            ),
            (
                Generation::Completions,
                Part::EchoedLogprobs,
                r#""echo":true"#,
                false,
            ),
            (
                Generation::Completions,
                Part::EchoedLogprobs,
                r#""echo":1,"logprobs":2"#,
                true,
            ),
            (
                Generation::Completions,
                Part::EchoedLogprobs,
                r#""echo":false,"logprobs":2"#,
                false,
            ),
            (
                Generation::Chat,
                Part::EchoedLogprobs,
                r#""echo":true,"logprobs":false"#,
                false,
            ),
            (
                Generation::Chat,
                Part::EchoedLogprobs,
                r#""echo":true,"logprobs":true"#,
                true,
            ),
            (
                Generation::Chat,
                Part::EchoedLogprobs,
                r#""echo":"yes","top_logprobs":2"#,
                true,
            ),
            (
                Generation::Chat,
                Part::BeamSearch,
                r#""use_beam_search":true"#,
                true,
            ),
            (
                Generation::Chat,
                Part::Background,
                r#""background":true"#,
                false,
            ),
            (
                Generation::Responses,
                Part::Background,
                r#""background":true"#,
                true,
            ),
            (
                Generation::Responses,
                Part::PreviousResponse,
                r#""previous_response_id":"r""#,
                true,
            ),
            (
                Generation::Responses,
                Part::PreviousResponse,
                r#""previous_response_id":null"#,
                false,
            ),
        ] {
            assert_eq!(asks(generation, part, members), expected, "{members}");
        }
    }
}
