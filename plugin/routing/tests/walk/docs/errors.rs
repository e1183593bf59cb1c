//! Owns `docs/errors.md`.

use std::collections::BTreeSet;
use std::fmt::Write;

use routing::fleet::{Role, WorkerId};
use routing::rendezvous::NotServed;
use routing::route::{PinProblem, PrefillFailure, Refusal};
use routing::selection::eligibility::Filter;

/// An error, its name in Dynamo's router, and when it occurs.
struct Line {
    refusal: Refusal,
    dynamo: &'static str,
    when: &'static str,
}

const HEAD: &str = "# Errors

What pd-router itself answers; errors of a worker reach the client as the worker sent them. This page is generated from
the code by `UPDATE_DOCS=1 cargo test -p routing --test walk`, and a test fails where it is out of date.

The body is JSON in the shape of OpenAI's:

```json
";

const TABLE: &str = "
```

*Retryable*: the same request may succeed later. Once an answer has begun there is no status left to say it with: the
stream is reset then, and never ends with `[DONE]`. Where a worker breaks its answer off after its headers and before its
client has read anything, the proxy answers in the filter's place: 503 `broken_off`. An unknown model is told as vLLM tells it; in metrics and on the status
page its reason is `model_not_found`. The second column is what Dynamo's router has in the same case.

| Error | In Dynamo | Status | `type` | `code` | Message | Retryable | Retry-After | When |
|---|---|---|---|---|---|---|---|---|
";

fn lines() -> Vec<Line> {
    let line = |refusal, dynamo, when| Line {
        refusal,
        dynamo,
        when,
    };
    let pin = |problem| Refusal::Pin {
        field: "decode_worker_id",
        id: WorkerId(u64::MAX),
        problem,
    };
    let prefill = |cause| Refusal::PrefillFailed { tried: 2, cause };
    let id_required = |role| Refusal::WorkerIdRequired {
        role,
        header: routing::request::overrides::header_for(role),
    };
    vec![
        // The request is at fault.
        line(
            Refusal::NotJson {
                detail: "expected value at line 1 column 1".to_owned(),
            },
            "",
            "the body is not JSON, and no worker runs whole requests unread",
        ),
        line(
            Refusal::Field {
                name: "model",
                problem: "must be a string",
            },
            "",
            "a field is missing or of the wrong type, or a client sets a hand-off",
        ),
        line(
            Refusal::Encoded,
            "",
            "the body is compressed, and no worker runs whole requests unread",
        ),
        line(
            Refusal::UnknownModel {
                model: "x".to_owned(),
            },
            "",
            "no worker of this model was ever known",
        ),
        line(
            Refusal::TooLong {
                field: "max_tokens",
                asked: 5001,
                longest: 4096,
            },
            "",
            "`max_tokens` alone, or a prompt that came as token ids with it, is more than the model takes (`max_model_len`); no prefill is made",
        ),
        line(
            Refusal::NoHandoffForPath,
            "",
            "another generation path than chat completions, completions and responses (with SGLang: responses too, unless the pool says `responses: split`), and no whole worker",
        ),
        // Pins.
        line(
            pin(PinProblem::Unknown),
            "does not identify a known worker",
            "a worker is named that is not there, and `on_stale_pin` is `reject`",
        ),
        line(
            pin(PinProblem::Elsewhere),
            "pinned worker not allowed",
            "it serves another model, or the two that are named are in different namespaces",
        ),
        line(
            pin(PinProblem::WrongRole { is: Role::Prefill }),
            "pinned worker not allowed",
            "it does something else",
        ),
        line(
            pin(PinProblem::RankOutOfRange {
                rank: 8,
                dp_size: 2,
            }),
            "rank outside `[start, start+size)`",
            "it has fewer ranks",
        ),
        line(
            pin(PinProblem::Draining),
            "pinned worker not allowed",
            "its source says that it drains, and `on_stale_pin` is `reject`",
        ),
        line(
            pin(PinProblem::NotEligible),
            "pinned worker not allowed",
            "its topology, or the request's own constraints, forbid it",
        ),
        line(
            Refusal::RankOutOfRange {
                role: Role::Decode,
                rank: 8,
            },
            "no endpoints",
            "a rank is named without a worker, and none has it",
        ),
        line(
            id_required(Role::Prefill),
            "missing worker id for direct routing",
            "`selection.prefill: direct`, and no prefill worker is named",
        ),
        line(
            id_required(Role::Decode),
            "worker id required on decode",
            "`selection.decode: direct`, and no decode worker is named",
        ),
        // The model key.
        line(
            Refusal::NotServed(NotServed::NotActivated),
            "not activated",
            "no prefill worker, and by policy nobody runs it whole",
        ),
        line(
            Refusal::NotServed(NotServed::Pending),
            "worker unavailable (pending)",
            "no prefill worker, or not the one that is named, is bound yet",
        ),
        line(
            Refusal::NotServed(NotServed::Ambiguous),
            "not ready (ambiguous)",
            "two sets of one role",
        ),
        line(
            Refusal::NotServed(NotServed::NoDecode),
            "no endpoints",
            "prefill workers without a decode worker",
        ),
        line(
            Refusal::NotServed(NotServed::Vacant),
            "no endpoints",
            "all workers of the model have left",
        ),
        line(
            Refusal::NoFleet,
            "",
            "discovery has not told of any worker yet",
        ),
        line(
            Refusal::Topology {
                problem: "no decode worker is where worker p1 may transfer to".to_owned(),
            },
            "topology (fails closed)",
            "no pair may exchange KV, or it cannot be known which",
        ),
        // Load.
        line(
            Refusal::Backpressure {
                queued_tokens: 9_000,
                allowed_tokens: 8_000,
            },
            "back-pressure (resource exhausted)",
            "more prompt tokens wait than `prefill.max_queued_tokens`; no worker is called",
        ),
        line(
            Refusal::NoneEligible {
                role: Role::Prefill,
                filter: Filter::Subset,
            },
            "no endpoints",
            "workers are there, but a filter leaves none: the message names it",
        ),
        line(
            Refusal::Overloaded {
                role: Role::Prefill,
            },
            "all eligible workers overloaded",
            "all who could take it are busier than `admission` allows",
        ),
        line(
            Refusal::QueueFull {
                waiting: 256,
                allowed: 256,
            },
            "queue rejected",
            "all are busy, and as many requests wait as `admission.queue` allows",
        ),
        line(
            Refusal::QueueDeadline {
                deadline_ms: 10_000,
            },
            "due time passed",
            "it waited for a worker as long as `admission.queue.deadline_ms`",
        ),
        line(
            Refusal::TooLarge {
                allowed_bytes: 16_777_216,
            },
            "",
            "the body is longer than `limits.body_bytes`; the proxy's own limit answers 413 without this body",
        ),
        line(
            Refusal::BodyTimeout {
                deadline_ms: 60_000,
            },
            "",
            "the body has not come within `limits.body_timeout_ms` of its headers",
        ),
        line(
            Refusal::Busy,
            "",
            "`limits.bodies_in_flight_bytes` is reached: there is no room for the body, or another one has taken it before this one was complete",
        ),
        // Prefill.
        line(
            prefill(PrefillFailure::NotSent),
            "prefill execution failed (1: not dispatched)",
            "the call could not be made",
        ),
        line(
            prefill(PrefillFailure::Broken),
            "prefill execution failed (2: stream ended)",
            "the connection broke after the answer had begun",
        ),
        line(
            prefill(PrefillFailure::Status(500)),
            "prefill execution failed (3: error answer)",
            "an error status; 503 and 504 also stand for a refused connection and for no answer in time",
        ),
        line(
            prefill(PrefillFailure::NoHandoff),
            "no hand-off data (disaggregated params)",
            "a good answer that did not end by itself and carries no hand-off",
        ),
        line(
            prefill(PrefillFailure::ForeignHost),
            "",
            "a hand-off that names a host in none of `handoff.networks`",
        ),
        // The proxy.
        line(
            Refusal::Unreachable {
                what: "decode worker",
                tried: 3,
            },
            "cannot connect",
            "nobody to whom the request could go took a connection",
        ),
        line(
            Refusal::DecodeTimeout,
            "",
            "the worker that was to answer said nothing for `decode.first_token_timeout_ms`, and nobody could take its place",
        ),
        line(
            Refusal::EmptyAnswer,
            "",
            "the worker that was to answer ended without a token, and nobody could take its place",
        ),
        line(
            Refusal::WorkerLeft,
            "",
            "a worker that the request waited for left the fleet, others were there, and none of them could take the request; where there are no others its answer is waited for",
        ),
        line(
            Refusal::NoPool,
            "",
            "there are several pools, and neither the route's metadata (`pd_router`: `pool`) nor its name is one of them",
        ),
        line(
            Refusal::Unsendable,
            "",
            "the path, the method or the authority holds bytes that the proxy sends nobody; no worker is called, and none is blamed",
        ),
        line(
            Refusal::UnusableStatus { status: 302 },
            "",
            "a worker answered with a redirect or a switch of protocols, and no other one could take its place",
        ),
        line(
            Refusal::UnknownPath,
            "",
            "the pool's `paths` do not name the request's path: nothing but inference is forwarded",
        ),
        line(
            Refusal::Internal,
            "",
            "the proxy would not carry out what was decided",
        ),
    ]
}

/// The name of each error. A new error does not compile until it has a name here, and fails the test until it has a line.
fn name(refusal: &Refusal) -> &'static str {
    match refusal {
        Refusal::NotJson { .. } => "not JSON",
        Refusal::Field { .. } => "invalid field",
        Refusal::Encoded => "encoded body",
        Refusal::NoHandoffForPath => "no hand-off for this path",
        Refusal::TooLong { .. } => "too long",
        Refusal::UnknownModel { .. } => "unknown model",
        Refusal::NotServed(NotServed::Pending) => "pending",
        Refusal::NotServed(NotServed::Ambiguous) => "ambiguous",
        Refusal::NotServed(NotServed::NotActivated) => "not activated",
        Refusal::NotServed(NotServed::NoDecode) => "no decode worker",
        Refusal::NotServed(NotServed::Vacant) => "no worker",
        Refusal::Pin { problem, .. } => match problem {
            PinProblem::Unknown => "pin: unknown",
            PinProblem::Elsewhere => "pin: elsewhere",
            PinProblem::WrongRole { .. } => "pin: wrong role",
            PinProblem::RankOutOfRange { .. } => "pin: rank",
            PinProblem::Draining => "pin: draining",
            PinProblem::NotEligible => "pin: not eligible",
        },
        Refusal::RankOutOfRange { .. } => "rank out of range",
        Refusal::WorkerIdRequired { role, .. } => match role {
            Role::Prefill => "prefill worker id required",
            Role::Decode | Role::Aggregated => "decode worker id required",
        },
        Refusal::Topology { .. } => "topology",
        Refusal::Backpressure { .. } => "back-pressure",
        Refusal::NoneEligible { .. } => "none eligible",
        Refusal::Overloaded { .. } => "overloaded",
        Refusal::QueueFull { .. } => "queue full",
        Refusal::QueueDeadline { .. } => "queue deadline",
        Refusal::NoFleet => "no fleet",
        Refusal::TooLarge { .. } => "body too large",
        Refusal::BodyTimeout { .. } => "body timeout",
        Refusal::Busy => "busy",
        Refusal::PrefillFailed { cause, .. } => match cause {
            PrefillFailure::NotSent => "prefill failed: not sent",
            PrefillFailure::Broken => "prefill failed: broken off",
            PrefillFailure::Status(_) => "prefill failed: status",
            PrefillFailure::NoHandoff => "prefill failed: no hand-off",
            PrefillFailure::ForeignHost => "prefill failed: foreign host",
        },
        Refusal::Unreachable { .. } => "unreachable",
        Refusal::DecodeTimeout => "decode timeout",
        Refusal::EmptyAnswer => "empty answer",
        Refusal::WorkerLeft => "worker left",
        Refusal::NoPool => "no pool",
        Refusal::Unsendable => "unsendable",
        Refusal::UnusableStatus { .. } => "unusable status",
        Refusal::UnknownPath => "unknown path",
        Refusal::Internal => "internal",
    }
}

/// Number of names.
const NAMES: usize = 44;

#[test]
fn every_code_is_listed_once() {
    let mut codes: Vec<&str> = lines().iter().map(|line| line.refusal.code()).collect();
    codes.sort_unstable();
    codes.dedup();
    let mut listed = Refusal::CODES.to_vec();
    listed.sort_unstable();
    assert_eq!(listed, codes);
}

fn table() -> String {
    let mut text = String::new();
    for Line {
        refusal,
        dynamo,
        when,
    } in lines()
    {
        let retry_after = refusal.retry_after_s();
        let json: serde_json::Value = serde_json::from_str(&refusal.to_json()).unwrap();
        let code = json["error"]["code"].to_string();
        let code = code.trim_matches('"');
        writeln!(
            text,
            "| {} | {dynamo} | {} | `{}` | `{code}` | {refusal} | {} | {} | {when} |",
            name(&refusal),
            refusal.status(),
            refusal.kind(),
            if is_retryable(&refusal) { "yes" } else { "no" },
            retry_after.map_or(String::new(), |seconds| format!("{seconds} s")),
        )
        .unwrap();
    }
    text
}

/// Whether the same request may succeed later.
fn is_retryable(refusal: &Refusal) -> bool {
    matches!(refusal.status(), 429 | 502 | 503 | 504)
}

#[test]
fn the_table_of_errors_is_what_the_code_says() {
    let example = Refusal::NotServed(NotServed::NotActivated).to_json();
    super::compare("errors.md", &format!("{HEAD}{example}{TABLE}{}", table()));
}

#[test]
fn every_error_has_its_line_and_openais_shape() {
    let names: BTreeSet<&str> = lines().iter().map(|line| name(&line.refusal)).collect();
    assert_eq!((lines().len(), names.len()), (NAMES, NAMES));
    for Line { refusal, .. } in lines() {
        let json: serde_json::Value = serde_json::from_str(&refusal.to_json()).unwrap();
        let error = json["error"].as_object().unwrap();
        let fields: Vec<&str> = error.keys().map(String::as_str).collect();
        assert_eq!(fields, ["code", "message", "param", "type"]);
        assert!((400..600).contains(&refusal.status()));
        // An error with a Retry-After must be retryable.
        assert!(refusal.retry_after_s().is_none() || is_retryable(&refusal));
        assert!(refusal.status() != 503 || refusal.retry_after_s().is_some());
    }
}

/// Name, status, `type`, `code`, retryable, Retry-After.
type Numbers = (
    &'static str,
    u32,
    &'static str,
    &'static str,
    bool,
    Option<u32>,
);

/// The errors of Dynamo's router, with their numbers written here and not taken from the code.
#[test]
fn the_errors_of_dynamos_router_have_their_numbers() {
    let table: Vec<Numbers> = vec![
        (
            "not activated",
            503,
            "service_unavailable",
            "prefill_not_activated",
            true,
            Some(1),
        ),
        (
            "pending",
            503,
            "service_unavailable",
            "prefill_pending",
            true,
            Some(1),
        ),
        (
            "prefill failed: not sent",
            503,
            "service_unavailable",
            "prefill_failed",
            true,
            Some(1),
        ),
        (
            "prefill failed: broken off",
            503,
            "service_unavailable",
            "prefill_failed",
            true,
            Some(1),
        ),
        (
            "prefill failed: status",
            503,
            "service_unavailable",
            "prefill_failed",
            true,
            Some(1),
        ),
        (
            "prefill failed: no hand-off",
            502,
            "api_error",
            "prefill_no_handoff",
            true,
            None,
        ),
        (
            "prefill worker id required",
            400,
            "invalid_request_error",
            "worker_id_required",
            false,
            None,
        ),
        (
            "decode worker id required",
            400,
            "invalid_request_error",
            "worker_id_required",
            false,
            None,
        ),
        (
            "back-pressure",
            429,
            "rate_limit_error",
            "backpressure",
            true,
            Some(1),
        ),
        (
            "topology",
            503,
            "service_unavailable",
            "topology",
            true,
            Some(1),
        ),
        (
            "pin: unknown",
            503,
            "service_unavailable",
            "stale_worker_id",
            true,
            Some(1),
        ),
    ];
    for (wanted, status, kind, code, retryable, retry_after) in table {
        let lines = lines();
        let line = lines
            .iter()
            .find(|line| name(&line.refusal) == wanted)
            .unwrap();
        let refusal = &line.refusal;
        assert!(!line.dynamo.is_empty());
        assert_eq!(
            (
                refusal.status(),
                refusal.kind(),
                refusal.code(),
                is_retryable(refusal),
                refusal.retry_after_s()
            ),
            (status, kind, code, retryable, retry_after),
            "{wanted}"
        );
    }
    // Messages name the remedy, or what was seen.
    let message = |wanted: &str| {
        let lines = lines();
        let line = lines
            .iter()
            .find(|line| name(&line.refusal) == wanted)
            .unwrap();
        line.refusal.to_string()
    };
    assert!(message("prefill worker id required").contains("x-dynamo-prefill-instance-id"));
    assert!(message("decode worker id required").contains("x-dynamo-worker-instance-id"));
    assert!(message("back-pressure").contains("9000") && message("back-pressure").contains("8000"));
    assert!(message("prefill failed: status").contains("500"));
    assert!(message("pin: unknown").contains("decode_worker_id=18446744073709551615"));
}
