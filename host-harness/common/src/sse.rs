//! Owns the reader of server-sent events.

/// One event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// Its type, where it names one.
    pub kind: Option<String>,
    /// Its lines of data, joined; `None` for a comment.
    pub data: Option<String>,
}

/// Cuts a stream into events, in whatever pieces it comes.
#[derive(Clone, Debug, Default)]
pub struct EventReader {
    /// The start of an event whose end has not come.
    begun: Vec<u8>,
}

/// Ends of an event.
const ENDS: [&[u8]; 2] = [b"\n\n", b"\r\n\r\n"];

impl EventReader {
    /// The events that this piece completes, in order.
    pub fn read(&mut self, piece: &[u8]) -> Vec<Event> {
        self.begun.extend_from_slice(piece);
        let mut events = Vec::new();
        let mut rest = self.begun.as_slice();
        while let Some((event, behind)) = split_at_end(rest) {
            events.push(Event::of(&String::from_utf8_lossy(event)));
            rest = behind;
        }
        self.begun = rest.to_vec();
        events
    }

    /// Whether an event has begun whose end has not come.
    pub fn has_rest(&self) -> bool {
        !self.begun.is_empty()
    }
}

fn split_at_end(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    (0..bytes.len()).find_map(|at| {
        let (event, behind) = bytes.split_at(at);
        let behind = ENDS.iter().find_map(|end| behind.strip_prefix(*end))?;
        Some((event, behind))
    })
}

impl Event {
    fn of(text: &str) -> Self {
        let values = |field: &'static str| {
            let values = text
                .lines()
                .filter_map(move |line| line.strip_prefix(field)?.strip_prefix(':'));
            values.map(|value| value.strip_prefix(' ').unwrap_or(value))
        };
        let data: Vec<&str> = values("data").collect();
        Self {
            kind: values("event").next_back().map(str::to_owned),
            data: (!data.is_empty()).then(|| data.join("\n")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(stream: &str) -> Vec<String> {
        let events = EventReader::default().read(stream.as_bytes());
        events.into_iter().filter_map(|event| event.data).collect()
    }

    #[test]
    fn events_end_with_a_blank_line() {
        assert_eq!(data("data: a\n\ndata:b\n\n"), ["a", "b"]);
        assert_eq!(data("data: a\r\n\r\ndata: b\r\n\r\n"), ["a", "b"]);
        let mut reader = EventReader::default();
        assert_eq!(reader.read(b"data: a\n\ndata: b\n").len(), 1);
        assert!(reader.has_rest());
    }

    #[test]
    fn a_stream_may_be_cut_at_any_byte() {
        let mut reader = EventReader::default();
        let stream = "data: é\n\nevent: error\ndata: b\r\n\r\n".as_bytes();
        let events = stream.iter().flat_map(|byte| reader.read(&[*byte]));
        let events: Vec<_> = events.collect();
        let event = |kind: Option<&str>, data: &str| Event {
            kind: kind.map(str::to_owned),
            data: Some(data.to_owned()),
        };
        assert_eq!(events, [event(None, "é"), event(Some("error"), "b")]);
        assert!(!reader.has_rest());
    }

    #[test]
    fn comments_have_no_data_and_lines_are_joined() {
        assert_eq!(data(": hello\n\nevent: x\ndata: a\ndata: b\n\n"), ["a\nb"]);
    }
}
