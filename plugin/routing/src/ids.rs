//! Owns by what a request is known: to the engines by an id of our own, in the log by its client's too.

use crate::excerpt::word;

/// By what a request is known.
pub struct Ids {
    /// To engines: our own.
    own: String,
    /// In the log and on the status page: the client's, then our own.
    told: String,
}

impl Ids {
    /// So much of a client's id is told, in bytes.
    const LONGEST: usize = 64;

    /// With the id that the client sent, if it did.
    pub fn new(clients: Option<&[u8]>, own: String) -> Self {
        let clients = String::from_utf8_lossy(clients.unwrap_or_default());
        let clients = match word(&clients, Self::LONGEST) {
            none if none.is_empty() => "-".to_owned(),
            some => some,
        };
        Self {
            told: format!("{clients} {own}"),
            own,
        }
    }

    /// What the engines are told.
    pub fn own(&self) -> &str {
        &self.own
    }

    /// What a line of the log begins with.
    pub fn told(&self) -> &str {
        &self.told
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn found_ids_a_client_writes_no_line_with_its_id() {
        let told = |clients: &[u8]| Ids::new(Some(clients), "0f".to_owned()).told().to_owned();
        assert_eq!(told(b"client-7"), "client-7 0f");
        assert_eq!(told(b""), "- 0f");
        assert_eq!(Ids::new(None, "0f".to_owned()).told(), "- 0f");
        assert_eq!(told(b"a] [b\n"), r"a\u{5d}\u{20}\u{5b}b\n 0f");
        assert_eq!(told(b"\xff"), r"\u{fffd} 0f");
        let long = told(&[b'x'; 1 << 20]);
        assert!(long.len() < 100 && long.ends_with(" 0f"), "{long}");
    }

    #[test]
    fn found_ids_engines_are_told_our_own() {
        assert_eq!(Ids::new(Some(b"client-7"), "0f".to_owned()).own(), "0f");
    }
}
