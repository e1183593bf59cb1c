//! vllm-project/router #46: a mode that is selected silently.

use pd_router_e2e::Proxy;
use pd_router_e2e::engines::{FAST, Fleet};
use pd_router_e2e::fixture::Fixture;
use pd_router_e2e::gateway::Gateway;
use serde_json::json;

pub async fn a_protocol_of_no_name_is_refused_with_the_names_there_are(proxy: Proxy) {
    let fleet = Fleet::start(1, 1, FAST).await;
    for wrong in ["nixlv2", "NIXL", ""] {
        let config = fleet.config_with(json!({"protocol": wrong}));
        let Err(failure) = Gateway::try_start(proxy, &config, &[]).await else {
            panic!("started with the protocol {wrong:?}");
        };
        for name in [
            "nixl",
            "mooncake",
            "sglang",
            "trtllm",
            "llmd",
            "direct",
            "aggregated",
        ] {
            assert!(failure.log.contains(name), "no {name}: {}", failure.log);
        }
    }
}

pub async fn the_status_page_tells_the_protocol(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    let page = fixture.gateway.status().await;
    assert!(page.to_string().contains(r#""protocol":"nixl""#), "{page}");
    fixture.release();
}
