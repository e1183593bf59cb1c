//! Owns the prompts of a completion that come as embeddings: how many there are, and how long they may be.

use crate::json::{Object, elements};
use crate::route::Refusal;

const NAME: &str = "prompt_embeds";

/// Bytes of one token: 4,096 numbers of two bytes, a usual model's, in base64. How wide the model is cannot be seen.
const TOKEN_BYTES: usize = 4_096 * 2 * 4 / 3;

/// The embedded prompts as they are written, each a string in base64.
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

/// How many sequences they are; none where there is not one.
pub(super) fn sequences(body: &Object<'_>) -> Option<u64> {
    let count = embedded(body)?.len() as u64;
    (count > 0).then_some(count)
}

/// An estimate of their tokens together; 0 where there are none.
///
/// # Errors
/// [`Refusal::Field`] where they are something else.
pub(super) fn tokens(body: &Object<'_>) -> Result<u64, Refusal> {
    let prompts = embedded(body).ok_or(Refusal::Field {
        name: NAME,
        problem: "must be a string in base64, or a list of them",
    })?;
    let tokens = |prompt: &str| prompt.len().div_ceil(TOKEN_BYTES) as u64;
    Ok(prompts.into_iter().map(tokens).sum())
}
