//! Owns the binding of a prefill worker: the address of its bootstrap server, through which SGLang's and Mooncake's legs
//! find each other, and what else must be known of the worker before it can be handed a request.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

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

/// Ids of a worker's engines, by rank.
pub type EngineIds = BTreeMap<u32, String>;

/// What is known of a prefill worker's process, without which it cannot be handed a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binding {
    /// Its bootstrap server.
    pub bootstrap: Bootstrap,
    /// The ids of its engines; empty where the protocol needs none.
    pub engines: EngineIds,
}

impl Binding {
    /// Whether this binding may come from the same process as `before`: each of those engines is still there.
    pub fn continues(&self, before: &Self) -> bool {
        let mut engines = before.engines.iter();
        self.bootstrap == before.bootstrap
            && engines.all(|(rank, id)| self.engines.get(rank) == Some(id))
    }
}

/// What only a query to the worker, or to its bootstrap server, shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Learned {
    /// The bootstrap server's port, where neither configuration nor discovery has it.
    Port,
    /// The engines' ids, which are new with each start.
    EngineIds,
}

/// Which of the proxy's clusters has the queried server as a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueriedCluster {
    /// That of the prefill workers.
    Prefill,
    /// That of their bootstrap servers.
    Bootstrap,
}

/// A query for a binding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BindingQuery {
    /// The server's address.
    pub destination: SocketAddr,
    /// The path to get.
    pub path: &'static str,
}

/// How prefill workers are bound under a protocol.
pub trait Binder: Sync {
    /// What a query shows.
    fn learned(&self) -> Learned;

    /// Where the queried servers are members.
    fn cluster(&self) -> QueriedCluster;

    /// The query for a worker at this address; `port`: its bootstrap server's, if known. None if the query needs the port.
    fn query(&self, worker: SocketAddr, port: Option<u16>) -> Option<BindingQuery>;

    /// The binding in the answer; none if the answer lacks it.
    fn read(&self, worker: SocketAddr, port: Option<u16>, answer: &[u8]) -> Option<Binding>;

    /// Interval of the queries to a bound worker, since a restart at the same address would change the answer.
    fn renewal(&self) -> Duration;
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
