//! Death of a serving VM under load: its own streams are lost, and nothing else.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, chat_body};
use pd_router_e2e::conversation::CHAT;
use pd_router_e2e::engines::{Fleet, Role, named, static_config, with};
use pd_router_e2e::gateway::{Gateway, GatewayParts};
use pd_router_e2e::paths;
use pd_router_e2e::process::unique_name;
use pd_router_e2e::threads::{PendingReply, Thread, connections_by_thread, endless};
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::json;

use crate::clients::Clients;
use crate::leader::{TRAP, serves_again, until_vms_are};
use crate::rig::{SUBSET, THREADS, UNHURRIED, VMS};

/// The thread whose VM dies.
const VICTIM: usize = 0;

/// In place of the shipped idle timeout.
const IDLE: Duration = Duration::from_secs(5);

/// Maximum of the shipped idle timeout, after which a stream of a dead VM ends.
const SHIPPED_IDLE_AT_MOST: Duration = Duration::from_secs(300);

/// Allowance for a busy machine.
const SLACK: Duration = Duration::from_secs(10);

/// Tokens of a stream on another thread, 100 ms apart: the stream outlasts the test.
const TOKENS: u64 = 150;

/// Blocks in use at which a decode worker counts as busy.
const BUSY_BLOCKS: u64 = 200;

/// Prefill workers: the last one hangs. Decode workers: a long prompt keeps the last one busy.
const HANGS: usize = 2;
const IS_BUSY: usize = 2;

/// The shipped bootstrap with a short idle timeout.
fn impatient_bootstrap() -> PathBuf {
    let shipped = std::fs::read_to_string(paths::bootstrap());
    let shipped = shipped.unwrap_or_else(|error| panic!("no bootstrap: {error}"));
    let name = "stream_idle_timeout: ";
    let Some((before, rest)) = shipped.split_once(name) else {
        panic!("the shipped bootstrap lets streams idle for ever");
    };
    let Some((seconds, after)) = rest.split_once('s') else {
        panic!("not a time: {rest}");
    };
    let seconds: u64 = seconds.parse().unwrap_or(u64::MAX);
    assert!(
        Duration::from_secs(seconds) <= SHIPPED_IDLE_AT_MOST,
        "{seconds} s"
    );
    let file = paths::scratch().join(format!("{}.yaml", unique_name("bootstrap")));
    let text = format!("{before}{name}{}s{after}", IDLE.as_secs());
    std::fs::write(&file, text).unwrap_or_else(|error| panic!("no bootstrap: {error}"));
    file
}

struct Rig {
    fleet: Fleet,
    gateway: Gateway,
    threads: Vec<Thread>,
}

impl Rig {
    async fn open(proxy: Proxy) -> Rig {
        let fleet = Fleet::start(3, 3, UNHURRIED).await;
        let workers = [
            named(&fleet.prefill, "p", 11),
            named(&fleet.decode, "d", 21),
        ];
        let pool = json!({
            "trust_clients": true,
            "admission": {"decode": {"blocks": BUSY_BLOCKS}, "queue": {"deadline_ms": 120_000}},
        });
        let build = GatewayParts {
            threads: THREADS,
            plugin: paths::trap_plugin(),
            bootstrap: impatient_bootstrap(),
        };
        let config = static_config(workers.concat(), pool);
        let gateway = Gateway::build(proxy, &build, &config, &[]).await;
        let threads = connections_by_thread(&gateway, THREADS.into()).await;
        fleet.prefill[HANGS].fault(&json!({"kind": "hang"})).await;
        Rig {
            fleet,
            gateway,
            threads,
        }
    }

    /// The subset of these workers of each role.
    fn subset(&self, prefill: &[usize], decode: &[usize]) -> String {
        let pick = |all: Vec<String>, at: &[usize]| -> Vec<String> {
            at.iter().map(|&at| all[at].clone()).collect()
        };
        let prefill = pick(self.fleet.prefill_addresses(), prefill);
        let decode = pick(self.fleet.decode_addresses(), decode);
        [prefill, decode].concat().join(",")
    }

    /// Workers that neither hang nor are busy.
    fn sound(&self) -> String {
        self.subset(&[0, 1], &[0, 1])
    }

    /// On the thread whose VM will die: a running stream, one that waits in the queue, two that wait for their prefill.
    async fn occupy_the_victim(&self) -> (Vec<PendingReply>, Vec<PendingReply>) {
        let victim = &self.threads[VICTIM];
        let busy = self.subset(&[0, 1], &[IS_BUSY]);
        let hanging = self.subset(&[HANGS], &[0, 1]);
        let long_prompt = "tell ".repeat(3200);
        let stream = |content: &str, subset: &str| {
            let ask = Ask::post(CHAT, endless(content).to_string());
            victim.ask(ask.header(SUBSET, subset))
        };
        let flowing = vec![stream(&long_prompt, &busy)];
        self.until_running(Role::Decode, IS_BUSY).await;
        let mut paused = vec![stream("wait for it", &busy)];
        self.until_gauge("pd_router_queue_requests", 1.0).await;
        paused.push(stream("hang", &hanging));
        let whole = Ask::chat("hang too").header(SUBSET, &hanging);
        paused.push(victim.ask(whole));
        eventually("prefills hang", GENEROUS, || async {
            let state = self.fleet.prefill[HANGS].state().await;
            // Requests that identified the threads may be among the answered ones.
            match state.requests >= state.answered + 2 {
                true => Ok(()),
                false => Err(format!("{state:?}")),
            }
        })
        .await;
        (flowing, paused)
    }

    async fn until_running(&self, role: Role, at: usize) {
        let engine = match role {
            Role::Prefill => &self.fleet.prefill[at],
            Role::Decode | Role::Aggregated => &self.fleet.decode[at],
        };
        eventually("the engine runs something", GENEROUS, || async {
            let state = engine.state().await;
            match state.running > 0 {
                true => Ok(()),
                false => Err(format!("{state:?}")),
            }
        })
        .await;
    }

    async fn until_gauge(&self, name: &str, wanted: f64) {
        eventually(name, GENEROUS, || async {
            let value = self.gateway.metrics().await.expect(name);
            match value == wanted {
                true => Ok(()),
                false => Err(value.to_string()),
            }
        })
        .await;
    }

    /// A stream on each thread except the victim, which ends by itself, much later.
    fn long_answers(&self) -> Vec<PendingReply> {
        let body = with(
            chat_body("a long story"),
            json!({"stream": true, "max_tokens": TOKENS}),
        );
        let others = self.threads.iter().skip(VICTIM + 1);
        others
            .map(|thread| {
                let ask = Ask::post(CHAT, body.to_string());
                thread.ask(ask.header(SUBSET, &self.sound()))
            })
            .collect()
    }
}

/// Fails unless each of these ends soon after its idle timeout.
async fn assert_end_in_time(since: Instant, pending: Vec<PendingReply>) {
    let limit = IDLE + SLACK;
    for outcome in join_all(pending).await {
        // The proxy decides how they end, but never as a complete answer.
        let outcome = outcome.unwrap_or_else(|error| panic!("{error}"));
        if let Ok(reply) = outcome {
            assert!(!reply.text().contains("[DONE]"), "{reply:?}");
        }
    }
    let took = since.elapsed();
    assert!(took < limit, "paused for {took:?}");
}

pub async fn when_a_serving_vm_dies_the_others_never_notice(proxy: Proxy) {
    let rig = Rig::open(proxy).await;
    let sound = rig.sound();
    let mut clients: Vec<Clients> = rig
        .threads
        .iter()
        .map(|thread| Clients::start(thread, 2, |ask| ask.header(SUBSET, &sound)))
        .collect();
    for clients in &clients {
        clients.until_answered(2).await;
    }
    let long_answers = rig.long_answers();
    let (flowing, paused) = rig.occupy_the_victim().await;

    let trap = Ask::chat("the end").header(SUBSET, &sound);
    let killed = Instant::now();
    // The VM dies before it can answer this request.
    let last = rig.threads[VICTIM].try_send(trap.header(TRAP, "here"));
    if let Ok(reply) = last.await {
        assert_ne!(reply.status, 200, "{reply:?}");
    }
    let of_victim = clients.remove(VICTIM);
    of_victim.until_something_else().await;
    assert_end_in_time(killed, flowing.into_iter().chain(paused).collect()).await;
    // The dead VM's bookings on the hanging prefill worker no longer count: without a subset it would be selected first.
    let hello = Ask::chat("hello").header(SUBSET, &sound);
    serves_again(&rig.threads[VICTIM], &hello).await;
    of_victim.until_answered(4).await;

    for clients in clients {
        clients.until_answered(4).await;
        clients.stop_untouched().await;
    }
    for answer in long_answers {
        let answer = answer.await.unwrap_or_else(|error| panic!("{error}"));
        let answer = answer.unwrap_or_else(|failure| panic!("{failure}"));
        answer.expect_tokens(TOKENS);
    }
    // Beside 200 and 503, only requests in flight at the VM's death have other outcomes.
    let seen = of_victim.stop().await;
    let others: u64 = seen
        .iter()
        .filter(|(outcome, _)| !["200", "503"].contains(&outcome.as_str()))
        .map(|(_, count)| count)
        .sum();
    assert!(others <= 2, "{seen:?}");

    rig.fleet.prefill[HANGS].clear_faults().await;
    rig.gateway.assert_comes_to_rest().await;
    rig.until_gauge("pd_router_queue_requests", 0.0).await;
    until_vms_are(&rig.gateway, VMS).await;
    // The dead VM's bookings burden no worker: the busy one takes requests again, on every thread.
    let freed = rig.subset(&[0, 1], &[IS_BUSY]);
    for thread in &rig.threads {
        let ask = Ask::chat("hello").header(SUBSET, &freed);
        thread.send(ask).await.expect(200);
    }
}
