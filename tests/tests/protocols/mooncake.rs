//! Mooncake only: engine ids from `/query`, one for each rank, new with each start.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use pd_router_e2e::Proxy;
use pd_router_e2e::client::Ask;
use pd_router_e2e::engines::{Engine, Role, static_config, with};
use pd_router_e2e::fixture::FixtureSpec;
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::protocols::Protocol;
use pd_router_e2e::wait::{eventually, within_tries};
use pd_router_e2e::worker_document::own_loopback;
use serde_json::{Value, json};

use crate::client_requests::CHATS;
use crate::rig::Rig;

const OPTIONS: [&str; 4] = ["--dialect", "mooncake", "--speedup", "50"];

pub async fn each_rank_has_its_engine_id(proxy: Proxy) {
    const RANKS: u64 = 3;
    const REQUESTS: usize = 12;
    let spec = FixtureSpec::of(proxy, Protocol::Mooncake);
    let mut rig = Rig::on(spec.engines(&["--dp-size", "3"], json!({"dp_size": RANKS}))).await;
    let mut pairs = BTreeSet::new();
    // Of six idle ranks one is drawn.
    within_tries("several ranks are used", async |number| {
        let legs = rig.legs_of(CHATS[0].ask()).await;
        let (prefill, decode) = legs.pair();
        let rank = prefill.values("x-data-parallel-rank").join(",");
        let rank_number = rank.parse::<u64>();
        assert!(
            rank_number.is_ok_and(|rank| rank < RANKS),
            "{rank:?}: {prefill:?}"
        );
        let params = &decode.json()["kv_transfer_params"];
        let server = params["remote_bootstrap_addr"].to_string();
        pairs.insert((server, rank, params["remote_engine_id"].to_string()));
        legs.reply.expect(200);
        match pairs.len() > 2 && number + 1 >= REQUESTS {
            true => Ok(()),
            false => Err(format!("{pairs:?}")),
        }
    })
    .await;
    let ids: BTreeSet<&String> = pairs.iter().map(|(_, _, id)| id).collect();
    assert_eq!(ids.len(), pairs.len(), "one id for each rank: {pairs:?}");
    rig.ends().await;
}

/// A bootstrap server is polled every two seconds; then its answer reaches the other threads. Twice that time.
const TWO_POLLS: Duration = Duration::from_secs(5);

/// A prefill engine that can be restarted at its address, with its bootstrap server.
struct Restarted {
    address: SocketAddr,
    port: String,
    bootstrap: SocketAddr,
}

impl Restarted {
    async fn find() -> Restarted {
        let anywhere = SocketAddr::from((own_loopback(), 0));
        let first = Engine::start_at(anywhere, Role::Prefill, &OPTIONS).await;
        let bootstrap = first.bootstrap;
        let bootstrap = bootstrap.unwrap_or_else(|| panic!("it has no bootstrap server"));
        Restarted {
            address: first.address,
            port: bootstrap.port().to_string(),
            bootstrap,
        }
    }

    async fn start(&self) -> Engine {
        let options = [&OPTIONS[..], &["--bootstrap-port", self.port.as_str()]].concat();
        Engine::start_at(self.address, Role::Prefill, &options).await
    }

    fn listed(&self, engine: &Engine) -> Value {
        with(
            engine.listed(),
            json!({"bootstrap_port": self.bootstrap.port()}),
        )
    }
}

pub async fn a_prefill_worker_that_restarts_is_asked_for_its_id_again(proxy: Proxy) {
    let place = Restarted::find().await;
    let mut prefill = place.start().await;
    let decode = Engine::start(Role::Decode, &OPTIONS).await;
    let workers = vec![place.listed(&prefill), decode.listed()];
    let config = static_config(workers, json!({"protocol": "mooncake"}));
    let gateway = Gateway::start(proxy, &config, &[]).await;
    gateway.answers().await;
    for _ in 0..2 {
        prefill.kill();
        gateway.send(Ask::chat("hello")).await.expect_error(503);
        prefill = place.start().await;
        // After a restart within milliseconds the threads may disagree about the engine until the next poll.
        eventually("all threads know of the new one", TWO_POLLS, || async {
            let before = decode.state().await.refused;
            // One connection meets one thread.
            for _ in 0..gateway.enough_connections() {
                let reply = gateway.send(Ask::chat("hello")).await;
                if reply.status != 200 {
                    return Err(reply.text().into_owned());
                }
            }
            match decode.state().await.refused - before {
                0 => Ok(()),
                refused => Err(format!("{refused} hand-offs of the old one")),
            }
        })
        .await;
        let before = decode.state().await.refused;
        for _ in 0..8 {
            let reply = gateway.send(Ask::chat_stream("hello")).await;
            reply.expect_tokens(4);
        }
        assert_eq!(decode.state().await.refused, before);
    }
    gateway.assert_comes_to_rest().await;
}

pub async fn nobody_is_asked_for_an_answer_before_the_engine_ids_are_known(proxy: Proxy) {
    let place = Restarted::find().await;
    let mut prefill = place.start().await;
    prefill.kill();
    let decode = Engine::start(Role::Decode, &OPTIONS).await;
    let workers = vec![place.listed(&prefill), decode.listed()];
    let config = static_config(workers, json!({"protocol": "mooncake"}));
    let gateway = Gateway::start(proxy, &config, &[]).await;
    for ask in [Ask::chat("hello"), Ask::chat_stream("hello")] {
        gateway.send(ask).await.expect_code(503, "prefill_pending");
    }
    gateway.send(Ask::get("/pd-router/ready")).await.expect(503);
    assert_eq!(decode.state().await.requests, 0);
    let _back = place.start().await;
    gateway.answers().await;
    gateway.is_ready().await;
    assert_eq!(decode.state().await.refused, 0);
    gateway.assert_comes_to_rest().await;
}
