//! Owns the token ids of a prompt, for the engine that passes them from one leg to the other.

use super::{BYTES_PER_TOKEN, Content, Endpoint, Fields, Input, Message, Prompt, native};
use crate::engine::refusal::Refusal;

/// The ids of one prompt.
#[derive(Debug, PartialEq, Eq)]
pub struct PromptIds {
    /// One id per token.
    pub ids: Vec<u32>,
    /// Whether the prompt came as ids, not as text.
    pub given: bool,
}

impl PromptIds {
    /// Parses the first prompt of a request.
    ///
    /// # Errors
    /// [`Refusal::BadRequest`] that names the field.
    pub(super) fn read(endpoint: Endpoint, fields: &Fields) -> Result<Self, Refusal> {
        match endpoint {
            Endpoint::Chat => {
                let messages: Vec<Message> = fields.required("messages")?;
                let contents = messages.iter().flat_map(|message| &message.content);
                Ok(Self::of(
                    &contents.flat_map(Content::texts).collect::<Vec<_>>(),
                ))
            }
            Endpoint::Responses => {
                let input: Input = fields.required("input")?;
                Ok(Self::of(&input.texts()))
            }
            Endpoint::Completions => Ok(Self::first(&fields.required("prompt")?)),
            Endpoint::Generate => Ok(Self::first(&native::prompt(fields)?)),
        }
    }

    /// Parses the ids of every prompt in a request's body.
    ///
    /// # Errors
    /// [`Refusal::BadRequest`] that names the field.
    pub fn of_body(endpoint: Endpoint, body: &[u8]) -> Result<Vec<Vec<u32>>, Refusal> {
        let fields = Fields::parse(body)?;
        match endpoint {
            Endpoint::Chat | Endpoint::Responses => Ok(vec![Self::read(endpoint, &fields)?.ids]),
            Endpoint::Completions => Ok(Self::of_each(&fields.required("prompt")?)),
            Endpoint::Generate => Ok(Self::of_each(&native::prompt(&fields)?)),
        }
    }

    fn first(prompt: &Prompt) -> Self {
        Self {
            ids: Self::of_each(prompt).into_iter().next().unwrap_or_default(),
            given: matches!(prompt, Prompt::Tokens(_) | Prompt::TokenLists(_)),
        }
    }

    /// The ids of each prompt of a batch.
    pub(super) fn of_each(prompt: &Prompt) -> Vec<Vec<u32>> {
        match prompt {
            Prompt::Text(text) => vec![Self::of(&[text]).ids],
            Prompt::Texts(texts) => texts.iter().map(|text| Self::of(&[text]).ids).collect(),
            Prompt::Tokens(ids) => vec![ids.clone()],
            Prompt::TokenLists(lists) => lists.clone(),
        }
    }

    /// The ids from a tokenizer with four bytes per token, for a sequence of texts; never empty.
    fn of(texts: &[&str]) -> Self {
        let text = texts.concat();
        let chunks = text.as_bytes().chunks(BYTES_PER_TOKEN);
        let mut ids: Vec<u32> = chunks.map(id).collect();
        if ids.is_empty() {
            ids.push(id(&[]));
        }
        Self { ids, given: false }
    }
}

/// A token id, positive also as a signed number, like real ids.
fn id(bytes: &[u8]) -> u32 {
    let number = bytes.iter().fold(1, |number: u32, byte| {
        number.wrapping_mul(257).wrapping_add(u32::from(*byte))
    });
    number & 0x7fff_ffff
}
