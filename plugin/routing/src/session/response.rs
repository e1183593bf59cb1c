//! Owns one answer on its way to the client: what of it is held back, passed on, edited or broken off.
//!
//! An answer is held back until it has content: as long as the client has read nothing, another worker can take the place of
//! one that fails. While a concurrent prefill runs, decode's answer may flow, but must not end well.

use std::time::Duration;

use super::deadlines::Deadlines;
use super::step::{AnswerStep, ContentLength, Due, NewBody, Passed, Piece, StreamEnd, Takeover};
use crate::answer::{EventEdit, Form, Reader, Rewriter, Verdict};
use crate::outcome::Came;
use crate::refusal::Refusal;
use crate::route::Patience;

/// Bytes that count as content, whatever they are: no engine's first event is longer.
const MOST_HELD: usize = 64 * 1024;

/// Longest unstreamed answer that is held to be edited, in bytes: half of what a proxy buffers, as a rule.
const MOST_EDITED: usize = 512 * 1024;

/// Rounds to wait for a piece of the answer in whose place the client gets the error.
const ROUNDS_BEFORE_RESET: u8 = 1;

/// State of a concurrent prefill.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ConcurrentPrefill {
    /// None, or ended.
    #[default]
    Nothing,
    /// Under way: decode's answer must not end well before prefill is known to be good.
    Running,
    /// Under way, and the answer lacks the logprobs of the prompt, which only prefill knows.
    RunningWithLogprobs,
}

/// Progress of the answer, and what of it is held back.
#[derive(Debug, Default)]
enum Phase {
    /// Nothing has come.
    #[default]
    Awaited,
    /// The headers have come, and are held back until the answer has content.
    Held,
    /// All of the answer has come, and is held back until the concurrent prefill is known to be good.
    Complete,
    /// The answer flows.
    Flowing,
    /// The answer has flowed; its end is held back until the concurrent prefill is known to be good.
    EndHeld,
    /// The answer has flowed, and must end with a reset.
    BreakingOff(PendingReset),
}

/// A reset that an answer must end with.
#[derive(Debug)]
struct PendingReset {
    reason: Refusal,
    /// Rounds until the reset.
    rounds: u8,
    event: ErrorEvent,
}

/// The event that shows the client of a stream why the stream ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ErrorEvent {
    /// The event replaces the next piece of the answer.
    Due,
    /// The event was sent: the next piece breaks the answer off.
    Sent,
    /// No event, since the end that is held back is the last piece: a round breaks the answer off.
    Omitted,
}

/// A successful answer, as far as its headers show it.
#[derive(Debug, Clone, Copy, Default)]
pub struct SuccessHead<'a> {
    /// The header `content-type`.
    pub content_type: &'a [u8],
    /// The header `content-encoding`.
    pub encoding: Option<&'a [u8]>,
    /// The header `content-length`, in bytes.
    pub length: Option<usize>,
    /// Whether the answer is charged to a worker.
    pub is_charged: bool,
    /// Whether the tokens of a charged answer are counted up to its end.
    pub is_counted: bool,
    /// Whether the request asks for generated text: an answer without content is a failure.
    pub expects_tokens: bool,
}

/// One answer on its way to the client.
#[derive(Debug)]
pub struct Response {
    phase: Phase,
    prefill: ConcurrentPrefill,
    form: Form,
    /// Whether the request asks for generated text, so that an answer without content is a failure.
    expects_tokens: bool,
    is_counted: bool,
    /// Reader of an answer that is charged to a worker.
    reader: Option<Reader>,
    /// Bytes of the held part that have been read already.
    read: usize,
    has_ended: bool,
    edits: Option<Rewriter>,
    deadlines: Deadlines,
    tokens: u64,
    /// When the first token came; none has if zero.
    first_token: Duration,
    /// First digit of the status that the client gets; 0: none.
    status_class: usize,
}

impl Default for Response {
    fn default() -> Self {
        Self {
            phase: Phase::Awaited,
            prefill: ConcurrentPrefill::Nothing,
            form: Form::Whole,
            expects_tokens: false,
            is_counted: true,
            reader: None,
            read: 0,
            has_ended: false,
            edits: None,
            deadlines: Deadlines::default(),
            tokens: 0,
            first_token: Duration::ZERO,
            status_class: 0,
        }
    }
}

impl Response {
    /// Starts the deadlines of a leg that is dispatched at `now`.
    pub fn start(&mut self, patience: Patience, now: Duration) {
        self.deadlines = Deadlines::start(patience, now);
    }

    /// Whether the leg has any deadline.
    pub fn has_deadline(&self) -> bool {
        self.deadlines.exist()
    }

    /// Notes a concurrent prefill that starts or, with [`ConcurrentPrefill::Nothing`], is given up.
    pub fn set_prefill(&mut self, prefill: ConcurrentPrefill) {
        self.prefill = prefill;
    }

    /// Whether a concurrent prefill runs.
    pub fn prefill_runs(&self) -> bool {
        self.prefill != ConcurrentPrefill::Nothing
    }

    /// Whether the answer lacks logprobs of the prompt that the running prefill will bring.
    pub fn awaits_logprobs(&self) -> bool {
        self.prefill == ConcurrentPrefill::RunningWithLogprobs
    }

    /// Adds an edit for the rest of the answer.
    pub fn edit(&mut self, edit: EventEdit) {
        self.edits.get_or_insert_default().add(edit);
    }

    /// Whether the client has read nothing of the answer.
    pub fn is_unread(&self) -> bool {
        matches!(self.phase, Phase::Awaited | Phase::Held)
    }

    /// Whether the client has read any of the answer.
    pub fn has_begun(&self) -> bool {
        matches!(
            self.phase,
            Phase::Flowing | Phase::EndHeld | Phase::BreakingOff(_)
        )
    }

    /// Notes the first digit of the status that the client gets.
    pub fn set_status_class(&mut self, class: usize) {
        self.status_class = class;
    }

    /// Notes that headers have come: the answer is held back until it is clear what follows.
    pub fn hold(&mut self) {
        self.phase = Phase::Held;
    }

    /// Notes that the answer has ended, with its headers, a piece or its trailers.
    pub fn end(&mut self) {
        self.has_ended = true;
    }

    /// Whether the answer has ended.
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// The headers of a success.
    pub fn success(&mut self, head: SuccessHead<'_>) -> (AnswerStep, ContentLength) {
        if !head.is_charged && self.edits.is_none() {
            return (self.begin(NewBody::AsItCame), ContentLength::Kept);
        }
        self.form = Form::of(head.content_type);
        self.expects_tokens = head.expects_tokens;
        self.is_counted = head.is_counted;
        self.reader = Some(Reader::new(head.content_type, head.encoding));
        let is_edited = self.edits.is_some() || self.awaits_logprobs();
        let length = match (is_edited, self.form) {
            (true, Form::Events) => ContentLength::Removed,
            _ => ContentLength::Kept,
        };
        (self.after_success(head.length), length)
    }

    fn after_success(&mut self, length: Option<usize>) -> AnswerStep {
        match (self.expects_tokens, self.has_ended) {
            (true, true) => AnswerStep::Fail(Came::Empty),
            (true, false) => AnswerStep::Hold,
            (false, false) if self.edits.is_some() && self.form == Form::Whole => {
                self.hold_to_edit(length)
            }
            // An unknown path may well answer nothing.
            (false, _) => {
                self.pass_held();
                AnswerStep::Pass(Passed {
                    is_first: false,
                    body: NewBody::AsItCame,
                })
            }
        }
    }

    /// Holds an unstreamed answer that generates nothing, such as embeddings, until it can be edited: its headers contain the
    /// length, which the edits change. An answer that may be too long to be held passes unedited.
    fn hold_to_edit(&mut self, length: Option<usize>) -> AnswerStep {
        if length.is_some_and(|length| length <= MOST_EDITED) {
            return AnswerStep::Hold;
        }
        self.edits = None;
        self.begin(NewBody::AsItCame)
    }

    /// What has come passes as it is: an error, or an answer that is not read.
    pub fn pass_held(&mut self) {
        self.phase = Phase::Flowing;
        self.deadlines.mark_activity();
    }

    /// Whether a piece passes unread: no piece of the answer is read, or the rest needs no reading, since its tokens are not
    /// counted, the client reads already, nothing is edited, and nothing else is under way for the request.
    pub fn passes_unread(&mut self) -> bool {
        let is_flowing = matches!(self.phase, Phase::Flowing);
        let needs_no_reading =
            !self.is_counted && is_flowing && !self.prefill_runs() && self.edits.is_none();
        let passes = self.reader.is_none() || needs_no_reading;
        if passes {
            self.deadlines.mark_activity();
        }
        passes
    }

    /// Bytes of the held part that have been read.
    pub fn held_bytes(&self) -> usize {
        self.read
    }

    /// Reads what is new in a piece; whether the first token has come with it.
    pub fn read(&mut self, piece: Piece<'_>) -> bool {
        let Some(reader) = &mut self.reader else {
            return false;
        };
        let new = piece.bytes().get(self.read..).unwrap_or_default();
        self.read = piece.bytes().len();
        if !new.is_empty() {
            self.deadlines.mark_activity();
        }
        let had_begun = reader.has_begun();
        reader.read(new);
        if piece.is_last() {
            reader.finish();
        }
        self.tokens = reader.tokens();
        reader.has_begun() && !had_begun
    }

    /// Decides about a piece that has been read.
    pub fn step(&mut self, piece: Piece<'_>, takeover: Takeover) -> AnswerStep {
        match &self.phase {
            Phase::Awaited | Phase::Held => self.held(piece, takeover),
            Phase::Flowing => self.flowing(piece),
            Phase::BreakingOff(_) => self.breaking_off(piece),
            Phase::Complete | Phase::EndHeld => AnswerStep::Hold,
        }
    }

    /// Decides about a piece while the client has read nothing.
    fn held(&mut self, piece: Piece<'_>, takeover: Takeover) -> AnswerStep {
        match self.verdict() {
            Verdict::Empty if self.expects_tokens => return AnswerStep::Fail(Came::Empty),
            Verdict::Nothing if !piece.is_last() && piece.bytes().len() < MOST_HELD => {
                return AnswerStep::Hold;
            }
            // The worker reports a failure in its answer in place of a status.
            Verdict::Failed(_) if takeover == Takeover::Possible => {
                // The worker is judged now, and not again when the stream ends.
                self.reader = None;
                return AnswerStep::Fail(Came::FailedInside);
            }
            _ => {}
        }
        if self.prefill_runs() && self.is_over(piece) {
            self.phase = Phase::Complete;
            return AnswerStep::Hold;
        }
        let is_unstreamed = self.form == Form::Whole;
        let waits_for_prefill = self.prefill_runs() && (is_unstreamed || self.awaits_logprobs());
        let waits_for_end = is_unstreamed && self.edits.is_some();
        if !piece.is_last() && (waits_for_prefill || waits_for_end || self.must_wait()) {
            return AnswerStep::Hold;
        }
        self.read = 0;
        let body = self.edited(piece);
        self.begin(body)
    }

    fn flowing(&mut self, piece: Piece<'_>) -> AnswerStep {
        if self.prefill_runs() && self.is_over(piece) {
            self.phase = Phase::EndHeld;
            return AnswerStep::Hold;
        }
        if !piece.is_last() && self.must_wait() {
            return AnswerStep::Hold;
        }
        self.read = 0;
        AnswerStep::Pass(Passed {
            is_first: false,
            body: self.edited(piece),
        })
    }

    /// An error event replaces a piece that would pass; the connection breaks with the next one, or in a later round. An event
    /// that is written together with the break would be lost.
    fn breaking_off(&mut self, piece: Piece<'_>) -> AnswerStep {
        let Phase::BreakingOff(reset) = &mut self.phase else {
            return AnswerStep::Hold;
        };
        let reason = reset.reason.code();
        if reset.event == ErrorEvent::Omitted {
            return AnswerStep::Hold;
        }
        let shows = self.form == Form::Events && reset.event == ErrorEvent::Due;
        if !shows || piece.is_last() {
            return AnswerStep::BreakOff(reason);
        }
        reset.event = ErrorEvent::Sent;
        self.read = 0;
        // The piece passed last may have ended in the middle of a line.
        let event = format!("\n\ndata: {}\n\n", reset.reason.to_json()).into_bytes();
        AnswerStep::Pass(Passed {
            is_first: false,
            body: NewBody::Error { event, reason },
        })
    }

    fn begin(&mut self, body: NewBody) -> AnswerStep {
        self.pass_held();
        AnswerStep::Pass(Passed {
            is_first: true,
            body,
        })
    }

    /// The piece as the client gets it: events are edited as they come, an unstreamed answer when it is complete.
    fn edited(&mut self, piece: Piece<'_>) -> NewBody {
        let Some(edits) = &mut self.edits else {
            return NewBody::AsItCame;
        };
        match self.form {
            Form::Events => match (piece.bytes(), edit_events(edits, piece)) {
                // Trailers come without a body.
                ([], events) if events.is_empty() => NewBody::AsItCame,
                (_, events) => NewBody::Events(events),
            },
            Form::Whole if piece.is_last() => {
                let document = edit_document(edits, piece.bytes());
                document.map_or(NewBody::AsItCame, NewBody::Document)
            }
            Form::Whole => NewBody::AsItCame,
        }
    }

    /// The answer to a call, complete, with the edits that a forwarded answer would have had.
    pub fn edit_reply(&mut self, reply: &[u8], form: Form) -> Vec<u8> {
        let edited = match (&mut self.edits, form) {
            (None, _) => None,
            (Some(edits), Form::Events) => Some(edit_events(edits, Piece::Last(reply))),
            (Some(edits), Form::Whole) => edit_document(edits, reply),
        };
        edited.unwrap_or_else(|| reply.to_vec())
    }

    /// Ends a concurrent prefill that was good; whether what is held back of the answer can go on, up to its end.
    pub fn prefill_is_good(&mut self) -> bool {
        self.prefill = ConcurrentPrefill::Nothing;
        matches!(self.phase, Phase::Complete | Phase::EndHeld)
    }

    /// Whether the answer is edited.
    pub fn is_edited(&self) -> bool {
        self.edits.is_some()
    }

    /// Passes what is held back of the answer, up to its end: the part as the client gets it.
    pub fn release(&mut self, held: &[u8]) -> NewBody {
        self.phase = Phase::Flowing;
        self.edited(Piece::Last(held))
    }

    /// Ends an answer that has begun with a reset, since its concurrent prefill has failed: it must not end as a success.
    pub fn break_off_for(&mut self, reason: Refusal) {
        self.prefill = ConcurrentPrefill::Nothing;
        let event = match self.phase {
            Phase::EndHeld => ErrorEvent::Omitted,
            _ => ErrorEvent::Due,
        };
        self.phase = Phase::BreakingOff(PendingReset {
            reason,
            rounds: ROUNDS_BEFORE_RESET,
            event,
        });
    }

    /// What is due in a round at `now`. To be called once a round.
    pub fn round(&mut self, now: Duration) -> Option<Due> {
        self.deadlines.round(now);
        match &mut self.phase {
            Phase::Awaited | Phase::Held => {
                let is_late = self.deadlines.first_is_late(now);
                is_late.then_some(Due::NothingCame)
            }
            Phase::Flowing => self.deadlines.rest_is_late(now).then_some(Due::Stalled),
            Phase::Complete | Phase::EndHeld => None,
            Phase::BreakingOff(reset) => match reset.rounds.checked_sub(1) {
                Some(left) => {
                    reset.rounds = left;
                    None
                }
                None => Some(Due::BreakOff(reset.reason.code())),
            },
        }
    }

    /// Whether this answer has moved since the other one last did.
    pub fn has_moved_since(&self, other: &Self) -> bool {
        self.deadlines.moved_after(&other.deadlines)
    }

    /// Whether the answer is read, and has neither ended nor failed: how its stream ended decides what came of the leg.
    pub fn is_open(&self) -> bool {
        let is_failed = matches!(self.verdict(), Verdict::Failed(_));
        self.reader.is_some() && !self.has_ended && !is_failed
    }

    /// What came of the leg, now that the stream has ended; none if there is nothing to judge a worker by. Not earlier: a
    /// worker that breaks every answer off begins all of them well.
    pub fn outcome(&self, end: StreamEnd) -> Option<Came> {
        let reader = self.reader.as_ref()?;
        match (reader.verdict(), end) {
            (Verdict::Failed(_), _) => Some(Came::FailedInside),
            _ if self.has_ended => Some(Came::Good),
            (_, StreamEnd::BrokenOff) => Some(Came::Cut),
            (_, StreamEnd::Other) => reader.has_begun().then_some(Came::Good),
        }
    }

    /// Notes when the first token came.
    pub fn first_token_at(&mut self, now: Duration) {
        self.first_token = now;
    }

    /// Notes the content of an answer that is complete at once.
    pub fn count(&mut self, reader: &Reader) {
        self.tokens = reader.tokens();
    }

    /// Tokens of the answer, as far as known.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// First digit of the status that the client gets; 0: none.
    pub fn status_class(&self) -> usize {
        self.status_class
    }

    /// Mean time between two tokens of a stream that ends `now`; an unstreamed answer has all of them at once.
    pub fn time_between_tokens(&self, now: impl FnOnce() -> Duration) -> Option<Duration> {
        let further = u32::try_from(self.tokens.saturating_sub(1)).unwrap_or(u32::MAX);
        if self.form != Form::Events || further == 0 || self.first_token.is_zero() {
            return None;
        }
        now().saturating_sub(self.first_token).checked_div(further)
    }

    fn verdict(&self) -> Verdict {
        self.reader
            .as_ref()
            .map_or(Verdict::Content, Reader::verdict)
    }

    /// Whether the answer's final event, or the answer's end, has come.
    fn is_over(&self, piece: Piece<'_>) -> bool {
        piece.is_last() || self.reader.as_ref().is_some_and(Reader::is_over)
    }

    /// Whether the received bytes wait for the next ones: they may look like a good end while the concurrent prefill is not
    /// known to be good, or they are to be edited and end amid a line.
    fn must_wait(&self) -> bool {
        self.reader.as_ref().is_some_and(|reader| {
            self.prefill_runs() && reader.may_have_ended()
                || self.edits.is_some() && reader.is_amid_line()
        })
    }
}

fn edit_events(edits: &mut Rewriter, piece: Piece<'_>) -> Vec<u8> {
    let mut events = edits.read(piece.bytes());
    if piece.is_last() {
        events.extend(edits.finish());
    }
    events
}

fn edit_document(edits: &Rewriter, document: &[u8]) -> Option<Vec<u8>> {
    let document = std::str::from_utf8(document).ok()?;
    edits.of_document(document).map(String::into_bytes)
}
