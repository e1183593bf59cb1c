//! Death of the leading VM: another takes over the polling of workers, and no request fails.

use std::time::Duration;

use pd_router_e2e::Proxy;
use pd_router_e2e::client::Ask;
use pd_router_e2e::engine_set::EngineSet;
use pd_router_e2e::engines::{FAST, Role};
use pd_router_e2e::gateway::{Gateway, GatewayParts, worker};
use pd_router_e2e::paths;
use pd_router_e2e::threads::{Thread, connections_by_thread};
use pd_router_e2e::wait::{GENEROUS, eventually};
use pd_router_e2e::worker_document::INTERVAL_MS;
use serde_json::json;

use crate::clients::Clients;
use crate::rig::{THREADS, VMS};

pub const TRAP: &str = "x-pd-router-trap";

/// A lease lasts a second: another VM leads after two at most.
const TWO_LEASES: Duration = Duration::from_secs(2);

/// Allowance for a machine that is busy with other tests; far less than forever.
const SLACK: Duration = Duration::from_secs(4);

const CLIENTS_EACH: usize = 2;

struct Rig {
    engines: EngineSet,
    gateway: Gateway,
    threads: Vec<Thread>,
}

impl Rig {
    /// Two listed workers of each role, and a third decode worker that can join.
    async fn open(proxy: Proxy) -> Rig {
        // 20 ms between two tokens keep an endless stream small.
        let options = [FAST, &["--token-ms", "1000"]].concat();
        let mut engines = EngineSet::with_slots(2, 3, &options).await;
        engines.start_and_list(Role::Prefill).await;
        engines.start(Role::Decode).await;
        engines.list_one(Role::Decode, 0);
        engines.list_one(Role::Decode, 1);
        let build = GatewayParts {
            plugin: paths::trap_plugin(),
            ..GatewayParts::on_threads(THREADS)
        };
        let gateway = engines.gateway_of(proxy, &build, json!({})).await;
        gateway.is_ready().await;
        let threads = connections_by_thread(&gateway, THREADS.into()).await;
        Rig {
            engines,
            gateway,
            threads,
        }
    }

    /// The threads that report that they lead; `left_out` is not queried.
    async fn leading(&self, left_out: Option<usize>) -> Vec<usize> {
        let mut leading = Vec::new();
        for (at, thread) in self.threads.iter().enumerate() {
            if Some(at) != left_out && thread.status().await["leads"] == true {
                leading.push(at);
            }
        }
        leading
    }

    /// Waits until one of the threads except `left_out` leads: two leases at most.
    async fn until_one_leads(&self, left_out: Option<usize>) -> usize {
        eventually("a thread leads", TWO_LEASES + SLACK, || async {
            match self.leading(left_out).await.as_slice() {
                [one] => Ok(*one),
                others => Err(format!("{others:?} lead")),
            }
        })
        .await
    }

    /// Waits until all threads list this decode worker, or no longer do: within an interval.
    async fn until_all_know(&self, name: &str, listed: bool) {
        let interval = Duration::from_millis(INTERVAL_MS);
        let what = format!("all threads know of {name}");
        eventually(&what, interval + SLACK, || async {
            for thread in &self.threads {
                let page = thread.try_send(Ask::get("/pd-router/status")).await;
                let page = page.map_err(|failure| failure.to_string())?;
                if page.status != 200 {
                    return Err(format!("{}: {}", page.status, page.text()));
                }
                let pool = page.json()["pools"][0].take();
                if worker(&pool, name).is_null() == listed {
                    return Err(pool.to_string());
                }
            }
            Ok(())
        })
        .await;
    }

    /// Kills the leading VM by a request to another thread.
    async fn kill_the_leader(&self, by: usize) {
        let ask = Ask::chat("a last wish").header(TRAP, "leader");
        self.threads[by].send(ask).await.expect(200);
    }

    /// A worker joins and another leaves; all threads adopt the change.
    async fn a_change_is_adopted_by_all(&mut self) {
        let names = self.engines.names(Role::Decode);
        self.engines.list_one(Role::Decode, 2);
        self.until_all_know(&names[2], true).await;
        self.engines.unlist_one(Role::Decode, 0);
        self.until_all_know(&names[0], false).await;
    }
}

pub async fn when_the_leader_dies_a_thread_takes_over(proxy: Proxy) {
    let mut rig = Rig::open(proxy).await;
    // The main thread's VM serves no requests, and leads by preference.
    assert_eq!(rig.leading(None).await, [0; 0]);
    let threads = rig.threads.iter();
    let clients: Vec<Clients> = threads
        .map(|thread| Clients::start(thread, CLIENTS_EACH, |ask| ask))
        .collect();
    for clients in &clients {
        clients.until_answered(4).await;
    }
    rig.kill_the_leader(0).await;
    rig.until_one_leads(None).await;
    rig.a_change_is_adopted_by_all().await;
    for clients in clients {
        clients.until_answered(4).await;
        clients.stop_untouched().await;
    }
    rig.gateway.assert_comes_to_rest().await;
    // The main thread gets no new VM, since no request reaches it.
    until_vms_are(&rig.gateway, VMS - 1.0).await;
}

pub async fn when_that_one_dies_too_another_takes_over(proxy: Proxy) {
    let mut rig = Rig::open(proxy).await;
    rig.kill_the_leader(0).await;
    let second = rig.until_one_leads(None).await;
    rig.kill_the_leader((second + 1) % rig.threads.len()).await;
    // Only a request would restart its VM, and none reaches its thread.
    rig.until_one_leads(Some(second)).await;
    serves_again(&rig.threads[second], &Ask::chat("hello")).await;
    rig.a_change_is_adopted_by_all().await;
    rig.gateway.assert_comes_to_rest().await;
    until_vms_are(&rig.gateway, VMS - 1.0).await;
}

/// Waits until this request is answered on this thread, whose VM has died; until then it gets 503.
pub async fn serves_again(thread: &Thread, ask: &Ask) {
    eventually("the thread serves again", GENEROUS, || async {
        let reply = thread.try_send(ask.clone()).await;
        let reply = reply.map_err(|failure| failure.to_string())?;
        match reply.status {
            200 => Ok(()),
            503 => Err("503".to_owned()),
            _ => panic!("{reply:?}"),
        }
    })
    .await;
}

/// Waits until `pd_router_vms` has this value.
pub async fn until_vms_are(gateway: &Gateway, count: f64) {
    eventually("living VMs", GENEROUS, || async {
        let vms = gateway.metrics().await.expect("pd_router_vms");
        match vms == count {
            true => Ok(()),
            false => Err(format!("{vms}, not {count}")),
        }
    })
    .await;
}
