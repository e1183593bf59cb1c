//! Owns the address of a prefill worker's bootstrap server, through which SGLang's and Mooncake's legs find each other.

use std::fmt;
use std::net::SocketAddr;

/// Address of a prefill worker's bootstrap server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bootstrap {
    host: String,
    port: u16,
}

impl Bootstrap {
    /// The bootstrap server on a worker's host, beside its HTTP server. An IPv6 host is written in brackets.
    pub fn beside(worker: SocketAddr, port: u16) -> Self {
        let host = match worker {
            SocketAddr::V4(address) => address.ip().to_string(),
            SocketAddr::V6(address) => format!("[{}]", address.ip()),
        };
        Self { host, port }
    }

    /// The host, which needs no escaping in JSON: an IP address, IPv6 in brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }
}

/// Written as the authority of a URL.
impl fmt::Display for Bootstrap {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}:{}", self.host, self.port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ipv6_host_is_in_brackets() {
        let bootstrap = Bootstrap::beside("[fd00::1]:30000".parse().unwrap(), 1);
        assert_eq!((bootstrap.host(), bootstrap.port()), ("[fd00::1]", 1));
        assert_eq!(bootstrap.to_string(), "[fd00::1]:1");
        let bootstrap = Bootstrap::beside("10.0.0.1:30000".parse().unwrap(), 8998);
        assert_eq!(bootstrap.to_string(), "10.0.0.1:8998");
    }
}
