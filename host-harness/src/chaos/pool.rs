//! Owns the plugin's configuration for a scenario: deadlines short enough that every fault is noticed within three seconds, and
//! long enough that a machine busy with other scenarios keeps them.

use std::time::Duration;

use routing::config::Limits;
use routing::fleet::Role;
use serde_json::{Value, json};

use super::scenario::PoolSettings;
use crate::engine::{Dialect, Engine};
use crate::run::fleet::MODEL;

/// Minimum prefill deadline for any prompt. An engine takes some 30 ms here, and the machine may be busy.
const PREFILL: Duration = Duration::from_millis(1200);
/// Deadline of decode's first token.
const FIRST_TOKEN: Duration = Duration::from_millis(1500);
/// Allowed silence of decode after its first token.
pub const SILENCE: Duration = Duration::from_millis(1500);
/// Allowance per token of an unstreamed answer; an engine takes 4 ms here.
const TOKEN: Duration = Duration::from_millis(30);
/// Interval and timeout of an engine's metrics poll.
const METRICS: Duration = Duration::from_millis(150);
/// The short deadline of a request body.
const HASTE: Duration = Duration::from_secs(1);
/// Bytes of the longest body where long ones are allowed: the limit of the proxy as shipped.
const LONG_BODY: usize = 32 * 1024 * 1024;
/// Length of a worker's first ejection.
const EJECTED: Duration = Duration::from_millis(1000);

/// The pool's name.
pub const POOL: &str = "chaos";

/// The plugin's configuration for these engines.
pub fn plugin_config(
    dialect: Dialect,
    engines: &[(Role, &Engine)],
    settings: PoolSettings,
) -> Vec<u8> {
    let workers: Vec<_> = engines
        .iter()
        .map(|(role, engine)| worker(*role, engine))
        .collect();
    let discovery = json!({"static": {"workers": workers}});
    let as_shipped = |limits| as_shipped(dialect, discovery.clone(), limits);
    let config = match settings {
        PoolSettings::Plain => document(pool_over(dialect, discovery, json!("members"))),
        PoolSettings::AsksMetrics => {
            let mut pool = pool_over(dialect, discovery, json!("members"));
            pool["engine_metrics"] = json!({
                "interval_ms": milliseconds(METRICS),
                "timeout_ms": milliseconds(METRICS),
                "stale_after_ms": milliseconds(2 * METRICS),
            });
            document(pool)
        }
        PoolSettings::Touchy => {
            let mut config = as_shipped(json!({}));
            let pool = &mut config["pools"][0];
            pool["decode"] = json!({"silence_timeout_ms": milliseconds(SILENCE)});
            pool["health"] = json!({"eject_after": 1});
            config
        }
        PoolSettings::Shipped => as_shipped(json!({})),
        PoolSettings::HastyBodies => as_shipped(json!({"body_timeout_ms": milliseconds(HASTE)})),
        PoolSettings::LongBodies => {
            let in_flight = Limits::default().bodies_in_flight_bytes / 2;
            as_shipped(json!({"body_bytes": LONG_BODY, "bodies_in_flight_bytes": in_flight}))
        }
    };
    in_bytes(&config)
}

/// The plugin's configuration with the defaults for all but these limits.
fn as_shipped(dialect: Dialect, discovery: Value, limits: Value) -> Value {
    let pool = json!({"name": POOL, "protocol": protocol(dialect), "discovery": discovery});
    json!({"pools": [pool], "limits": limits})
}

fn in_bytes(config: &Value) -> Vec<u8> {
    config.to_string().into_bytes()
}

/// The plugin's configuration with this `discovery` and these `destinations`.
pub fn plugin_config_over(dialect: Dialect, discovery: Value, destinations: Value) -> Vec<u8> {
    in_bytes(&document(pool_over(dialect, discovery, destinations)))
}

fn document(pool: Value) -> Value {
    json!({"pools": [pool]})
}

fn pool_over(dialect: Dialect, discovery: Value, destinations: Value) -> Value {
    json!({
        "name": POOL,
        "protocol": protocol(dialect),
        "discovery": discovery,
        "destinations": destinations,
        "prefill": {
            "timeout_ms": milliseconds(4 * PREFILL),
            "base_timeout_ms": milliseconds(PREFILL),
            "timeout_ms_per_1k_tokens": milliseconds(PREFILL / 4),
            "attempts": 3,
        },
        "decode": {
            "attempts": 3,
            "first_token_timeout_ms": milliseconds(FIRST_TOKEN),
            "silence_timeout_ms": milliseconds(SILENCE),
            "timeout_ms_per_token": milliseconds(TOKEN),
            "recoveries": 1,
        },
        "health": {"eject_after": 3, "eject_ms": milliseconds(EJECTED)},
        "cleanup": {"timeout_ms": 5000},
    })
}

/// Bytes of a request body that the proxy buffers: as shipped, where the filter's own limits are tested.
pub fn buffer_limit(settings: PoolSettings) -> usize {
    match settings.bounds_memory() {
        true => LONG_BODY,
        false => 1024 * 1024,
    }
}

fn worker(role: Role, engine: &Engine) -> Value {
    let mut worker = json!({"address": engine.address, "role": role.name(), "model": MODEL});
    if let Some(bootstrap) = engine.bootstrap {
        worker["bootstrap_port"] = json!(bootstrap.port());
    }
    worker
}

fn protocol(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::Vllm => "nixl",
        Dialect::Llmd => "llmd",
        Dialect::Mooncake => "mooncake",
        Dialect::Sglang => "sglang",
        Dialect::Trtllm => "trtllm",
    }
}

fn milliseconds(time: Duration) -> u128 {
    time.as_millis()
}
