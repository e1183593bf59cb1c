//! Owns what is asked: chat completions of a given size, with prompts of which no two are alike, or few.

use bytes::Bytes;

/// Which prompts there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prompts {
    /// No two alike: they differ from their first bytes on, by a number that counts from here.
    AllDifferent {
        /// The first one's.
        from: u64,
    },
    /// So many, in turn.
    InTurn(u64),
}

/// What is asked.
#[derive(Clone, Debug)]
pub struct Asking {
    /// The model.
    pub model: String,
    /// Bytes of a body.
    pub body_bytes: usize,
    /// Whether for a stream of events.
    pub streamed: bool,
    /// Tokens (`max_tokens`).
    pub tokens: u32,
    /// Which prompts.
    pub prompts: Prompts,
}

/// Writes one body after the other.
pub struct Author {
    head: String,
    text: String,
    prompts: Prompts,
    number: u64,
}

const TAIL: &str = r#""}]}"#;
/// Digits of a prompt's number.
const NUMBER: usize = 16;

/// What prompts are made of: words of several lengths, none of which JSON would escape.
const WORDS: &str = "Nothing of what follows was ever said by anybody, and yet it reads much as people write when they ask a machine for \
something: a sentence of some length, a shorter one. Then a question? A list, perhaps, of three things, and the wish that all of them \
be answered in order. ";

impl Author {
    /// Of bodies as asked for.
    pub fn new(asking: &Asking) -> Self {
        let model = serde_json::Value::from(asking.model.as_str());
        let head = format!(
            r#"{{"model":{model},"stream":{},"max_tokens":{},"messages":[{{"role":"user","content":""#,
            asking.streamed, asking.tokens
        );
        let fixed = head.len() + NUMBER + TAIL.len();
        let text = WORDS.chars().cycle();
        Self {
            text: text.take(asking.body_bytes.saturating_sub(fixed)).collect(),
            head,
            prompts: asking.prompts,
            number: match asking.prompts {
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
