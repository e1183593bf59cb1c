//! Owns the prompts of a completion that come as embeddings: their number, and an estimate of their length.

use crate::json::{Object, elements};
use crate::refusal::Refusal;

const NAME: &str = "prompt_embeds";

/// Bytes of one token: 4,096 numbers of two bytes, as in a usual model, in base64. The real width of the model is unknown here.
const TOKEN_BYTES: usize = 4_096 * 2 * 4 / 3;

/// The embedded prompts as written, each a string in base64.
fn embedded<'a>(body: &Object<'a>) -> Option<Vec<&'a str>> {
    let Some(member) = body.get(NAME) else {
        return Some(Vec::new());
    };
    match member.value.as_bytes().first() {
        Some(b'"') => Some(vec![member.value]),
        Some(b'n') => Some(Vec::new()),
        _ => elements(member.value)
            .filter(|prompts| prompts.iter().all(|prompt| prompt.starts_with('"'))),
    }
}

/// Number of embedded prompts; none where there is none.
pub(super) fn sequences(body: &Object<'_>) -> Option<u64> {
    let count = embedded(body)?.len() as u64;
    (count > 0).then_some(count)
}

/// Estimated tokens of all embedded prompts; 0 where there is none.
///
/// # Errors
/// [`Refusal::Field`] where the member is neither a string nor a list of strings.
pub(super) fn tokens(body: &Object<'_>) -> Result<u64, Refusal> {
    let prompts = embedded(body).ok_or(Refusal::Field {
        name: NAME,
        problem: "must be a string in base64, or a list of them",
    })?;
    let tokens = |prompt: &str| prompt.len().div_ceil(TOKEN_BYTES) as u64;
    Ok(prompts.into_iter().map(tokens).sum())
}
