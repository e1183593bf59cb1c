//! A gateway with four threads over engines with names, and connections to each thread.

use pd_router_e2e::Proxy;
use pd_router_e2e::engines::{Fleet, named, static_config, with};
use pd_router_e2e::gateway::{Gateway, GatewayParts};
use pd_router_e2e::threads::{Thread, connections_by_thread};
use serde_json::{Value, json};

pub const THREADS: u16 = 4;

/// One main thread in addition.
pub const VMS: f64 = THREADS as f64 + 1.0;

/// Engines that compute prompts at once and generate slowly: a stream of a thousand tokens outlasts a test.
pub const UNHURRIED: &[&str] = &["--prefill-rate", "1000000", "--token-ms", "100"];

/// Header in which trusted callers allow a subset of the workers.
pub const SUBSET: &str = "x-gateway-destination-endpoint-subset";

pub struct Rig {
    pub fleet: Fleet,
    pub gateway: Gateway,
    pub threads: Vec<Thread>,
}

impl Rig {
    /// This many prefill workers, `p0` and so on with ids from 11, and decode workers, `d0` and so on with ids from 21.
    pub async fn open(
        proxy: Proxy,
        (prefill, decode): (usize, usize),
        options: &[&str],
        sharing: Value,
    ) -> Rig {
        let fleet = Fleet::start(prefill, decode, options).await;
        let workers = [
            named(&fleet.prefill, "p", 11),
            named(&fleet.decode, "d", 21),
        ];
        let config = static_config(workers.concat(), json!({"trust_clients": true}));
        let config = with(config, json!({"sharing": sharing}));
        let gateway = Gateway::build(proxy, &GatewayParts::on_threads(THREADS), &config, &[]).await;
        let threads = connections_by_thread(&gateway, THREADS.into()).await;
        Rig {
            fleet,
            gateway,
            threads,
        }
    }

    /// The subset of all prefill workers and these decode workers.
    pub fn only(&self, decodes: &[usize]) -> String {
        let mut left = self.fleet.prefill_addresses();
        let all = self.fleet.decode_addresses();
        left.extend(decodes.iter().map(|&at| all[at].clone()));
        left.join(",")
    }
}
