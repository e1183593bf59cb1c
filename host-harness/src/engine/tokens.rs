//! Owns a vLLM server's answers about itself and about a prompt without running it: its version, and the prompt's token ids.

use bytes::Bytes;
use hyper::{Response, StatusCode};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use super::body::{self, Body};
use super::node::EngineContext;
use super::refusal::Refusal;
use super::request::{Endpoint, PromptIds};

/// The version with which the contract test compares.
const VERSION: &str = "0.32.0";

/// Size of the vocabulary in these answers. Ids inside an engine are hashes and longer, which would give a router more to parse
/// than a real engine's.
const VOCABULARY: u32 = 128_000;

/// The answer to `GET /version`.
pub fn version() -> String {
    format!(r#"{{"version":"{VERSION}"}}"#)
}

/// A query about a prompt.
#[derive(Clone, Copy, Debug)]
pub enum TokenQuery {
    /// The ids alone.
    Tokenize,
    /// The chat request as the engine would run it, with ids instead of messages.
    Render,
}

#[derive(Deserialize)]
struct PromptForm {
    messages: Option<IgnoredAny>,
}

#[derive(Serialize)]
struct Tokenized<'a> {
    count: usize,
    max_model_len: u64,
    tokens: &'a [u32],
    token_strs: Option<()>,
}

#[derive(Serialize)]
struct Rendered<'a> {
    request_id: String,
    token_ids: &'a [u32],
    features: Option<()>,
    model: &'a str,
}

impl TokenQuery {
    /// The query at `path`, if it is one.
    pub fn at(path: &str) -> Option<Self> {
        match path {
            "/tokenize" => Some(Self::Tokenize),
            "/v1/chat/completions/render" => Some(Self::Render),
            _ => None,
        }
    }

    /// Answers the query.
    pub fn answer(self, node: &EngineContext, content: &[u8]) -> Response<Body> {
        match self.ids(content) {
            Ok(ids) => body::json(StatusCode::OK, self.write(node, &ids)),
            Err(refusal) => refusal.response(node.config.dialect),
        }
    }

    /// The ids of the first prompt.
    fn ids(self, content: &[u8]) -> Result<Vec<u32>, Refusal> {
        let endpoint = match self {
            Self::Render => Endpoint::Chat,
            Self::Tokenize => match serde_json::from_slice(content) {
                Ok(PromptForm { messages: Some(_) }) => Endpoint::Chat,
                // Errors in the request are reported when it is parsed.
                _ => Endpoint::Completions,
            },
        };
        let prompts = PromptIds::of_body(endpoint, content)?;
        let first = prompts.into_iter().next().unwrap_or_default();
        Ok(first.into_iter().map(|id| id % VOCABULARY).collect())
    }

    fn write(self, node: &EngineContext, ids: &[u32]) -> Bytes {
        let written = match self {
            Self::Tokenize => serde_json::to_vec(&Tokenized {
                count: ids.len(),
                max_model_len: node.context(),
                tokens: ids,
                token_strs: None,
            }),
            Self::Render => serde_json::to_vec(&Rendered {
                request_id: format!("chatcmpl-{:032x}", rand::random::<u128>()),
                token_ids: ids,
                features: None,
                model: &node.config.model,
            }),
        };
        // Strings and numbers only: serialising them cannot fail.
        Bytes::from(written.unwrap_or_default())
    }
}
