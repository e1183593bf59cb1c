//! Owns the destinations of one leg: in order, and how far the proxy has come with them.

use std::net::SocketAddr;

/// Destinations that a leg was sent to, in the order in which the proxy tries them.
#[derive(Debug, Clone, Default)]
pub struct Tried(Vec<SocketAddr>);

impl Tried {
    /// The destinations of a leg that is dispatched.
    pub fn new(destinations: &[SocketAddr]) -> Self {
        Self(destinations.to_vec())
    }

    /// All of them.
    pub fn all(&self) -> &[SocketAddr] {
        &self.0
    }

    /// The destinations that were tried before this address.
    pub fn before(&self, address: SocketAddr) -> &[SocketAddr] {
        let at = self.0.iter().position(|tried| *tried == address);
        self.0.get(..at.unwrap_or(0)).unwrap_or_default()
    }

    /// Notes the destination that was tried last. If the proxy does not say, only the first has been tried: it took the
    /// connection.
    pub fn reached(&mut self, last: Option<SocketAddr>) {
        let Some(last) = last else {
            return self.0.truncate(1);
        };
        let before = self.before(last).len();
        self.0.truncate(before);
        self.0.push(last);
    }
}
