//! Owns refusals: status, reason, and the message for the client.

use serde_json::{Value, json};

use crate::excerpt::{MESSAGE, NAME, excerpt};
use crate::fleet::{Role, WorkerId};
use crate::rendezvous::NotServed;
use crate::selection::eligibility::Filter;

/// A request that pd-router itself answers with an error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The body is not valid JSON.
    #[error("the request body is not valid JSON: {detail}")]
    NotJson {
        /// The error found in it.
        detail: String,
    },
    /// Valid JSON, but not a valid request.
    #[error("{name}: {problem}")]
    Field {
        /// The field at fault.
        name: &'static str,
        /// What is wrong and what would be right.
        problem: &'static str,
    },
    /// A compressed body, and no worker that could take it unread.
    #[error(
        "the request body is compressed and cannot be routed unread; send it without content-encoding"
    )]
    Encoded,
    /// A generation path without a hand-off, and no worker that runs requests aggregated.
    #[error("this path cannot be split into prefill and decode, and no worker runs whole requests")]
    NoHandoffForPath,
    /// The request is longer than the model takes.
    #[error(
        "{field}: this model's maximum context length is {longest} tokens, and the request asks for at least {asked}"
    )]
    TooLong {
        /// The field at fault.
        field: &'static str,
        /// Tokens of the prompt, as far as known, and of the answer.
        asked: u64,
        /// Tokens that the model takes.
        longest: u64,
    },
    /// No worker serves the model.
    #[error("The model `{}` does not exist.", excerpt(model, NAME))]
    UnknownModel {
        /// The requested model.
        model: String,
    },
    /// The state of the model key does not serve the request.
    #[error("{0}")]
    NotServed(#[from] NotServed),
    /// A worker that the caller named cannot be used.
    #[error("{field}={id}: {problem}")]
    Pin {
        /// The field that names the worker, in the body or as a header.
        field: &'static str,
        /// The worker named.
        id: WorkerId,
        /// What is wrong with the worker.
        problem: PinProblem,
    },
    /// A rank that no worker has.
    #[error("no {} worker has the data-parallel rank {rank}", role.name())]
    RankOutOfRange {
        /// The role.
        role: Role,
        /// The rank.
        rank: u32,
    },
    /// The pool picks no worker, and the caller named none.
    #[error("a {} worker id is required: set the header {header}", role.name())]
    WorkerIdRequired {
        /// The role.
        role: Role,
        /// The header to set.
        header: &'static str,
    },
    /// No pair may exchange KV.
    #[error("topology: {problem}")]
    Topology {
        /// The reason.
        problem: String,
    },
    /// Too many prompt tokens wait for prefill.
    #[error("prefill is saturated: {queued_tokens} prompt tokens wait, {allowed_tokens} may")]
    Backpressure {
        /// Tokens that wait.
        queued_tokens: u64,
        /// Tokens that may wait.
        allowed_tokens: u64,
    },
    /// There are workers, but none of them may take this request.
    #[error("no {} worker may take this request: the filter `{}` left none", role.name(), filter.name())]
    NoneEligible {
        /// The role.
        role: Role,
        /// The filter that left no worker.
        filter: Filter,
    },
    /// All workers that could take the request are busier than their threshold.
    #[error("every {} worker is overloaded", role.name())]
    Overloaded {
        /// The role.
        role: Role,
    },
    /// As many requests are queued already as are allowed.
    #[error("the queue is full: {waiting} requests wait, {allowed} may")]
    QueueFull {
        /// Requests that wait.
        waiting: usize,
        /// Requests that may wait.
        allowed: usize,
    },
    /// The request waited for a worker until its deadline.
    #[error("no worker became free within {deadline_ms} ms")]
    QueueDeadline {
        /// Milliseconds that a request may wait.
        deadline_ms: u64,
    },
    /// No worker is known yet.
    #[error("no worker is known yet")]
    NoFleet,
    /// The body exceeds the size limit.
    #[error("the request body is longer than {allowed_bytes} bytes")]
    TooLarge {
        /// The most bytes that a body may have.
        allowed_bytes: usize,
    },
    /// The body did not arrive in time.
    #[error("the request body did not come within {deadline_ms} ms")]
    BodyTimeout {
        /// Milliseconds that a body may take.
        deadline_ms: u64,
    },
    /// The bodies in flight reached the configured bound.
    #[error("too many request bodies in flight")]
    Busy,
    /// Every prefill worker that was tried failed.
    #[error("prefill failed ({tried} tried): {cause}")]
    PrefillFailed {
        /// Workers tried.
        tried: usize,
        /// The failure of the last one.
        cause: PrefillFailure,
    },
    /// No possible destination took a connection.
    #[error("no {what} could be reached, or it broke off before it answered ({tried} tried)")]
    Unreachable {
        /// What was tried: a decode worker, a frontend.
        what: &'static str,
        /// Number of destinations tried.
        tried: usize,
    },
    /// The serving worker was silent for too long.
    #[error("the worker did not begin to answer in time")]
    DecodeTimeout,
    /// The serving worker ended without any output.
    #[error("the worker answered nothing")]
    EmptyAnswer,
    /// The serving worker has left the fleet, and no other one could replace it.
    #[error("the worker that was to answer has left, and no other one could take its place")]
    WorkerLeft,
    /// A path that the pool does not forward.
    #[error("this path is not forwarded: the pool's `paths` do not name it")]
    UnknownPath,
    /// There are several pools, and the request's route names none of them.
    #[error("this route belongs to no pool of the gateway's")]
    NoPool,
    /// A header of the request cannot be sent on.
    #[error(
        "the request cannot be sent on: its path, method and authority must be text without control characters"
    )]
    Unsendable,
    /// A worker answered with a status that is no answer to such a request, and no other one could replace it.
    #[error("the worker answered {status}, which is no answer to this request")]
    UnusableStatus {
        /// Its status.
        status: u16,
    },
    /// The proxy would not carry out the decision.
    #[error("the request could not be forwarded")]
    Internal,
}

/// What a status means for a worker: the proxy's own 503 and 504 stand for a worker that did not answer at all.
fn answered(status: u16) -> String {
    match status {
        503 => "it refused the connection, or answered 503".to_owned(),
        504 => "it did not answer in time, or answered 504".to_owned(),
        status => format!("it answered {status}"),
    }
}

/// What is wrong with a worker that the caller named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PinProblem {
    /// No worker has this id.
    #[error("there is no such worker")]
    Unknown,
    /// The worker serves another model, or the two named workers are not in one namespace.
    #[error("that worker does not serve this model, or not together with the other one named")]
    Elsewhere,
    /// The worker has another role.
    #[error("that worker is a {} worker", is.name())]
    WrongRole {
        /// Its role.
        is: Role,
    },
    /// The worker has no such rank.
    #[error("rank {rank} is out of range: the worker has {dp_size}")]
    RankOutOfRange {
        /// The rank named.
        rank: u32,
        /// Number of ranks.
        dp_size: u32,
    },
    /// The worker is draining: it takes no new requests.
    #[error("that worker is draining: it takes no new requests")]
    Draining,
    /// The worker exists, but cannot take this request: its topology forbids it, or it is not bound yet.
    #[error("that worker cannot take this request now")]
    NotEligible,
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
    #[error("{}", answered(*.0))]
    Status(u16),
    /// A good answer without the hand-off that decode needs.
    #[error("its answer carried no hand-off")]
    NoHandoff,
    /// A hand-off that names a host in none of the pool's networks.
    #[error("its hand-off named a host that decode may not be sent to")]
    ForeignHost,
}

impl Refusal {
    /// All values of [`Refusal::code`].
    pub const CODES: [&str; 36] = [
        "not_json",
        "invalid_field",
        "encoded_body",
        "no_handoff_for_path",
        "context_length_exceeded",
        "model_not_found",
        "dp_rank_out_of_range",
        "invalid_worker_id",
        "stale_worker_id",
        "worker_id_required",
        "topology",
        "backpressure",
        "no_eligible_worker",
        "overloaded",
        "queue_full",
        "queue_deadline",
        "no_fleet",
        "body_too_large",
        "body_timeout",
        "bodies_in_flight",
        "prefill_no_handoff",
        "prefill_failed",
        "unreachable",
        "decode_timeout",
        "empty_answer",
        "worker_left",
        "no_pool",
        "unsendable",
        "unusable_status",
        "unknown_path",
        "internal",
        "prefill_pending",
        "ambiguous_sets",
        "prefill_not_activated",
        "no_decode_worker",
        "no_worker",
    ];

    /// The HTTP status.
    pub fn status(&self) -> u32 {
        match self {
            // The picker that named the worker will know better in a moment.
            Self::Pin {
                problem: PinProblem::Unknown | PinProblem::Draining,
                ..
            } => 503,
            Self::NotJson { .. }
            | Self::Field { .. }
            | Self::TooLong { .. }
            | Self::Pin { .. }
            | Self::RankOutOfRange { .. }
            | Self::WorkerIdRequired { .. }
            | Self::Unsendable => 400,
            Self::UnknownModel { .. } | Self::NoPool | Self::UnknownPath => 404,
            Self::BodyTimeout { .. } => 408,
            Self::TooLarge { .. } => 413,
            Self::Encoded => 415,
            Self::Backpressure { .. }
            | Self::Overloaded { .. }
            | Self::QueueFull { .. }
            | Self::QueueDeadline { .. } => 429,
            Self::Internal => 500,
            Self::NoHandoffForPath => 501,
            Self::PrefillFailed {
                cause: PrefillFailure::NoHandoff | PrefillFailure::ForeignHost,
                ..
            }
            | Self::EmptyAnswer
            | Self::UnusableStatus { .. } => 502,
            Self::DecodeTimeout => 504,
            Self::NotServed(_)
            | Self::NoneEligible { .. }
            | Self::Topology { .. }
            | Self::NoFleet
            | Self::Busy
            | Self::PrefillFailed { .. }
            | Self::Unreachable { .. }
            | Self::WorkerLeft => 503,
        }
    }

    /// The reason in one word, for metrics and, except for an unknown model, for `error.code`.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NotJson { .. } => "not_json",
            Self::Field { .. } => "invalid_field",
            Self::Encoded => "encoded_body",
            Self::NoHandoffForPath => "no_handoff_for_path",
            Self::TooLong { .. } => "context_length_exceeded",
            Self::UnknownModel { .. } => "model_not_found",
            Self::NotServed(reason) => reason.code(),
            Self::Pin {
                problem: PinProblem::RankOutOfRange { .. },
                ..
            }
            | Self::RankOutOfRange { .. } => "dp_rank_out_of_range",
            Self::Pin {
                problem: PinProblem::Unknown | PinProblem::Draining,
                ..
            } => "stale_worker_id",
            Self::Pin { .. } => "invalid_worker_id",
            Self::WorkerIdRequired { .. } => "worker_id_required",
            Self::Topology { .. } => "topology",
            Self::Backpressure { .. } => "backpressure",
            Self::NoneEligible { .. } => "no_eligible_worker",
            Self::Overloaded { .. } => "overloaded",
            Self::QueueFull { .. } => "queue_full",
            Self::QueueDeadline { .. } => "queue_deadline",
            Self::NoFleet => "no_fleet",
            Self::TooLarge { .. } => "body_too_large",
            Self::BodyTimeout { .. } => "body_timeout",
            Self::Busy => "bodies_in_flight",
            Self::PrefillFailed {
                cause: PrefillFailure::NoHandoff | PrefillFailure::ForeignHost,
                ..
            } => "prefill_no_handoff",
            Self::PrefillFailed { .. } => "prefill_failed",
            Self::Unreachable { .. } => "unreachable",
            Self::DecodeTimeout => "decode_timeout",
            Self::EmptyAnswer => "empty_answer",
            Self::WorkerLeft => "worker_left",
            Self::NoPool => "no_pool",
            Self::Unsendable => "unsendable",
            Self::UnusableStatus { .. } => "unusable_status",
            Self::UnknownPath => "unknown_path",
            Self::Internal => "internal",
        }
    }

    /// Why the request was dropped, in the terms of the endpoint picker protocol; none if the request itself or its worker
    /// was at fault.
    pub fn dropped_reason(&self) -> Option<&'static str> {
        match self {
            Self::Backpressure { .. }
            | Self::Overloaded { .. }
            | Self::QueueFull { .. }
            | Self::Busy
            | Self::NoneEligible {
                filter: Filter::Overload,
                ..
            } => Some("rejected-saturated"),
            Self::QueueDeadline { .. } => Some("rejected-ttl-expired"),
            Self::NotServed(_) | Self::NoFleet | Self::NoneEligible { .. } => {
                Some("rejected-no-endpoints")
            }
            _ => None,
        }
    }

    /// Whether there is no worker at all that the request could go to.
    pub fn is_emptiness(&self) -> bool {
        matches!(self, Self::NoFleet | Self::NotServed(NotServed::Vacant))
    }

    /// Seconds after which a client may try again; none if a retry would not help.
    pub fn retry_after_s(&self) -> Option<u32> {
        matches!(self.status(), 429 | 503).then_some(1)
    }

    /// OpenAI's `type`.
    pub fn kind(&self) -> &'static str {
        match self.status() {
            404 if self.is_engines() => "NotFoundError",
            400 | 408 | 413 | 415 => "invalid_request_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            503 => "service_unavailable",
            _ => "api_error",
        }
    }

    /// Whether the error has an engine's form, since an engine would have given it: the engine's `type`, and a status as `code`.
    fn is_engines(&self) -> bool {
        matches!(self, Self::UnknownModel { .. })
    }

    /// The value of `error.code`.
    fn json_code(&self) -> Value {
        match self.is_engines() {
            true => self.status().into(),
            false => self.code().into(),
        }
    }

    /// The error as OpenAI's JSON.
    pub fn to_json(&self) -> String {
        let param = match self {
            Self::Field { name, .. } => Some(*name),
            Self::TooLong { field, .. } => Some(*field),
            Self::Pin { field, .. } => Some(*field),
            Self::UnknownModel { .. } => Some("model"),
            _ => None,
        };
        let message = excerpt(self, MESSAGE);
        json!({"error": {"message": message, "type": self.kind(), "param": param, "code": self.json_code()}}).to_string()
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
    fn found_b10_a_models_name_stands_in_a_refusal_on_one_line_and_cut() {
        let refusal = Refusal::UnknownModel {
            model: format!("m\n[critical] {}", "x".repeat(20 << 20)),
        };
        let (said, json) = (refusal.to_string(), refusal.to_json());
        assert!(said.starts_with(r"The model `m\n[critical] xxx"), "{said}");
        assert!(said.len() < 200, "{}", said.len());
        assert!(json.len() < 400, "{}", json.len());
        let detail = Refusal::NotJson {
            detail: "y\u{2028}".repeat(1 << 20),
        };
        assert!(detail.to_json().len() < 2048);
        assert!(!detail.to_json().contains('\u{2028}'));
    }

    #[test]
    fn what_may_pass_says_when_to_try_again() {
        let refusal = Refusal::NotServed(NotServed::NoDecode);
        assert_eq!((refusal.status(), refusal.retry_after_s()), (503, Some(1)));
        assert!(refusal.to_json().contains("no decode worker"));
    }

    #[test]
    fn found_v5_an_unknown_model_is_told_as_an_engine_tells_it() {
        let refusal = Refusal::UnknownModel {
            model: "x".to_owned(),
        };
        assert_eq!(refusal.status(), 404);
        assert_eq!(
            refusal.to_json(),
            r#"{"error":{"code":404,"message":"The model `x` does not exist.","param":"model","type":"NotFoundError"}}"#
        );
    }
}
