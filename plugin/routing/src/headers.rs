//! Owns the names of headers: those that direct the proxy, those that a client must not set, and those of its request that
//! are copied to the calls made for it.

use crate::request::overrides::header_names;

/// Where a request or a call goes: an ordered list of `ip:port`, read by the clusters' `override_host` policy.
pub const DESTINATION: &str = "x-gateway-destination-endpoint";
/// Maximum times the proxy may move on to the next destination of the list.
pub const MAX_RETRIES: &str = "x-envoy-max-retries";
/// Failures on which the proxy may move on.
pub const RETRY_ON: &str = "x-envoy-retry-on";
/// The failures after which the same bytes may go to another worker: nothing of the request was sent.
pub const BEFORE_SENT: &str = "connect-failure,refused-stream,reset-before-request";
/// The chosen prefill worker, for people.
pub const PREFILL: &str = "x-pd-router-prefill";
/// The chosen decode worker, for people.
pub const DECODE: &str = "x-pd-router-decode";
/// The endpoints that a gateway in front allows.
pub use crate::request::overrides::SUBSET;
/// The endpoint that really answered: the gateway sends it to the picker in the endpoint picker protocol.
pub const SERVED: &str = "x-gateway-destination-endpoint-served";
/// Why a request was dropped, in the words of the endpoint picker protocol.
pub const DROPPED: &str = "x-llm-d-request-dropped-reason";
/// Requests the cost terms of the choice; the answer carries them.
pub const EXPLAIN: &str = "x-pd-router-explain";
/// Tenant of the request: tenants share no cache.
pub const TENANT: &str = "x-tenant-id";
/// The request's id, the same on both legs.
pub const REQUEST_ID: &str = "x-request-id";

/// Headers by which a client could pick a worker or change the proxy's retries and timeouts, beside the routing overrides.
const RESERVED: &[&str] = &[
    DESTINATION,
    EXPLAIN,
    "x-bypass-remote-prefill",
    SERVED,
    DROPPED,
    "x-prefiller-host-port",
    "x-encoder-hosts-ports",
    "x-kv-cache-source-host-port",
    "x-data-parallel-host-port",
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

/// Content type of every call. A call of type `application/grpc` would get the proxy's own errors as 200.
pub const CONTENT_TYPE: (&str, &str) = ("content-type", "application/json");

/// The parts of a request's line, as the proxy's pseudo-headers.
const OF_THE_LINE: &[&str] = &[":method", ":scheme", ":authority", ":path"];

/// Headers of a client's request that are copied to the calls made for it: the caller's identity, the trace, and the reader
/// of the answer.
const GO_ALONG: &[&str] = &[
    "authorization",
    "traceparent",
    "tracestate",
    "baggage",
    "b3",
    REQUEST_ID,
    "user-agent",
    "accept-language",
];

/// Prefix of the other headers that are copied: Zipkin's, one for each part of a span.
const GO_ALONG_BEGIN: &str = "x-b3-";

/// Headers about one connection.
const OF_A_CONNECTION: &[&str] = &[
    "connection",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Headers about a body's form or the proxy's behaviour: each leg has its own, whatever a pool configures.
const EACH_LEGS_OWN: &[&str] = &[
    "accept",
    "accept-encoding",
    "expect",
    "host",
    "proxy-authorization",
    REQUEST_ID,
];
/// Prefixes of further such headers.
const EACH_LEGS_OWN_BEGIN: &[&str] = &[":", "content-", "grpc-", "x-envoy-"];

/// Whether a header can be set on a call: the proxy's own, such as the path, must be text without control characters.
/// Headers that cannot be set are left out.
pub fn is_sendable((name, value): &(Vec<u8>, Vec<u8>)) -> bool {
    let is_text = || {
        let text = std::str::from_utf8(value);
        text.is_ok_and(|text| !text.chars().any(char::is_control))
    };
    !name.starts_with(b":") || is_text()
}

/// Whether a client must not set this header.
pub fn is_reserved(name: &[u8]) -> bool {
    let mut reserved = RESERVED.iter().copied().chain(header_names());
    reserved.any(|known| known.as_bytes().eq_ignore_ascii_case(name))
}

/// Whether this header of a client's request is copied to the calls made for it, given the pool's `further` headers.
pub fn goes_along(name: &[u8], further: &[String]) -> bool {
    contains(OF_THE_LINE, name)
        || contains(GO_ALONG, name)
        || begins(name, GO_ALONG_BEGIN)
        || further
            .iter()
            .any(|known| known.as_bytes().eq_ignore_ascii_case(name))
}

/// Why a pool may not have this header of a client copied.
pub fn stays_behind(name: &str) -> Option<&'static str> {
    let name = name.as_bytes();
    let of_a_name = |byte: &u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~:".contains(byte);
    if name.is_empty() || !name.iter().all(of_a_name) {
        return Some("is no header's name: write it as \"x-api-key\"");
    }
    if is_reserved(name) {
        return Some("names a header that no client may set");
    }
    let is_own = contains(OF_A_CONNECTION, name)
        || contains(EACH_LEGS_OWN, name)
        || EACH_LEGS_OWN_BEGIN
            .iter()
            .any(|beginning| begins(name, beginning));
    is_own.then_some("names a header that is each leg's own")
}

/// Headers of an answer about a proxy on the way, or about a length that the answer may no longer have.
const OF_A_HOP: &[&str] = &["content-length", "proxy-authenticate"];

/// Whether a header of a worker's answer to a call goes to the client: all do, as if the answer had been forwarded, except
/// those of one hop, including the ones that `connection` names.
pub fn is_a_clients_too(name: &[u8], connection: &[u8]) -> bool {
    let mut named = connection.split(|byte| *byte == b',');
    let is_of_the_hop = named.any(|other| other.trim_ascii().eq_ignore_ascii_case(name));
    let is_of_the_hop =
        is_of_the_hop || contains(OF_A_CONNECTION, name) || contains(OF_A_HOP, name);
    !name.starts_with(b":") && !is_of_the_hop
}

/// Whether a content type is gRPC's: the proxy would then write its own errors as gRPC.
pub fn is_grpc(content_type: &[u8]) -> bool {
    begins(content_type, "application/grpc")
}

/// Whether a text begins so, in upper or lower case.
pub(crate) fn begins(text: &[u8], beginning: &str) -> bool {
    let begin = text.get(..beginning.len());
    begin.is_some_and(|begin| begin.eq_ignore_ascii_case(beginning.as_bytes()))
}

fn contains(names: &[&str], name: &[u8]) -> bool {
    names
        .iter()
        .any(|known| known.as_bytes().eq_ignore_ascii_case(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn found_b17_only_listed_headers_of_a_client_go_along() {
        let further = ["X-Api-Key".to_owned()];
        for name in [
            ":path",
            "authorization",
            "Traceparent",
            "tracestate",
            "baggage",
            "b3",
            "x-b3-traceid",
            "X-B3-Sampled",
            "user-agent",
            "accept-language",
            "x-api-key",
        ] {
            assert!(goes_along(name.as_bytes(), &further), "{name}");
        }
        for name in [
            "content-type",
            "content-encoding",
            "content-length",
            "te",
            "grpc-timeout",
            "cookie",
            "x-forwarded-for",
            "x-worker-instance-id",
            "x-envoy-max-retries",
            ":protocol",
            "b",
            "x-b3",
            "",
        ] {
            assert!(!goes_along(name.as_bytes(), &further), "{name}");
        }
        assert!(!goes_along(b"x-api-key", &[]));
    }

    #[test]
    fn found_b17_what_a_pool_cannot_have_go_along_is_told() {
        for name in ["x-api-key", "anthropic-version", "Cookie", "x-tenant-id"] {
            assert_eq!(stays_behind(name), None, "{name}");
        }
        for (name, part) in [
            ("", "no header's name"),
            ("a b", "no header's name"),
            ("x-\u{e9}", "no header's name"),
            ("x\r\ny", "no header's name"),
            ("Content-Type", "each leg's own"),
            ("grpc-timeout", "each leg's own"),
            ("TE", "each leg's own"),
            ("host", "each leg's own"),
            (":path", "each leg's own"),
            ("x-request-id", "each leg's own"),
            ("X-Envoy-Retry-On", "no client may set"),
            ("x-envoy-original-path", "each leg's own"),
            ("x-worker-instance-id", "no client may set"),
            ("x-llm-d-inference-objective", "no client may set"),
        ] {
            let said = stays_behind(name).unwrap_or_default();
            assert!(said.contains(part), "{name}: {said}");
        }
    }

    #[test]
    fn found_l3_a_workers_own_headers_are_its_clients_but_for_those_of_a_hop() {
        let connection = b"close, X-Hop ,x-other";
        for name in [
            "content-type",
            "retry-after",
            "set-cookie",
            "x-request-id",
            "date",
            "x-hop-2",
        ] {
            assert!(is_a_clients_too(name.as_bytes(), connection), "{name}");
        }
        for name in [
            ":status",
            "Connection",
            "content-length",
            "keep-alive",
            "transfer-encoding",
            "upgrade",
            "trailer",
            "x-hop",
            "X-Other",
        ] {
            assert!(!is_a_clients_too(name.as_bytes(), connection), "{name}");
        }
        assert!(is_a_clients_too(b"x-hop", b""));
    }

    #[test]
    fn found_b17_the_page_names_every_header() {
        let page = include_str!("../../../docs/headers.md");
        let overrides = header_names();
        let all = [RESERVED, GO_ALONG].concat();
        for name in all
            .into_iter()
            .chain(overrides)
            .chain([TENANT, CONTENT_TYPE.0])
        {
            assert!(page.contains(&format!("`{name}`")), "{name}");
        }
        assert!(page.contains(&format!("`{GO_ALONG_BEGIN}*`")));
    }

    #[test]
    fn found_b17_every_spelling_of_grpc_is_known() {
        for text in [
            "application/grpc",
            "application/grpc+json",
            "application/grpc-web",
            "Application/gRPC;x=y",
        ] {
            assert!(is_grpc(text.as_bytes()), "{text}");
        }
        for text in ["application/json", "", "application/gr"] {
            assert!(!is_grpc(text.as_bytes()), "{text}");
        }
    }
}
