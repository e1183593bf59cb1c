//! Owns the answer to a query-only request: which workers would be picked. Nothing is booked, and no backend is touched.

use std::time::Duration;

use serde_json::{Value, json};

use super::selection_request::SelectionContext;
use crate::fleet::Target;
use crate::request::{AnswerForm, Generation, Request};

/// An answer given by the router itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalAnswer {
    /// The content type.
    pub content_type: &'static str,
    /// The body.
    pub body: String,
}

/// Names the workers: id and rank of both; for an aggregated request, the same worker twice, as in Dynamo. Adds the prompt's
/// token ids if the request carried them, else its length in blocks.
pub(super) fn answer(
    request: &Request<'_>,
    context: &SelectionContext<'_>,
    prefill: Option<&Target>,
    decode: &Target,
    block_tokens: u32,
    now: Duration,
) -> LocalAnswer {
    let now_s = now.as_secs();
    let prefill = prefill.unwrap_or(decode);
    let mut nvext = json!({"worker_id": {
        "prefill_worker_id": prefill.worker.id.0,
        "prefill_dp_rank": prefill.rank.unwrap_or(0),
        "decode_worker_id": decode.worker.id.0,
        "decode_dp_rank": decode.rank.unwrap_or(0),
    }});
    let ids = context
        .overrides
        .token_data
        .clone()
        .or_else(|| request.prompt_ids());
    let (name, value) = match ids {
        Some(ids) => ("token_ids", json!(ids)),
        None => {
            let blocks = request
                .prompt_tokens
                .div_ceil(u64::from(block_tokens.max(1)));
            ("block_count", json!(blocks))
        }
    };
    if let Some(fields) = nvext.as_object_mut() {
        fields.insert(name.to_owned(), value);
    }
    match request.form() {
        AnswerForm::Unstreamed => LocalAnswer {
            content_type: "application/json",
            body: document(request, &nvext, now_s, "message").to_string(),
        },
        AnswerForm::Stream { .. } => LocalAnswer {
            content_type: "text/event-stream",
            body: format!(
                "data: {}\n\ndata: [DONE]\n\n",
                document(request, &nvext, now_s, "delta")
            ),
        },
    }
}

fn document(request: &Request<'_>, nvext: &Value, now_s: u64, part: &str) -> Value {
    let (object, choice) = match request.generation {
        Generation::Completions => (
            "text_completion",
            json!({"index": 0, "text": "", "finish_reason": null, "logprobs": null}),
        ),
        _ => {
            let object = if part == "delta" {
                "chat.completion.chunk"
            } else {
                "chat.completion"
            };
            (
                object,
                json!({"index": 0, part: {"role": "assistant", "content": null}, "finish_reason": null, "logprobs": null}),
            )
        }
    };
    json!({"id": "query", "object": object, "created": now_s, "model": &*request.model, "choices": [choice], "nvext": nvext})
}
