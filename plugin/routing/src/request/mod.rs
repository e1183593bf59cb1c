//! Owns a request as routing sees it: its path, its model, and the length of its prompt and answer.

mod buffered;
mod embeds;
mod forged;
mod form;
mod limits;
mod nvext;
pub mod overrides;
mod parts;
pub mod prompt;
pub mod rename;
pub mod sequences;

pub use buffered::{BufferedRequest, ParsedRequest};
pub use forged::check_unread;
pub use form::AnswerForm;
pub use nvext::OVERRIDE_FIELDS;
pub use overrides::{Pin, RoutingOverrides};
pub use parts::Part;
pub use sequences::{Prompts, Sequences};

use std::borrow::Cow;
use std::sync::Arc;

use memchr::memmem;
use percent_encoding::percent_decode;

use crate::json::{
    JsonError, MAX_DEPTH, MAX_VALUES, Member, Object, has_more_values_than, is_deeper_than,
};
use crate::refusal::Refusal;
use crate::transfer::IN_REQUESTS;

/// A request's line and headers, before its body is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head<'a> {
    /// `GET`, `POST`, …
    pub method: &'a [u8],
    /// Path with its query.
    pub path: &'a [u8],
    /// `content-encoding`, where the client sent one.
    pub encoding: Option<&'a [u8]>,
}

/// Prefix of the paths of stored answers, by id.
const STORED: &[u8] = b"/v1/responses/";

/// The kinds of request that generate text, and so have a prefill and a decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Generation {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/v1/responses`
    Responses,
    /// SGLang's own `/generate`
    Generate,
    /// Another engine's or vendor's path, which may generate text: one worker must run the whole request.
    Other,
}

/// What must be known of a request before its body is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Generates text: the body is read, and two workers are picked.
    Generation(Generation),
    /// Anything else: models, tokenisation, operations on a stored answer. One worker answers, and the body is not read.
    Plain,
}

impl Head<'_> {
    /// The kind of this request. Paths are compared by their end, so that prefixes such as `/openai` do not matter, without
    /// their query, and decoded, as in the engines' servers.
    ///
    /// A request to an unknown path may generate text: it counts as a generation that one worker must run whole, so that no
    /// decode worker gets it without a hand-off.
    pub fn kind(&self) -> Kind {
        // Engines generate by no other method.
        if !matches!(self.method, b"POST" | b"PUT" | b"PATCH") {
            return Kind::Plain;
        }
        let path = self
            .path
            .split(|byte| *byte == b'?')
            .next()
            .unwrap_or_default();
        let path: Cow<'_, [u8]> = percent_decode(path).into();
        let path = path.strip_suffix(b"/").unwrap_or(&path);
        if memmem::find(path, STORED).is_some() {
            return Kind::Plain;
        }
        let known = [
            (
                &b"/chat/completions"[..],
                Kind::Generation(Generation::Chat),
            ),
            (b"/completions", Kind::Generation(Generation::Completions)),
            (b"/v1/responses", Kind::Generation(Generation::Responses)),
            // Below `/v1` and `/api` the name belongs to other interfaces.
            (b"/v1/generate", Kind::Generation(Generation::Other)),
            (b"/api/generate", Kind::Generation(Generation::Other)),
            (b"/generate", Kind::Generation(Generation::Generate)),
            (b"/tokenize", Kind::Plain),
            (b"/detokenize", Kind::Plain),
            (b"/count_tokens", Kind::Plain),
            (b"/render", Kind::Plain),
        ];
        let found = known.iter().find(|(end, _)| path.ends_with(end));
        found.map_or(Kind::Generation(Generation::Other), |(_, kind)| *kind)
    }

    /// Whether the body is compressed, and therefore unreadable here.
    pub fn is_encoded(&self) -> bool {
        self.encoding
            .is_some_and(|value| !value.is_empty() && !value.eq_ignore_ascii_case(b"identity"))
    }
}

impl Generation {
    /// All kinds.
    pub const ALL: [Self; 5] = [
        Self::Chat,
        Self::Completions,
        Self::Responses,
        Self::Generate,
        Self::Other,
    ];

    /// The fields that may hold the prompt; the first one present counts.
    fn prompt_fields(self) -> &'static [&'static str] {
        match self {
            Self::Chat | Self::Other => &["messages"],
            Self::Completions => &["prompt"],
            Self::Responses => &["input"],
            Self::Generate => &["text", "input_ids", "input_embeds"],
        }
    }

    /// The member that holds the prompt.
    fn prompt<'o, 'a>(self, body: &'o Object<'a>) -> Option<&'o Member<'a>> {
        let mut members = self
            .prompt_fields()
            .iter()
            .filter_map(|name| body.get(name));
        match self {
            Self::Generate => members.find(|member| member.value != "null"),
            _ => members.next(),
        }
    }
}

/// Top-level members that routing reads or edits, except those that carry hand-offs.
const OWN_MEMBERS: &[&str] = &[
    "model",
    "messages",
    "prompt",
    "prompt_token_ids",
    "prompt_embeds",
    "input",
    "text",
    "input_ids",
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "instructions",
    "tools",
    "functions",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "chat_template_args",
    "reasoning_effort",
    "reasoning",
    "mm_processor_kwargs",
    "add_special_tokens",
    "truncate_prompt_tokens",
    "cache_salt",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "min_tokens",
    "truncate_prompt_tokens",
    "n",
    "best_of",
    "sampling_params",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "echo",
    "return_context_logits",
    "use_beam_search",
    "background",
    "previous_response_id",
    "return_logprob",
    "ec_transfer_params",
    "vllm_xargs",
    "rid",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "data_parallel_rank",
    "nvext",
];

/// Top-level members that routing or a hand-off reads or edits.
pub const MEMBERS: &[&str] = &{
    let mut all = [""; OWN_MEMBERS.len() + IN_REQUESTS.len()];
    let (own, carried) = all.split_at_mut(OWN_MEMBERS.len());
    own.copy_from_slice(OWN_MEMBERS);
    carried.copy_from_slice(&IN_REQUESTS);
    all
};

/// The client's limit on an answer's tokens, and the member that sets it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit {
    /// The member.
    pub name: &'static str,
    /// Tokens.
    pub tokens: u64,
}

/// A request whose body has been read.
#[derive(Debug)]
pub struct Request<'a> {
    /// The interface of the request.
    pub generation: Generation,
    /// The requested model; empty where the interface has none.
    pub model: Arc<str>,
    /// An estimate of the prompt's length: one token per four bytes, or the number of token ids.
    pub prompt_tokens: u64,
    /// The members that a hand-off may edit.
    pub body: Object<'a>,
    sequences: Sequences,
    fault: Fault,
    max_tokens: Option<u64>,
    known_tokens: Option<u64>,
    hands_off_itself: bool,
}

impl<'a> Request<'a> {
    /// Reads a body and checks it.
    ///
    /// # Errors
    /// As [`Request::read`] and [`Request::check`].
    pub fn parse(generation: Generation, body: &'a [u8]) -> Result<Self, Refusal> {
        let request = Self::read(generation, body)?;
        request.check().map(|()| request)
    }

    /// Reads a body as far as possible. Errors in it are found by [`Request::check`], and matter only where two legs depend
    /// on a field: a single worker reads the body itself, and accepts more than is understood here.
    ///
    /// # Errors
    /// [`Refusal`] where the body is not a usable JSON object.
    pub fn read(generation: Generation, body: &'a [u8]) -> Result<Self, Refusal> {
        if has_more_values_than(MAX_VALUES, body) {
            return Err(Refusal::Field {
                name: "body",
                problem: "has more than 2,097,152 JSON values and names in it",
            });
        }
        let object = Object::parse(body, MEMBERS)?;
        if is_deeper_than(MAX_DEPTH, body) {
            return Err(Refusal::Field {
                name: "body",
                problem: "nests lists and objects more than 128 deep",
            });
        }
        // Not every interface has a model: such a request is routed by load alone.
        if generation == Generation::Other && object.get("model").is_none() {
            return Err(Refusal::NoHandoffForPath);
        }
        check_nvext(&object)?;
        let mut fault = Fault::default();
        let model = fault.noted(model(generation, &object), String::new());
        let prompt_tokens = match generation {
            Generation::Other => estimate_tokens(body.len()),
            _ => fault.noted(
                prompt_tokens(generation, &object),
                estimate_tokens(body.len()),
            ),
        };
        let sequences = fault.noted(Sequences::read(generation, &object), Sequences::ONE);
        fault.noted(check_stream(&object), ());
        fault.noted(limits::check(&object), ());
        Ok(Self {
            generation,
            model: model.into(),
            prompt_tokens,
            sequences,
            fault,
            max_tokens: limits::max_tokens(generation, &object),
            known_tokens: has_known_prompt(generation, &object, sequences).then_some(prompt_tokens),
            hands_off_itself: forged::own_handoff(&object).is_some(),
            body: object,
        })
    }

    /// Reports the first error in the body.
    ///
    /// # Errors
    /// [`Refusal`] names the field that is missing or of the wrong type.
    pub fn check(&self) -> Result<(), Refusal> {
        self.fault.0.clone().map_or(Ok(()), Err)
    }
}

/// The first error in a request that can be routed nevertheless.
#[derive(Debug, Clone, Default)]
struct Fault(Option<Refusal>);

impl Fault {
    /// The value read, or `otherwise` with a note of the error.
    fn noted<T>(&mut self, read: Result<T, Refusal>, otherwise: T) -> T {
        read.unwrap_or_else(|why| {
            self.0.get_or_insert(why);
            otherwise
        })
    }
}

impl Request<'_> {
    /// The form in which the client requested its answer.
    pub fn form(&self) -> AnswerForm {
        let stream = self.body.get("stream");
        match stream.is_some_and(|member| parts::is_true(member.value)) {
            true => AnswerForm::Stream {
                usage: self.wants_usage(),
            },
            false => AnswerForm::Unstreamed,
        }
    }

    fn wants_usage(&self) -> bool {
        #[derive(serde::Deserialize)]
        struct Options {
            include_usage: Option<bool>,
        }
        let options = self.body.get("stream_options");
        let options = options.and_then(|member| serde_json::from_str::<Options>(member.value).ok());
        options
            .and_then(|options| options.include_usage)
            .unwrap_or(false)
    }

    /// The client's limit on an answer's tokens; none where not set.
    pub fn max_tokens(&self) -> Option<u64> {
        self.max_tokens
    }

    /// The limit above which an engine refuses a request as too long. Responses have none: theirs is cut.
    pub fn limit(&self) -> Option<Limit> {
        let names: &[&'static str] = match self.generation {
            Generation::Chat => &["max_completion_tokens", "max_tokens"],
            Generation::Completions => &["max_tokens"],
            Generation::Generate => {
                let name = "sampling_params";
                return self.max_tokens.map(|tokens| Limit { name, tokens });
            }
            Generation::Responses | Generation::Other => &[],
        };
        names.iter().find_map(|&name| {
            let tokens = limits::whole(self.body.get(name)?.value)?;
            Some(Limit { name, tokens })
        })
    }

    /// The tokens of a single prompt that came as ids and is used unchanged.
    pub fn known_tokens(&self) -> Option<u64> {
        self.known_tokens
    }

    /// The sequences that the request asks for.
    pub fn sequences(&self) -> Sequences {
        self.sequences
    }

    /// The prompt as written.
    fn prompt(&self) -> Option<&str> {
        self.generation
            .prompt(&self.body)
            .map(|member| member.value)
    }

    /// The prompt as token ids; none where it came in another form.
    pub fn prompt_ids(&self) -> Option<Vec<u32>> {
        match self.generation {
            Generation::Completions | Generation::Generate => {
                serde_json::from_str(self.prompt()?).ok()
            }
            _ => None,
        }
    }

    /// Whether the client itself hands the request from one worker to another: a field of a hand-off is set to a value.
    pub fn hands_off_itself(&self) -> bool {
        self.hands_off_itself
    }

    /// Checks that the client sets no hand-off: otherwise it could read another client's KV cache. Null and `{}` are allowed.
    ///
    /// # Errors
    /// [`Refusal::Field`] names the field that is set.
    pub fn check_handoff_is_ours(&self) -> Result<(), Refusal> {
        match forged::forged(&self.body) {
            None => Ok(()),
            Some(name) => Err(forged::refusal(name)),
        }
    }
}

impl From<JsonError> for Refusal {
    fn from(error: JsonError) -> Self {
        match error {
            JsonError::Syntax(detail) => Self::NotJson { detail },
            JsonError::NotAnObject => Self::Field {
                name: "body",
                problem: "must be a JSON object",
            },
            JsonError::TooManyRepeats => Self::Field {
                name: "body",
                problem: "repeats a member too often",
            },
        }
    }
}

/// The requested model; empty where the interface has none.
fn model(generation: Generation, object: &Object<'_>) -> Result<String, Refusal> {
    match generation {
        Generation::Generate if is_absent(object, "model") => Ok(String::new()),
        _ => text_field(object, "model"),
    }
}

/// A required, non-empty string.
fn text_field(object: &Object<'_>, name: &'static str) -> Result<String, Refusal> {
    let Some(member) = object.get(name) else {
        return Err(Refusal::Field {
            name,
            problem: "is missing; a string is required",
        });
    };
    match serde_json::from_str::<String>(member.value) {
        Ok(text) if !text.is_empty() => Ok(text),
        Ok(_) => Err(Refusal::Field {
            name,
            problem: "must not be empty",
        }),
        // In valid JSON a string is unreadable only where an escape stands for half a character.
        Err(_) if member.value.starts_with('"') => Err(Refusal::Field {
            name,
            problem: "is not valid Unicode",
        }),
        Err(_) => Err(Refusal::Field {
            name,
            problem: "must be a string",
        }),
    }
}

/// Whether a member is missing or null.
fn is_absent(object: &Object<'_>, name: &str) -> bool {
    object.get(name).is_none_or(|member| member.value == "null")
}

fn prompt_tokens(generation: Generation, object: &Object<'_>) -> Result<u64, Refusal> {
    if generation != Generation::Completions {
        return written_tokens(generation, object);
    }
    let embedded = embeds::tokens(object)?;
    match embedded > 0 && is_absent(object, "prompt") {
        true => Ok(embedded),
        false => Ok(written_tokens(generation, object)?.saturating_add(embedded)),
    }
}

/// The tokens of a prompt in text or ids.
fn written_tokens(generation: Generation, object: &Object<'_>) -> Result<u64, Refusal> {
    let name = generation.prompt_fields().first().copied();
    let missing = Refusal::Field {
        name: name.unwrap_or_default(),
        problem: "is missing; the prompt is required",
    };
    let prompt = generation.prompt(object).ok_or(missing)?;
    let fields = generation.prompt_fields().iter();
    let name = fields
        .copied()
        .find(|name| prompt.key == *name)
        .unwrap_or_default();
    let kind = prompt.value.as_bytes().first();
    match (name, kind) {
        ("messages", Some(b'[')) => Ok(estimate_tokens(prompt.value.len())),
        ("input_embeds", Some(b'[')) => Ok(count_embeddings(prompt.value)),
        ("input_ids", Some(b'[')) => Ok(count_prompt(prompt.value)),
        ("prompt" | "input" | "text", Some(b'[' | b'"')) => Ok(count_prompt(prompt.value)),
        ("messages", _) => Err(Refusal::Field {
            name,
            problem: "must be a list of messages",
        }),
        ("input_ids" | "input_embeds", _) => Err(Refusal::Field {
            name,
            problem: "must be a list",
        }),
        _ => Err(Refusal::Field {
            name,
            problem: "must be a string or a list",
        }),
    }
}

/// Each list of numbers is one token: its bracket is followed by a number.
fn count_embeddings(value: &str) -> u64 {
    let mut after = None;
    let mut found = 0_u64;
    for byte in value.bytes().filter(|byte| !byte.is_ascii_whitespace()) {
        found = found.saturating_add(u64::from(after == Some(b'[') && byte != b'['));
        after = Some(byte);
    }
    found.max(1)
}

/// Token ids are counted, text is estimated.
fn count_prompt(value: &str) -> u64 {
    match is_ids(value) {
        true => value.bytes().filter(|byte| *byte == b',').count() as u64 + 1,
        false => estimate_tokens(value.len()),
    }
}

/// Whether there is a single prompt that came as ids and is used unchanged.
fn has_known_prompt(generation: Generation, object: &Object<'_>, sequences: Sequences) -> bool {
    let has_ids = matches!(generation, Generation::Completions | Generation::Generate);
    let is_one = matches!(sequences.prompts, Prompts::One | Prompts::Batch(1));
    let others = ["truncate_prompt_tokens", "prompt_embeds"];
    let is_alone = others.iter().all(|name| is_absent(object, name));
    let prompt = generation.prompt(object);
    let prompt = prompt.filter(|_| has_ids && is_one && is_alone);
    prompt.is_some_and(|prompt| prompt.value.starts_with('[') && is_ids(prompt.value))
}

/// Whether a value consists only of numbers and lists of them.
fn is_ids(value: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_digit() || b"[], \t\r\n".contains(&byte);
    value.bytes().all(is_part)
}

/// One token per four bytes of text: the same estimate as in the picker of the Gateway API inference extension.
fn estimate_tokens(bytes: usize) -> u64 {
    (bytes as u64).div_ceil(4).max(1)
}

fn check_stream(object: &Object<'_>) -> Result<(), Refusal> {
    match object.get("stream").map(|member| member.value) {
        None | Some("true" | "false" | "null") => Ok(()),
        Some(_) => Err(Refusal::Field {
            name: "stream",
            problem: "must be true or false",
        }),
    }
}

/// Routing overrides in `nvext` must be found to be used, or to be removed.
fn check_nvext(object: &Object<'_>) -> Result<(), Refusal> {
    let repeats = |member: &Member<'_>| {
        Object::parse(member.value.as_bytes(), &OVERRIDE_FIELDS).err()
            == Some(JsonError::TooManyRepeats)
    };
    match object.all("nvext").any(repeats) {
        true => Err(Refusal::Field {
            name: "nvext",
            problem: "repeats a member too often",
        }),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests;
