//! Owns the requests of a load: chat completions of a given size, with distinct or repeated prompts.

use bytes::Bytes;

/// The set of prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prompts {
    /// All distinct: they differ from their first bytes on, by a number that counts from `from`.
    AllDifferent {
        /// Number of the first prompt.
        from: u64,
    },
    /// This many prompts, in turn.
    InTurn(u64),
}

/// The requests of a load.
#[derive(Clone, Debug)]
pub struct RequestSpec {
    /// The model.
    pub model: String,
    /// Bytes of a request's body.
    pub body_bytes: usize,
    /// Whether the answers are streamed.
    pub streamed: bool,
    /// Requested tokens (`max_tokens`).
    pub tokens: u32,
    /// The set of prompts.
    pub prompts: Prompts,
}

/// Writes the bodies in sequence.
pub struct BodyWriter {
    head: String,
    text: String,
    prompts: Prompts,
    number: u64,
}

const TAIL: &str = r#""}]}"#;
/// Digits of a prompt's number.
const NUMBER: usize = 16;

/// Text of the prompts: words of several lengths, none of which needs JSON escapes.
const WORDS: &str = "Nothing of what follows was ever said by anybody, and yet it reads much as people write when they ask a machine for \
something: a sentence of some length, a shorter one. Then a question? A list, perhaps, of three things, and the wish that all of them \
be answered in order. ";

impl BodyWriter {
    /// A writer of these requests.
    pub fn new(spec: &RequestSpec) -> Self {
        let model = serde_json::Value::from(spec.model.as_str());
        let head = format!(
            r#"{{"model":{model},"stream":{},"max_tokens":{},"messages":[{{"role":"user","content":""#,
            spec.streamed, spec.tokens
        );
        let fixed = head.len() + NUMBER + TAIL.len();
        let text = WORDS.chars().cycle();
        Self {
            text: text.take(spec.body_bytes.saturating_sub(fixed)).collect(),
            head,
            prompts: spec.prompts,
            number: match spec.prompts {
                Prompts::AllDifferent { from } => from,
                Prompts::InTurn(_) => 0,
            },
        }
    }

    /// The next body.
    pub fn next(&mut self) -> Bytes {
        let number = match self.prompts {
            Prompts::AllDifferent { .. } => self.number,
            Prompts::InTurn(count) => self.number % count.max(1),
        };
        self.number = self.number.wrapping_add(1);
        let all = self.head.len() + NUMBER + self.text.len() + TAIL.len();
        let mut body = Vec::with_capacity(all);
        body.extend_from_slice(self.head.as_bytes());
        body.extend_from_slice(format!("{number:016x}").as_bytes());
        body.extend_from_slice(self.text.as_bytes());
        body.extend_from_slice(TAIL.as_bytes());
        body.into()
    }
}
