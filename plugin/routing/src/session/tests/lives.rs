//! Lives of requests from their plan to their end, in a host that fails, answers late, loses workers and clients.

use proptest::prelude::*;

use super::host::{ANSWERS, Event, Host, POOLS};
use crate::config::Pool;

fn event() -> impl Strategy<Value = Event> {
    let workers = prop::sample::select(&[1_u64, 2, 11, 12][..]);
    prop_oneof![
        6 => (0..3_usize, 0..ANSWERS.len()).prop_map(|(call, answer)| Event::Prefill(call, answer)),
        1 => Just(Event::Hedge),
        5 => (0..ANSWERS.len()).prop_map(Event::Decode),
        1 => Just(Event::Refused),
        1 => Just(Event::Reset),
        1 => Just(Event::Silence),
        1 => workers.prop_map(Event::Departure),
        1 => Just(Event::Leaving),
    ]
}

/// Lives that are tried; some ten events each.
fn lives() -> u32 {
    match std::env::var_os("PD_SOAK") {
        Some(_) => 10_000_000,
        None => 100_000,
    }
}

fn play(pool: &Pool, events: &[Event]) {
    let mut host = Host::start(pool);
    for event in events {
        host.play(*event);
    }
    host.end();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(lives()))]

    #[test]
    fn whatever_happens_a_request_has_one_answer_and_leaves_nothing(
        events in prop::collection::vec(event(), 1..16),
        pool in prop::sample::select(&POOLS[..]),
    ) {
        play(&pool, &events);
    }
}
