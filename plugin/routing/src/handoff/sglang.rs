//! Owns SGLang's bootstrap hand-off: both legs at once, with the same three fields, by which the engines find each other.
//!
//! The prefill worker stops after one token by itself. Its leg is not streamed, so that an error is a status and not an
//! event in a stream that began well.

use std::net::SocketAddr;

use crate::json::Edits;
use crate::request::Request;

/// The fields of a hand-off: a client must not set them.
pub const FIELDS: [&str; 3] = ["bootstrap_host", "bootstrap_port", "bootstrap_room"];

/// Ranks in a body: the router picks the rank, and the room is aligned to it.
const RANKS: [&str; 2] = ["routed_dp_rank", "disagg_prefill_dp_rank"];

/// Where a prefill worker's bootstrap server is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bootstrap {
    host: String,
    port: u16,
}

impl Bootstrap {
    /// The bootstrap server of a worker, beside its HTTP server. An IPv6 host is written in brackets.
    pub fn beside(worker: SocketAddr, port: u16) -> Self {
        let host = match worker {
            SocketAddr::V4(address) => address.ip().to_string(),
            SocketAddr::V6(address) => format!("[{}]", address.ip()),
        };
        Self { host, port }
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Puts the hand-off into a leg.
    pub fn put_into(&self, room: u64, edits: &mut Edits) {
        // An IP address needs no escaping.
        edits.insert("bootstrap_host", format!("\"{}\"", self.host));
        edits.insert("bootstrap_port", self.port.to_string());
        edits.insert("bootstrap_room", room.to_string());
    }
}

/// Edits of the decode leg, but for the hand-off.
pub fn decode_edits(request: &Request<'_>) -> Edits {
    let mut edits = request.body.edit();
    for name in FIELDS.into_iter().chain(RANKS) {
        request
            .body
            .all(name)
            .for_each(|member| edits.remove(member));
    }
    edits
}

/// Edits of the prefill leg, but for the hand-off.
pub fn prefill_edits(request: &Request<'_>) -> Edits {
    let mut edits = decode_edits(request);
    request
        .body
        .all("stream")
        .for_each(|member| edits.replace(member, "false"));
    // The id by which the worker is told to drop the request is ours: of two the last one would count.
    request
        .body
        .all("rid")
        .for_each(|member| edits.remove(member));
    request
        .body
        .all("stream_options")
        .for_each(|member| edits.remove(member));
    edits
}

/// The bootstrap port in what a worker says of itself at `/get_server_info`; none where it says none.
pub fn bootstrap_port(server_info: &[u8]) -> Option<u16> {
    #[derive(serde::Deserialize)]
    struct ServerInfo {
        disaggregation_bootstrap_port: Option<u16>,
    }
    let info: ServerInfo = serde_json::from_slice(server_info).ok()?;
    info.disaggregation_bootstrap_port.filter(|port| *port != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Generation;

    #[test]
    fn both_legs_golden_bytes() {
        let body = r#"{"model":"m", "messages":[],"stream":true,"stream_options":{"include_usage":true},"bootstrap_room":null,"seed":9007199254740993}"#;
        let request = Request::parse(Generation::Chat, body.as_bytes()).unwrap();
        let bootstrap = Bootstrap::beside("10.0.0.1:30000".parse().unwrap(), 8998);
        let leg = |mut edits: Edits| {
            bootstrap.put_into(9_223_372_036_854_775_807, &mut edits);
            String::from_utf8(edits.apply(body.as_bytes())).unwrap()
        };
        let fields = r#""bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":9223372036854775807"#;
        assert_eq!(
            leg(decode_edits(&request)),
            format!(
                r#"{{{fields},"model":"m", "messages":[],"stream":true,"stream_options":{{"include_usage":true}},"seed":9007199254740993}}"#
            )
        );
        assert_eq!(
            leg(prefill_edits(&request)),
            format!(
                r#"{{{fields},"model":"m", "messages":[],"stream":false,"seed":9007199254740993}}"#
            )
        );
    }

    #[test]
    fn an_ipv6_host_is_in_brackets_and_a_port_is_read_from_what_a_worker_says() {
        let bootstrap = Bootstrap::beside("[fd00::1]:30000".parse().unwrap(), 1);
        assert_eq!(bootstrap.host, "[fd00::1]");
        assert_eq!(
            bootstrap_port(br#"{"disaggregation_bootstrap_port": 8999, "x": 1}"#),
            Some(8999)
        );
        for answer in [
            &b"{}"[..],
            b"",
            br#"{"disaggregation_bootstrap_port": null}"#,
            br#"{"disaggregation_bootstrap_port": -1}"#,
        ] {
            assert_eq!(bootstrap_port(answer), None);
        }
    }
}
