//! Owns a request as routing sees it: where it is sent, what model it asks for, how long its prompt and answer may be.

mod forged;
mod limits;
pub mod prompt;
pub mod rename;
pub mod sequences;
pub mod steering;

pub use forged::check_unread;
pub use sequences::{Prompts, Sequences};
pub use steering::{Pin, Steering};

use std::borrow::Cow;

use percent_encoding::percent_decode;

use crate::handoff::direct;
use crate::handoff::terminal::Form;
use crate::json::{JsonError, MAX_DEPTH, Member, Object, is_deeper_than};
use crate::route::Refusal;

/// What a request's line and headers say, before any of its body is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head<'a> {
    /// `GET`, `POST`, …
    pub method: &'a [u8],
    /// Path with its query.
    pub path: &'a [u8],
    /// `content-encoding`, where the client sent one.
    pub encoding: Option<&'a [u8]>,
}

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
    /// Another engine's or vendor's path, which may generate text: it can only be run whole.
    Other,
}

/// What must be known of a request before its body is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It generates text: its body is read, its two workers are picked.
    Generation(Generation),
    /// Anything else: models, tokenisation, metrics. One worker answers, the body is not looked at.
    Plain,
}

impl Head<'_> {
    /// What kind of request this is. Paths are compared by their end, so that prefixes such as `/openai` do not hide
    /// them, without their query, and decoded, as the engines' servers do before they look at them.
    ///
    /// Whatever is sent to a path that is not known may generate text: it counts as a generation that can only be run whole,
    /// so that no decode worker gets it without a hand-off.
    pub fn kind(&self) -> Kind {
        if matches!(self.method, b"GET" | b"HEAD" | b"OPTIONS") {
            return Kind::Plain;
        }
        let path = self
            .path
            .split(|byte| *byte == b'?')
            .next()
            .unwrap_or_default();
        let path: Cow<'_, [u8]> = percent_decode(path).into();
        let path = path.strip_suffix(b"/").unwrap_or(&path);
        let known = [
            (
                &b"/chat/completions"[..],
                Kind::Generation(Generation::Chat),
            ),
            (b"/completions", Kind::Generation(Generation::Completions)),
            (b"/v1/responses", Kind::Generation(Generation::Responses)),
            // Below `/v1` and `/api` other interfaces have that name.
            (b"/v1/generate", Kind::Generation(Generation::Other)),
            (b"/api/generate", Kind::Generation(Generation::Other)),
            (b"/generate", Kind::Generation(Generation::Generate)),
            (b"/tokenize", Kind::Plain),
            (b"/detokenize", Kind::Plain),
            (b"/render", Kind::Plain),
        ];
        let found = known.iter().find(|(end, _)| path.ends_with(end));
        found.map_or(Kind::Generation(Generation::Other), |(_, kind)| *kind)
    }

    /// Whether the body is compressed, and so cannot be read here.
    pub fn is_encoded(&self) -> bool {
        self.encoding
            .is_some_and(|value| !value.is_empty() && !value.eq_ignore_ascii_case(b"identity"))
    }
}

impl Generation {
    /// The fields that may hold the prompt. Of several the first one that is there counts.
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

/// Top-level members that routing or a hand-off reads or edits.
pub const MEMBERS: &[&str] = &[
    "model",
    "messages",
    "prompt",
    "prompt_token_ids",
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
    "cache_salt",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "min_tokens",
    "n",
    "best_of",
    "sampling_params",
    "return_logprob",
    "kv_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "disaggregated_params",
    "ec_transfer_params",
    "vllm_xargs",
    "rid",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "nvext",
];

/// A request whose body has been read.
#[derive(Debug)]
pub struct Request<'a> {
    /// Which interface it uses.
    pub generation: Generation,
    /// The model asked for; empty where the interface names none.
    pub model: String,
    /// An estimate of the prompt's length: one token per four bytes, or the number of token ids.
    pub prompt_tokens: u64,
    /// The members that a hand-off may edit.
    pub body: Object<'a>,
    sequences: Sequences,
}

impl<'a> Request<'a> {
    /// Reads a body.
    ///
    /// # Errors
    /// [`Refusal`] names the field that is missing or of the wrong type.
    pub fn parse(generation: Generation, body: &'a [u8]) -> Result<Self, Refusal> {
        let object = Object::parse(body, MEMBERS)?;
        if is_deeper_than(MAX_DEPTH, body) {
            return Err(Refusal::Field {
                name: "body",
                problem: "nests lists and objects more than 128 deep",
            });
        }
        let model = match generation {
            // Not every interface names its model: such a request goes by load alone.
            Generation::Other if object.get("model").is_none() => {
                return Err(Refusal::NoHandoffForPath);
            }
            Generation::Generate if is_absent(&object, "model") => String::new(),
            _ => text_field(&object, "model")?,
        };
        let prompt_tokens = match generation {
            Generation::Other => estimate_tokens(body.len()),
            _ => prompt_tokens(generation, &object)?,
        };
        let sequences = Sequences::read(generation, &object)?;
        check_stream(&object)?;
        limits::check(&object)?;
        check_nvext(&object)?;
        Ok(Self {
            generation,
            model,
            prompt_tokens,
            body: object,
            sequences,
        })
    }
}

impl Request<'_> {
    /// How the client wants its answer.
    pub fn form(&self) -> Form {
        match self.body.get("stream").map(|member| member.value) {
            Some("true") => Form::Stream {
                usage: self.wants_usage(),
            },
            _ => Form::Whole,
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

    /// The most tokens that an answer may have, where the client says so.
    pub fn max_tokens(&self) -> Option<u64> {
        if self.generation == Generation::Generate {
            return self.max_new_tokens();
        }
        let names = ["max_completion_tokens", "max_output_tokens", "max_tokens"];
        names
            .iter()
            .find_map(|name| self.body.get(name)?.value.parse().ok())
    }

    /// SGLang's limit: of several that for the longest answer, none where one of them has none.
    fn max_new_tokens(&self) -> Option<u64> {
        #[derive(serde::Deserialize)]
        struct Sampling {
            max_new_tokens: u64,
        }
        let objects = sequences::objects(self.body.get("sampling_params")?.value)?;
        let limits = objects
            .into_iter()
            .map(|object| serde_json::from_str::<Sampling>(object).ok());
        let limits: Option<Vec<u64>> = limits
            .map(|sampling| sampling.map(|sampling| sampling.max_new_tokens))
            .collect();
        limits?.into_iter().max()
    }

    /// How many sequences it asks for.
    pub fn sequences(&self) -> Sequences {
        self.sequences
    }

    /// The prompt as it is written.
    fn prompt(&self) -> Option<&str> {
        self.generation
            .prompt(&self.body)
            .map(|member| member.value)
    }

    /// The prompt as token ids, where the client sent it so.
    pub fn prompt_ids(&self) -> Option<Vec<u32>> {
        match self.generation {
            Generation::Completions | Generation::Generate => {
                serde_json::from_str(self.prompt()?).ok()
            }
            _ => None,
        }
    }

    /// Whether the client itself hands the request from one worker to another: it set a field of a hand-off, and to something.
    pub fn hands_off_itself(&self) -> bool {
        forged::own_handoff(&self.body).is_some()
    }

    /// That the hand-off is left to the router: a client that could set it could read another's KV cache. Null and `{}` say
    /// nothing.
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
        Err(_) => Err(Refusal::Field {
            name,
            problem: "must be a string",
        }),
    }
}

/// Whether a member is not there, or null.
fn is_absent(object: &Object<'_>, name: &str) -> bool {
    object.get(name).is_none_or(|member| member.value == "null")
}

fn prompt_tokens(generation: Generation, object: &Object<'_>) -> Result<u64, Refusal> {
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

/// One list of numbers is one token: it opens behind a bracket or a comma, and a number follows.
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
    let is_ids = |byte: u8| byte.is_ascii_digit() || b"[], \t\r\n".contains(&byte);
    match value.bytes().all(is_ids) {
        true => value.bytes().filter(|byte| *byte == b',').count() as u64 + 1,
        false => estimate_tokens(value.len()),
    }
}

/// One token per four bytes of text: what the picker of the Gateway API inference extension assumes too.
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

/// What steers in `nvext` must be found to be heard, or to be taken out.
fn check_nvext(object: &Object<'_>) -> Result<(), Refusal> {
    let repeats = |member: &Member<'_>| {
        Object::parse(member.value.as_bytes(), &direct::STEERING).err()
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
mod tests {
    use super::*;
    use crate::handoff;

    fn kind(method: &str, path: &str) -> Kind {
        Head {
            method: method.as_bytes(),
            path: path.as_bytes(),
            encoding: None,
        }
        .kind()
    }

    #[test]
    fn only_posts_to_generation_paths_have_two_legs() {
        for (path, generation) in [
            ("/v1/chat/completions", Generation::Chat),
            ("/v1/chat/completions?x=1", Generation::Chat),
            ("/openai/v1/chat/completions/", Generation::Chat),
            ("/v1/completions", Generation::Completions),
            ("/v1/responses", Generation::Responses),
            ("/generate", Generation::Generate),
            ("/generate/?x", Generation::Generate),
            ("/sglang/generate", Generation::Generate),
            ("/inference/v1/generate", Generation::Other),
            ("/api/generate", Generation::Other),
            ("/generate_stream", Generation::Other),
            ("/v1/chat%2Fcompletions", Generation::Chat),
            ("/v1/%63hat/completion%73", Generation::Chat),
            ("/v1/chat/completions/batch", Generation::Other),
            ("/invocations", Generation::Other),
            ("/v1/embeddings", Generation::Other),
            ("/flush_cache", Generation::Other),
            ("/", Generation::Other),
            ("", Generation::Other),
            ("/x?y=/v1/completions", Generation::Other),
        ] {
            assert_eq!(kind("POST", path), Kind::Generation(generation), "{path}");
            assert_eq!(kind("GET", path), Kind::Plain, "{path}");
        }
        for path in ["/tokenize", "/v1/detokenize", "/v1/chat/completions/render"] {
            assert_eq!(kind("POST", path), Kind::Plain, "{path}");
        }
    }

    fn refused(generation: Generation, body: &str) -> Refusal {
        Request::parse(generation, body.as_bytes())
            .map(|_| ())
            .unwrap_err()
    }

    #[test]
    fn a_wrong_field_is_named() {
        for (generation, body, name) in [
            (Generation::Chat, "{}", "model"),
            (Generation::Chat, r#"{"model":1,"messages":[]}"#, "model"),
            (Generation::Chat, r#"{"model":"","messages":[]}"#, "model"),
            (Generation::Chat, r#"{"model":"m"}"#, "messages"),
            (
                Generation::Chat,
                r#"{"model":"m","messages":"hi"}"#,
                "messages",
            ),
            (
                Generation::Completions,
                r#"{"model":"m","messages":[]}"#,
                "prompt",
            ),
            (
                Generation::Completions,
                r#"{"model":"m","prompt":3}"#,
                "prompt",
            ),
            (Generation::Responses, r#"{"model":"m"}"#, "input"),
            (
                Generation::Chat,
                r#"{"model":"m","messages":[],"stream":"yes"}"#,
                "stream",
            ),
            (Generation::Chat, "[]", "body"),
            (Generation::Generate, "{}", "text"),
            (Generation::Generate, r#"{"text":null}"#, "text"),
            (Generation::Generate, r#"{"text":{}}"#, "text"),
            (Generation::Generate, r#"{"input_ids":"a"}"#, "input_ids"),
            (
                Generation::Generate,
                r#"{"input_embeds":1}"#,
                "input_embeds",
            ),
            (Generation::Generate, r#"{"text":"a","model":1}"#, "model"),
            (Generation::Generate, r#"{"text":"a","stream":1}"#, "stream"),
        ] {
            let refusal = refused(generation, body);
            assert!(
                matches!(refusal, Refusal::Field { name: named, .. } if named == name),
                "{body}: {refusal}"
            );
        }
        assert!(matches!(
            refused(Generation::Chat, "{,}"),
            Refusal::NotJson { .. }
        ));
    }

    #[test]
    fn prompts_of_all_shapes_are_measured() {
        let tokens = |prompt: &str| {
            let body = format!(r#"{{"model":"m","prompt":{prompt}}}"#);
            Request::parse(Generation::Completions, body.as_bytes())
                .unwrap()
                .prompt_tokens
        };
        assert_eq!(tokens("\"\""), 1);
        assert_eq!(tokens("[1, 2, 3]"), 3);
        assert_eq!(tokens("[[1,2],[3]]"), 3);
        assert_eq!(tokens(r#"["some text","more"]"#), 5);
        assert_eq!(tokens(&format!("\"{}\"", "x".repeat(398))), 100);
    }

    #[test]
    fn generate_names_no_model_and_its_prompt_has_three_shapes() {
        let tokens = |member: &str| {
            let body = format!(r#"{{{member},"sampling_params":{{"max_new_tokens":7}}}}"#);
            let request = Request::parse(Generation::Generate, body.as_bytes()).unwrap();
            assert_eq!(
                (request.model.as_str(), request.max_tokens()),
                ("", Some(7))
            );
            request.prompt_tokens
        };
        assert_eq!(tokens(r#""text":"some text""#), 3);
        assert_eq!(tokens(r#""text":null,"input_ids":[1,2,3],"model":null"#), 3);
        assert_eq!(tokens(r#""input_ids":[[1,2],[3]]"#), 3);
        assert_eq!(tokens(r#""input_embeds":[[ [0.5, -1],[2e1,3]],[[1]] ]"#), 3);
        let named = Request::parse(Generation::Generate, br#"{"text":"a","model":"m"}"#).unwrap();
        assert_eq!((named.model.as_str(), named.max_tokens()), ("m", None));
        let limits =
            br#"{"text":["a","b"],"sampling_params":[{"max_new_tokens":7},{"max_new_tokens":9}]}"#;
        let request = Request::parse(Generation::Generate, limits).unwrap();
        assert_eq!(request.max_tokens(), Some(9));
        let ids = Request::parse(Generation::Generate, br#"{"input_ids":[1,2]}"#).unwrap();
        assert_eq!(ids.prompt_ids(), Some(vec![1, 2]));
    }

    #[test]
    fn a_handoff_is_the_routers_unless_it_says_nothing() {
        for name in handoff::FIELDS {
            let sets = |value: &str| {
                let body = format!(r#"{{"model":"m","messages":[],"{name}":{value}}}"#);
                let request = Request::parse(Generation::Chat, body.as_bytes()).unwrap();
                let refused = match request.check_handoff_is_ours() {
                    Ok(()) => None,
                    Err(Refusal::Field { name, .. }) => Some(name),
                    Err(other) => panic!("{other}"),
                };
                assert_eq!(request.hands_off_itself(), refused.is_some());
                refused
            };
            for nothing in ["null", "{}", "{ }"] {
                assert_eq!(sets(nothing), None, "{name} {nothing}");
            }
            for something in [
                r#"{"do_remote_prefill":true}"#,
                "[]",
                "0",
                r#""x""#,
                "false",
            ] {
                assert_eq!(sets(something), Some(name), "{name} {something}");
            }
            let twice = format!(r#"{{"model":"m","messages":[],"{name}":[1],"{name}":null}}"#);
            let request = Request::parse(Generation::Chat, twice.as_bytes()).unwrap();
            assert!(request.hands_off_itself());
        }
    }
}
