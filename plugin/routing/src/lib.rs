//! The routing of pd-router: the choice of workers for a request, and the contents of each leg.
//!
//! Pure: no proxy, no clock, no randomness of its own, no I/O. [`route`] holds a request's steps in order; every other
//! module answers one question.
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
pub mod sharing;
pub mod topology;
pub mod uploads;
