//! The bootstraps that are shipped are ones that Envoy takes.
#![forbid(unsafe_code)]

use std::process::Command;

use pd_router_e2e::paths;
use pd_router_e2e::process::unique_name;

/// Envoy looks at the bootstrap as it does when it starts, the plugin and its configuration included, and serves nothing.
fn is_taken(name: &str) {
    let shipped = paths::workspace().join("envoy").join(name);
    let text = std::fs::read_to_string(&shipped)
        .unwrap_or_else(|error| panic!("cannot read {}: {error}", shipped.display()));
    let plugin = paths::plugin().display().to_string();
    let file = paths::scratch().join(format!("{}.yaml", unique_name(name)));
    std::fs::write(&file, text.replace("target/pd_router.wasm", &plugin))
        .unwrap_or_else(|error| panic!("cannot write {}: {error}", file.display()));
    let judged = Command::new(paths::envoy())
        .args(["--mode", "validate", "--disable-hot-restart"])
        .arg("--config-path")
        .arg(&file)
        .output()
        .unwrap_or_else(|error| panic!("Envoy does not start: {error}"));
    assert!(
        judged.status.success(),
        "{name}: {}",
        String::from_utf8_lossy(&judged.stderr)
    );
}

#[test]
fn workers_in_the_configuration() {
    is_taken("bootstrap.yaml");
}

#[test]
fn workers_in_envoys_clusters() {
    is_taken("bootstrap-clusters.yaml");
}

#[test]
fn one_that_stays_open_without_a_picker() {
    is_taken("bootstrap-fail-open.yaml");
}
