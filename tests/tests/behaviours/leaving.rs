//! Clients that leave before they are answered: every charge is released, and hand-offs left behind are counted.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use pd_router_e2e::Proxy;
use pd_router_e2e::client::chat_body;
use pd_router_e2e::engines::{Fleet, MODEL, Role};
use pd_router_e2e::fixture::{Fixture, FixtureSpec};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::raw::{self, Raw};
use pd_router_e2e::wait::{GENEROUS, count, eventually};
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::sleep;

const CHAT: &str = "/v1/chat/completions";

/// Blocks for every hand-off that is never pulled, and a lease that outlasts the test.
const ROOMY: [&str; 4] = ["--kv-blocks", "1000000", "--lease-ms", "3600000"];

/// Concurrent clients.
const AT_ONCE: usize = 10;

/// 400 tokens of prompt, at one token for four bytes.
const PROMPT_BYTES: usize = 1600;

/// With the rate below, a prefill of that prompt takes 400 ms.
const SLOW_PREFILL: [&str; 2] = ["--prefill-rate", "1000"];

pub async fn clients_that_leave_in_the_middle_of_prefill_leave_no_charge_behind(proxy: Proxy) {
    // Without clean-up, hand-offs left behind stay, and are counted.
    let spec = FixtureSpec::nixl(proxy, (2, 1)).pool(json!({"cleanup": {"held_bytes": 0}}));
    let options = [ROOMY.as_slice(), &SLOW_PREFILL].concat();
    let mut fixture = Fixture::acquire(spec.only_options(&options)).await;
    let before = counted_leaks(&fixture.gateway).await;
    let body = chat_body(&"tell ".repeat(PROMPT_BYTES / 5)).to_string();
    let request = raw::post(CHAT, &[], body.as_bytes());
    let clients = count(50, 1000);
    for first in (0..clients).step_by(AT_ONCE) {
        let numbers = first..clients.min(first + AT_ONCE);
        join_all(numbers.map(|number| leave_during_prefill(&fixture.gateway, &request, number)))
            .await;
        // The queue stays shorter than a call's deadline: time-outs are another test's subject.
        prefills_are_down_to(&fixture, AT_ONCE as u64, 0).await;
    }

    // Calls outlive their clients; the accounting ends with the last prefill.
    prefills_are_down_to(&fixture, 0, clients as u64).await;
    fixture.gateway.assert_comes_to_rest().await;
    fixture.gateway.assert_serves().await;
    fixture.gateway.assert_comes_to_rest().await;
    let left = assert_leaks_are_counted(&fixture, &before).await;
    assert!(left > 0, "no client left in the middle of prefill");
    fixture.assert_good_hand_offs().await;
    fixture.release();
}

/// Waits until no more than `open` prefills are waiting or running, of at least `begun`.
async fn prefills_are_down_to(fixture: &Fixture, open: u64, begun: u64) {
    eventually(
        "the prefills of clients that left end",
        GENEROUS,
        || async {
            let state = fixture.total(Role::Prefill).await;
            // An engine counts as running only the prompt that it computes; the other requests are queued.
            let unfinished = state.requests - state.handoffs_issued;
            if state.requests >= begun && unfinished <= open {
                return Ok(());
            }
            Err(format!("{state:?}"))
        },
    )
    .await;
}

/// Sends the whole request and leaves at a moment within the prefill that depends on `number`.
async fn leave_during_prefill(gateway: &Gateway, request: &[u8], number: usize) {
    let mut client = Raw::connect(gateway.listen).await;
    client.write(request).await;
    let moment = 30 + (number * 37) % 170;
    sleep(Duration::from_millis(moment as u64)).await;
}

/// Hand-offs and their blocks that the gateway counts as never pulled, or perhaps not.
async fn counted_leaks(gateway: &Gateway) -> [f64; 2] {
    let metrics = gateway.metrics().await;
    ["handoffs", "blocks"].map(|what| {
        let of = |fate| metrics.expect(&format!("pd_router_kv_{fate}_{what}_total"));
        of("leaked") + of("unknown")
    })
}

/// The blocks that were never pulled; fails unless the gateway counts as many more than before.
async fn assert_leaks_are_counted(fixture: &Fixture, before: &[f64; 2]) -> u64 {
    eventually(
        "the gateway counts hand-offs that were never pulled",
        GENEROUS,
        || async {
            let state = fixture.total(Role::Prefill).await;
            let counted = counted_leaks(&fixture.gateway).await;
            let (hand_offs, blocks) = (counted[0] - before[0], counted[1] - before[1]);
            let unused = state.handoffs_issued - state.handoffs_consumed;
            if blocks == state.blocks_unpulled as f64 && hand_offs == unused as f64 {
                return Ok(state.blocks_unpulled);
            }
            Err(format!(
                "the gateway counts {blocks} blocks of {hand_offs} hand-offs; {state:?}"
            ))
        },
    )
    .await
}

pub async fn clients_that_leave_in_the_middle_of_a_stream_leave_no_charge_behind(proxy: Proxy) {
    // A decode of a quarter of an hour: only the gateway's abort ends it in time.
    let options = [ROOMY.as_slice(), &["--token-ms", "100"]].concat();
    let spec = FixtureSpec::nixl(proxy, (1, 2)).only_options(&options);
    let mut fixture = Fixture::acquire(spec).await;
    let before = counted_leaks(&fixture.gateway).await;
    let mut body = chat_body("a long story");
    body["max_tokens"] = json!(10_000);
    body["stream"] = json!(true);
    let request = raw::post(CHAT, &[], body.to_string().as_bytes());
    let clients = count(20, 200);
    for first in (0..clients).step_by(AT_ONCE) {
        let numbers = first..clients.min(first + AT_ONCE);
        join_all(numbers.map(|number| leave_during_decode(&fixture.gateway, &request, number)))
            .await;
    }

    eventually("the decodes of those who left end", GENEROUS, || async {
        let state = fixture.total(Role::Decode).await;
        if state.running == 0 && state.requests == clients as u64 {
            return Ok(());
        }
        Err(format!("{state:?}"))
    })
    .await;
    fixture.gateway.assert_comes_to_rest().await;
    fixture.gateway.assert_serves().await;
    assert_leaks_are_counted(&fixture, &before).await;
    fixture.assert_good_hand_offs().await;
    fixture.release();
}

/// Reads a few events of the stream and leaves.
async fn leave_during_decode(gateway: &Gateway, request: &[u8], number: usize) {
    let mut client = Raw::connect(gateway.listen).await;
    client.write(request).await;
    client.read_until("data:", 1 + number % 4).await;
}

pub async fn clients_that_leave_in_the_middle_of_their_body_leave_no_charge_behind(proxy: Proxy) {
    let spec = FixtureSpec::nixl(proxy, (1, 1)).only_options(&ROOMY);
    let mut fixture = Fixture::acquire(spec).await;
    let before = counted_leaks(&fixture.gateway).await;
    let request = raw::post(CHAT, &[], chat_body("hello").to_string().as_bytes());
    let whole = request.len();
    for missing in [1, 10, 40, 100] {
        let mut client = Raw::connect(fixture.gateway.listen).await;
        client.write(&request[..whole - missing]).await;
    }
    fixture.gateway.assert_serves().await;
    fixture.gateway.assert_comes_to_rest().await;
    // Only the complete request reached an engine.
    assert_eq!(fixture.total(Role::Prefill).await.requests, 1);
    assert_eq!(assert_leaks_are_counted(&fixture, &before).await, 0);
    fixture.release();
}

pub async fn a_prefill_that_fails_after_its_client_left_leaves_no_charge_behind(proxy: Proxy) {
    let fleet = Fleet::start(0, 1, &ROOMY).await;
    let workers = [SilentWorker::start().await, SilentWorker::start().await];
    let mut config = fleet.config();
    let listed = &mut config["pools"][0]["discovery"]["static"]["workers"];
    let worker = |worker: &SilentWorker| {
        let address = worker.address.to_string();
        json!({"address": address, "role": "prefill", "model": MODEL})
    };
    *listed = json!([worker(&workers[0]), worker(&workers[1]), listed[0]]);
    let gateway = Gateway::start(proxy, &config, &[]).await;
    let request = raw::post(CHAT, &[], chat_body("hello").to_string().as_bytes());
    // Twelve clients reach both threads.
    let mut clients = Vec::new();
    for _ in 0..12 {
        let mut client = Raw::connect(gateway.listen).await;
        client.write(&request).await;
        clients.push(client);
    }
    eventually("all prefills are under way", GENEROUS, || async {
        let charges = gateway.metrics().await.expect("pd_router_prefill_charges");
        let called: usize = workers.iter().map(SilentWorker::called).sum();
        if charges == 12.0 && called > 0 {
            return Ok(());
        }
        Err(format!("{charges} charges, {called} connections"))
    })
    .await;

    drop(clients);
    eventually("the gateway knows that they left", GENEROUS, || async {
        let streams = gateway.metrics().await.expect("pd_router_streams");
        if streams == 0.0 {
            return Ok(());
        }
        Err(format!("{streams} streams"))
    })
    .await;
    for worker in workers {
        worker.hang_up();
    }
    gateway.assert_comes_to_rest().await;
}

/// A worker that accepts connections and sends nothing.
struct SilentWorker {
    address: SocketAddr,
    connections: Arc<Mutex<Vec<TcpStream>>>,
    accepting: JoinHandle<()>,
}

impl SilentWorker {
    async fn start() -> SilentWorker {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("a bound address");
        let connections = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&connections);
        let accepting = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                kept.lock().expect("no test panics in here").push(stream);
            }
        });
        SilentWorker {
            address,
            connections,
            accepting,
        }
    }

    /// Connections accepted so far.
    fn called(&self) -> usize {
        self.connections
            .lock()
            .expect("no test panics in here")
            .len()
    }

    /// Closes every connection and accepts no more.
    fn hang_up(self) {
        self.accepting.abort();
        self.connections
            .lock()
            .expect("no test panics in here")
            .clear();
    }
}

pub async fn found_b9_a_call_whose_client_has_left_holds_its_share_of_the_budget(proxy: Proxy) {
    let fleet = Fleet::start(1, 1, &ROOMY).await;
    // A worker without any answer yet has the same deadline as others.
    let mut config = fleet.config_with(json!({"health": {"cold_timeout_ms": 0}}));
    config["limits"] = json!({"bodies_in_flight_bytes": 3_000_000});
    let gateway = Gateway::start_on_one_thread(proxy, &config, &[]).await;
    let hang = json!({"kind": "hang", "times": 1});
    fleet.prefill[0].fault(&hang).await;
    let mut body = chat_body("hello");
    body["bulk"] = json!("x".repeat(2_000_000));
    let request = raw::post(CHAT, &[], body.to_string().as_bytes());

    let mut leaver = Raw::connect(gateway.listen).await;
    leaver.write(&request).await;
    eventually("prefill has been called", GENEROUS, || async {
        let requests = fleet.prefill_total().await.requests;
        (requests == 1).then_some(()).ok_or(requests.to_string())
    })
    .await;
    drop(leaver);
    eventually("the client has left", GENEROUS, || async {
        let streams = gateway.metrics().await.expect("pd_router_streams");
        (streams == 0.0).then_some(()).ok_or(streams.to_string())
    })
    .await;
    // The proxy keeps the body for the call that hangs: a second one exceeds the budget.
    let refused = Raw::exchange(gateway.listen, request.clone()).await;
    refused.expect_code(503, "bodies_in_flight");
    // The call's deadline ends it.
    eventually("there is room again", GENEROUS, || async {
        let reply = Raw::exchange(gateway.listen, request.clone()).await;
        (reply.status == 200)
            .then_some(())
            .ok_or(reply.status.to_string())
    })
    .await;
    gateway.assert_comes_to_rest().await;
}
