//! Owns the reader of server-sent events.

use serde_json::Value;

/// The `data` of each event, in order. Comments and other fields are skipped.
pub fn data(stream: &str) -> Vec<String> {
    let text = stream.replace("\r\n", "\n");
    text.split("\n\n").filter_map(event_data).collect()
}

/// The events before `[DONE]` as JSON. Fails when the stream does not end with `[DONE]`.
pub fn json_until_done(stream: &str) -> Vec<Value> {
    let mut events = data(stream);
    assert_eq!(
        events.pop().as_deref(),
        Some("[DONE]"),
        "the stream must end with [DONE]: {stream:?}"
    );
    let parse = |event: &String| {
        serde_json::from_str(event)
            .unwrap_or_else(|error| panic!("an event is not JSON ({error}): {event:?}"))
    };
    events.iter().map(parse).collect()
}

fn event_data(event: &str) -> Option<String> {
    let lines: Vec<&str> = event
        .lines()
        .filter_map(|line| line.strip_prefix("data:"))
        .map(|value| value.strip_prefix(' ').unwrap_or(value))
        .collect();
    (!lines.is_empty()).then(|| lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_split_at_blank_lines() {
        assert_eq!(data("data: a\n\ndata:b\n\n"), ["a", "b"]);
        assert_eq!(data("data: a\r\n\r\ndata: b\r\n\r\n"), ["a", "b"]);
    }

    #[test]
    fn comments_and_other_fields_are_left_out_and_lines_are_joined() {
        assert_eq!(data(": hello\n\nevent: x\ndata: a\ndata: b\n\n"), ["a\nb"]);
    }

    #[test]
    fn json_events_end_with_done() {
        let events = json_until_done("data: {\"a\":1}\n\ndata: [DONE]\n\n");
        assert_eq!(events, [serde_json::json!({"a": 1})]);
    }

    #[test]
    #[should_panic(expected = "must end with [DONE]")]
    fn a_stream_without_done_fails() {
        json_until_done("data: {\"a\":1}\n\n");
    }
}
