//! Owns the answers of SGLang's own endpoint (`/generate`): one object per sequence, in a stream with all its text so far.

use bytes::Bytes;
use serde_json::{Value, json};

use super::{Answer, Finish, framed, word};
use crate::engine::request::{Generation, Logprobs};

/// Id of an answer's token 0; the others follow.
const FIRST_ID: u64 = 1000;

/// Contents of these answers beyond those of the OpenAI endpoints.
pub(super) struct Native {
    /// Tokens of each prompt.
    prompts: Vec<u64>,
    /// Tokens of each prompt found in the prefix cache; empty if there are none.
    pub(super) found: Vec<u64>,
    choices: u64,
    /// Whether the answer is a list, even of one entry.
    listed: bool,
    logprobs: Logprobs,
}

impl Native {
    pub(super) fn new(generation: &Generation, logprobs: Logprobs) -> Self {
        Self {
            prompts: generation.prompts.clone(),
            found: Vec::new(),
            choices: generation.choices,
            listed: generation.batch || generation.choices > 1,
            logprobs,
        }
    }

    /// The prompt of a sequence.
    fn prompt_of(&self, sequence: u64) -> usize {
        usize::try_from(sequence / self.choices).unwrap_or_default()
    }
}

impl Answer {
    pub(super) fn native_whole(&self) -> Bytes {
        let of = |sequence| self.native_sequence(sequence, self.output.tokens);
        let whole = match self.native.listed {
            true => Value::from((0..self.sequences).map(of).collect::<Vec<_>>()),
            false => of(0),
        };
        framed(Vec::new(), &whole, b"")
    }

    /// The event after which a sequence has this many tokens.
    pub(super) fn native_event(&self, sequence: u64, tokens: u64) -> Bytes {
        let mut event = self.native_sequence(sequence, tokens);
        if self.native.listed {
            event["index"] = json!(sequence);
        }
        framed(b"data: ".to_vec(), &event, b"\n\n")
    }

    fn native_sequence(&self, sequence: u64, tokens: u64) -> Value {
        let native = &self.native;
        let prompt = native.prompt_of(sequence);
        let prompt_tokens = native.prompts.get(prompt).copied().unwrap_or_default();
        let id = match native.listed {
            true => format!("{}_{sequence}", self.id),
            false => self.id.clone(),
        };
        let cached = match (
            native.found.get(prompt),
            self.usage.prompt_tokens_details.cached_tokens,
        ) {
            (Some(found), _) => *found,
            // Either all of a prompt came with its KV, or none of it.
            (None, 0) => 0,
            (None, _) => prompt_tokens,
        };
        let mut meta = json!({"id": id, "finish_reason": self.native_finish(tokens),
            "prompt_tokens": prompt_tokens, "cached_tokens": cached, "completion_tokens": tokens});
        if let Some(prompts) = &native.logprobs {
            let input = prompts.get(prompt).map_or(&[][..], Vec::as_slice);
            meta["input_token_logprobs"] = input_logprobs(input);
            meta["output_token_logprobs"] = (0..tokens)
                .map(|number| json!([logprob(number), FIRST_ID + number, null]))
                .collect();
        }
        json!({"text": (0..tokens).map(word).collect::<String>(),
            "output_ids": (0..tokens).map(|number| FIRST_ID + number).collect::<Vec<_>>(),
            "meta_info": meta})
    }

    fn native_finish(&self, tokens: u64) -> Value {
        match self.output.finish {
            _ if tokens < self.output.tokens => Value::Null,
            Finish::Length => json!({"type": "length", "length": tokens}),
            Finish::Stop => json!({"type": "stop", "matched": FIRST_ID + tokens}),
        }
    }
}

/// A triple for each token; the first one has no predecessor, so that its probability is null.
fn input_logprobs(ids: &[u32]) -> Value {
    (0..)
        .zip(ids)
        .map(|(number, id)| match number {
            0 => json!([null, id, null]),
            _ => json!([logprob(number), id, null]),
        })
        .collect()
}

/// An arbitrary log probability, the same in every engine.
fn logprob(number: u64) -> f64 {
    -0.125 * (number % 8 + 1) as f64
}
