//! What follows from each event in each phase of a request.

use super::host::{ANSWERS, ERROR, Event, Host, POOLS, STAGED, TERMINAL, WITHOUT};
use crate::config::Pool;
use crate::handoff::LegOrder;
use crate::route::CallEnd;

/// A phase of a request: its name, and the events that lead there.
type Phase = (&'static str, &'static [Event]);

/// The answers that a table shows: their places in [`ANSWERS`].
const SHOWN: [usize; 9] = [0, 3, 4, 7, 8, 10, 11, 12, 13];

const SEQUENTIAL: [Phase; 4] = [
    ("prefill is called", &[]),
    ("decode is forwarded", &[Event::Prefill(0, 0)]),
    (
        "prefill is called again",
        &[Event::Prefill(0, 0), Event::Silence],
    ),
    (
        "decode is called",
        &[Event::Prefill(0, 0), Event::Silence, Event::Prefill(0, 0)],
    ),
];

const CONCURRENT: [Phase; 3] = [
    ("both legs run", &[]),
    ("decode runs, prefill was good", &[Event::Prefill(0, 4)]),
    ("another pair is called", &[Event::Silence]),
];

/// What follows from each event in each phase, by protocol, as a text.
fn table() -> String {
    let mut lines = Vec::new();
    for pool in [&POOLS[0], &POOLS[2]] {
        let phases = match pool.rules().order {
            LegOrder::Sequential => &SEQUENTIAL[..],
            _ => &CONCURRENT[..],
        };
        for (phase, before) in phases {
            lines.push(format!("{:?}: {phase}", pool.protocol));
            for event in events_of_table() {
                let follows = what_follows(pool, before, event);
                if !follows.is_empty() {
                    lines.push(format!("  {:26} {}", describe(event), follows.join(", ")));
                }
            }
        }
    }
    lines.push(String::new());
    lines.join("\n")
}

fn events_of_table() -> Vec<Event> {
    let of_prefill = SHOWN.map(|answer| Event::Prefill(0, answer));
    let of_decode = SHOWN.map(Event::Decode);
    let others = [Event::Refused, Event::Silence, Event::Reset, Event::Leaving];
    [&of_prefill[..], &of_decode, &others].concat()
}

fn describe(event: Event) -> String {
    let answer = |at: usize| match ANSWERS[at] {
        CallEnd::Whole { status, body } => format!("{status} {}", kind(body)),
        other => other.to_string(),
    };
    match event {
        Event::Prefill(_, at) => format!("prefill: {}", answer(at)),
        Event::Decode(at) => format!("decode: {}", answer(at)),
        other => format!("{other:?}").to_lowercase(),
    }
}

fn kind(body: &[u8]) -> &'static str {
    match body {
        STAGED => "hand-off",
        TERMINAL => "terminal",
        WITHOUT => "no hand-off",
        ERROR => "error",
        _ => "",
    }
}

fn what_follows(pool: &Pool, before: &[Event], event: Event) -> Vec<String> {
    let mut host = Host::start(pool);
    for event in before {
        host.play(*event);
    }
    host.effects.clear();
    host.play(event);
    std::mem::take(&mut host.effects)
}

#[test]
fn each_event_has_its_effects_in_each_phase() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/session/tests/follows.txt");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, table()).unwrap();
    }
    assert_eq!(table(), std::fs::read_to_string(path).unwrap());
}
