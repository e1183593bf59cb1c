//! The page on plain Envoy: its commands make a configuration that Envoy accepts, with the workers that the page names.

use std::fs;
use std::process::Command;

use pd_router_e2e::paths;
use pd_router_e2e::process::unique_name;
use serde_json::Value;

use crate::files::read;
use crate::judge::is_taken;

/// The page's only block that is a shell script.
fn script() -> String {
    let page = read("envoy/plain/README.md");
    let mut blocks = page.split("```sh\n").skip(1);
    let block = blocks.next().and_then(|rest| rest.split("```").next());
    assert!(blocks.next().is_none(), "the page has several scripts");
    block.expect("the page has a script").to_owned()
}

/// The ports of the workers of a cluster.
fn ports(bootstrap: &Value, cluster: &str) -> Vec<u64> {
    let clusters = bootstrap["static_resources"]["clusters"].as_array();
    let found = clusters
        .into_iter()
        .flatten()
        .find(|known| known["name"] == cluster);
    let endpoints = found.and_then(|known| {
        known
            .pointer("/load_assignment/endpoints/0/lb_endpoints")?
            .as_array()
    });
    let port = |endpoint: &Value| {
        let port = endpoint.pointer("/endpoint/address/socket_address/port_value");
        port.and_then(Value::as_u64)
    };
    endpoints.into_iter().flatten().filter_map(port).collect()
}

#[test]
fn the_page_makes_a_bootstrap_for_two_engines() {
    let made = paths::scratch().join(format!("{}.yaml", unique_name("my-bootstrap")));
    let script = script().replace("my-bootstrap.yaml", &made.display().to_string());
    let ran = Command::new("sh")
        .args(["-ec", &script])
        .current_dir(paths::workspace())
        .status()
        .expect("there is a shell");
    assert!(ran.success(), "{script}");
    let text = fs::read_to_string(&made).expect("the script has written its file");
    let bootstrap: Value = serde_yaml_ng::from_str(&text).expect("the script writes YAML");
    assert_eq!(ports(&bootstrap, "prefill"), [9101]);
    assert_eq!(ports(&bootstrap, "decode"), [9201]);
    is_taken("envoy/plain", &text);
}
