//! The routing of pd-router: the choice of workers for a request, and the contents of each leg.
//!
//! Pure: no proxy, no clock, no randomness of its own, no I/O. [`session`] holds one request's life, [`route`] the choices
//! made for it, [`outcome`] what the end of a leg means; every other module answers one question.
//!
//! A request's life, in the order of calls. The caller makes the calls to the workers and owns the client's stream; the router
//! says what to send where:
//!
//! ```
//! use std::time::Duration;
//!
//! use routing::config::{Pool, ProtocolName};
//! use routing::fleet::{Fleet, Role, Worker, WorkerId};
//! use routing::outcome::Came;
//! use routing::request::Generation;
//! use routing::route::{AfterPrefill, CallEnd, Client, Plan, PlanInput, Router};
//!
//! let pool = Pool::new("llm", ProtocolName::Nixl);
//! let worker = |id, role, address: &str| Worker {
//!     model: Some("m".to_owned()),
//!     ..Worker::new(WorkerId(id), role, address.parse().ok())
//! };
//! let workers = vec![
//!     worker(1, Role::Prefill, "10.0.0.1:8000"),
//!     worker(2, Role::Decode, "10.0.0.2:8000"),
//! ];
//! // The choice between equal workers follows from the seed. No other router of the proxy has the same owner.
//! let (seed, owner) = (1, 2);
//! // The time since 1970: a router has no clock.
//! let now = Duration::from_secs(1_800_000_000);
//! let mut router = Router::new(pool, seed, owner, now);
//! let version = 1;
//! router.adopt(Fleet::new(version, workers));
//!
//! let body = br#"{"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": true}"#;
//! let input = PlanInput { now, ..PlanInput::default() };
//!
//! // Both workers are picked and booked in one step. The prefill charge belongs to the phase, the decode charge to the
//! // assignment, and each frees itself.
//! let Plan::Prefill(phase, mut assignment) = router.plan(Generation::Chat, body, input)? else {
//!     panic!("a pair serves the request");
//! };
//! assert_eq!(phase.destination(), "10.0.0.1:8000".parse().ok());
//! let _sent_to_prefill = phase.body(body);
//!
//! // Prefill's answer brings the hand-off, which is spliced into the client's own bytes.
//! let answer = br#"{"choices": [{"message": {"content": "Hi"}, "finish_reason": "length"}],
//!     "kv_transfer_params": {"do_remote_prefill": true, "remote_block_ids": [7]}}"#;
//! router.advance(now);
//! let answer = CallEnd::whole(200, answer);
//! let after = phase.answered(answer, Client::Waits, &mut router);
//! let AfterPrefill::Decode { dispatch, target: (worker, key), staged } = after else {
//!     panic!("decode follows");
//! };
//! router.assign_decode(&mut assignment, &worker, key, staged);
//! assert_eq!(dispatch.destinations, ["10.0.0.2:8000".parse()?]);
//! let sent_to_decode = dispatch.edits.expect("a hand-off").apply(body);
//! assert!(sent_to_decode.starts_with(br#"{"kv_transfer_params":{"do_remote_prefill": true"#));
//!
//! // The client reads: from now on no other worker can take over. Then the answer ends.
//! router.answer_begins(&mut assignment);
//! assignment.first_token(now);
//! assignment.generated(12);
//! let _meaning = router.leg_ended(&mut assignment, Came::Good);
//! router.request_ended(&assignment);
//! drop(assignment);
//! assert!(router.total_load().is_idle());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(
    test,
    allow(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::indexing_slicing,
        clippy::panic
    )
)]

pub mod admission;
pub mod answer;
pub mod budget;
pub mod clock;
pub mod config;
pub mod discovery;
pub mod engine_metrics;
pub mod excerpt;
pub mod fleet;
pub mod handoff;
pub mod headers;
pub mod ids;
pub mod json;
pub mod load;
pub mod model_state;
pub mod network;
pub mod outcome;
pub mod prefix;
pub mod refusal;
pub mod rendezvous;
pub mod request;
pub mod route;
pub mod selection;
pub mod session;
pub mod sharing;
pub mod topology;
pub mod transfer;
pub mod uploads;
