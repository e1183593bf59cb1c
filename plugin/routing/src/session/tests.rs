//! The life of an answer: what follows from each event in each phase, and what holds for any order of events.

mod host;
mod lives;
mod table;

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::answer::{EventEdit, Form};
use crate::outcome::Came;
use crate::refusal::{PrefillFailure, Refusal};
use crate::route::{CallEnd, Patience};

const ROLE: &str =
    "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
const TEXT: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
const STOP: &str = "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
const DONE: &str = "data: [DONE]\n\n";
const FAILED: &str = "data: {\"error\":{\"message\":\"out of memory\",\"code\":500}}\n\n";

const STREAM: SuccessHead<'_> = SuccessHead {
    content_type: b"text/event-stream",
    encoding: None,
    length: None,
    is_charged: true,
    is_counted: true,
    expects_tokens: true,
};
const DOCUMENT: SuccessHead<'_> = SuccessHead {
    content_type: b"application/json",
    ..STREAM
};

fn second(at: u64) -> Duration {
    Duration::from_secs(at)
}

/// An answer whose headers have come.
fn begun(head: SuccessHead<'_>, prefill: ConcurrentPrefill) -> Response {
    let mut response = Response::default();
    let patience = Patience {
        first: Some(second(10)),
        silence: Some(second(5)),
        ..Patience::default()
    };
    response.start(patience, second(100));
    response.set_prefill(prefill);
    response.hold();
    let (step, _) = response.success(head);
    assert_eq!(step, AnswerStep::Hold);
    response
}

fn next(response: &mut Response, piece: Piece<'_>, takeover: Takeover) -> AnswerStep {
    if let Piece::Last(_) = piece {
        response.end();
    }
    response.read(piece);
    response.step(piece, takeover)
}

fn part(response: &mut Response, text: &str) -> AnswerStep {
    next(response, Piece::Part(text.as_bytes()), Takeover::Possible)
}

fn last(response: &mut Response, text: &str) -> AnswerStep {
    next(response, Piece::Last(text.as_bytes()), Takeover::Possible)
}

fn pass(is_first: bool, body: NewBody) -> AnswerStep {
    AnswerStep::Pass(Passed { is_first, body })
}

fn first() -> AnswerStep {
    pass(true, NewBody::AsItCame)
}

fn further() -> AnswerStep {
    pass(false, NewBody::AsItCame)
}

fn refusal() -> Refusal {
    let cause = PrefillFailure::Status(500);
    Refusal::PrefillFailed { tried: 1, cause }
}

#[test]
fn a_stream_is_held_until_it_has_content() {
    let mut response = begun(STREAM, ConcurrentPrefill::Nothing);
    assert_eq!(part(&mut response, ROLE), AnswerStep::Hold);
    assert!(response.is_unread() && response.tokens() == 0);
    // The held pieces come again, with the next one.
    assert_eq!(part(&mut response, &[ROLE, TEXT].concat()), first());
    assert!(response.has_begun() && response.tokens() == 1);
    assert_eq!(part(&mut response, TEXT), further());
    assert_eq!(last(&mut response, DONE), further());
    assert_eq!(response.outcome(StreamEnd::Other), Some(Came::Good));
}

#[test]
fn bytes_that_show_nothing_are_held_up_to_a_bound() {
    let mut response = begun(STREAM, ConcurrentPrefill::Nothing);
    let comment = |bytes: usize| format!(": {}\n\n", "x".repeat(bytes));
    assert_eq!(part(&mut response, &comment(1024)), AnswerStep::Hold);
    assert_eq!(part(&mut response, &comment(64 * 1024)), first());
}

#[test]
fn what_fails_before_the_client_reads_goes_to_another_worker() {
    for (head, text, came) in [
        (STREAM, FAILED, Came::FailedInside),
        (STREAM, DONE, Came::Empty),
        (DOCUMENT, "{\"choices\":[]}", Came::Empty),
        (
            DOCUMENT,
            "{\"error\":{\"message\":\"x\",\"code\":500}}",
            Came::FailedInside,
        ),
    ] {
        let mut response = begun(head, ConcurrentPrefill::Nothing);
        assert_eq!(last(&mut response, text), AnswerStep::Fail(came), "{text}");
        assert!(response.is_unread());
    }
    let mut empty = Response::default();
    empty.hold();
    empty.end();
    assert_eq!(empty.success(STREAM).0, AnswerStep::Fail(Came::Empty));
}

#[test]
fn a_failure_inside_is_the_clients_where_nobody_can_take_over() {
    let mut response = begun(STREAM, ConcurrentPrefill::Nothing);
    let step = next(
        &mut response,
        Piece::Last(FAILED.as_bytes()),
        Takeover::Impossible,
    );
    assert_eq!(step, first());
    assert_eq!(response.outcome(StreamEnd::Other), Some(Came::FailedInside));
}

#[test]
fn a_worker_that_was_judged_is_not_judged_again_at_the_end() {
    let mut response = begun(STREAM, ConcurrentPrefill::Nothing);
    assert_eq!(
        part(&mut response, FAILED),
        AnswerStep::Fail(Came::FailedInside)
    );
    response.pass_held();
    assert_eq!(response.outcome(StreamEnd::BrokenOff), None);
}

#[test]
fn the_end_of_a_stream_is_judged_by_what_came_before() {
    let stream = |pieces: &[&str]| {
        let mut response = begun(STREAM, ConcurrentPrefill::Nothing);
        for piece in pieces {
            let _ = part(&mut response, piece);
        }
        response
    };
    // The client has left: with content, the worker has worked.
    assert_eq!(stream(&[ROLE]).outcome(StreamEnd::Other), None);
    assert_eq!(stream(&[TEXT]).outcome(StreamEnd::Other), Some(Came::Good));
    assert_eq!(
        stream(&[TEXT]).outcome(StreamEnd::BrokenOff),
        Some(Came::Cut)
    );
    assert_eq!(
        stream(&[TEXT, FAILED]).outcome(StreamEnd::Other),
        Some(Came::FailedInside)
    );
    assert_eq!(Response::default().outcome(StreamEnd::BrokenOff), None);
}

#[test]
fn an_answer_without_a_worker_to_charge_passes_at_once() {
    let head = SuccessHead {
        is_charged: false,
        expects_tokens: false,
        ..DOCUMENT
    };
    let mut response = Response::default();
    response.hold();
    assert_eq!(response.success(head), (first(), ContentLength::Kept));
    assert!(response.passes_unread() && response.has_begun());
}

#[test]
fn the_rest_of_an_answer_that_is_not_counted_passes_unread() {
    for (is_counted, passes) in [(true, false), (false, true)] {
        let head = SuccessHead {
            is_counted,
            ..STREAM
        };
        let mut response = begun(head, ConcurrentPrefill::Nothing);
        assert!(!response.passes_unread(), "the client has read nothing");
        assert_eq!(part(&mut response, TEXT), first());
        assert_eq!(response.passes_unread(), passes);
        let mut beside = begun(head, ConcurrentPrefill::Running);
        assert_eq!(part(&mut beside, TEXT), first());
        assert!(!beside.passes_unread(), "its prefill may still fail");
    }
}

#[test]
fn an_answer_that_generates_nothing_is_held_only_to_be_edited() {
    let head = |length| SuccessHead {
        expects_tokens: false,
        length,
        ..DOCUMENT
    };
    let with_edit = |head| {
        let mut response = Response::default();
        response.edit(EventEdit::ModelName("mine".to_owned()));
        response.hold();
        (response.success(head).0, response)
    };
    let mut plain = Response::default();
    plain.hold();
    assert_eq!(plain.success(head(Some(10))).0, further());
    let (step, mut response) = with_edit(head(Some(40)));
    assert_eq!(step, AnswerStep::Hold);
    let edited = NewBody::Document(b"{\"model\":\"mine\"}".to_vec());
    assert_eq!(
        last(&mut response, "{\"model\":\"engine\"}"),
        pass(true, edited)
    );
    // Too long to be held, or of an unknown length.
    for length in [Some(512 * 1024 + 1), None] {
        let (step, mut response) = with_edit(head(length));
        assert_eq!(step, first());
        assert_eq!(last(&mut response, "{\"model\":\"engine\"}"), further());
    }
}

#[test]
fn events_are_edited_line_by_line_and_their_length_is_removed() {
    let mut response = Response::default();
    response.edit(EventEdit::CachedTokens(7));
    response.hold();
    assert_eq!(
        response.success(STREAM),
        (AnswerStep::Hold, ContentLength::Removed)
    );
    let usage = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9}}\n\n";
    // A line that has begun waits for its end.
    let begun = [TEXT, "data: {\"cho"].concat();
    assert_eq!(part(&mut response, &begun), AnswerStep::Hold);
    let step = part(&mut response, &[TEXT, usage].concat());
    let AnswerStep::Pass(Passed {
        is_first: true,
        body: NewBody::Events(events),
    }) = step
    else {
        panic!("{step:?}");
    };
    assert!(
        String::from_utf8(events)
            .unwrap()
            .contains("\"cached_tokens\":7")
    );
    // Trailers come without a body.
    assert_eq!(last(&mut response, ""), further());
}

#[test]
fn decode_may_flow_beside_a_prefill_but_not_end() {
    let mut response = begun(STREAM, ConcurrentPrefill::Running);
    assert_eq!(part(&mut response, TEXT), first());
    assert_eq!(part(&mut response, STOP), AnswerStep::Hold);
    assert_eq!(
        last(&mut response, &[STOP, DONE].concat()),
        AnswerStep::Hold
    );
    assert!(response.has_begun());
    assert!(response.prefill_is_good());
    assert_eq!(response.release(b""), NewBody::AsItCame);
    assert_eq!(response.outcome(StreamEnd::Other), Some(Came::Good));
}

#[test]
fn an_unstreamed_answer_waits_for_the_prefill_beside_it() {
    let document = "{\"choices\":[{\"text\":\"a\",\"finish_reason\":\"stop\"}]}";
    let mut response = begun(DOCUMENT, ConcurrentPrefill::Running);
    assert_eq!(part(&mut response, document), AnswerStep::Hold);
    assert_eq!(last(&mut response, document), AnswerStep::Hold);
    assert!(!response.is_unread() && !response.has_begun());
    assert!(response.prefill_is_good());
}

#[test]
fn logprobs_that_only_prefill_knows_hold_the_stream() {
    let mut response = begun(STREAM, ConcurrentPrefill::RunningWithLogprobs);
    assert_eq!(part(&mut response, TEXT), AnswerStep::Hold);
    // Not complete: what comes next goes on.
    assert!(!response.prefill_is_good());
    assert_eq!(part(&mut response, &[TEXT, TEXT].concat()), first());
}

#[test]
fn a_failed_prefill_ends_a_stream_with_an_event_and_a_reset() {
    let mut response = begun(STREAM, ConcurrentPrefill::Running);
    assert_eq!(part(&mut response, TEXT), first());
    response.break_off_for(refusal());
    assert!(response.has_begun() && !response.prefill_runs());
    let step = part(&mut response, TEXT);
    let AnswerStep::Pass(Passed {
        body: NewBody::Error { event, reason },
        ..
    }) = step
    else {
        panic!("{step:?}");
    };
    assert_eq!(reason, refusal().code());
    let event = String::from_utf8(event).unwrap();
    assert!(event.starts_with("\n\ndata: {\"error\":") && event.ends_with("\n\n"));
    assert_eq!(part(&mut response, TEXT), AnswerStep::BreakOff(reason));
}

#[test]
fn a_reset_comes_without_an_event_where_no_piece_follows() {
    let reason = refusal().code();
    let mut silent = begun(STREAM, ConcurrentPrefill::Running);
    assert_eq!(part(&mut silent, TEXT), first());
    silent.break_off_for(refusal());
    assert_eq!(silent.round(second(101)), None);
    assert_eq!(silent.round(second(101)), Some(Due::BreakOff(reason)));

    let mut over = begun(STREAM, ConcurrentPrefill::Running);
    assert_eq!(part(&mut over, TEXT), first());
    assert_eq!(last(&mut over, DONE), AnswerStep::Hold);
    over.break_off_for(refusal());
    // What passed before is on its way: the reset waits for a round.
    assert_eq!(last(&mut over, DONE), AnswerStep::Hold);
    assert_eq!(over.round(second(101)), None);
    assert_eq!(over.round(second(101)), Some(Due::BreakOff(reason)));

    let mut ending = begun(STREAM, ConcurrentPrefill::Running);
    assert_eq!(part(&mut ending, TEXT), first());
    ending.break_off_for(refusal());
    assert_eq!(last(&mut ending, DONE), AnswerStep::BreakOff(reason));
}

#[test]
fn each_phase_has_its_deadline() {
    let mut response = begun(STREAM, ConcurrentPrefill::Running);
    assert_eq!(response.round(second(109)), None);
    // An answer without content is late all the same.
    assert_eq!(part(&mut response, ROLE), AnswerStep::Hold);
    assert_eq!(response.round(second(110)), Some(Due::NothingCame));
    assert_eq!(part(&mut response, &[ROLE, TEXT].concat()), first());
    // The clock is read in rounds: the piece counts from the next one on.
    assert_eq!(response.round(second(120)), None);
    assert_eq!(response.round(second(124)), None);
    assert_eq!(response.round(second(125)), Some(Due::Stalled));
    // An end that is held back has no deadline: the prefill beside it has.
    assert_eq!(last(&mut response, DONE), AnswerStep::Hold);
    assert_eq!(response.round(second(500)), None);
}

#[test]
fn an_answer_is_compared_with_another_by_its_last_piece() {
    let mut one = begun(STREAM, ConcurrentPrefill::Nothing);
    let mut other = begun(STREAM, ConcurrentPrefill::Nothing);
    assert!(!one.has_moved_since(&other) && !other.has_moved_since(&one));
    assert_eq!(part(&mut one, TEXT), first());
    assert!(one.has_moved_since(&other) && !other.has_moved_since(&one));
    let _ = (one.round(second(101)), other.round(second(101)));
    assert_eq!(part(&mut other, TEXT), first());
    let _ = other.round(second(102));
    assert!(other.has_moved_since(&one) && !one.has_moved_since(&other));
}

#[test]
fn tokens_are_timed_only_where_they_stream() {
    let mut response = begun(STREAM, ConcurrentPrefill::Nothing);
    assert_eq!(response.time_between_tokens(|| second(200)), None);
    let _ = part(&mut response, TEXT);
    response.first_token_at(second(101));
    assert_eq!(response.time_between_tokens(|| second(200)), None);
    let _ = part(&mut response, &TEXT.repeat(4));
    assert_eq!(
        response.time_between_tokens(|| second(105)),
        Some(second(1))
    );
}

#[test]
fn a_reply_to_a_call_is_edited_as_a_forwarded_answer_is() {
    let mut response = Response::default();
    assert_eq!(response.edit_reply(b"{}", Form::Whole), b"{}");
    response.edit(EventEdit::ModelName("mine".to_owned()));
    let document = b"{\"model\":\"engine\"}";
    assert_eq!(
        response.edit_reply(document, Form::Whole),
        b"{\"model\":\"mine\"}"
    );
    let events = b"data: {\"model\":\"engine\"}";
    assert_eq!(
        response.edit_reply(events, Form::Events),
        b"data: {\"model\":\"mine\"}"
    );
    // Bytes that are no text pass.
    assert_eq!(response.edit_reply(b"\xff", Form::Whole), b"\xff");
}

#[test]
fn destinations_behind_the_one_that_was_reached_were_not_tried() {
    let address = |port: u16| SocketAddr::from(([10, 0, 0, 1], port));
    let mut tried = Tried::new(&[address(1), address(2), address(3)]);
    assert_eq!(tried.before(address(2)), [address(1)]);
    // The proxy has tried an address that it was not given: what came before it is not known.
    assert!(tried.before(address(9)).is_empty());
    tried.reached(Some(address(2)));
    assert_eq!(tried.all(), [address(1), address(2)]);
    tried.reached(None);
    assert_eq!(tried.all(), [address(1)]);
    tried.reached(Some(address(9)));
    assert_eq!(tried.all(), [address(9)]);
}

#[test]
fn the_last_answer_of_a_worker_is_the_clients() {
    let error = CallEnd::whole(429, b"later");
    let status = Came::Status(429);
    let kept = || vec![(b"retry-after".to_vec(), b"1".to_vec())];
    // An error that is still held back stays.
    let held = Failure::Status.then(status, error, kept());
    assert!(matches!(held.answer(1), LastAnswer::Held));
    let second = Failure::Silent.then(status, error, kept());
    let LastAnswer::Error(reply) = second.answer(1) else {
        panic!("the worker's error was lost");
    };
    assert_eq!((reply.status, &reply.body[..]), (429, &b"later"[..]));
    assert_eq!(reply.headers, kept());
    let redirect = CallEnd::whole(302, b"");
    let failure = Failure::Silent.then(Came::Status(302), redirect, Vec::new());
    assert!(matches!(failure, Failure::Unusable { status: 302 }));
    let failure = Failure::Left.then(Came::Cut, CallEnd::Broken, Vec::new());
    assert!(matches!(failure, Failure::Left));
}

#[test]
fn each_failure_has_its_refusal() {
    let code = |failure: Failure| match failure.answer(3) {
        LastAnswer::Refused(refusal) => refusal.code(),
        other => panic!("{other:?}"),
    };
    let unreachable = Refusal::Unreachable {
        what: "decode worker",
        tried: 3,
    };
    assert_eq!(code(Failure::Unreached), unreachable.code());
    assert_eq!(code(Failure::Broken), unreachable.code());
    assert_eq!(code(Failure::Silent), Refusal::DecodeTimeout.code());
    assert_eq!(code(Failure::Empty), Refusal::EmptyAnswer.code());
    assert_eq!(code(Failure::Left), Refusal::WorkerLeft.code());
    let unusable = Refusal::UnusableStatus { status: 101 };
    assert_eq!(code(Failure::Unusable { status: 101 }), unusable.code());
    assert_eq!(code(Failure::Refused(refusal())), refusal().code());
}

/// What may happen to an answer whose headers have come.
#[derive(Debug, Clone, Copy)]
enum Event {
    Part(&'static str),
    Last(&'static str),
    PrefillGood,
    PrefillFailed,
    Round,
}

fn event() -> impl Strategy<Value = Event> {
    let text =
        || prop::sample::select(&[ROLE, TEXT, STOP, DONE, FAILED, ": x\n\n", "data: {", ""][..]);
    prop_oneof![
        6 => text().prop_map(Event::Part),
        1 => text().prop_map(Event::Last),
        2 => Just(Event::PrefillGood),
        1 => Just(Event::PrefillFailed),
        2 => Just(Event::Round),
    ]
}

/// A client and a proxy around an answer: the proxy's buffer of what is held back, and what the client has got.
struct Life {
    response: Response,
    held: Vec<u8>,
    got: Vec<u8>,
    prefill: Option<bool>,
    is_complete: bool,
    is_over: bool,
}

impl Life {
    fn play(&mut self, event: Event, now: Duration) {
        match event {
            Event::Part(text) => self.piece(text, false),
            Event::Last(text) => self.piece(text, true),
            Event::PrefillGood if self.prefill == Some(false) => {
                self.prefill = Some(true);
                if self.response.prefill_is_good() {
                    let body = self.response.release(&self.held);
                    self.write(body);
                }
            }
            // As the caller does: an unread answer is recovered, one that has begun is reset.
            Event::PrefillFailed if self.prefill == Some(false) => {
                match self.response.has_begun() {
                    true => self.response.break_off_for(refusal()),
                    false => self.is_over = true,
                }
                self.prefill = None;
            }
            Event::PrefillGood | Event::PrefillFailed => {}
            Event::Round => self.is_over |= self.response.round(now).is_some(),
        }
    }

    fn piece(&mut self, text: &str, is_last: bool) {
        if self.is_complete {
            return;
        }
        self.is_complete = is_last;
        self.held.extend_from_slice(text.as_bytes());
        let bytes = self.held.clone();
        let had_begun = self.response.has_begun();
        let piece = match is_last {
            true => Piece::Last(&bytes),
            false => Piece::Part(&bytes),
        };
        match next(&mut self.response, piece, Takeover::Possible) {
            AnswerStep::Hold => {}
            AnswerStep::Pass(Passed { is_first, body }) => {
                assert_eq!(is_first, !had_begun);
                self.write(body);
            }
            AnswerStep::Fail(_) => {
                assert!(!had_begun, "a client that reads cannot be served anew");
                self.is_over = true;
            }
            AnswerStep::BreakOff(_) => {
                assert!(had_begun);
                self.is_over = true;
            }
        }
    }

    fn write(&mut self, body: NewBody) {
        let held = std::mem::take(&mut self.held);
        self.got.extend(match body {
            NewBody::AsItCame => held,
            NewBody::Events(bytes) | NewBody::Document(bytes) => bytes,
            NewBody::Error { event, .. } => event,
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100_000))]

    #[test]
    fn a_stream_never_ends_well_before_its_prefill_has(
        events in prop::collection::vec(event(), 1..12),
        is_concurrent: bool,
    ) {
        let prefill = match is_concurrent {
            true => ConcurrentPrefill::Running,
            false => ConcurrentPrefill::Nothing,
        };
        let mut life = Life {
            response: begun(STREAM, prefill),
            held: Vec::new(),
            got: Vec::new(),
            prefill: is_concurrent.then_some(false),
            is_complete: false,
            is_over: false,
        };
        for (at, event) in (101..).zip(events) {
            if life.is_over {
                break;
            }
            let is_good = !is_concurrent || life.prefill == Some(true);
            life.play(event, second(at));
            let is_good = is_good || life.prefill == Some(true);
            let got = String::from_utf8_lossy(&life.got);
            let ends_well = got.lines().any(|line| line == DONE.trim() || line == STOP.trim());
            prop_assert!(is_good || !ends_well, "{got}");
            prop_assert!(life.got.is_empty() || life.response.has_begun());
            // Nothing passes twice, and nothing is lost.
            prop_assert!(!life.is_complete || !is_good || life.is_over || life.held.is_empty());
        }
    }
}
