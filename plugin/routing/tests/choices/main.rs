//! Tests of worker selection, seen from outside: bursts, costs, overrides, marks, filters, policies and bookings.
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used
)]

mod accounting;
mod burst;
mod eligibility;
mod engine;
mod health;
mod incarnations;
mod kv;
mod marks;
mod overrides;
mod policies;
mod pressure;
mod rates;
mod reports;
mod shapes;
mod sharing;
mod support;
