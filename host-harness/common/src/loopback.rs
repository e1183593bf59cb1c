//! Owns addresses of this machine for servers that tests start.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};

/// A free port, where clients connect from as well.
pub const ANYWHERE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// A loopback address that no other run uses: a port that a server leaves for a while stays free there, since connections are
/// made from 127.0.0.1.
pub fn own() -> Ipv4Addr {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let [_, _, high, low] = std::process::id().to_be_bytes();
    // Three of the four bytes vary; 127.0.0.0/16 stays shared. A process gets an address again only after 254 others.
    let number = 1 + NEXT.fetch_add(1, Ordering::Relaxed) % 254;
    Ipv4Addr::new(127, 1 + high % 254, low, number as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_ones_own() {
        assert_ne!(own(), own());
        assert!(own().is_loopback());
    }
}
