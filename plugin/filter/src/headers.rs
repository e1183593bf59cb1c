//! Owns the names of headers: those that steer the proxy, those a client must not set, those a prefill leg does not carry.

use crate::host::Header;
use routing::request::steering::{FAIRNESS, MODEL_REWRITE, OBJECTIVE};

/// Where a request or a call goes: an ordered list of `ip:port`, read by the clusters' `override_host` policy.
pub const DESTINATION: &str = "x-gateway-destination-endpoint";
/// How often the proxy may move on to the next destination of the list.
pub const MAX_RETRIES: &str = "x-envoy-max-retries";
/// On which failures it may.
pub const RETRY_ON: &str = "x-envoy-retry-on";
/// The failures after which the same bytes may go to another worker: nothing of the request has been sent.
pub const BEFORE_SENT: &str = "connect-failure,refused-stream,reset-before-request";
/// The chosen prefill worker, for people.
pub const PREFILL: &str = "x-pd-router-prefill";
/// The chosen decode worker, for people.
pub const DECODE: &str = "x-pd-router-decode";
/// The endpoints that a gateway in front allows.
pub use routing::request::steering::SUBSET;
/// The endpoint that really answered: what the gateway tells the picker in the endpoint picker protocol.
pub const SERVED: &str = "x-gateway-destination-endpoint-served";
/// Why a request was dropped, in the words of the endpoint picker protocol.
pub const DROPPED: &str = "x-llm-d-request-dropped-reason";
/// Asks for the terms of the choice, and answers with them.
pub const EXPLAIN: &str = "x-pd-router-explain";
/// Tenants share no cache.
pub const TENANT: &str = "x-tenant-id";
/// The request's id, the same on both legs.
pub const REQUEST_ID: &str = "x-request-id";

/// Headers by which a client could pick a worker or change how the proxy retries and times out.
const NOT_A_CLIENTS: &[&str] = &[
    DESTINATION,
    SUBSET,
    EXPLAIN,
    "x-bypass-remote-prefill",
    SERVED,
    DROPPED,
    "x-prefiller-host-port",
    "x-encoder-hosts-ports",
    "x-kv-cache-source-host-port",
    "x-data-parallel-host-port",
    "x-data-parallel-rank",
    "x-dp-rank",
    "x-prefill-dp-rank",
    "x-worker-instance-id",
    "x-prefill-instance-id",
    "x-dynamo-worker-instance-id",
    "x-dynamo-prefill-instance-id",
    "x-dynamo-backend-instance-id",
    "x-dynamo-dp-rank",
    "x-dynamo-prefill-dp-rank",
    "x-dynamo-routing-mode",
    "x-dynamo-epp-booking-id",
    "x-dynamo-prefill-worker-id",
    "x-dynamo-decode-worker-id",
    "x-dynamo-token-data",
    PREFILL,
    DECODE,
    MAX_RETRIES,
    RETRY_ON,
    "x-envoy-retry-grpc-on",
    "x-envoy-retriable-status-codes",
    "x-envoy-retriable-header-names",
    "x-envoy-hedge-on-per-try-timeout",
    "x-envoy-upstream-rq-timeout-ms",
    "x-envoy-upstream-rq-per-try-timeout-ms",
];

/// Headers by which a gateway in front says more than where a request goes.
const A_GATEWAYS: [[&str; 2]; 3] = [MODEL_REWRITE, OBJECTIVE, FAIRNESS];

/// Headers of the client's request that are about its connection or its body's form, not about the request.
const NOT_ON_A_CALL: &[&str] = &[
    "accept-encoding",
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Whether a header can be set on a call: the proxy's own, as the path is, must be text without control characters. Others that are
/// not stay behind.
pub fn is_sendable((name, value): &Header) -> bool {
    let is_text = || {
        let text = std::str::from_utf8(value);
        text.is_ok_and(|text| !text.chars().any(char::is_control))
    };
    !name.starts_with(b":") || is_text()
}

/// Whether a client must not set this header.
pub fn is_not_a_clients(name: &[u8]) -> bool {
    contains(NOT_A_CLIENTS, name) || contains(A_GATEWAYS.as_flattened(), name)
}

/// Whether this header of the client's request is set on a leg that is called too.
pub fn goes_on_a_call(name: &[u8]) -> bool {
    !contains(NOT_ON_A_CALL, name) && !is_not_a_clients(name) && !name.starts_with(b"x-envoy-")
}

fn contains(names: &[&str], name: &[u8]) -> bool {
    names
        .iter()
        .any(|known| known.as_bytes().eq_ignore_ascii_case(name))
}
