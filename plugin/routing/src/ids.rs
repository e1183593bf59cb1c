//! Owns the ids of a request: engines see only the gateway's id, logs show the client's too.

use crate::excerpt::word;

/// The ids of a request.
pub struct Ids {
    /// For engines: the gateway's own.
    own: String,
    /// For the log and the status page: the client's, then the gateway's own.
    for_log: String,
}

impl Ids {
    /// Longest part of a client's id that is shown, in bytes.
    const LONGEST: usize = 64;

    /// From the client's id, if it sent one, and the gateway's own.
    pub fn new(clients: Option<&[u8]>, own: String) -> Self {
        let clients = String::from_utf8_lossy(clients.unwrap_or_default());
        let clients = match word(&clients, Self::LONGEST) {
            none if none.is_empty() => "-".to_owned(),
            some => some,
        };
        Self {
            for_log: format!("{clients} {own}"),
            own,
        }
    }

    /// The id that the engines get.
    pub fn own(&self) -> &str {
        &self.own
    }

    /// The ids that begin a line of the log.
    pub fn for_log(&self) -> &str {
        &self.for_log
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn found_ids_a_client_writes_no_line_with_its_id() {
        let for_log = |clients: &[u8]| {
            Ids::new(Some(clients), "0f".to_owned())
                .for_log()
                .to_owned()
        };
        assert_eq!(for_log(b"client-7"), "client-7 0f");
        assert_eq!(for_log(b""), "- 0f");
        assert_eq!(Ids::new(None, "0f".to_owned()).for_log(), "- 0f");
        assert_eq!(for_log(b"a] [b\n"), r"a\u{5d}\u{20}\u{5b}b\n 0f");
        assert_eq!(for_log(b"\xff"), r"\u{fffd} 0f");
        let long = for_log(&[b'x'; 1 << 20]);
        assert!(long.len() < 100 && long.ends_with(" 0f"), "{long}");
    }

    #[test]
    fn found_ids_engines_are_told_our_own() {
        assert_eq!(Ids::new(Some(b"client-7"), "0f".to_owned()).own(), "0f");
    }
}
