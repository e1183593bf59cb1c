//! Policies by their names, and policies by which gateways agree without communication.

use std::collections::BTreeSet;

use futures_util::future::join_all;
use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Pair, chat_body};
use pd_router_e2e::engines::{Engine, FAST, Role, static_config, with};
use pd_router_e2e::gateway::{Booked, Gateway};
use pd_router_e2e::threads::{PendingReply, Thread, connections_by_marked_thread, endless};
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};

use crate::rig::CHAT;

/// Policies in pairs: one host uses the first for prefill, the other host the second.
const PAIRS: [[&str; 2]; 3] = [
    ["kv", "round_robin"],
    ["random", "power_of_two"],
    ["least_loaded", "direct"],
];

/// Policies without memory, so that gateways agree.
const AGREEING: [&str; 2] = ["prefix_hash", "session"];

/// Small fleets, each with a model of its own, and the number of workers of each role.
const FLEETS: [(&str, [(Role, usize); 2]); 3] = [
    ("one", [(Role::Prefill, 1), (Role::Decode, 1)]),
    ("two", [(Role::Prefill, 2), (Role::Decode, 2)]),
    ("whole", [(Role::Aggregated, 1), (Role::Prefill, 0)]),
];

/// Engines that compute prompts at once and generate slowly: an endless stream stays small.
const UNHURRIED: &[&str] = &["--prefill-rate", "1000000", "--token-ms", "20"];

/// An engine, the model it serves and its id.
type Placed = (Engine, &'static str, u64);

async fn small_fleets(options: &[&str]) -> Vec<Placed> {
    let wanted = FLEETS.iter().flat_map(|(model, counts)| {
        let roles = counts.iter().flat_map(|(role, count)| vec![*role; *count]);
        roles.map(move |role| (*model, role))
    });
    let started = wanted.enumerate().map(|(at, (model, role))| async move {
        let options = [options, &["--model", model]].concat();
        (Engine::start(role, &options).await, model, at as u64 + 1)
    });
    join_all(started).await
}

fn listed((engine, model, id): &Placed) -> Value {
    with(engine.listed(), json!({"model": model, "id": id}))
}

/// A chat request for a model; it names workers, for the policy that requires it.
fn chat(model: &str, engines: &[Placed], stream: bool) -> Ask {
    let fields = json!({"model": model, "stream": stream});
    let body = with(chat_body(&"What is new? ".repeat(20)), fields);
    let mut ask = Ask::post(CHAT, body.to_string()).header("x-session-id", "a session");
    let one_of = |decodes: bool| {
        let fits =
            |placed: &&Placed| placed.1 == model && (placed.0.role != Role::Prefill) == decodes;
        engines.iter().find(fits).map(|placed| placed.2.to_string())
    };
    for (header, id) in [
        ("x-prefill-instance-id", one_of(false)),
        ("x-worker-instance-id", one_of(true)),
    ] {
        if let Some(id) = id {
            ask = ask.header(header, &id);
        }
    }
    ask
}

async fn start(proxy: Proxy, engines: &[Placed], [one, other]: [&str; 2]) -> Gateway {
    let (prefill, decode) = match proxy {
        Proxy::Wasmtime => (one, other),
        Proxy::Envoy => (other, one),
    };
    // Only trusted callers may name workers; for other policies such names would hide their choices.
    let trusts = [one, other].contains(&"direct");
    let pool = json!({
        "trust_clients": trusts,
        "selection": {"prefill": prefill, "decode": decode},
    });
    let config = static_config(engines.iter().map(listed).collect(), pool);
    Gateway::start(proxy, &config, &[]).await
}

async fn serves_all(gateway: &Gateway, engines: &[Placed], policies: [&str; 2]) {
    for (model, _) in FLEETS {
        for stream in [false, true] {
            let reply = gateway.send(chat(model, engines, stream)).await;
            assert_eq!(reply.status, 200, "{policies:?} {model}: {}", reply.text());
        }
    }
    gateway.assert_comes_to_rest().await;
}

async fn assert_none_refused(engines: &[Placed]) {
    for (engine, model, _) in engines {
        let state = engine.state().await;
        assert_eq!(state.refused(), 0, "{model}: {state:?}");
    }
}

pub async fn every_policy_serves_every_small_fleet(proxy: Proxy) {
    let engines = small_fleets(FAST).await;
    for policies in PAIRS {
        let gateway = start(proxy, &engines, policies).await;
        serves_all(&gateway, &engines, policies).await;
    }
    assert_none_refused(&engines).await;
}

pub async fn a_policy_of_no_name_is_refused_with_the_names_there_are(proxy: Proxy) {
    let pool = json!({"selection": {"prefill": "cache_aware"}});
    let started = Gateway::try_start(proxy, &static_config(Vec::new(), pool), &[]).await;
    let Err(failure) = started else {
        panic!("started with a policy that does not exist");
    };
    assert!(failure.status.is_some_and(|status| !status.success()));
    let names = PAIRS.concat().into_iter().chain(AGREEING);
    for name in names.chain(["cache_aware"]) {
        let quoted = format!("`{name}`");
        assert!(failure.log.contains(&quoted), "{name}:\n{}", failure.log);
    }
}

/// The threads of a gateway, and endless streams of another model than the requests'.
struct Threads {
    threads: Vec<Thread>,
    streams: Vec<PendingReply>,
}

impl Threads {
    async fn find(gateway: &Gateway) -> Threads {
        Threads {
            threads: connections_by_marked_thread(gateway, 2, marker()).await,
            streams: Vec::new(),
        }
    }

    /// The pair of a request on this thread. The policy bounds a worker's requests, and a request counts until its thread has
    /// reported its end: with it, all threads learn of a later stream on that thread.
    async fn pair(&mut self, at: usize, ask: Ask) -> Pair {
        let thread = &self.threads[at % self.threads.len()];
        let pair = thread.send(ask).await.expect(200).pair();
        self.streams.push(thread.ask(marker()));
        self.until_all_count_streams_alone().await;
        pair
    }

    async fn end_streams(&mut self) {
        for stream in self.streams.drain(..) {
            stream.abort();
        }
        self.until_all_count_streams_alone().await;
    }

    async fn until_all_count_streams_alone(&self) {
        let wanted = Booked {
            prefills: 0,
            decodes: self.streams.len() as u64,
        };
        for thread in &self.threads {
            eventually("a thread knows what is booked", GENEROUS, || async {
                let pool = thread.status().await["pools"][0].take();
                match Booked::anywhere(&pool) == wanted {
                    true => Ok(()),
                    false => Err(pool.to_string()),
                }
            })
            .await;
        }
    }
}

/// An endless stream of a model with one worker of each role.
fn marker() -> Ask {
    let body = with(endless("which thread is this?"), json!({"model": "one"}));
    Ask::post(CHAT, body.to_string())
}

pub async fn gateways_that_never_talk_agree_on_beginnings_and_sessions(proxy: Proxy) {
    let engines = small_fleets(UNHURRIED).await;
    let gateways = [
        start(proxy, &engines, AGREEING).await,
        start(proxy, &engines, AGREEING).await,
    ];
    let mut threads = [
        Threads::find(&gateways[0]).await,
        Threads::find(&gateways[1]).await,
    ];
    let mut pairs = Vec::new();
    for number in 0..8 {
        let content = format!("Prompt number {number}. ").repeat(20);
        let body = with(chat_body(&content), json!({"model": "two"})).to_string();
        let session = format!("session {number}");
        let mut seen: BTreeSet<Pair> = BTreeSet::new();
        for turn in 0..4 {
            for threads in &mut threads {
                let ask = Ask::post(CHAT, body.clone()).header("x-session-id", &session);
                seen.insert(threads.pair(turn, ask).await);
            }
        }
        for threads in &mut threads {
            threads.end_streams().await;
        }
        assert_eq!(seen.len(), 1, "prompt {number}: {seen:?}");
        pairs.extend(seen);
    }
    let prefills: BTreeSet<&str> = pairs.iter().map(|pair| pair.prefill.as_str()).collect();
    let decodes: BTreeSet<&str> = pairs.iter().map(|pair| pair.decode.as_str()).collect();
    assert!(prefills.len() > 1 && decodes.len() > 1, "{pairs:?}");
    serves_all(&gateways[0], &engines, AGREEING).await;
    assert_none_refused(&engines).await;
}
