//! Owns Dynamo's tables as inputs: each line's state, event and answer, with both bugs of the first table fixed.

use routing::config::{OnPrefillAbsent, ProtocolName};

use crate::check::check;
use crate::oracle::{Setup, remember};
use crate::subject::{Ask, Got, Real, Subject};
use crate::world::{Event, World};

const P: usize = 0;
const P2: usize = 1;
const D: usize = 2;
const D2: usize = 3;

const fn joins(slot: usize) -> Event {
    Event::Join {
        slot,
        space: 0,
        set: 0,
    }
}

/// A worker that joins another set, or another namespace.
const fn joins_at(slot: usize, space: usize, set: usize) -> Event {
    Event::Join { slot, space, set }
}

use Event::{Bound, JoinAgain, LateBound, Leave, LeaveAgain, Restart, Return};

/// Earlier events, the event, the state that follows, and the answer to a normal request.
type Line = (&'static [Event], Event, &'static str, Answer);

#[derive(Debug, Clone, Copy, PartialEq)]
enum Answer {
    Pair,
    No(&'static str),
}
use Answer::{No, Pair};

/// B.1 and B.2: *register* is the first decode worker's joining, *activate* the first prefill worker's (with its binding).
#[rustfmt::skip]
const RENDEZVOUS: &[Line] = &[
    // vacant
    (&[], joins(D), "decode_waiting", No("prefill_not_activated")),
    (&[], joins(P), "prefill_ready", No("no_decode_worker")),
    (&[joins(D)], Leave(D), "vacant", No("no_worker")),
    (&[joins(P)], Leave(P), "vacant", No("no_worker")),
    (&[joins(P), Leave(P)], LeaveAgain(P), "vacant", No("no_worker")),
    (&[joins(D), Leave(D)], LeaveAgain(D), "vacant", No("no_worker")),
    // decode waiting; a repeated registration keeps it, and one of another set is ambiguous rather than lost
    (&[joins(D)], JoinAgain(D), "decode_waiting", No("prefill_not_activated")),
    (&[joins(D)], joins(D2), "decode_waiting", No("prefill_not_activated")),
    (&[joins(D)], joins_at(D2, 0, 1), "ambiguous", No("ambiguous_sets")),
    (&[joins(D), joins(P)], Bound(P), "active", Pair),
    // an unrelated component's end does not end the waiting
    (&[joins(D), joins_at(P, 1, 0)], Leave(P), "decode_waiting", No("prefill_not_activated")),
    // first bug: the endpoint survives the handshake, and a rebuilt decode set is activated at once
    (&[joins(D), joins(P), Bound(P)], Restart(D), "active", Pair),
    (&[joins(D), joins(P), Bound(P), Leave(D)], joins(D), "active", Pair),
    (&[joins(P), Bound(P), joins(D), Leave(D)], joins(D), "active", Pair),
    (&[joins(P), Bound(P), joins(D), Leave(D), Return(D), Leave(D)], Return(D), "active", Pair),
    // second bug: a decode set that dies waiting leaves nothing behind
    (&[joins(D), Restart(D), joins(P)], Bound(P), "active", Pair),
    (&[joins(D), Leave(D), joins(D), joins(P)], Bound(P), "active", Pair),
    (&[joins(D), Leave(D), joins(P), Bound(P)], joins(D), "active", Pair),
    (&[joins(D), joins(D2), Leave(D), joins(P)], Bound(P), "active", Pair),
    // prefill ready
    (&[joins(P), Bound(P)], joins(D), "active", Pair),
    (&[joins(P), Bound(P)], JoinAgain(P), "prefill_ready", No("no_decode_worker")),
    (&[joins(P), Bound(P)], joins(P2), "prefill_ready", No("no_decode_worker")),
    (&[joins(P), Bound(P), joins(D)], joins(P2), "active", Pair),
    (&[joins(P), Bound(P), joins(D)], Leave(D), "prefill_ready", No("no_decode_worker")),
    // prefill's end deactivates, whatever came first, and its return reactivates
    (&[joins(P), Bound(P), joins(D)], Leave(P), "deactivated", No("prefill_not_activated")),
    (&[joins(P), Bound(P), joins(D), Leave(P)], LeaveAgain(P), "deactivated", No("prefill_not_activated")),
    (&[joins(P), Bound(P), joins(D), Leave(P), Return(P)], Bound(P), "active", Pair),
    (&[joins(P), Bound(P), joins(D), Leave(P), joins(P)], Bound(P), "active", Pair),
    (&[joins(P), Bound(P), joins(D), joins(P2)], Leave(P), "pending", No("prefill_pending")),
    (&[joins(P), Bound(P), joins(D), joins(P2), Bound(P2)], Leave(P), "active", Pair),
    (&[joins(D), joins(P)], Leave(P), "decode_waiting", No("prefill_not_activated")),
];

/// B.3 and A.3: the target is set where there is exactly one set of each role; a binding counts only for its own target.
#[rustfmt::skip]
const TARGETS: &[Line] = &[
    (&[joins(D)], joins(P), "pending", No("prefill_pending")),
    (&[joins(D), joins(P), Bound(P)], JoinAgain(P), "active", Pair),
    (&[joins(D), joins(P), Bound(P)], joins_at(P2, 0, 1), "ambiguous", No("ambiguous_sets")),
    (&[joins(D), joins(P), Bound(P), joins_at(P2, 0, 1)], Leave(P2), "active", Pair),
    (&[joins(D), joins(P), Bound(P), joins_at(P2, 0, 1)], Leave(P), "pending", No("prefill_pending")),
    (&[joins(D), joins(P), Bound(P), joins_at(P2, 0, 1), Leave(P)], Bound(P2), "active", Pair),
    (&[joins(D), joins(P), Bound(P), joins_at(D2, 0, 1)], Leave(D), "active", Pair),
    // a new target: its binding is rebuilt, and a finished binding of the old target is discarded
    (&[joins(D), joins(P), Bound(P)], Restart(P), "pending", No("prefill_pending")),
    (&[joins(D), joins(P), Bound(P), Restart(P)], LateBound(P), "pending", No("prefill_pending")),
    (&[joins(D), joins(P), Restart(P)], LateBound(P), "pending", No("prefill_pending")),
    (&[joins(D), joins(P), Restart(P), LateBound(P)], Bound(P), "active", Pair),
    (&[joins(D), joins(P), Leave(P)], Bound(P), "decode_waiting", No("prefill_not_activated")),
    (&[joins(D), joins(P), Leave(P), Bound(P)], Return(P), "pending", No("prefill_pending")),
    // a failed binding is retried
    (&[joins(D), joins(P)], Event::Failed(P), "pending", No("prefill_pending")),
    (&[joins(D), joins(P), Event::Failed(P)], Bound(P), "active", Pair),
];

#[test]
fn dynamos_tables_are_answered_as_dynamo_does_with_both_bugs_healed() {
    for (before, event, state, answer) in RENDEZVOUS.iter().chain(TARGETS) {
        for whole in [false, true] {
            let setup = Setup {
                protocol: ProtocolName::Sglang,
                shared_model: false,
                absent: OnPrefillAbsent::Aggregate,
                whole,
            };
            let mut subject = Real::new(setup);
            let mut world = World::empty(2, 2);
            for event in before.iter().chain([event]) {
                let news = world.apply(*event);
                remember(&mut world, &setup);
                subject.on_news(news, &world);
            }
            let line = format!("{before:?}, {event:?}");
            assert_eq!(subject.state(0), Some(*state), "{line}");
            let got = subject.ask(&Ask {
                model: setup.model(0),
                ..Ask::default()
            });
            // Passed on to a decode worker that can run it: B's passthrough.
            let passed_on = whole && *answer == No("prefill_not_activated");
            match (&got, answer) {
                (Got::Pair { .. }, Pair) => {}
                (Got::Refused { status: 503, code }, No(reason)) if code == reason => {}
                (Got::Whole { .. }, No(_)) if passed_on => {}
                _ => panic!("{line}: {got:?}, not {answer:?}"),
            }
            check(&mut subject, &world, &setup)
                .unwrap_or_else(|problem| panic!("{line}: {problem}"));
        }
    }
}

/// B.3's test of convergence: all start orders end in the same state.
#[test]
fn all_orders_of_start_converge() {
    let setup = Setup {
        protocol: ProtocolName::Sglang,
        shared_model: true,
        absent: OnPrefillAbsent::Fail,
        whole: false,
    };
    for order in [
        [P, D, P2],
        [P, P2, D],
        [D, P, P2],
        [D, P2, P],
        [P2, D, P],
        [P2, P, D],
    ] {
        let mut subject = Real::new(setup);
        let mut world = World::empty(2, 2);
        for event in order.map(joins).into_iter().chain([Bound(P), Bound(P2)]) {
            let news = world.apply(event);
            remember(&mut world, &setup);
            subject.on_news(news, &world);
        }
        assert_eq!(subject.state(0), Some("active"), "{order:?}");
    }
}
