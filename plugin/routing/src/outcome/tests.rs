//! Every row of the table of outcomes.

use super::*;

const FIRST: Before = Before {
    called_off: false,
    resets: 0,
    has_asked_another: false,
};
const ASKED: Before = Before {
    has_asked_another: true,
    ..FIRST
};

use Blame::{BackPressure, Credit, Nothing, Pair, PassedOver, Unreachable, Worker};
use Follows::{Anew, PassedOn, SameBytes};

const WORKER: Follows = Anew(LeftOut::Worker);
const AT_FIRST: Follows = Anew(LeftOut::WorkerAtFirst);
const PAIR: Follows = Anew(LeftOut::Pair);

/// An outcome, and its meaning for a prefill, a decode after it, an aggregated worker, a sidecar and a frontend.
type Row = (Came, [(Blame, Follows); 5], Cost);

#[rustfmt::skip]
const ROWS: &[Row] = &[
    (Came::Good, [(Credit, PassedOn); 5], Cost::Nothing),
    (Came::Unsendable, [(Nothing, PassedOn); 5], Cost::Nothing),
    (Came::Unread, [(Nothing, PassedOn); 5], Cost::Nothing),
    (Came::NotSent, [(PassedOver, WORKER), (PassedOver, SameBytes), (PassedOver, WORKER), (PassedOver, WORKER), (Nothing, WORKER)], Cost::Nothing),
    (Came::Refused, [(Unreachable, WORKER), (Unreachable, SameBytes), (Unreachable, WORKER), (Unreachable, WORKER), (Nothing, WORKER)], Cost::Nothing),
    (Came::Left, [(Nothing, WORKER); 5], Cost::Nothing),
    (Came::Reset, [(Nothing, AT_FIRST); 5], Cost::Nothing),
    (Came::Cut, [(Worker, WORKER), (Worker, WORKER), (Worker, WORKER), (Worker, WORKER), (Nothing, WORKER)], Cost::Work),
    (Came::NoHandoff, [(Worker, WORKER), (Worker, WORKER), (Worker, WORKER), (Worker, WORKER), (Nothing, WORKER)], Cost::Work),
    (Came::Silent, [(Worker, PassedOn), (Worker, PassedOn), (Worker, PassedOn), (Worker, PassedOn), (Nothing, PassedOn)], Cost::Work),
    (Came::TimedOut, [(Worker, WORKER), (Pair, PAIR), (Worker, WORKER), (Pair, PAIR), (Nothing, WORKER)], Cost::Work),
    (Came::Empty, [(Worker, WORKER), (Pair, PAIR), (Worker, WORKER), (Pair, PAIR), (Nothing, WORKER)], Cost::Work),
    (Came::FailedInside, [(Worker, WORKER), (Pair, PAIR), (Worker, WORKER), (Pair, PAIR), (Nothing, WORKER)], Cost::Work),
    (Came::Status(500), [(Worker, WORKER), (Pair, PAIR), (Worker, WORKER), (Pair, PAIR), (Nothing, WORKER)], Cost::Work),
    (Came::Status(502), [(Worker, WORKER), (Pair, PAIR), (Worker, WORKER), (Pair, PAIR), (Nothing, WORKER)], Cost::Work),
    (Came::Status(504), [(Worker, WORKER), (Pair, PAIR), (Worker, WORKER), (Pair, PAIR), (Nothing, WORKER)], Cost::Work),
    (Came::Status(503), [(BackPressure, WORKER), (BackPressure, PAIR), (BackPressure, WORKER), (BackPressure, PAIR), (Nothing, WORKER)], Cost::Nothing),
    (Came::Status(429), [(BackPressure, WORKER), (BackPressure, SameBytes), (BackPressure, WORKER), (BackPressure, PAIR), (Nothing, WORKER)], Cost::Nothing),
    (Came::Status(401), [(Worker, WORKER), (Worker, SameBytes), (Worker, WORKER), (Pair, PAIR), (Nothing, WORKER)], Cost::Nothing),
    (Came::Status(403), [(Worker, WORKER), (Worker, SameBytes), (Worker, WORKER), (Pair, PAIR), (Nothing, WORKER)], Cost::Nothing),
    (Came::Status(404), [(Worker, WORKER), (Worker, SameBytes), (Worker, WORKER), (Pair, PAIR), (Nothing, WORKER)], Cost::Nothing),
    (Came::Status(405), [(Worker, WORKER), (Worker, SameBytes), (Worker, WORKER), (Pair, PAIR), (Nothing, WORKER)], Cost::Nothing),
    (Came::Status(408), [(Worker, WORKER), (Worker, WORKER), (Worker, WORKER), (Pair, PAIR), (Nothing, WORKER)], Cost::Work),
    (Came::Status(400), [(Nothing, PassedOn); 5], Cost::Nothing),
    (Came::Status(431), [(Nothing, PassedOn); 5], Cost::Nothing),
    (Came::Status(413), [(Nothing, PassedOn); 5], Cost::Nothing),
    (Came::Status(422), [(Nothing, PassedOn); 5], Cost::Nothing),
    (Came::Status(101), [(Worker, WORKER), (Pair, PAIR), (Worker, WORKER), (Pair, PAIR), (Nothing, WORKER)], Cost::Work),
    (Came::Status(307), [(Worker, WORKER), (Pair, PAIR), (Worker, WORKER), (Pair, PAIR), (Nothing, WORKER)], Cost::Work),
];

#[test]
fn every_row_means_what_it_says() {
    for (came, cells, cost) in ROWS {
        for (leg, (held, follows)) in Leg::ALL.into_iter().zip(cells) {
            let meaning = judge(leg, *came, FIRST);
            let expected = Meaning::new(*held, *follows, *cost);
            assert_eq!(meaning, expected, "{leg:?} {came:?}");
        }
    }
}

/// A decode leg gets the same hand-off again only where the first worker provably never began: otherwise the hand-off could
/// be used twice.
#[test]
fn found_w3_a_handoff_is_offered_again_only_where_nothing_began() {
    for (came, ..) in ROWS {
        let unbegun = matches!(
            came,
            Came::NotSent | Came::Refused | Came::Status(401..=405 | 421 | 423 | 429)
        );
        let follows = judge(Leg::Decode, *came, FIRST).follows;
        assert_eq!(follows == SameBytes, unbegun, "{came:?}");
        for leg in [Leg::Prefill, Leg::Aggregated, Leg::Sidecar, Leg::Frontend] {
            assert_ne!(
                judge(leg, *came, FIRST).follows,
                SameBytes,
                "{leg:?} {came:?}"
            );
        }
    }
}

#[test]
fn found_w3_the_first_reset_is_held_against_no_worker_and_the_second_is() {
    for leg in [Leg::Prefill, Leg::Decode, Leg::Aggregated, Leg::Sidecar] {
        let blame = |resets| judge(leg, Came::Reset, Before { resets, ..FIRST }).blame;
        assert_eq!(
            (blame(0), blame(1), blame(2)),
            (Nothing, Worker, Worker),
            "{leg:?}"
        );
    }
}

/// After a refusal that may be the worker's own, one other worker is asked, and its answer is passed on.
#[test]
fn found_b3_one_other_worker_is_asked_and_no_third() {
    for leg in Leg::ALL {
        for status in [
            401, 402, 403, 404, 405, 406, 407, 408, 410, 421, 423, 424, 425, 426, 429, 499,
        ] {
            let follows = |before| judge(leg, Came::Status(status), before).follows;
            assert_ne!(follows(FIRST), PassedOn, "{leg:?} {status}");
            assert_eq!(follows(ASKED), PassedOn, "{leg:?} {status}");
        }
        for status in [400, 409, 411, 413, 414, 415, 417, 422, 428, 431, 451] {
            let meaning = judge(leg, Came::Status(status), FIRST);
            assert_eq!((meaning.blame, meaning.follows), (Nothing, PassedOn));
        }
    }
}

#[test]
fn found_c3_what_the_gateway_called_off_is_held_against_no_worker() {
    let before = Before {
        called_off: true,
        ..FIRST
    };
    for (came, ..) in ROWS {
        for leg in Leg::ALL {
            let expected = match came {
                Came::Good => Credit,
                _ => Nothing,
            };
            assert_eq!(
                judge(leg, *came, before).blame,
                expected,
                "{leg:?} {came:?}"
            );
        }
    }
}

#[test]
fn the_proxys_own_words_are_told_from_a_workers() {
    let connect = "upstream connect error or disconnect/reset before headers. reset reason:";
    for (status, body, came) in [
        (
            503,
            format!("{connect} remote connection failure"),
            Some(Came::Refused),
        ),
        (
            503,
            format!("{connect} connection timeout"),
            Some(Came::Refused),
        ),
        (
            503,
            format!("{connect} connection termination"),
            Some(Came::Reset),
        ),
        (503, format!("{connect} remote reset"), Some(Came::Reset)),
        (503, format!("{connect} protocol error"), Some(Came::Reset)),
        (503, format!("{connect} overflow"), Some(Came::NotSent)),
        (503, "no healthy upstream".to_owned(), Some(Came::NotSent)),
        (
            504,
            "upstream request timeout".to_owned(),
            Some(Came::TimedOut),
        ),
        (503, "queue is full".to_owned(), None),
        (
            503,
            r#"{"error":"the queue is full: connection failure"}"#.to_owned(),
            None,
        ),
        (500, "upstream request timeout".to_owned(), None),
    ] {
        assert_eq!(of_call(status, body.as_bytes()), came, "{status} {body}");
    }
    for (details, came) in [
        (
            "upstream_reset_before_response_started{remote_connection_failure|111}",
            Some(Came::Refused),
        ),
        (
            "upstream_reset_before_response_started{connection_termination}",
            Some(Came::Reset),
        ),
        (
            "upstream_reset_before_response_started{overflow}",
            Some(Came::NotSent),
        ),
        ("no_healthy_upstream", Some(Came::NotSent)),
        ("response_timeout", Some(Came::TimedOut)),
        ("request_payload_too_large", None),
        ("via_upstream", None),
    ] {
        assert_eq!(of_words(details.as_bytes()), came, "{details}");
    }
}

/// A slow client makes its worker look silent: while that worker's other streams move, the worker is not at fault.
#[test]
fn found_b7_a_silence_while_other_streams_of_the_worker_move_is_held_against_none() {
    for leg in Leg::ALL {
        assert_eq!(judge(leg, Came::Unread, FIRST).blame, Nothing);
    }
    let silent = judge(Leg::Decode, Came::Silent, FIRST);
    assert_eq!(silent.blame, Worker);
}
