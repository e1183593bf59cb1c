//! Owns the parsing of SGLang's own endpoint (`/generate`): a prompt under other names, and limits in `sampling_params`.

use serde::Deserialize;

use super::{Fields, MOST_CHOICES, MOST_OUTPUT_TOKENS, Prompt, PromptIds, within};
use crate::engine::refusal::Refusal;

/// Output tokens if the request sets no limit, as in SGLang.
const DEFAULT_NEW_TOKENS: u64 = 128;

/// Requested choices and tokens.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Limits {
    /// Choices per prompt.
    pub choices: u64,
    /// Tokens of each choice.
    pub output_tokens: u64,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct SamplingParams {
    n: Option<i64>,
    max_new_tokens: Option<i64>,
    min_new_tokens: Option<i64>,
}

/// The ids of the prompts whose log probabilities are requested; `None` without such a request.
pub type Logprobs = Option<Vec<Vec<u32>>>;

/// Parses the prompt, text or ids.
///
/// # Errors
/// [`Refusal::BadRequest`].
pub(super) fn prompt(fields: &Fields) -> Result<Prompt, Refusal> {
    let both = || Refusal::BadRequest("Either text or input_ids should be provided.".into());
    let shape = |name| Refusal::BadRequest(format!("Invalid `{name}`"));
    match (fields.optional("text")?, fields.optional("input_ids")?) {
        (Some(prompt @ (Prompt::Text(_) | Prompt::Texts(_))), None) => Ok(prompt),
        (None, Some(prompt @ (Prompt::Tokens(_) | Prompt::TokenLists(_)))) => Ok(prompt),
        (Some(_), None) => Err(shape("text")),
        (None, Some(_)) => Err(shape("input_ids")),
        (Some(_), Some(_)) | (None, None) => Err(both()),
    }
}

/// Parses the limits. One `sampling_params` per prompt of a batch, which SGLang accepts too, is not simulated.
///
/// # Errors
/// [`Refusal::BadRequest`] that names the field.
pub(super) fn limits(fields: &Fields) -> Result<Limits, Refusal> {
    let params: SamplingParams = fields.optional("sampling_params")?.unwrap_or_default();
    let most = within("max_new_tokens", params.max_new_tokens, MOST_OUTPUT_TOKENS)?;
    let output_tokens = most.unwrap_or(DEFAULT_NEW_TOKENS);
    let least = params.min_new_tokens.unwrap_or(0);
    if least < 0 || least as u64 > output_tokens {
        return Err(Refusal::BadRequest(format!(
            "min_new_tokens must be in [0, max_new_tokens({output_tokens})], got {least}."
        )));
    }
    Ok(Limits {
        choices: within("n", params.n, MOST_CHOICES)?.unwrap_or(1),
        output_tokens,
    })
}

/// Parses whether log probabilities are requested.
///
/// # Errors
/// [`Refusal::BadRequest`] that names the field.
pub(super) fn logprobs(fields: &Fields) -> Result<Logprobs, Refusal> {
    match fields.optional::<bool>("return_logprob")? {
        Some(true) => Ok(Some(PromptIds::of_each(&prompt(fields)?))),
        Some(false) | None => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::request::{Endpoint, Generation};

    fn parse(body: &str) -> Result<Generation, Refusal> {
        Generation::parse(Endpoint::Generate, body.as_bytes())
    }

    #[test]
    fn all_shapes_are_read() {
        for (body, prompts, sequences, batch) in [
            (r#"{"text":"12345678"}"#, vec![2], 1, false),
            (r#"{"text":["1234","12345"]}"#, vec![1, 2], 2, true),
            (r#"{"input_ids":[1,2,3]}"#, vec![3], 1, false),
            (
                r#"{"input_ids":[[1,2],[3]],"sampling_params":{"n":2,"x":[]}}"#,
                vec![2, 1],
                4,
                true,
            ),
        ] {
            let generation = parse(body).expect(body);
            assert_eq!(generation.prompts, prompts, "{body}");
            assert_eq!(generation.sequences(), sequences, "{body}");
            assert_eq!(generation.batch, batch, "{body}");
            assert_eq!(generation.output_tokens, 128);
        }
    }

    #[test]
    fn faults_are_refused_by_name() {
        for (body, named) in [
            ("{}", "text or input_ids"),
            (r#"{"text":"a","input_ids":[1]}"#, "text or input_ids"),
            (r#"{"text":[1]}"#, "`text`"),
            (r#"{"input_ids":"a"}"#, "`input_ids`"),
            (
                r#"{"text":"a","sampling_params":[{}]}"#,
                "`sampling_params`",
            ),
            (
                r#"{"text":"a","sampling_params":{"max_new_tokens":0}}"#,
                "max_new_tokens",
            ),
            (
                r#"{"text":"a","sampling_params":{"max_new_tokens":1,"min_new_tokens":2}}"#,
                "min_new_tokens",
            ),
            (r#"{"text":"a","sampling_params":{"n":0}}"#, "n must"),
        ] {
            let refusal = parse(body).expect_err(body).to_string();
            assert!(refusal.contains(named), "{body}: {refusal}");
        }
    }
}
