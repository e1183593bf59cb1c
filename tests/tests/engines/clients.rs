//! The clients that people use, through Envoy in front of real engines, and past it: tests/engines/clients has a script for each.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use pd_router_e2e::engines::{Role, in_turns, static_config, with};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::vllm::Fleet;
use pd_router_e2e::{Proxy, paths};
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::time::timeout;

/// A script takes half a minute on an idle machine; engines that share two cores with other tests are slow.
const SCRIPT_LIMIT: Duration = Duration::from_secs(600);

/// The model that a refusing gateway has no living worker for; `GONE` in the scripts.
const GONE: &str = "gone";

/// OpenAI's SDK for Python.
pub async fn openai_python(fleet: &Fleet) {
    passes(fleet, python("openai_python.py")).await;
}

/// LiteLLM.
pub async fn litellm(fleet: &Fleet) {
    passes(fleet, python("litellm_client.py")).await;
}

/// LangChain's ChatOpenAI.
pub async fn langchain(fleet: &Fleet) {
    passes(fleet, python("langchain_client.py")).await;
}

/// OpenAI's SDK for node.
pub async fn openai_node(fleet: &Fleet) {
    let mut node = Command::new("node");
    node.env("NODE_PATH", paths::engine_clients().join("node_modules"))
        .arg(script("openai_node.mjs"));
    passes(fleet, node).await;
}

fn python(name: &str) -> Command {
    let mut python = Command::new(paths::engine_clients().join("venv/bin/python"));
    // -B: nothing is written beside the scripts.
    python.arg("-B").arg(script(name));
    python
}

fn script(name: &str) -> PathBuf {
    paths::workspace().join("tests/engines/clients").join(name)
}

/// Runs the script with the addresses that it takes, and fails with what it says where it does.
async fn passes(fleet: &Fleet, mut script: Command) {
    let (config, refusing) = (fleet.config(), refusing(fleet));
    let (gateway, refusing) = tokio::join!(
        Gateway::start(Proxy::Envoy, &config, &[]),
        Gateway::start(Proxy::Envoy, &refusing, &[]),
    );
    for (option, address) in [
        ("--gateway", gateway.listen),
        ("--admin", gateway.admin),
        ("--refusing", refusing.listen),
        ("--alone", fleet.alone.address),
    ] {
        script.arg(option).arg(format!("http://{address}"));
    }
    for engine in &fleet.engines {
        script
            .arg("--engine")
            .arg(format!("http://{}", engine.address));
    }
    script.stdin(Stdio::null()).kill_on_drop(true);
    let output = timeout(SCRIPT_LIMIT, script.output()).await;
    let output = output.unwrap_or_else(|_| panic!("{script:?}: not over after {SCRIPT_LIMIT:?}"));
    let output = output.unwrap_or_else(|error| panic!("cannot start {script:?}: {error}"));
    assert!(
        output.status.success(),
        "{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    gateway.assert_comes_to_rest().await;
}

/// One pair that takes a request only while it has no other, and two workers of another model at addresses that nothing
/// listens on.
fn refusing(fleet: &Fleet) -> Value {
    let pair = [Role::Prefill, Role::Decode].map(|role| fleet.first(role).listed());
    let mut workers = Vec::from(pair);
    for (role, port) in [(Role::Prefill, 1), (Role::Decode, 2)] {
        workers.push(json!({
            "name": format!("{}-{GONE}", role.as_str()),
            "address": format!("127.0.0.1:{port}"),
            "role": role.as_str(),
            "model": GONE,
        }));
    }
    let one_at_a_time = json!({"admission": {"decode": {"blocks": 0}}});
    static_config(workers, with(in_turns(), one_at_a_time))
}
