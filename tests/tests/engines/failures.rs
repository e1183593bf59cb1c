//! Engines that are killed under load, and come back.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use pd_router_e2e::Proxy;
use pd_router_e2e::client::{self, Failure};
use pd_router_e2e::engines::Role;
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::vllm::{Engine, Fleet, LEASE};
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::json;
use tokio::time::sleep;

use crate::answer::Answer;
use crate::compare::{ask_all, counted};
use crate::corpus::{self, Case};
use crate::errors::nothing_is_held_within;

/// Clients that ask one request after the other.
const CLIENTS: usize = 8;

/// Different requests: an engine that is alone has answered each of them before.
const CASES: usize = 60;

/// How long clients ask before the engine is killed, and after it is back.
const BESIDE: Duration = Duration::from_secs(5);

pub async fn engines_are_killed_and_come_back(fleet: &Fleet) {
    // That an engine is back is found out within 20 seconds.
    let pool = json!({"health": {"most_eject_ms": 20_000}});
    let gateway = Gateway::start(Proxy::Envoy, &fleet.config_with(pool), &[]).await;
    let cases = corpus::handed_over(CASES);
    let expected = ask_all(fleet.alone.address, &cases).await;
    for role in [Role::Prefill, Role::Decode] {
        let engine = fleet.first(role);
        let is_over = AtomicBool::new(false);
        let load = join_all((0..CLIENTS).map(|client| ask(&gateway, client, &cases, &is_over)));
        let (outcomes, ()) = tokio::join!(load, kill_and_restart(engine, &is_over));
        let outcomes: Vec<_> = outcomes.into_iter().flatten().collect();
        assert!(
            outcomes.len() > CASES,
            "too few to tell: {}",
            outcomes.len()
        );
        judge(role, &cases, &expected, outcomes);
        serves_again(&gateway, engine, &cases[0]).await;
    }
    gateway.assert_comes_to_rest().await;
    // A hand-off to a killed engine stays until its lease ends.
    nothing_is_held_within(LEASE + GENEROUS, fleet).await;
}

async fn kill_and_restart(engine: &Engine, is_over: &AtomicBool) {
    sleep(BESIDE).await;
    engine.kill();
    engine.start().await;
    sleep(BESIDE).await;
    is_over.store(true, Ordering::Relaxed);
}

type Outcome = (usize, Result<Answer, Failure>);

/// What one client got, with the places of its requests among the cases.
async fn ask(
    gateway: &Gateway,
    client: usize,
    cases: &[Case],
    is_over: &AtomicBool,
) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        let at = (client * 7 + outcomes.len()) % cases.len();
        let reply = client::try_send(gateway.listen, cases[at].ask()).await;
        outcomes.push((at, reply.map(|reply| Answer::of(&reply))));
    }
    outcomes
}

/// Each is answered as by one engine, but for streams whose decode engine had answered its headers when it was killed: those
/// break off, with an answer of the proxy's own where the client has read nothing (docs/failures.md).
fn judge(role: Role, cases: &[Case], expected: &[Answer], outcomes: Vec<Outcome>) {
    let count = outcomes.len();
    let mut broken_off = 0;
    let mut wrong = Vec::new();
    let mut tokens = 0;
    for (at, outcome) in outcomes {
        match outcome {
            Ok(answer) if answer == expected[at] => tokens += answer.tokens(),
            outcome if role == Role::Decode && breaks_off(&cases[at], &outcome) => broken_off += 1,
            other => wrong.push(format!(
                "{}: {other:?}, not {:?}",
                cases[at].name, expected[at]
            )),
        }
    }
    counted(count, tokens, wrong.len());
    println!(
        "{} killed: {count} requests, {broken_off} streams broke off",
        role.as_str()
    );
    assert!(broken_off <= CLIENTS, "{broken_off} streams broke off");
    assert!(
        wrong.is_empty(),
        "{} of {count}:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

fn breaks_off(case: &Case, outcome: &Result<Answer, Failure>) -> bool {
    let is_cut = match outcome {
        Ok(answer) => answer.status == 503 && answer.body["error"]["code"] == "broken_off",
        Err(failure) => matches!(failure, Failure::BreaksOff(_)),
    };
    case.is_streamed() && is_cut
}

/// Waits until the engine that came back is chosen.
async fn serves_again(gateway: &Gateway, engine: &Engine, case: &Case) {
    eventually("the engine that came back is used", GENEROUS, || async {
        let pair = gateway.send(case.ask()).await.expect(200).pair();
        let chosen = [&pair.prefill, &pair.decode];
        if chosen.contains(&&engine.name) {
            return Ok(());
        }
        Err(format!("{pair:?}, not {engine:?}"))
    })
    .await;
}
