//! Owns what a test expects of a stream of server-sent events.

use pd_harness_common::sse::EventReader;
use serde_json::Value;

/// The `data` of each complete event, in order. Comments and other fields are skipped.
pub fn data(stream: &str) -> Vec<String> {
    let events = EventReader::default().read(stream.as_bytes());
    events.into_iter().filter_map(|event| event.data).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

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
