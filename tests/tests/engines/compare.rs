//! The gateway's answers beside those of one engine that does all alone, token for token.

use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};

use futures_util::{StreamExt, stream};
use pd_router_e2e::Proxy;
use pd_router_e2e::client::{self, Reply};
use pd_router_e2e::engines::{Role, in_turns, static_config, with};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::vllm::{Engine, Figures, Fleet, patient};

use crate::answer::Answer;
use crate::corpus::{self, Case};

/// Requests under way at the same time.
const AT_ONCE: usize = 8;

/// How often a real engine is asked, where its answer differs from the one compared: what it does not say each time is no
/// difference.
pub const TIMES: usize = 3;

/// What was compared, over all tests.
static REPORT: Mutex<Report> = Mutex::new(Report {
    prompts: 0,
    tokens: 0,
    uncertain: 0,
    transferred: 0.0,
    computed: 0.0,
    hand_offs: 0.0,
    failures: 0,
});

#[derive(Clone, Copy)]
struct Report {
    prompts: usize,
    tokens: u64,
    uncertain: usize,
    transferred: f64,
    computed: f64,
    hand_offs: f64,
    failures: usize,
}

/// The numbers, in one line.
pub fn report() -> String {
    let report = *REPORT.lock().unwrap_or_else(PoisonError::into_inner);
    let prompt_tokens = report.transferred + report.computed;
    let share = 100.0 * report.computed / prompt_tokens.max(1.0);
    format!(
        "{} prompts and {} tokens compared, {} of them set aside, as one engine differs there from itself; of {} prompt tokens \
         with a hand-off decode computed {share:.1} %; {} hand-offs; {} failures",
        report.prompts,
        report.tokens,
        report.uncertain,
        prompt_tokens,
        report.hand_offs,
        report.failures
    )
}

fn note(change: impl FnOnce(&mut Report)) {
    change(&mut REPORT.lock().unwrap_or_else(PoisonError::into_inner));
}

pub async fn each_kind_of_request_is_answered_as_by_one_engine(fleet: &Fleet) {
    let gateway = Gateway::start(Proxy::Envoy, &fleet.config(), &[]).await;
    are_equal(&gateway, &fleet.alone, &corpus::one_of_each()).await;
    gateway.assert_comes_to_rest().await;
}

pub async fn what_no_hand_off_serves_runs_whole(fleet: &Fleet) {
    let workers = fleet.engines.iter().chain([&fleet.alone]);
    let pool = with(in_turns(), patient());
    let config = static_config(workers.map(Engine::listed).collect(), pool);
    let gateway = Gateway::start(Proxy::Envoy, &config, &[]).await;
    are_equal(&gateway, &fleet.alone, &corpus::whole()).await;
    gateway.assert_comes_to_rest().await;
}

pub async fn five_hundred_mixed_requests_are_answered_as_by_one_engine(fleet: &Fleet) {
    let gateway = Gateway::start(Proxy::Envoy, &fleet.config(), &[]).await;
    are_equal(&gateway, &fleet.alone, &corpus::mixed(500)).await;
    gateway.assert_comes_to_rest().await;
}

pub async fn decode_engines_compute_no_prompt(fleet: &Fleet) {
    let gateway = Gateway::start(Proxy::Envoy, &fleet.config(), &[]).await;
    let before = fleet.figures(Role::Decode).await;
    let cases = corpus::handed_over(40);
    are_equal(&gateway, &fleet.alone, &cases).await;
    let after = fleet.figures(Role::Decode).await;
    let hand_offs = gateway
        .metrics()
        .await
        .expect("pd_router_prefill_calls_total");
    count(&before, &after, hand_offs);
    assert!(after.transferred > before.transferred, "{after:?}");
    assert_eq!(after.computed, before.computed, "{before:?}, {after:?}");
    assert_eq!(after.failed_transfers, before.failed_transfers);
}

fn count(before: &Figures, after: &Figures, hand_offs: f64) {
    note(|report| {
        report.transferred += after.transferred - before.transferred;
        report.computed += after.computed - before.computed;
        report.hand_offs += hand_offs;
    });
}

/// Fails where the gateway answers any of the cases otherwise than the engine does, each time that it is asked.
pub async fn are_equal(gateway: &Gateway, alone: &Engine, cases: &[Case]) {
    let through = ask_all(gateway.listen, cases).await;
    let expected = ask_all(alone.address, cases).await;
    let mut differing: Vec<usize> = (0..cases.len())
        .filter(|at| through[*at] != expected[*at])
        .collect();
    let suspected = differing.len();
    for _ in 1..TIMES {
        if differing.is_empty() {
            break;
        }
        let again = ask_all(alone.address, cases).await;
        differing.retain(|at| again[*at] == expected[*at]);
    }
    note(|report| {
        report.prompts += cases.len();
        report.tokens += through.iter().map(Answer::tokens).sum::<u64>();
        report.uncertain += suspected - differing.len();
        report.failures += differing.len();
    });
    let shown: Vec<String> = differing
        .iter()
        .map(|at| difference(&cases[*at], &through[*at], &expected[*at]))
        .collect();
    assert!(
        shown.is_empty(),
        "{} differ:\n{}",
        shown.len(),
        shown.join("\n")
    );
}

fn difference(case: &Case, through: &Answer, expected: &Answer) -> String {
    let Case { name, path, body } = case;
    format!(
        "{name}: {path} {body}\n  the gateway: {} {}\n  one engine:  {} {}",
        through.status, through.body, expected.status, expected.body
    )
}

/// Notes what was compared elsewhere.
pub fn counted(prompts: usize, tokens: u64, failures: usize) {
    note(|report| {
        report.prompts += prompts;
        report.tokens += tokens;
        report.failures += failures;
    });
}

/// The answers to all cases, in their order.
pub async fn ask_all(to: SocketAddr, cases: &[Case]) -> Vec<Answer> {
    let asked = cases.iter().map(|case| async move {
        let reply = client::try_send(to, case.ask()).await;
        reply.map_or_else(
            |failure| Answer::none(&failure),
            |reply: Reply| Answer::of(&reply),
        )
    });
    stream::iter(asked).buffered(AT_ONCE).collect().await
}
