//! One row of docs/failures.md under one protocol: the faulty workers, the clients' answers, and the final state.

use futures_util::future::join_all;
use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Reply, chat_body};
use pd_router_e2e::engines::{Role, in_turns, with};
use pd_router_e2e::fixture::{Fixture, FixtureSpec};
use pd_router_e2e::metrics::Metrics;
use pd_router_e2e::protocols::Protocol;
use pd_router_e2e::raw::{self, Raw};
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};

pub const CHAT: &str = "/v1/chat/completions";

/// Milliseconds until a prefill, a first token or a next token is late: short for tests that wait for it, long
/// for engines that answer at once on a busy machine.
pub const LIMIT_MS: u64 = 2000;

/// Failures in a row after which a worker is ejected.
const EJECT_AFTER: u64 = 2;

/// Requested tokens.
pub const TOKENS: u64 = 4;

/// Requests sent at once while one of two workers fails: round robin on two threads gives it at least one of them.
const REQUESTS: usize = 8;

/// Requested form of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerMode {
    /// In one piece.
    Unstreamed,
    /// As a stream.
    Streamed,
}

pub const BOTH: &[AnswerMode] = &[AnswerMode::Unstreamed, AnswerMode::Streamed];
pub const UNSTREAMED: &[AnswerMode] = &[AnswerMode::Unstreamed];
pub const STREAMED: &[AnswerMode] = &[AnswerMode::Streamed];

/// Short limits, and an early ejection.
fn pool() -> Value {
    let limits = json!({
        "prefill": {"base_timeout_ms": LIMIT_MS, "timeout_ms_per_1k_tokens": 0},
        "decode": {
            "first_token_timeout_ms": LIMIT_MS,
            "silence_timeout_ms": LIMIT_MS,
            "timeout_ms_per_token": 1,
        },
        "health": {"eject_after": EJECT_AFTER, "cold_timeout_ms": 0},
    });
    with(in_turns(), limits)
}

/// A status that an engine answers before any work, with a body of its own.
pub fn status(status: u16) -> Value {
    json!({"kind": "status", "status": status, "headers": {"retry-after": "7"}, "body": error_body(status)})
}

/// The body of that status.
fn error_body(status: u16) -> String {
    format!("{{\"error\": {{ \"message\":\"the engine says {status}\",\"code\":{status} }} }}")
}

/// A body of a chat request.
pub fn body(mode: AnswerMode, content: &str, tokens: u64) -> Value {
    let fields = json!({"max_tokens": tokens, "stream": mode == AnswerMode::Streamed});
    with(chat_body(content), fields)
}

fn ask(mode: AnswerMode) -> Ask {
    Ask::post(CHAT, body(mode, "a question", TOKENS).to_string())
}

/// A protocol's fixture and its counters at the beginning.
pub struct Row {
    pub fixture: Fixture,
    pub protocol: Protocol,
    begun: Metrics,
    before: Metrics,
    requests: [Vec<usize>; 2],
}

impl Row {
    /// Two healthy workers of each role, all of which have answered.
    pub async fn begin(proxy: Proxy, protocol: Protocol) -> Row {
        let fixture = Fixture::acquire(FixtureSpec::of(proxy, protocol).pool(pool())).await;
        let replies =
            join_all((0..REQUESTS).map(|_| fixture.gateway.send(ask(AnswerMode::Unstreamed))))
                .await;
        for reply in replies {
            reply.expect_tokens(TOKENS);
        }
        fixture.comes_to_rest().await;
        let begun = fixture.gateway.metrics().await;
        Row {
            before: begun.clone(),
            begun,
            requests: [
                fixture.requests(Role::Prefill).await,
                fixture.requests(Role::Decode).await,
            ],
            fixture,
            protocol,
        }
    }

    /// One worker of this role has the fault throughout, and all clients are answered.
    pub async fn with_one(
        proxy: Proxy,
        protocol: Protocol,
        (role, fault): (Role, &Value),
        modes: &[AnswerMode],
    ) -> Row {
        let row = Row::begin(proxy, protocol).await;
        row.fixture.inject_one(role, fault).await;
        match (protocol, role) {
            (Protocol::Sglang, Role::Prefill) => row.answers_or_breaks_off(modes).await,
            _ => row.answers(modes).await,
        }
        row.ejects_only(role).await;
        row
    }

    /// Restarts the counts.
    pub async fn mark(&mut self) {
        self.fixture.comes_to_rest().await;
        self.before = self.fixture.gateway.metrics().await;
        for (role, count) in [Role::Prefill, Role::Decode].into_iter().zip(0..) {
            self.requests[count] = self.fixture.requests(role).await;
        }
    }

    /// All workers of this role have the fault from now on.
    pub async fn with_all(proxy: Proxy, protocol: Protocol, role: Role, fault: &Value) -> Row {
        let row = Row::begin(proxy, protocol).await;
        row.fixture.inject_all(role, fault).await;
        row
    }

    /// Sends many requests at once, all of which must be answered.
    pub async fn answers(&self, modes: &[AnswerMode]) {
        let many: Vec<AnswerMode> = modes.iter().copied().cycle().take(REQUESTS).collect();
        for reply in self.replies(&many).await {
            reply.expect_tokens(TOKENS);
        }
    }

    /// The same where decode may break off with its prefill and report first: the client then gets `broken_off`.
    pub async fn answers_or_breaks_off(&self, modes: &[AnswerMode]) {
        let many: Vec<AnswerMode> = modes.iter().copied().cycle().take(REQUESTS).collect();
        let mut answered = 0;
        for reply in self.replies(&many).await {
            match reply.status {
                200 => answered += usize::from(reply.expect_tokens(TOKENS).status == 200),
                _ => drop(reply.expect_code(503, "broken_off")),
            }
        }
        assert!(answered > 0, "no request was answered");
    }

    /// Sends one request; fails without an answer.
    pub async fn send(&self, mode: AnswerMode) -> Reply {
        self.fixture.gateway.send(ask(mode)).await
    }

    /// Sends one request of each mode at the same time; fails if one gets no answer.
    pub async fn replies(&self, modes: &[AnswerMode]) -> Vec<Reply> {
        let sent = modes
            .iter()
            .map(|mode| self.fixture.gateway.send(ask(*mode)));
        join_all(sent).await
    }

    /// Sends one request of each mode; the answers must be the engines' own error of [`status`].
    pub async fn replies_are_the_engines(&self, status: u16, modes: &[AnswerMode]) {
        for reply in self.replies(modes).await {
            assert_engine_error(reply, status);
        }
    }

    /// A client that has sent its request.
    pub async fn client(&self, body: &Value) -> Raw {
        let mut client = Raw::connect(self.fixture.gateway.listen).await;
        let request = raw::post(CHAT, &[], body.to_string().as_bytes());
        client.write(&request).await;
        client
    }

    /// Waits until engines of this role have received a request since the mark.
    pub async fn until_requested(&self, role: Role) {
        eventually("an engine is asked", GENEROUS, || async {
            let got = self.got(role).await;
            if got.iter().sum::<usize>() > 0 {
                return Ok(());
            }
            Err(format!("{got:?}"))
        })
        .await;
    }

    /// Requests of each engine of this role since the mark.
    pub async fn got(&self, role: Role) -> Vec<usize> {
        let before = match role {
            Role::Prefill => &self.requests[0],
            Role::Decode | Role::Aggregated => &self.requests[1],
        };
        let mut more = Vec::new();
        for (slot, before) in self.fixture.slots(role).iter().zip(before) {
            let all = match slot.is_running() {
                true => slot.engine().requests().await.len(),
                false => *before,
            };
            more.push(all - before);
        }
        more
    }

    /// Requests of all engines of this role since the mark.
    pub async fn got_in_all(&self, role: Role) -> usize {
        self.got(role).await.iter().sum()
    }

    /// Growth of this counter since the mark, over all labels.
    pub async fn counted(&self, name: &str) -> f64 {
        let now = self.fixture.gateway.metrics().await;
        self.since_the_mark(&now, name, &[])
    }

    fn since_the_mark(&self, now: &Metrics, name: &str, labels: &[(&str, &str)]) -> f64 {
        let value = |metrics: &Metrics| metrics.sum_where(name, labels).unwrap_or_default();
        value(now) - value(&self.before)
    }

    /// Retries since the mark: prefills, decodes by the list, and recoveries.
    pub async fn tried_again(&self) -> [f64; 3] {
        [
            self.counted("pd_router_prefill_retries_total").await,
            self.counted("pd_router_decode_retries_total").await,
            self.counted("pd_router_recoveries_total").await,
        ]
    }

    /// Ejections since the mark: of prefill workers, of all others.
    pub async fn ejections(&self) -> [f64; 2] {
        let name = "pd_router_ejections_total";
        // One page for both: a worker may be ejected between two.
        let now = self.fixture.gateway.metrics().await;
        let prefill = self.since_the_mark(&now, name, &[("role", "prefill")]);
        [prefill, self.since_the_mark(&now, name, &[]) - prefill]
    }

    /// Fails if any worker was ejected.
    pub async fn ejects_no_worker(&self) {
        let ejected = self.ejections().await;
        assert_eq!(ejected, [0.0, 0.0], "ejected: prefill, decode");
    }

    /// Fails if any worker of the other role was ejected.
    pub async fn ejects_only(&self, role: Role) {
        let ejected = self.ejections().await;
        let other = match role {
            Role::Prefill => ejected[1],
            Role::Decode | Role::Aggregated => ejected[0],
        };
        assert_eq!(other, 0.0, "ejected: prefill, decode: {ejected:?}");
    }

    /// At the end nothing is booked, nothing runs, no hand-off was refused, no prompt was computed twice, and hand-offs that
    /// were never pulled are counted.
    pub async fn ends(self) {
        self.rests(|known, unknown, left| known <= left && known + unknown == left)
            .await;
    }

    /// The same where a decode was reset before its first byte: its hand-off may or may not have been used.
    pub async fn ends_with_resets(self) {
        self.rests(|known, unknown, left| known <= left && left <= known + unknown)
            .await;
    }

    /// The same where all workers that could give a hand-off are dead.
    pub async fn ends_with_refusals(self) {
        self.fixture.comes_to_rest().await;
        let state = self.fixture.state().await;
        assert_eq!(state.recomputed, 0, "{state:?}");
        self.fixture.release();
    }

    /// Hand-offs that the gateway knows to be left, and those in doubt.
    async fn leaked(&self) -> [u64; 2] {
        let now = self.fixture.gateway.metrics().await;
        let names = [
            "pd_router_kv_leaked_handoffs_total",
            "pd_router_kv_unknown_handoffs_total",
        ];
        names.map(|name| {
            let counted = |metrics: &Metrics| metrics.sum(name).unwrap_or_default();
            (counted(&now) - counted(&self.begun)) as u64
        })
    }

    async fn rests(self, is_right: impl Fn(u64, u64, u64) -> bool) {
        self.fixture.comes_to_rest().await;
        self.fixture.assert_good_hand_offs().await;
        if self.protocol.is_sequential() {
            eventually(
                "hand-offs that were never pulled are counted",
                GENEROUS,
                || async {
                    let state = self.fixture.state().await;
                    let [known, unknown] = self.leaked().await;
                    // A killed engine takes its counts along.
                    let left = state.issued.saturating_sub(state.pulled);
                    if is_right(known, unknown, left) {
                        return Ok(());
                    }
                    Err(format!(
                        "the gateway knows of {known} and doubts {unknown} of {left}: {state:?}"
                    ))
                },
            )
            .await;
        }
        self.fixture.release();
    }
}

/// Fails unless this is an engine's own error of [`status`].
pub fn assert_engine_error(reply: Reply, status: u16) {
    let reply = reply.expect(status);
    assert_eq!(reply.text(), error_body(status));
    assert_eq!(reply.header("retry-after"), Some("7"), "{reply:?}");
    let content = reply.header("content-type").unwrap_or_default();
    assert!(content.starts_with("application/json"), "{reply:?}");
}

/// Fails if these bytes, all that came of a stream, end like a complete one.
pub fn assert_torn_text(text: &str) {
    assert!(!text.contains("[DONE]"), "{text}");
    assert!(!text.ends_with("0\r\n\r\n"), "it ends as if whole: {text}");
}
