//! Reads an OpenAI generation request as vLLM would, and refuses what vLLM refuses.

use std::borrow::Cow;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use super::lease::KvOf;
use super::marker::Markers;
use super::refusal::Refusal;
use native::Limits;

mod ids;
mod native;

pub use ids::PromptIds;
pub use native::Logprobs;

/// Output tokens where the request sets no limit.
const DEFAULT_OUTPUT_TOKENS: u64 = 16;
/// The largest output limit taken, in tokens.
const MOST_OUTPUT_TOKENS: i64 = 1_000_000;
/// The most choices (`n`) taken.
const MOST_CHOICES: i64 = 128;
/// Bytes of text that make one token.
const BYTES_PER_TOKEN: usize = 4;

/// The generation paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/v1/responses`
    Responses,
    /// SGLang's own, `/generate`
    Generate,
}

impl Endpoint {
    /// The generation endpoint at `path`, if it is one.
    pub fn at(path: &str) -> Option<Self> {
        match path {
            "/v1/chat/completions" => Some(Self::Chat),
            "/v1/completions" => Some(Self::Completions),
            "/v1/responses" => Some(Self::Responses),
            "/generate" => Some(Self::Generate),
            _ => None,
        }
    }
}

/// What is asked of an engine.
#[derive(Debug)]
pub struct Generation {
    /// Where it was asked.
    pub endpoint: Endpoint,
    /// The model named; SGLang's own endpoint names none.
    pub model: Option<String>,
    /// Tokens of each prompt; one entry but for a batch of completions. Never empty.
    pub prompts: Vec<u64>,
    /// Whether the prompt is a list of prompts, be it of one.
    pub batch: bool,
    /// Identity of the prompts: equal for equal ones, also in another engine of this build.
    pub fingerprint: u64,
    /// Choices per prompt (`n`).
    pub choices: u64,
    /// Tokens to generate for each choice.
    pub output_tokens: u64,
    /// Whether the answer is to be streamed.
    pub stream: bool,
    /// Whether a stream ends with a usage chunk.
    pub include_usage: bool,
    /// What the prompts' text asks for.
    pub markers: Markers,
    /// SGLang's own endpoint: whose log probabilities are asked for.
    pub logprobs: Logprobs,
    /// vLLM's hand-off part, with either connector, unread: a dialect's business. `None` also for `null`.
    pub kv_transfer_params: Option<Box<RawValue>>,
    /// SGLang's.
    pub bootstrap: Bootstrap,
    /// TensorRT-LLM's.
    pub disaggregated_params: Option<Box<RawValue>>,
    /// The prompt's ids, where TensorRT-LLM's part is there.
    pub ids: Option<PromptIds>,
    /// The ids as a leg of TensorRT-LLM carries them beside the prompt.
    pub prompt_token_ids: Option<Vec<u32>>,
}

/// The fields of SGLang's hand-off, unread. `None` also for `null`.
#[derive(Debug)]
pub struct Bootstrap {
    /// The request's id.
    pub rid: Option<Box<RawValue>>,
    /// Host of the prefill engine's bootstrap server.
    pub host: Option<Box<RawValue>>,
    /// Port of the prefill engine's bootstrap server.
    pub port: Option<Box<RawValue>>,
    /// The room in which the legs meet.
    pub room: Option<Box<RawValue>>,
    /// The rank that is to run this leg.
    pub routed_dp_rank: Option<Box<RawValue>>,
    /// The rank that runs the prefill.
    pub disagg_prefill_dp_rank: Option<Box<RawValue>>,
}

impl Generation {
    /// Reads a request body.
    ///
    /// # Errors
    /// [`Refusal::BadRequest`] that names the field.
    pub fn parse(endpoint: Endpoint, body: &[u8]) -> Result<Self, Refusal> {
        let fields = Fields::parse(body)?;
        let (model, logprobs) = match endpoint {
            Endpoint::Generate => (None, native::logprobs(&fields)?),
            _ => (Some(fields.required("model")?), None),
        };
        let Prompts {
            tokens: prompts,
            batch,
            fingerprint,
            markers,
        } = read_prompts(endpoint, &fields)?;
        let Limits {
            choices,
            output_tokens,
        } = read_limits(endpoint, &fields)?;
        let stream = fields.optional("stream")?.unwrap_or(false);
        let include_usage = read_stream_options(&fields, stream)?;
        let disaggregated_params: Option<Box<RawValue>> =
            fields.optional("disaggregated_params")?;
        let ids = disaggregated_params.as_ref();
        let ids = ids
            .map(|_| PromptIds::read(endpoint, &fields))
            .transpose()?;
        Ok(Self {
            endpoint,
            model,
            prompts,
            batch,
            // Over ids, since one leg of TensorRT-LLM carries text and the other ids.
            fingerprint: ids
                .as_ref()
                .map_or(fingerprint, |prompt| identity(&prompt.ids)),
            choices,
            output_tokens,
            stream,
            include_usage,
            markers,
            logprobs,
            kv_transfer_params: fields.optional("kv_transfer_params")?,
            bootstrap: Bootstrap {
                rid: fields.optional("rid")?,
                host: fields.optional("bootstrap_host")?,
                port: fields.optional("bootstrap_port")?,
                room: fields.optional("bootstrap_room")?,
                routed_dp_rank: fields.optional("routed_dp_rank")?,
                disagg_prefill_dp_rank: fields.optional("disagg_prefill_dp_rank")?,
            },
            prompt_token_ids: match disaggregated_params {
                Some(_) => fields.optional("prompt_token_ids")?,
                None => None,
            },
            disaggregated_params,
            ids,
        })
    }

    /// Tokens of all prompts.
    pub fn prompt_tokens(&self) -> u64 {
        self.prompts.iter().sum()
    }

    /// Sequences to generate: prompts times choices.
    pub fn sequences(&self) -> u64 {
        self.prompts.len() as u64 * self.choices
    }

    /// Tokens of all sequences.
    pub fn completion_tokens(&self) -> u64 {
        self.sequences() * self.output_tokens
    }

    /// KV blocks of `block_tokens` tokens that the prompts fill.
    pub fn prompt_blocks(&self, block_tokens: u32) -> u64 {
        let blocks = |tokens: &u64| tokens.div_ceil(u64::from(block_tokens));
        self.prompts.iter().map(blocks).sum()
    }

    /// What the KV of all prompts is of.
    pub fn kv(&self) -> KvOf {
        KvOf {
            prompt_tokens: self.prompt_tokens(),
            prompt_fingerprint: self.fingerprint,
        }
    }

    /// What the KV of each sequence is of, where each has its own.
    pub fn kv_of_each(&self) -> impl Iterator<Item = KvOf> {
        let of = |(number, tokens): (u64, &u64)| KvOf {
            prompt_tokens: *tokens,
            prompt_fingerprint: self.fingerprint.wrapping_add(number),
        };
        let choices = usize::try_from(self.choices).unwrap_or(usize::MAX);
        let prompts = (0..).zip(&self.prompts).map(of);
        prompts.flat_map(move |of| std::iter::repeat_n(of, choices))
    }
}

/// The members of the top-level object, unread. Of equal names the last counts, as in Python.
struct Fields<'a>(HashMap<Cow<'a, str>, &'a RawValue>);

impl<'a> Fields<'a> {
    fn parse(body: &'a [u8]) -> Result<Self, Refusal> {
        serde_json::from_slice(body)
            .map(Self)
            .map_err(|error| Refusal::BadRequest(format!("Invalid JSON body: {error}")))
    }

    fn optional<T: DeserializeOwned>(&self, name: &'static str) -> Result<Option<T>, Refusal> {
        let Some(value) = self.0.get(name) else {
            return Ok(None);
        };
        serde_json::from_str(value.get())
            .map_err(|error| Refusal::BadRequest(format!("Invalid `{name}`: {error}")))
    }

    fn required<T: DeserializeOwned>(&self, name: &'static str) -> Result<T, Refusal> {
        self.optional(name)?
            .ok_or_else(|| Refusal::BadRequest(format!("Field required: `{name}`")))
    }
}

#[derive(Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

#[derive(Deserialize, Hash)]
struct Message {
    role: String,
    content: Option<Content>,
}

#[derive(Deserialize, Hash)]
struct Item {
    role: Option<String>,
    content: Option<Content>,
}

#[derive(Deserialize, Hash)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Deserialize, Hash)]
struct Part {
    text: Option<String>,
}

#[derive(Deserialize, Hash)]
#[serde(untagged)]
enum Input {
    Text(String),
    Items(Vec<Item>),
}

#[derive(Deserialize, Hash)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

impl Content {
    fn texts(&self) -> Vec<&str> {
        match self {
            Self::Text(text) => vec![text],
            Self::Parts(parts) => {
                let texts = parts.iter().flat_map(|part| &part.text);
                texts.map(String::as_str).collect()
            }
        }
    }
}

impl Input {
    fn texts(&self) -> Vec<&str> {
        match self {
            Self::Text(text) => vec![text],
            Self::Items(items) => {
                let contents = items.iter().flat_map(|item| &item.content);
                contents.flat_map(Content::texts).collect()
            }
        }
    }
}

impl Prompt {
    fn tokens(&self) -> Vec<u64> {
        match self {
            Self::Text(text) => vec![text_tokens(text.len())],
            Self::Tokens(tokens) => vec![tokens.len() as u64],
            Self::Texts(texts) => texts.iter().map(|text| text_tokens(text.len())).collect(),
            Self::TokenLists(lists) => lists.iter().map(|list| list.len() as u64).collect(),
        }
    }

    fn is_batch(&self) -> bool {
        matches!(self, Self::Texts(_) | Self::TokenLists(_))
    }

    fn texts(&self) -> Vec<&str> {
        match self {
            Self::Text(text) => vec![text],
            Self::Texts(texts) => texts.iter().map(String::as_str).collect(),
            Self::Tokens(_) | Self::TokenLists(_) => Vec::new(),
        }
    }
}

/// Tokens of a text: one per four bytes begun, at least one.
fn text_tokens(bytes: usize) -> u64 {
    bytes.div_ceil(BYTES_PER_TOKEN).max(1) as u64
}

/// What is asked about.
struct Prompts {
    /// Tokens of each.
    tokens: Vec<u64>,
    batch: bool,
    fingerprint: u64,
    markers: Markers,
}

impl Prompts {
    fn conversation(texts: &[&str], fingerprint: u64) -> Self {
        Self {
            tokens: vec![conversation_tokens(texts)],
            batch: false,
            fingerprint,
            markers: Markers::find(texts),
        }
    }

    fn plain(prompt: &Prompt) -> Self {
        Self {
            tokens: prompt.tokens(),
            batch: prompt.is_batch(),
            fingerprint: identity(prompt),
            markers: Markers::find(&prompt.texts()),
        }
    }
}

fn read_prompts(endpoint: Endpoint, fields: &Fields) -> Result<Prompts, Refusal> {
    let prompts = match endpoint {
        Endpoint::Chat => {
            let messages: Vec<Message> = fields.required("messages")?;
            if messages.is_empty() {
                return Err(Refusal::BadRequest("`messages` must not be empty".into()));
            }
            let contents = messages.iter().flat_map(|message| &message.content);
            let texts: Vec<&str> = contents.flat_map(Content::texts).collect();
            Prompts::conversation(&texts, identity(&messages))
        }
        Endpoint::Responses => {
            let input: Input = fields.required("input")?;
            Prompts::conversation(&input.texts(), identity(&input))
        }
        Endpoint::Completions => Prompts::plain(&fields.required("prompt")?),
        Endpoint::Generate => Prompts::plain(&native::prompt(fields)?),
    };
    if prompts.tokens.is_empty() || prompts.tokens.contains(&0) {
        return Err(Refusal::BadRequest("`prompt` must not be empty".into()));
    }
    Ok(prompts)
}

/// Tokens of a prompt that is made of several texts.
fn conversation_tokens(texts: &[&str]) -> u64 {
    text_tokens(texts.iter().map(|text| text.len()).sum())
}

fn identity(prompt: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    prompt.hash(&mut hasher);
    hasher.finish()
}

fn read_stream_options(fields: &Fields, stream: bool) -> Result<bool, Refusal> {
    let Some(options) = fields.optional::<StreamOptions>("stream_options")? else {
        return Ok(false);
    };
    if !stream {
        return Err(Refusal::BadRequest(
            "Stream options can only be defined when `stream=True`.".into(),
        ));
    }
    Ok(options.include_usage.unwrap_or(false))
}

fn read_limits(endpoint: Endpoint, fields: &Fields) -> Result<Limits, Refusal> {
    if endpoint == Endpoint::Generate {
        return native::limits(fields);
    }
    Ok(Limits {
        choices: bounded(fields, "n", MOST_CHOICES)?.unwrap_or(1),
        output_tokens: read_output_tokens(endpoint, fields)?,
    })
}

fn read_output_tokens(endpoint: Endpoint, fields: &Fields) -> Result<u64, Refusal> {
    let max_tokens = bounded(fields, "max_tokens", MOST_OUTPUT_TOKENS)?;
    let limit = match endpoint {
        Endpoint::Chat => {
            bounded(fields, "max_completion_tokens", MOST_OUTPUT_TOKENS)?.or(max_tokens)
        }
        Endpoint::Completions | Endpoint::Generate => max_tokens,
        Endpoint::Responses => bounded(fields, "max_output_tokens", MOST_OUTPUT_TOKENS)?,
    };
    let min_tokens = fields.optional::<i64>("min_tokens")?.unwrap_or(0);
    if min_tokens < 0 {
        return Err(Refusal::BadRequest(format!(
            "min_tokens must be greater than or equal to 0, got {min_tokens}."
        )));
    }
    if let Some(limit) = limit
        && min_tokens as u64 > limit
    {
        return Err(Refusal::BadRequest(format!(
            "min_tokens must be less than or equal to max_tokens={limit}, got {min_tokens}."
        )));
    }
    Ok(limit.unwrap_or(DEFAULT_OUTPUT_TOKENS))
}

/// A whole number from 1 to `most`, if the field is there.
fn bounded(fields: &Fields, name: &'static str, most: i64) -> Result<Option<u64>, Refusal> {
    within(name, fields.optional(name)?, most)
}

fn within(name: &str, value: Option<i64>, most: i64) -> Result<Option<u64>, Refusal> {
    match value {
        None => Ok(None),
        Some(value) if value < 1 => Err(Refusal::BadRequest(format!(
            "{name} must be at least 1, got {value}."
        ))),
        Some(value) if value > most => Err(Refusal::BadRequest(format!(
            "{name} is too large: {value}. This model supports at most {most}."
        ))),
        Some(value) => Ok(Some(value as u64)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completions(body: &str) -> Result<Generation, Refusal> {
        Generation::parse(Endpoint::Completions, body.as_bytes())
    }

    #[test]
    fn all_prompt_shapes_are_counted() {
        let cases = [
            (r#""""#, vec![1]),
            (r#""12345678""#, vec![2]),
            (r#""123456789""#, vec![3]),
            (r#"[1,2,3]"#, vec![3]),
            (r#"["1234","12345"]"#, vec![1, 2]),
            (r#"[[1,2],[3]]"#, vec![2, 1]),
        ];
        for (prompt, tokens) in cases {
            let body = format!(r#"{{"model":"m","prompt":{prompt}}}"#);
            assert_eq!(completions(&body).expect(prompt).prompts, tokens);
        }
        for prompt in ["[]", "[[]]", "null", "5", r#"[1,"a"]"#] {
            let body = format!(r#"{{"model":"m","prompt":{prompt}}}"#);
            assert!(completions(&body).is_err(), "{prompt}");
        }
    }

    #[test]
    fn chat_counts_text_and_parts_and_knows_prompts_apart() {
        let parse = |content: &str| {
            let body = format!(
                r#"{{"model":"m","messages":[{{"role":"user","content":{content},"x":[[]]}}]}}"#
            );
            Generation::parse(Endpoint::Chat, body.as_bytes()).expect("valid")
        };
        let text = parse(r#""12345678""#);
        let parts = parse(r#"[{"type":"text","text":"12345678"},{"type":"image_url"}]"#);
        assert_eq!(text.prompts, [2]);
        assert_eq!(parts.prompts, [2]);
        assert_eq!(text.fingerprint, parse(r#""12345678""#).fingerprint);
        assert_ne!(text.fingerprint, parse(r#""12345679""#).fingerprint);
        assert_eq!(parse("null").prompts, [1]);
    }

    #[test]
    fn the_last_of_equal_names_counts() {
        let body = r#"{"model":"a","prompt":"x","max_tokens":0,"model":"b","max_tokens":3}"#;
        let generation = completions(body).expect("valid");
        assert_eq!(
            (generation.model.as_deref(), generation.output_tokens),
            (Some("b"), 3)
        );
    }

    #[test]
    fn faults_are_refused_by_name() {
        let cases = [
            ("", "Invalid JSON"),
            ("[]", "Invalid JSON"),
            (r#"{"prompt":"x"}"#, "`model`"),
            (r#"{"model":3,"prompt":"x"}"#, "`model`"),
            (r#"{"model":"m"}"#, "`prompt`"),
            (r#"{"model":"m","prompt":"x","max_tokens":0}"#, "max_tokens"),
            (
                r#"{"model":"m","prompt":"x","max_tokens":-1}"#,
                "max_tokens",
            ),
            (
                r#"{"model":"m","prompt":"x","max_tokens":1.5}"#,
                "max_tokens",
            ),
            (
                r#"{"model":"m","prompt":"x","max_tokens":1e30}"#,
                "max_tokens",
            ),
            (r#"{"model":"m","prompt":"x","n":0}"#, "n must"),
            (
                r#"{"model":"m","prompt":"x","max_tokens":1,"min_tokens":2}"#,
                "min_tokens",
            ),
            (
                r#"{"model":"m","prompt":"x","stream_options":{}}"#,
                "Stream options",
            ),
            (r#"{"model":"m","prompt":"x","stream":"yes"}"#, "`stream`"),
        ];
        for (body, named) in cases {
            let refusal = completions(body).expect_err(body).to_string();
            assert!(refusal.contains(named), "{body}: {refusal}");
        }
    }

    #[test]
    fn depth_is_no_danger() {
        let deep = format!(
            r#"{{"model":"m","prompt":"x","x":{}{}}}"#,
            "[".repeat(100_000),
            "]".repeat(100_000)
        );
        assert!(completions(&deep).is_ok());
        let prompt = format!(r#"{{"model":"m","prompt":{}"#, "[".repeat(100_000));
        assert!(completions(&prompt).is_err());
    }
}
