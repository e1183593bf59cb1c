//! Owns the form in which a client requests its answer.

/// The form in which the client requested its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerForm {
    /// One JSON document.
    Unstreamed,
    /// Server-sent events.
    Stream {
        /// Whether the stream ends with the usage.
        usage: bool,
    },
}
