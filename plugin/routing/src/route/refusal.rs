//! Owns why a request is refused: status, reason and the words a client reads.

use serde_json::json;

use crate::fleet::Role;

/// A request that pd-router itself answers with an error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The body cannot be read as JSON.
    #[error("the request body is {detail}")]
    NotJson {
        /// What is wrong with it.
        detail: String,
    },
    /// JSON, but not a request.
    #[error("{name}: {problem}")]
    Field {
        /// The field at fault.
        name: &'static str,
        /// What is wrong and what would be right.
        problem: &'static str,
    },
    /// A compressed body, and nobody who could take it unread.
    #[error(
        "the request body is compressed and cannot be routed unread; send it without content-encoding"
    )]
    Encoded,
    /// A generation path that has no hand-off, and nobody who runs whole requests.
    #[error("this path cannot be split into prefill and decode, and no worker runs whole requests")]
    NoHandoffForPath,
    /// No worker serves the model.
    #[error("the model `{model}` does not exist")]
    UnknownModel {
        /// The model asked for.
        model: String,
    },
    /// A role has no worker for this request.
    #[error("no {} worker is available", role.name())]
    NoWorker {
        /// The role that is empty.
        role: Role,
    },
    /// Nothing is known of any worker yet.
    #[error("no worker is known yet")]
    NoFleet,
    /// The bodies in flight reached the configured bound.
    #[error("too many request bodies in flight")]
    Busy,
    /// Every prefill worker that was tried failed.
    #[error("prefill failed on all {tried} workers tried: {cause}")]
    PrefillFailed {
        /// Workers tried.
        tried: usize,
        /// What the last one did.
        cause: PrefillFailure,
    },
    /// Nobody to whom the request could go would take a connection.
    #[error("no {what} could be reached ({tried} tried)")]
    Unreachable {
        /// What was tried: a decode worker, a frontend.
        what: &'static str,
        /// How many were tried.
        tried: usize,
    },
    /// The proxy would not carry out what was decided.
    #[error("the request could not be forwarded")]
    Internal,
}

/// How a prefill worker failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PrefillFailure {
    /// The call could not be made at all.
    #[error("it could not be called")]
    NotSent,
    /// The connection broke after the answer had begun.
    #[error("its answer broke off")]
    Broken,
    /// An error status; 503 and 504 also stand for a worker that refused the connection or did not answer in time.
    #[error("it answered {0}")]
    Status(u16),
    /// A good answer without the hand-off that decode needs.
    #[error("its answer carried no hand-off")]
    NoHandoff,
}

impl Refusal {
    /// The HTTP status.
    pub fn status(&self) -> u32 {
        match self {
            Self::NotJson { .. } | Self::Field { .. } => 400,
            Self::UnknownModel { .. } => 404,
            Self::Encoded => 415,
            Self::NoHandoffForPath => 501,
            Self::PrefillFailed {
                cause: PrefillFailure::NoHandoff,
                ..
            } => 502,
            Self::Internal => 500,
            Self::NoWorker { .. }
            | Self::NoFleet
            | Self::Busy
            | Self::PrefillFailed { .. }
            | Self::Unreachable { .. } => 503,
        }
    }

    /// The reason in one word, for metrics and for `error.code`.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NotJson { .. } => "not_json",
            Self::Field { .. } => "invalid_field",
            Self::Encoded => "encoded_body",
            Self::NoHandoffForPath => "no_handoff_for_path",
            Self::UnknownModel { .. } => "model_not_found",
            Self::NoWorker { role } => match role {
                Role::Prefill => "no_prefill_worker",
                Role::Decode => "no_decode_worker",
                Role::Aggregated => "no_aggregated_worker",
            },
            Self::NoFleet => "no_fleet",
            Self::Busy => "bodies_in_flight",
            Self::PrefillFailed { .. } => "prefill_failed",
            Self::Unreachable { .. } => "unreachable",
            Self::Internal => "internal",
        }
    }

    /// Seconds after which a client may try again; none where trying again would not help.
    pub fn retry_after_s(&self) -> Option<u32> {
        (self.status() == 503).then_some(1)
    }

    /// The error in the shape of OpenAI's.
    pub fn to_json(&self) -> String {
        let kind = match self.status() {
            400 | 415 => "invalid_request_error",
            404 => "not_found_error",
            503 => "service_unavailable",
            _ => "api_error",
        };
        let param = match self {
            Self::Field { name, .. } => Some(*name),
            Self::UnknownModel { .. } => Some("model"),
            _ => None,
        };
        json!({"error": {"message": self.to_string(), "type": kind, "param": param, "code": self.code()}}).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_openais_shape_and_name_the_field() {
        let refusal = Refusal::Field {
            name: "model",
            problem: "must be a string",
        };
        assert_eq!(refusal.status(), 400);
        assert_eq!(refusal.retry_after_s(), None);
        assert_eq!(
            refusal.to_json(),
            r#"{"error":{"code":"invalid_field","message":"model: must be a string","param":"model","type":"invalid_request_error"}}"#
        );
    }

    #[test]
    fn what_may_pass_says_when_to_try_again() {
        let refusal = Refusal::NoWorker { role: Role::Decode };
        assert_eq!((refusal.status(), refusal.retry_after_s()), (503, Some(1)));
        assert!(refusal.to_json().contains("no decode worker"));
    }
}
