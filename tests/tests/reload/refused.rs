//! An invalid configuration: refused as a whole, with the reason in Envoy's log, and the old one stays in use.

use pd_router_e2e::client::Ask;
use pd_router_e2e::engines::{FAST, with};
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::json;

use crate::rig::{Rig, marked};

const NEWCOMER: &str = "newcomer";

pub async fn a_wrong_configuration_is_refused_whole_and_the_old_one_goes_on() {
    let rig = Rig::start(2, FAST, json!({})).await;
    // Each of these would list another worker, and disable the response headers.
    let right = marked(rig.configuration(json!({})), NEWCOMER);
    let right = with(right, json!({"response_headers": false}));
    let without_a_role = {
        let mut wrong = right.clone();
        wrong["pools"][0]["discovery"]["static"]["workers"][3]["role"] = json!("cook");
        wrong
    };
    let twice = {
        let mut wrong = right.clone();
        wrong["pools"] = json!([right["pools"][0], right["pools"][0]]);
        wrong
    };
    let unknown = with(right.clone(), json!({"sharing": {"lode": true}}));
    for (wrong, named) in [
        (
            without_a_role.to_string(),
            "pools[0].discovery.static.workers[3].role",
        ),
        (twice.to_string(), "pools[1].name"),
        (unknown.to_string(), "lode"),
        ("{\"pools\": ".to_owned(), "EOF"),
    ] {
        let refused = rig
            .metric("envoy_listener_manager_lds_update_rejected")
            .await;
        let logged = rig.log().len();
        rig.publish(&wrong);
        rig.until_metric("envoy_listener_manager_lds_update_rejected", refused + 1.0)
            .await;
        eventually("the reason is logged", GENEROUS, || async {
            let log = rig.log().split_off(logged);
            match log.contains(named) {
                true => Ok(()),
                false => Err(log),
            }
        })
        .await;
        for _ in 0..8 {
            rig.send(Ask::chat("hello")).await.expect_tokens(4).pair();
            let pool = rig.pool().await.to_string();
            assert!(!pool.contains(NEWCOMER), "{pool}");
        }
    }
    // A valid configuration is still accepted.
    rig.reconfigure(rig.configuration(json!({}))).await;
    rig.send(Ask::chat("hello")).await.expect_tokens(4);
    rig.comes_to_rest().await;
}
