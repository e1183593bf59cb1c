//! Owns the answers of the responses API, unstreamed and as the events that vLLM streams: one message of one text.

use bytes::Bytes;
use serde_json::{Value, json};

use super::{Answer, Finish, framed, word};

/// Events before that of the first token.
const BEFORE: u64 = 4;

impl Answer {
    /// The unstreamed answer, with these parameters of a hand-off.
    pub(super) fn response_whole(&self, kv_transfer_params: Value) -> Bytes {
        framed(Vec::new(), &self.response_ended(kv_transfer_params), b"")
    }

    pub(super) fn response_opening(&self) -> Vec<Bytes> {
        let events = [(0, "response.created"), (1, "response.in_progress")];
        let response = self.response("in_progress", json!([]), Value::Null);
        let event = |(number, name)| event(number, name, json!({"response": response}));
        events.map(event).to_vec()
    }

    pub(super) fn response_token(&self, number: u64) -> Vec<Bytes> {
        let mut events = Vec::new();
        if number == 0 {
            let item = self.item("in_progress", json!([]));
            let added = json!({"item": item, "output_index": 0});
            events.push(event(2, "response.output_item.added", added));
            let part = json!({"part": part("", json!([])), "item_id": self.item_id(), "output_index": 0,
                "content_index": 0});
            events.push(event(3, "response.content_part.added", part));
        }
        let delta = json!({"delta": word(number), "item_id": self.item_id(), "output_index": 0,
            "content_index": 0, "logprobs": []});
        events.push(event(BEFORE + number, "response.output_text.delta", delta));
        events
    }

    /// vLLM's last event is `response.completed`, for any finish reason.
    pub(super) fn response_closing(&self) -> Vec<Bytes> {
        let text = self.text();
        let part = part(&text, Value::Null);
        let item = self.item("completed", json!([part]));
        let place = |mut members: Value| {
            members["item_id"] = json!(self.item_id());
            members["output_index"] = json!(0);
            members["content_index"] = json!(0);
            members
        };
        let events = [
            (
                "response.output_text.done",
                place(json!({"text": text, "logprobs": []})),
            ),
            ("response.content_part.done", place(json!({"part": part}))),
            (
                "response.output_item.done",
                json!({"item": item, "output_index": 0}),
            ),
            (
                "response.completed",
                json!({"response": self.response_ended(Value::Null)}),
            ),
        ];
        (BEFORE + self.output.tokens..)
            .zip(events)
            .map(|(number, (name, members))| event(number, name, members))
            .collect()
    }

    fn response_ended(&self, kv_transfer_params: Value) -> Value {
        let (status, incomplete) = match self.output.finish {
            Finish::Length => ("incomplete", json!({"reason": "max_output_tokens"})),
            Finish::Stop => ("completed", Value::Null),
        };
        let output = json!([self.item("completed", json!([part(&self.text(), Value::Null)]))]);
        let mut response = self.response(status, output, kv_transfer_params);
        let usage = self.usage;
        response["incomplete_details"] = incomplete;
        response["usage"] = json!({"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
            "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "cache_write_tokens": 0, "input_tokens_per_turn": [], "cached_tokens_per_turn": []},
            "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0,
                "output_tokens_per_turn": [], "tool_output_tokens_per_turn": []}});
        response
    }

    fn response(&self, status: &str, output: Value, kv_transfer_params: Value) -> Value {
        json!({"id": self.id, "object": "response", "created_at": self.created, "model": self.model,
            "status": status, "incomplete_details": null, "output": output, "usage": null,
            "instructions": null, "metadata": null, "parallel_tool_calls": true, "temperature": 0.0,
            "tool_choice": "none", "tools": [], "top_p": 1.0, "background": false,
            "max_output_tokens": self.output.tokens, "max_tool_calls": null, "previous_response_id": null,
            "prompt": null, "reasoning": null, "service_tier": "auto", "text": null, "top_logprobs": null,
            "truncation": "disabled", "user": null, "presence_penalty": 0.0, "frequency_penalty": 0.0,
            "kv_transfer_params": kv_transfer_params, "ec_transfer_params": null, "input_messages": null,
            "output_messages": null})
    }

    fn item(&self, status: &str, content: Value) -> Value {
        json!({"id": self.item_id(), "type": "message", "role": "assistant", "status": status,
            "content": content, "phase": null})
    }

    fn item_id(&self) -> String {
        format!("msg_{}", self.id)
    }
}

fn part(text: &str, logprobs: Value) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
}

fn event(number: u64, name: &str, mut data: Value) -> Bytes {
    data["sequence_number"] = json!(number);
    data["type"] = json!(name);
    framed(
        format!("event: {name}\ndata: ").into_bytes(),
        &data,
        b"\n\n",
    )
}
