//! A host around one session: it does what the filter does, and checks each effect.

use std::sync::Arc;
use std::sync::LazyLock;
use std::time::Duration;

use crate::budget::{Budget, HeldBytes, Share};
use crate::config::{Config, Pool};
use crate::fleet::{Fleet, Worker};
use crate::handoff::LegOrder;
use crate::request::Generation;
use crate::route::fate::Fate;
use crate::route::{CallEnd, Plan, PlanInput, PrefillPhase, Router};
use crate::session::*;

const CHAT: &[u8] = br#"{"model":"m","messages":[{"role":"user","content":"hello"}]}"#;

pub const STAGED: &[u8] = br#"{"choices":[{"finish_reason":"length","message":{"content":"a"}}],"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[4,5]]}}"#;
pub const TERMINAL: &[u8] = br#"{"object":"chat.completion","choices":[{"index":0,"finish_reason":"stop","message":{"role":"assistant","content":""}}]}"#;
pub const WITHOUT: &[u8] = br#"{"choices":[{"finish_reason":"length","message":{"content":"a"}}]}"#;
const ANSWER: &[u8] = br#"{"choices":[{"finish_reason":"stop","message":{"content":"hi"}}]}"#;
const EMPTY: &[u8] = br#"{"choices":[]}"#;
pub const ERROR: &[u8] = br#"{"error":{"message":"x","code":500}}"#;

/// Details of the proxy's for a request that no worker has answered.
const REFUSED: &[u8] = b"upstream_reset_before_response_started{remote_connection_failure}";
const RESET: &[u8] = b"upstream_reset_before_response_started{connection_termination}";
const NOT_SENT: &[u8] = b"no_healthy_upstream";

/// Answers of workers to calls.
pub const ANSWERS: [CallEnd<'static>; 14] = [
    whole(200, STAGED),
    whole(200, STAGED),
    whole(200, STAGED),
    whole(200, TERMINAL),
    whole(200, WITHOUT),
    whole(200, ANSWER),
    whole(200, EMPTY),
    whole(200, ERROR),
    whole(400, ERROR),
    whole(429, ERROR),
    whole(500, ERROR),
    whole(503, ERROR),
    CallEnd::Broken,
    CallEnd::NotSent,
];

const fn whole(status: u16, body: &'static [u8]) -> CallEnd<'static> {
    CallEnd::Whole { status, body }
}

const PROTOCOLS: [&str; 2] = ["nixl", "sglang"];
const POLICIES: [&str; 2] = ["", r#","decode":{"recoveries":4}"#];

/// A pool of each protocol and policy.
pub static POOLS: LazyLock<Vec<Pool>> = LazyLock::new(|| {
    let all = PROTOCOLS
        .iter()
        .flat_map(|protocol| POLICIES.map(|policy| pool(protocol, policy)));
    all.collect()
});

fn pool(protocol: &str, policy: &str) -> Pool {
    let worker = |role: &str, port: u16| {
        let room = match (protocol, role) {
            ("sglang", "prefill") => r#","bootstrap_port":8998"#,
            _ => "",
        };
        format!(r#"{{"role":"{role}","address":"10.0.0.1:{port}","id":{port},"model":"m"{room}}}"#)
    };
    let workers = [
        worker("prefill", 1),
        worker("prefill", 2),
        worker("decode", 11),
        worker("decode", 12),
    ];
    let document = format!(
        r#"{{"pools":[{{"name":"p","protocol":"{protocol}","discovery":{{"static":{{"workers":[{}]}}}}{policy}}}]}}"#,
        workers.join(",")
    );
    let config = Config::parse(document.as_bytes()).unwrap();
    config.pools[0].clone()
}

/// What may happen to a request.
#[derive(Debug, Clone, Copy)]
pub enum Event {
    /// One of the prefill calls under way is answered.
    Prefill(usize, usize),
    /// A second prefill worker is called, as the first is late.
    Hedge,
    /// Decode answers with this status, or its answer begins.
    Decode(usize),
    /// No decode worker takes the connection.
    Refused,
    /// The decode worker resets after its headers: the stream ends.
    Reset,
    /// Decode is silent for too long.
    Silence,
    /// A worker leaves the fleet.
    Departure(u64),
    /// The client leaves.
    Leaving,
}

/// The decode leg under way.
enum Decode {
    None,
    Forwarded,
    Called(Failure, u32),
}

/// A prefill call under way.
struct PrefillCall {
    phase: PrefillPhase,
    /// The attempt and the placement that it belongs to.
    attempt: u32,
    placement: u32,
    _share: Option<Arc<Share>>,
}

/// Room of each budget, in bytes.
const ROOM: usize = 1 << 20;

/// A host around one session. It does what the filter does, and checks each effect.
pub struct Host {
    router: Router,
    session: Session,
    bodies: Bodies,
    /// The budget for bodies, and the bound on what is kept for other legs.
    budget: Budget,
    bound: Budget,
    prefills: Vec<PrefillCall>,
    /// Requests that clean-up legs under way carry.
    cleanups: Vec<CleanupRequest>,
    /// How often the request was placed again.
    placements: u32,
    /// An answer is being handled of a call that belongs to an earlier placement.
    is_late: bool,
    decode: Decode,
    now: Duration,
    /// Hand-offs that prefill has given out, by the fates that were noted or are pending.
    given_out: usize,
    fates: usize,
    /// Answers that the client got.
    answers: usize,
    forwards: usize,
    runs_whole: bool,
    is_gone: bool,
    /// Effects since the last look.
    pub effects: Vec<String>,
}

impl Host {
    pub fn start(pool: &Pool) -> Self {
        let mut router = Router::new(pool.clone(), 42, 7, Duration::ZERO);
        let input = PlanInput {
            now: Duration::from_secs(1),
            ..PlanInput::default()
        };
        let Ok(Plan::Prefill(phase, assignment)) = router.plan(Generation::Chat, CHAT, input)
        else {
            panic!("no prefill");
        };
        let budget = Budget::of(ROOM, &HeldBytes::default());
        let bound = Budget::of(ROOM, &HeldBytes::default());
        let mut bodies = Bodies::new(Arc::default());
        bodies.share = budget.take(CHAT.len()).map(Arc::new);
        bodies.replay = Some(ReplayBuffer {
            body: CHAT.to_vec(),
            bound: bound.take(CHAT.len()).unwrap(),
        });
        let mut host = Self {
            router,
            session: Session {
                stage: Stage::Prefilling,
                assignment,
                ..Session::default()
            },
            bodies,
            budget,
            bound,
            prefills: Vec::new(),
            cleanups: Vec::new(),
            placements: 0,
            is_late: false,
            decode: Decode::None,
            now: Duration::from_secs(1),
            given_out: 0,
            fates: 0,
            answers: 0,
            forwards: 0,
            runs_whole: false,
            is_gone: false,
            effects: Vec::new(),
        };
        host.carry_out(Effect::CallPrefill(Box::new(phase)));
        host
    }

    fn step<'a>(
        &mut self,
        take: impl FnOnce(&mut Session, &mut StepContext<'_>) -> Vec<Effect<'a>>,
    ) {
        let mut with = StepContext {
            router: &mut self.router,
            bodies: &mut self.bodies,
            budget: &self.bound,
            now: self.now,
        };
        let effects = take(&mut self.session, &mut with);
        for effect in effects {
            self.carry_out(effect);
        }
        self.free_answered();
    }

    fn free_answered(&mut self) {
        if self.session.is_answered() {
            self.bodies.release();
        }
    }

    fn carry_out(&mut self, effect: Effect<'_>) {
        self.effects.push(name(&effect));
        // A call for the client, too, has no place after its end.
        let is_for_client = !matches!(
            effect,
            Effect::CleanUp(..)
                | Effect::CallOff(..)
                | Effect::Abort(_)
                | Effect::AbortAtEnd(_)
                | Effect::LeaveQueue(_)
                | Effect::Note(_)
                | Effect::KeepRequest
                | Effect::CopyRequest
        );
        assert!(!is_for_client || !self.is_gone, "{effect:?} after the end");
        assert!(
            !is_for_client || !self.is_late,
            "{effect:?} by a late answer"
        );
        match effect {
            Effect::CallPrefill(phase) => self.call_prefill(*phase),
            Effect::OnStream(OnStream::Forward(dispatch)) => {
                self.assert_no_bare_decode(&dispatch);
                self.forwards += 1;
                self.session.dispatched(&dispatch, self.now);
                if !self.session.assignment.may_recover() {
                    self.bodies.replay = None;
                }
                self.bodies.forwarded();
                self.decode = Decode::Forwarded;
            }
            Effect::CallDecode(dispatch, failure) => {
                self.assert_no_bare_decode(&dispatch);
                self.session.decode_called(&dispatch);
                self.decode = Decode::Called(failure, self.session.attempt());
            }
            Effect::OnStream(OnStream::Deliver(_))
            | Effect::OnStream(OnStream::AnswerTerminal(_))
            | Effect::OnStream(OnStream::Answer(_)) => self.answered(),
            Effect::OnStream(OnStream::Refuse(_)) => self.answered(),
            Effect::OnStream(OnStream::PassHeld) => {
                self.answers += 1;
                self.decode = Decode::None;
            }
            Effect::OnStream(OnStream::ReleaseHeld) => self.begins(),
            Effect::CleanUp(..) => {
                self.fates += 1;
                self.cleanups.extend(self.bodies.cleanup.take());
            }
            Effect::CallOff(..) => self.fates += 1,
            Effect::CopyRequest => self.copy_request(),
            Effect::KeepRequest => self.keep_request(),
            Effect::Note(Note::HandedOff(_) | Note::Leaked { .. }) => self.fates += 1,
            Effect::Note(Note::RunsWhole { .. }) => self.runs_whole = true,
            Effect::Note(Note::Recovers { .. }) => self.placements += 1,
            Effect::OnStream(OnStream::BreakOff(_)) => self.answered(),
            Effect::Note(_)
            | Effect::Abort(_)
            | Effect::AbortAtEnd(_)
            | Effect::LeaveQueue(_)
            | Effect::Watch => {}
        }
    }

    fn copy_request(&mut self) {
        if self.bodies.replay.is_some() && self.bodies.cleanup.is_none() {
            let bound = self.bound.take(CHAT.len()).unwrap();
            self.bodies.leave(CHAT.to_vec(), bound);
        }
    }

    fn keep_request(&mut self) {
        self.bodies.replay = None;
        let bound = self.bound.take(CHAT.len()).unwrap();
        self.bodies.leave(CHAT.to_vec(), bound);
    }

    /// Whatever is kept of the body, or carried by a call, counts in the one budget, and once.
    fn assert_body_counts_once(&self) {
        let is_kept = self.bodies.replay.is_some() || self.bodies.cleanup.is_some();
        let is_carried = !self.prefills.is_empty() || !self.cleanups.is_empty();
        let held = self.budget.lacks(ROOM);
        assert!(held == CHAT.len() || held == 0, "{held} bytes");
        assert!(
            held != 0 || !is_kept && !is_carried,
            "a body is in no budget"
        );
        let is_needed = is_carried || !self.session.is_answered();
        assert!(is_needed || held == 0, "a body is kept that no leg needs");
    }

    fn call_prefill(&mut self, phase: PrefillPhase) {
        if !self.session.needs_prefill() {
            return;
        }
        self.session.prefill_called();
        let decode = self.session.decode_beside(&mut self.router, &phase);
        if let Some(decode) = decode {
            self.carry_out(decode);
        }
        self.prefills.push(PrefillCall {
            phase,
            attempt: self.session.attempt(),
            placement: self.placements,
            _share: self.bodies.share.clone(),
        });
    }

    fn assert_no_bare_decode(&self, dispatch: &Dispatch) {
        let edits = dispatch.edits.as_ref().expect("the body of a decode leg");
        let body = String::from_utf8(edits.apply(CHAT)).unwrap();
        let is_handed = body.contains("do_remote_prefill") || body.contains("bootstrap_room");
        assert!(
            is_handed || self.runs_whole,
            "a bare decode request: {body}"
        );
    }

    fn answered(&mut self) {
        self.answers += 1;
        self.session.stage = Stage::Answered;
        self.session.assignment.release();
        self.decode = Decode::None;
    }

    fn begins(&mut self) {
        self.bodies.answer_begins();
        self.session.answer_begins(&mut self.router);
    }

    pub fn play(&mut self, event: Event) {
        self.now += Duration::from_millis(50);
        self.router.advance(self.now);
        match event {
            Event::Prefill(call, answer) => self.answer_prefill(call, ANSWERS[answer]),
            Event::Hedge => self.hedge(),
            Event::Decode(answer) => self.answer_decode(ANSWERS[answer]),
            Event::Refused => self.leave_unanswered(REFUSED),
            Event::Reset => self.reset(),
            Event::Silence => self.fail(Session::timed_out),
            Event::Departure(id) => self.depart(id),
            Event::Leaving => self.leave(),
        }
        self.assert_body_counts_once();
    }

    fn answer_prefill(&mut self, call: usize, answer: CallEnd<'_>) {
        if self.prefills.is_empty() {
            return;
        }
        let called = self.prefills.remove(call % self.prefills.len());
        let PrefillCall {
            phase,
            attempt,
            placement,
            ..
        } = called;
        let is_sequential = phase.order() == LegOrder::Sequential;
        if let CallEnd::Whole { body: STAGED, .. } = answer
            && is_sequential
        {
            self.given_out += 1;
        }
        let call = CallAnswer {
            answer,
            headers: &json,
        };
        self.is_late = placement != self.placements;
        self.step(|session, with| session.prefill_answered(with, phase, attempt, call));
        self.is_late = false;
    }

    fn hedge(&mut self) {
        let due = self.prefills.iter();
        let mut due = due.filter(|call| self.session.awaits_one_prefill(call.attempt));
        let hedge = due
            .next()
            .and_then(|call| call.phase.hedge(&mut self.router));
        if let Some(phase) = hedge {
            self.call_prefill(phase);
        }
    }

    fn answer_decode(&mut self, answer: CallEnd<'_>) {
        match std::mem::replace(&mut self.decode, Decode::None) {
            Decode::None => {}
            Decode::Forwarded => self.answer_forwarded(answer),
            Decode::Called(failure, attempt) => {
                let call = CallAnswer {
                    answer,
                    headers: &json,
                };
                self.step(|session, with| {
                    session.replacement_answered(with, failure, attempt, call)
                });
            }
        }
    }

    fn answer_forwarded(&mut self, answer: CallEnd<'_>) {
        let is_unread = self.session.stage == Stage::Forwarded && self.session.response.is_unread();
        let status = match answer {
            CallEnd::Whole { status, .. } => status,
            CallEnd::Broken => return self.leave_unanswered(RESET),
            _ => return self.leave_unanswered(NOT_SENT),
        };
        if !is_unread {
            return;
        }
        self.session.response.hold();
        if status < 300 {
            let head = super::DOCUMENT;
            let _ = self.session.response.success(head);
            if !self.session.response.prefill_runs() {
                self.answers += 1;
                self.begins();
            }
            return;
        }
        self.fail_forwarded(status, ErrorOrigin::Worker);
    }

    fn fail_forwarded(&mut self, status: u16, origin: ErrorOrigin<'_>) {
        let mut after = None;
        self.step(|session, with| {
            after = Some(session.error_came(with, status, origin));
            Vec::new()
        });
        match after.unwrap() {
            AfterError::Recover(failure, end) => {
                self.step(|session, with| session.replace_leg(with, failure, end));
            }
            AfterError::Pass(effects) => {
                self.answers += 1;
                for effect in effects {
                    self.carry_out(effect);
                }
            }
            AfterError::Rewrite(_) => self.answered(),
        }
        self.free_answered();
    }

    /// The worker has answered with headers, and the client has read nothing of the answer.
    fn reset(&mut self) {
        if self.session.stage == Stage::Forwarded && self.session.response.is_unread() {
            self.session.response.hold();
            let _ = self.session.response.success(super::STREAM);
            self.end_stream(StreamEnd::BrokenOff);
        }
    }

    fn leave_unanswered(&mut self, details: &[u8]) {
        let is_due = self.session.stage == Stage::Forwarded && self.session.response.is_unread();
        if !is_due || self.answers > 0 {
            return;
        }
        self.decode = Decode::None;
        let last = None;
        self.fail_forwarded(503, ErrorOrigin::Proxy { details, last });
    }

    fn fail(&mut self, fail: fn(&mut Session, &mut StepContext<'_>) -> Vec<Effect<'static>>) {
        let is_due = self.session.stage == Stage::Forwarded && self.session.response.is_unread();
        if !is_due
            || self.answers > 0
            || self.session.takeover(&self.bodies) == Takeover::Impossible
        {
            return;
        }
        self.decode = Decode::None;
        self.step(fail);
    }

    fn depart(&mut self, id: u64) {
        let left: Vec<_> = self.router.fleet().workers().map(|w| w.id).collect();
        let staying = self.router.fleet().workers().filter(|w| w.id.0 != id);
        let staying: Vec<Worker> = staying.map(|worker| Worker::clone(worker)).collect();
        let version = self.router.fleet().version() + 1;
        self.router.adopt(Fleet::new(version, staying));
        let left: Vec<_> = left.into_iter().filter(|known| known.0 == id).collect();
        if self.session.awaits(&left) {
            self.fail(Session::worker_left);
        }
    }

    fn leave(&mut self) {
        self.end_stream(StreamEnd::Other);
    }

    /// As the filter does at the end of a stream.
    fn end_stream(&mut self, end: StreamEnd) {
        if self.is_gone {
            return;
        }
        self.is_gone = true;
        self.step(|session, with| session.stream_ended(with, || end == StreamEnd::BrokenOff));
        self.decode = Decode::None;
    }

    /// Ends what is under way, late answers included, and checks that nothing is left.
    pub fn end(mut self) {
        self.leave();
        while !self.prefills.is_empty() {
            self.play(Event::Prefill(0, 0));
        }
        assert!(self.answers <= 1, "{} answers", self.answers);
        assert!(self.forwards <= 1, "{} forwards", self.forwards);
        assert!(self.router.total_load().is_idle(), "a booking is left");
        let lost = usize::try_from(self.router.take_lost().handoffs).unwrap();
        let is_sequential = self.router.pool().rules().order == LegOrder::Sequential;
        assert!(
            !is_sequential || self.fates + lost == self.given_out,
            "{} fates of {} hand-offs, {lost} lost",
            self.fates,
            self.given_out
        );
        let Self {
            session,
            bodies,
            cleanups,
            ..
        } = self;
        drop((session, bodies, cleanups));
        for budget in [self.budget, self.bound] {
            assert_eq!(budget.lacks(ROOM), 0, "bytes are left in a budget");
        }
    }
}

fn json() -> Vec<Header> {
    vec![(b"content-type".to_vec(), b"application/json".to_vec())]
}

/// Name of an effect, for a table.
fn name(effect: &Effect<'_>) -> String {
    match effect {
        Effect::CallPrefill(_) => "call prefill".to_owned(),
        Effect::OnStream(OnStream::Forward(_)) => "forward".to_owned(),
        Effect::CallDecode(..) => "call decode".to_owned(),
        Effect::OnStream(OnStream::Deliver(reply)) => format!("deliver {}", reply.status),
        Effect::OnStream(OnStream::AnswerTerminal(_)) => "answer with prefill's".to_owned(),
        Effect::OnStream(OnStream::Answer(reply)) => format!("answer {}", reply.status),
        Effect::OnStream(OnStream::Refuse(refusal)) => {
            format!("refuse {} {}", refusal.status(), refusal.code())
        }
        Effect::OnStream(OnStream::ReleaseHeld) => "release held".to_owned(),
        Effect::OnStream(OnStream::PassHeld) => "pass held".to_owned(),
        Effect::OnStream(OnStream::BreakOff(reason)) => format!("break off: {reason}"),
        Effect::Watch => "reset in a round".to_owned(),
        Effect::CopyRequest => "copy request".to_owned(),
        Effect::KeepRequest => "keep request".to_owned(),
        Effect::CleanUp(..) => "clean up".to_owned(),
        Effect::CallOff(..) => "call off".to_owned(),
        Effect::Abort(_) | Effect::AbortAtEnd(_) => "abort".to_owned(),
        Effect::LeaveQueue(_) => "leave queue".to_owned(),
        Effect::Note(note) => format!("({})", name_of_note(note)),
    }
}

fn name_of_note(note: &Note) -> &'static str {
    match note {
        Note::Cached(_) => "cached",
        Note::DecodeFailed => "decode failed",
        Note::PrefillFailed(_) => "prefill failed",
        Note::PrefillReplaced { .. } => "prefill replaced",
        Note::RunsWhole { .. } => "runs whole",
        Note::Recovers { .. } => "recovers",
        Note::BrokenOff => "broken off",
        Note::Ended { .. } => "ended",
        Note::HandedOff(handed) => match handed.fate {
            Fate::Fetched => "fetched",
            Fate::Leaked => "leaked",
            Fate::Unknown => "unknown",
        },
        Note::Leaked { .. } => "leaked",
    }
}
