//! Owns the conversion of a complete answer to the events of a stream.

use serde_json::{Value, json};

/// The events of an answer, as in its interface; none where `answer` is no answer. `usage`: whether the client requested
/// it; responses always include it.
pub(super) fn of(answer: &Value, usage: bool) -> Option<String> {
    match answer.get("choices").and_then(Value::as_array) {
        Some(choices) => Some(chunks(answer, choices, usage)),
        None => responses(answer),
    }
}

/// One chunk, the usage where requested, and the end.
fn chunks(answer: &Value, choices: &[Value], usage: bool) -> String {
    let object = match answer.get("object").and_then(Value::as_str) {
        Some("chat.completion") => "chat.completion.chunk",
        Some(other) => other,
        None => "text_completion",
    };
    let chunk = |choices: Vec<Value>, usage: Value| {
        let field = |name: &str| answer.get(name).cloned().unwrap_or(Value::Null);
        json!({"id": field("id"), "object": object, "created": field("created"), "model": field("model"),
               "choices": choices, "usage": usage})
    };
    let mut text = format!(
        "data: {}\n\n",
        chunk(choices.iter().map(as_delta).collect(), Value::Null)
    );
    if let Some(counted) = answer.get("usage").filter(|_| usage) {
        text.push_str(&format!("data: {}\n\n", chunk(Vec::new(), counted.clone())));
    }
    text.push_str("data: [DONE]\n\n");
    text
}

/// In a stream a message is called a delta, and its tool calls are numbered.
fn as_delta(choice: &Value) -> Value {
    let mut choice = choice.clone();
    if let Some(fields) = choice.as_object_mut()
        && let Some(mut message) = fields.remove("message")
    {
        number_calls(&mut message);
        fields.insert("delta".to_owned(), message);
    }
    choice
}

fn number_calls(message: &mut Value) {
    let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
    let calls = calls.into_iter().flatten().filter_map(Value::as_object_mut);
    for (index, call) in calls.enumerate() {
        call.entry("index").or_insert_with(|| json!(index));
    }
}

/// The Responses interface announces the beginning and the end of each item and of each text in it.
fn responses(answer: &Value) -> Option<String> {
    let output = answer.get("output")?.as_array()?;
    let mut begun = answer.clone();
    if let Some(fields) = begun.as_object_mut() {
        fields.insert("status".to_owned(), json!("in_progress"));
        fields.insert("output".to_owned(), json!([]));
        fields.insert("usage".to_owned(), Value::Null);
    }
    let mut events = Responses::default();
    events.put("response.created", json!({"response": begun}));
    for (index, item) in output.iter().enumerate() {
        events.item(index, item);
    }
    let end = match answer.get("status").and_then(Value::as_str) {
        Some("incomplete") => "response.incomplete",
        _ => "response.completed",
    };
    events.put(end, json!({"response": answer}));
    Some(events.text)
}

#[derive(Default)]
struct Responses {
    text: String,
    sequence: u64,
}

impl Responses {
    fn put(&mut self, kind: &str, mut event: Value) {
        if let Some(fields) = event.as_object_mut() {
            fields.insert("type".to_owned(), json!(kind));
            fields.insert("sequence_number".to_owned(), json!(self.sequence));
        }
        self.sequence = self.sequence.saturating_add(1);
        self.text
            .push_str(&format!("event: {kind}\ndata: {event}\n\n"));
    }

    fn item(&mut self, index: usize, item: &Value) {
        let mut begun = item.clone();
        if let Some(content) = begun.get_mut("content") {
            *content = json!([]);
        }
        self.put(
            "response.output_item.added",
            json!({"output_index": index, "item": begun}),
        );
        let parts = item.get("content").and_then(Value::as_array);
        for (part_index, part) in parts.into_iter().flatten().enumerate() {
            self.part((index, item), part_index, part);
        }
        self.put(
            "response.output_item.done",
            json!({"output_index": index, "item": item}),
        );
    }

    fn part(&mut self, (output, item): (usize, &Value), index: usize, part: &Value) {
        let with = |name: &str, value: Value| json!({"item_id": item.get("id"), "output_index": output, "content_index": index, name: value});
        let is_text = part.get("type").and_then(Value::as_str) == Some("output_text");
        let Some(text) = part.get("text").filter(|_| is_text) else {
            return;
        };
        let mut begun = part.clone();
        if let Some(fields) = begun.as_object_mut() {
            fields.insert("text".to_owned(), json!(""));
        }
        self.put("response.content_part.added", with("part", begun));
        self.put("response.output_text.delta", with("delta", text.clone()));
        self.put("response.output_text.done", with("text", text.clone()));
        self.put("response.content_part.done", with("part", part.clone()));
    }
}
