//! Owns TensorRT-LLM's hand-off, context first: prefill computes the context and the first token, decode continues from there.
//!
//! Prefill's answer has the parameters in its only choice, and the prompt's token ids beside it, so that decode need not
//! tokenise the prompt again. Ids are numbers up to 2^63 and pass as written. Source: TensorRT-LLM's disaggregated server.

use super::protocol::{
    AbortCall, Handoff, HandoffPair, LegOrder, Prefill, Protocol, ProtocolRules,
};
use super::rooms::Rooms;
use super::staged::Staged;
use super::unserved;
use super::{MAX_HANDOFF, hosts, one_token, without};
use crate::answer::{End, Verdict, usage};
use crate::json::{Edits, Object, ValueSpan, edited, elements, length};
use crate::refusal::Refusal;
use crate::request::{Generation, Request};
use crate::transfer::DISAGGREGATED;

const PARAMS: &str = DISAGGREGATED.name();
const REQUEST_TYPE: &str = "request_type";
const CTX_USAGE: &str = "ctx_usage";
/// Numbers by which decode finds the context. Newer engines identify a request by the second.
const IDS: [&str; 2] = ["ctx_request_id", "disagg_request_id"];
/// Address from which decode fetches the context.
const ENDPOINT: &str = "ctx_info_endpoint";
const PROMPT_IDS: &str = "prompt_token_ids";

/// TensorRT-LLM (`trtllm-serve`).
#[derive(Debug)]
pub struct Trtllm;

impl Protocol for Trtllm {
    fn rules(&self) -> &'static ProtocolRules {
        &ProtocolRules {
            name: "trtllm",
            order: LegOrder::Sequential,
            reaches_workers: true,
            split: &[Generation::Chat, Generation::Completions],
            split_if_configured: &[],
            has_generate_api: false,
            unserved: &[
                &unserved::PROMPT_LOGPROBS,
                &unserved::ECHOED_LOGPROBS,
                &unserved::CONTEXT_LOGITS,
                &unserved::BACKGROUND,
                &unserved::PREVIOUS_RESPONSE,
            ],
            // The engine lowers a limit that is too high.
            refuses_too_long: false,
        }
    }

    fn handoff(
        &self,
        _pair: &HandoffPair<'_>,
        request: &Request<'_>,
        rooms: &mut Rooms,
    ) -> Result<Box<dyn Handoff>, Refusal> {
        Ok(Box::new(TrtllmHandoff {
            prefill: prefill_edits(request),
            decode: GenerationLeg::new(request),
            cleanup: GenerationLeg::cleanup(request),
            id: rooms.draw_high(),
        }))
    }
}

/// The legs of one request, and the number by which decode finds the context.
#[derive(Debug, Clone)]
struct TrtllmHandoff {
    prefill: Edits,
    decode: GenerationLeg,
    cleanup: GenerationLeg,
    id: u64,
}

impl Handoff for TrtllmHandoff {
    fn prefill(&self) -> Edits {
        let mut edits = self.prefill.clone();
        let (name, value) = context_only(self.id);
        edits.insert(name, value);
        edits
    }

    fn decode_at_once(&self) -> Option<Edits> {
        None
    }

    fn staged(&self, answer: &[u8], block_tokens: u32) -> Option<Staged> {
        if Verdict::of_prefill(answer) == Verdict::Ended(End::Itself) {
            return None;
        }
        let context = Context::parse(answer).ok()?;
        Some(Staged {
            blocks: context.blocks(block_tokens),
            decode: self.decode.edits(&context),
            cleanup: self.cleanup.edits(&context),
            hosts: context.hosts,
            expires: None,
        })
    }

    fn renewed(&self, _prefill: &Prefill<'_>, rooms: &mut Rooms) -> Option<Box<dyn Handoff>> {
        Some(Box::new(Self {
            id: rooms.draw_high(),
            ..self.clone()
        }))
    }

    fn abort(&self) -> Option<AbortCall> {
        None
    }
}

/// Edits that make the client's body the prefill leg's, without the member of [`context_only`].
pub fn prefill_edits(request: &Request<'_>) -> Edits {
    without(request, &[DISAGGREGATED], one_token::edits(request))
}

/// The member that makes a leg a prefill leg. `id` is used once, 2^62 ≤ `id` < 2^63.
pub fn context_only(id: u64) -> (&'static str, String) {
    let params =
        format!(r#"{{"request_type":"context_only","disagg_request_id":{id},"schedule_style":0}}"#);
    (PARAMS, params)
}

/// A decode leg whose context is still being computed.
#[derive(Debug, Clone)]
pub struct GenerationLeg {
    edits: Edits,
    ids_name: &'static str,
    ids_at: Vec<ValueSpan>,
}

impl GenerationLeg {
    /// The client's own request.
    pub fn new(request: &Request<'_>) -> Self {
        Self::of(request, request.body.edit())
    }

    /// The leg that fetches a context left behind by a client: one token, unstreamed.
    pub fn cleanup(request: &Request<'_>) -> Self {
        Self::of(request, one_token::edits(request))
    }

    fn of(request: &Request<'_>, edits: Edits) -> Self {
        let ids_name = match request.generation {
            Generation::Completions => "prompt",
            _ => PROMPT_IDS,
        };
        Self {
            edits: without(request, &[DISAGGREGATED], edits),
            ids_name,
            ids_at: request
                .body
                .all(ids_name)
                .map(|member| member.place())
                .collect(),
        }
    }

    /// Edits that make the client's body the decode leg of `context`.
    pub fn edits(&self, context: &Context) -> Edits {
        let mut edits = self.edits.clone();
        edits.insert(PARAMS, context.params.as_str());
        if let Some(ids) = &context.prompt_ids {
            for place in &self.ids_at {
                edits.replace_at(place, ids.as_str());
            }
            if self.ids_at.is_empty() {
                edits.insert(self.ids_name, ids.as_str());
            }
        }
        edits
    }
}

/// Prefill's hand-off for decode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Context {
    /// The parameters as decode needs them.
    params: String,
    /// The prompt's token ids, as written.
    prompt_ids: Option<String>,
    prompt_tokens: u64,
    hosts: Vec<String>,
}

/// Why a prefill answer cannot be handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ContextProblem {
    /// No JSON object, or one without choices.
    #[error("its answer has no choices")]
    NoAnswer,
    /// Other than one choice.
    #[error("its answer has {0} choices, where a context has one")]
    Choices(usize),
    /// The choice has no parameters.
    #[error("its answer carries no disaggregated_params")]
    NoParams,
    /// The parameters have no context id.
    #[error("its disaggregated_params name no request to go on with")]
    NoId,
    /// The prompt's ids are no list.
    #[error("its prompt_token_ids are no list")]
    PromptIds,
    /// Longer than any prompt needs.
    #[error("what it hands over is too long")]
    TooLong,
}

impl Context {
    /// Reads a prefill worker's answer.
    ///
    /// # Errors
    /// [`ContextProblem`] where the answer has no usable hand-off.
    pub fn parse(answer: &[u8]) -> Result<Self, ContextProblem> {
        let object = Object::parse(answer, &["choices", "usage", PROMPT_IDS])
            .map_err(|_| ContextProblem::NoAnswer)?;
        let said = |name: &str| {
            let value = object.get(name).map(|member| member.value);
            value.filter(|value| *value != "null")
        };
        let choices = said("choices").and_then(elements);
        let choices = choices.ok_or(ContextProblem::NoAnswer)?;
        let [choice] = choices.as_slice() else {
            return Err(ContextProblem::Choices(choices.len()));
        };
        let prompt_ids = said(PROMPT_IDS);
        let ids = prompt_ids.map(|ids| length(ids).ok_or(ContextProblem::PromptIds));
        let counted = ids.transpose()?.unwrap_or_default() as u64;
        let handed = choice.len().saturating_add(prompt_ids.map_or(0, str::len));
        if handed > MAX_HANDOFF {
            return Err(ContextProblem::TooLong);
        }
        let params = generation_only(choice, said("usage"))?;
        Ok(Self {
            hosts: hosts_in(&params),
            params,
            prompt_ids: prompt_ids.map(str::to_owned),
            prompt_tokens: usage::prompt_tokens(answer).max(counted),
        })
    }

    /// KV blocks that the prefill worker holds until they are fetched. Its answer has no block ids, so the prompt's tokens
    /// are counted.
    pub fn blocks(&self, block_tokens: u32) -> u64 {
        self.prompt_tokens.div_ceil(u64::from(block_tokens.max(1)))
    }
}

fn hosts_in(params: &str) -> Vec<String> {
    let Ok(object) = Object::parse(params.as_bytes(), &[ENDPOINT]) else {
        return Vec::new();
    };
    let named = object.all(ENDPOINT);
    named
        .flat_map(|member| hosts::named(member.value))
        .collect()
}

/// A choice's parameters, byte for byte, except that decode generates, with the context's usage in front.
fn generation_only(choice: &str, usage: Option<&str>) -> Result<String, ContextProblem> {
    let object =
        Object::parse(choice.as_bytes(), &[PARAMS]).map_err(|_| ContextProblem::NoParams)?;
    let params = object.get(PARAMS).ok_or(ContextProblem::NoParams)?.value;
    let wanted = [REQUEST_TYPE, CTX_USAGE, IDS[0], IDS[1]];
    let mut has_id = false;
    let params = edited(params, &wanted, |object, edits| {
        let is_id = |name: &&str| {
            let id = object.get(name).map(|member| member.value);
            id.is_some_and(|id| id.as_bytes().first().is_some_and(u8::is_ascii_digit))
        };
        has_id = IDS.iter().any(is_id);
        if let Some(usage) = usage {
            edits.remove_all(object, CTX_USAGE);
            edits.insert(CTX_USAGE, usage);
        }
        edits.set(object, REQUEST_TYPE, "\"generation_only\"");
    });
    match params {
        None => Err(ContextProblem::NoParams),
        Some(_) if !has_id => Err(ContextProblem::NoId),
        Some(params) => Ok(params),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: &str = r#"{"id":"x","choices":[{"index":0,"finish_reason":"length","disaggregated_params": {"request_type":"context_only", "first_gen_tokens":[7],"ctx_request_id":9223372036854775807,"encoded_opaque_state":"AA==","disagg_request_id":4611686018427387905,"new":1e400}}],"prompt_token_ids":[1, 2,3],"usage":{"prompt_tokens":3}}"#;

    /// The part of the answer that decode gets.
    const PARAMS_SENT: &str = r#""disaggregated_params":{"ctx_usage":{"prompt_tokens":3},"request_type":"generation_only", "first_gen_tokens":[7],"ctx_request_id":9223372036854775807,"encoded_opaque_state":"AA==","disagg_request_id":4611686018427387905,"new":1e400}"#;

    fn applied(edits: &Edits, body: &str) -> String {
        String::from_utf8(edits.apply(body.as_bytes())).unwrap()
    }

    #[test]
    fn prefill_leg_golden_bytes() {
        let body =
            r#"{"model":"m", "messages":[],"disaggregated_params":null,"stream":true,"n":1}"#;
        let request = Request::parse(Generation::Chat, body.as_bytes()).unwrap();
        let mut edits = prefill_edits(&request);
        let (name, value) = context_only((1 << 63) - 1);
        edits.insert(name, value);
        assert_eq!(
            applied(&edits, body),
            r#"{"max_tokens":1,"disaggregated_params":{"request_type":"context_only","disagg_request_id":9223372036854775807,"schedule_style":0},"model":"m", "messages":[],"stream":false,"n":1}"#
        );
    }

    #[test]
    fn decode_and_clean_up_legs_golden_bytes() {
        let context = Context::parse(ANSWER.as_bytes()).unwrap();
        assert_eq!((context.blocks(2), context.blocks(0)), (2, 3));
        let body = r#"{"model":"m", "messages":[],"disaggregated_params":{},"stream":true,"seed":9007199254740993}"#;
        let request = Request::parse(Generation::Chat, body.as_bytes()).unwrap();
        let ids = r#""prompt_token_ids":[1, 2,3]"#;
        assert_eq!(
            applied(&GenerationLeg::new(&request).edits(&context), body),
            format!(
                r#"{{{PARAMS_SENT},{ids},"model":"m", "messages":[],"stream":true,"seed":9007199254740993}}"#
            )
        );
        assert_eq!(
            applied(&GenerationLeg::cleanup(&request).edits(&context), body),
            format!(
                r#"{{"max_tokens":1,{PARAMS_SENT},{ids},"model":"m", "messages":[],"stream":false,"seed":9007199254740993}}"#
            )
        );
        let body = r#"{"prompt" : "a \u0022 b","model":"m","max_tokens":9}"#;
        let request = Request::parse(Generation::Completions, body.as_bytes()).unwrap();
        assert_eq!(
            applied(&GenerationLeg::new(&request).edits(&context), body),
            format!(r#"{{{PARAMS_SENT},"prompt" : [1, 2,3],"model":"m","max_tokens":9}}"#)
        );
    }

    #[test]
    fn ids_of_the_client_are_not_left_beside_those_of_the_context() {
        let context = Context::parse(ANSWER.as_bytes()).unwrap();
        let body = r#"{"model":"m","messages":[],"prompt_token_ids":[9]}"#;
        let request = Request::parse(Generation::Chat, body.as_bytes()).unwrap();
        assert_eq!(
            applied(&GenerationLeg::new(&request).edits(&context), body),
            format!(r#"{{{PARAMS_SENT},"model":"m","messages":[],"prompt_token_ids":[1, 2,3]}}"#)
        );
    }

    #[test]
    fn members_that_an_engine_writes_as_null_do_not_win_over_ours() {
        let answer = r#"{"choices":[{"disaggregated_params":{"ctx_usage":null,"ctx_request_id":1}}],"prompt_token_ids":null,"usage":{}}"#;
        let context = Context::parse(answer.as_bytes()).unwrap();
        assert_eq!(
            context.params,
            r#"{"ctx_usage":{},"request_type":"generation_only","ctx_request_id":1}"#
        );
        let body = r#"{"model":"m","prompt":"p"}"#;
        let request = Request::parse(Generation::Completions, body.as_bytes()).unwrap();
        let leg = applied(&GenerationLeg::new(&request).edits(&context), body);
        assert!(leg.ends_with(r#","model":"m","prompt":"p"}"#), "{leg}");
    }

    #[test]
    fn an_answer_that_hands_nothing_over_says_why() {
        let with = |choices: &str| format!(r#"{{"choices":[{choices}]}}"#);
        let params = |params: &str| with(&format!(r#"{{"disaggregated_params":{params}}}"#));
        let one = r#"{"disaggregated_params":{"ctx_request_id":1}}"#;
        for (answer, problem) in [
            (String::new(), ContextProblem::NoAnswer),
            ("[]".to_owned(), ContextProblem::NoAnswer),
            (r#"{"choices":null}"#.to_owned(), ContextProblem::NoAnswer),
            (r#"{"choices":{}}"#.to_owned(), ContextProblem::NoAnswer),
            (with(""), ContextProblem::Choices(0)),
            (with(&format!("{one},{one}")), ContextProblem::Choices(2)),
            (with("{}"), ContextProblem::NoParams),
            (with("1"), ContextProblem::NoParams),
            (params("null"), ContextProblem::NoParams),
            (params("[]"), ContextProblem::NoParams),
            (params("{}"), ContextProblem::NoId),
            (params(r#"{"ctx_request_id":null}"#), ContextProblem::NoId),
            (
                format!(r#"{{"choices":[{one}],"prompt_token_ids":"AQI="}}"#),
                ContextProblem::PromptIds,
            ),
        ] {
            assert_eq!(Context::parse(answer.as_bytes()), Err(problem), "{answer}");
        }
        assert!(Context::parse(params(r#"{"disagg_request_id":1}"#).as_bytes()).is_ok());
    }
}
