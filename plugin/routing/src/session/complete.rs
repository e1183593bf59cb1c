//! Owns the reading of an answer that has come in one piece, as the answers to calls do.

use super::Header;
use crate::answer::{Form, Reader, Verdict};
use crate::outcome::Came;

/// A complete answer of a worker's.
#[derive(Debug, Clone, Copy)]
pub struct CompleteAnswer<'a> {
    /// Headers: names in lower case, and values.
    pub headers: &'a [Header],
    /// Body.
    pub body: &'a [u8],
}

impl CompleteAnswer<'_> {
    /// The form that the headers name.
    pub fn form(&self) -> Form {
        Form::of(self.find(b"content-type").unwrap_or_default())
    }

    /// Reads the answer.
    pub fn read(&self) -> Reader {
        let kind = self.find(b"content-type").unwrap_or_default();
        let mut reader = Reader::new(kind, self.find(b"content-encoding"));
        reader.read(self.body);
        reader.finish();
        reader
    }

    /// What came of the leg, if its status is a success.
    pub fn came(&self) -> Came {
        match self.read().verdict() {
            Verdict::Failed(_) => Came::FailedInside,
            Verdict::Empty => Came::Empty,
            Verdict::Nothing | Verdict::Content | Verdict::Ended(_) => Came::Good,
        }
    }

    fn find(&self, name: &[u8]) -> Option<&[u8]> {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_slice())
    }
}
