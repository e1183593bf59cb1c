//! Proof of the routing state machine: every reachable state, every short sequence of events, and long random histories,
//! against an oracle written from the rules; and the documentation generated from the same walk.
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unreachable,
    clippy::unwrap_used
)]

mod check;
mod docs;
mod dynamo;
mod fresh;
mod historic;
mod histories;
mod oracle;
mod search;
mod subject;
mod world;

use std::sync::OnceLock;

use routing::config::{OnPrefillAbsent, ProtocolName};

use historic::{Bug, Historic};
use oracle::Setup;
use search::{Make, Walked, sequences, walk};
use subject::Real;

const BINDINGS: Setup = Setup {
    protocol: ProtocolName::Sglang,
    shared_model: false,
    absent: OnPrefillAbsent::Fail,
    whole: false,
};

fn walked(setup: Setup, make: Make<'_>) -> Walked {
    walk(&setup, make).unwrap_or_else(|found| panic!("{setup:?}: {found}"))
}

/// The walk behind the documentation; run once.
fn the_walk_with_bindings() -> &'static Walked {
    static WALK: OnceLock<Walked> = OnceLock::new();
    WALK.get_or_init(|| walk_the_router(BINDINGS))
}

fn walk_the_router(setup: Setup) -> Walked {
    let walked = walked(setup, &|| Box::new(Real::new(setup)));
    // Guards against a proof over an empty set.
    assert!(walked.states > 1_000, "{} states", walked.states);
    walked
}

#[test]
fn every_reachable_state_answers_as_the_table_says_with_bindings() {
    the_walk_with_bindings();
}

#[test]
fn every_reachable_state_answers_as_the_table_says_with_bindings_and_whole_workers() {
    walk_the_router(Setup {
        shared_model: true,
        absent: OnPrefillAbsent::Aggregate,
        whole: true,
        ..BINDINGS
    });
}

#[test]
fn every_reachable_state_answers_as_the_table_says_without_bindings() {
    for (shared_model, whole) in [(true, false), (false, true)] {
        let setup = Setup {
            protocol: ProtocolName::Nixl,
            shared_model,
            absent: OnPrefillAbsent::Aggregate,
            whole,
        };
        let walked = walked(setup, &|| Box::new(Real::new(setup)));
        assert!(walked.states > 300, "{} states", walked.states);
    }
}

#[test]
fn every_sequence_of_up_to_five_events_is_answered_as_the_table_says() {
    let setup = BINDINGS;
    let count = sequences(5, &setup, &|| Box::new(Real::new(setup)));
    let count = count.unwrap_or_else(|found| panic!("{found}"));
    assert!(count > 50_000, "{count} sequences");
}

#[test]
fn every_sequence_of_up_to_five_events_is_answered_as_the_table_says_without_bindings() {
    let setup = Setup {
        protocol: ProtocolName::Nixl,
        shared_model: true,
        absent: OnPrefillAbsent::Aggregate,
        whole: true,
    };
    let count = sequences(5, &setup, &|| Box::new(Real::new(setup)));
    let count = count.unwrap_or_else(|found| panic!("{found}"));
    assert!(count > 20_000, "{count} sequences");
}

/// The checker's finding in the event-driven rendezvous; none without one.
fn found_in(bug: Bug, setup: Setup) -> Option<String> {
    let found = walk(&setup, &|| Box::new(Historic::new(setup, bug)));
    let by_sequence = sequences(4, &setup, &|| Box::new(Historic::new(setup, bug)));
    assert_eq!(found.is_err(), by_sequence.is_err());
    found.err().map(|found| found.to_string())
}

#[test]
fn the_checker_finds_both_historic_bugs_by_the_shortest_way() {
    let plain = Setup {
        protocol: ProtocolName::Nixl,
        ..BINDINGS
    };
    let whole = Setup {
        absent: OnPrefillAbsent::Aggregate,
        whole: true,
        ..BINDINGS
    };
    for setup in [plain, whole] {
        assert_eq!(found_in(Bug::Healed, setup), None);
    }
    // Number 0 is a prefill worker, number 2 a decode worker.
    for setup in [plain, whole] {
        for (bug, shortest) in [
            // The handshake is over, and a new decode router waits for ever.
            (
                Bug::EndpointForgotten,
                "0 joins a/x, 2 joins a/x, 2 restarts: ",
            ),
            // The waiter is gone, and prefill calls it all the same.
            (
                Bug::WaiterLeftBehind,
                "2 joins a/x, 2 restarts, 0 joins a/x: ",
            ),
        ] {
            let found = found_in(bug, setup).expect("a counterexample");
            assert!(found.starts_with(shortest), "{bug:?}: {found}");
            // Bare requests reach a decode worker that can run them; otherwise a refusal never ends.
            let wrong = if setup.whole {
                "Whole"
            } else {
                "not_activated"
            };
            assert!(found.contains(wrong), "{bug:?}: {found}");
        }
    }
}
