//! Owns the check whether Envoy would start with a bootstrap.

use std::fs;
use std::process::Command;

use pd_router_e2e::paths;
use pd_router_e2e::process::unique_name;

/// Locations of the plugin in the bootstraps: from the repository's root, and in the Kubernetes folders' pods.
const PLUGIN_PLACES: [&str; 2] = ["target/pd_router.wasm", "/plugin/plugin.wasm"];

/// Envoy validates the bootstrap, YAML or JSON, as at a start, with the plugin and its configuration, and serves
/// nothing.
///
/// # Panics
/// With Envoy's message, if it would not start.
pub fn is_taken(title: &str, bootstrap: &str) {
    let plugin = paths::plugin().display().to_string();
    let bootstrap_with = |text: String, place: &str| text.replace(place, &plugin);
    let text = PLUGIN_PLACES
        .into_iter()
        .fold(bootstrap.to_owned(), bootstrap_with);
    assert!(text.contains(&plugin), "{title} loads no plugin");
    let file = paths::scratch().join(format!("{}.yaml", unique_name("deployment")));
    fs::write(&file, text)
        .unwrap_or_else(|error| panic!("cannot write {}: {error}", file.display()));
    let judged = Command::new(paths::envoy())
        .args(["--mode", "validate", "--disable-hot-restart"])
        .arg("--config-path")
        .arg(&file)
        .output()
        .unwrap_or_else(|error| panic!("Envoy does not start: {error}"));
    let errors = String::from_utf8_lossy(&judged.stderr).into_owned();
    assert!(judged.status.success(), "{title}: {errors}");
    assert!(
        !errors.contains("deprecated"),
        "{title} has what Envoy no longer accepts: {errors}"
    );
}
