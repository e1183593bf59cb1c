//! Owns name resolution: by the system, or by a given DNS server.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use tokio::net::UdpSocket;

/// A name, and how it is resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    /// The name.
    pub host: String,
    /// The port of all its addresses.
    pub port: u16,
    /// The DNS server to query; `None`: the system's resolver.
    pub server: Option<SocketAddr>,
}

/// Why a name is not resolved.
#[derive(Debug, thiserror::Error)]
pub enum NameError {
    /// The system or the network reports an error.
    #[error("{host} cannot be resolved: {cause}")]
    Io {
        /// The name.
        host: String,
        /// Cause.
        cause: std::io::Error,
    },
    /// The server's answer is invalid or an error.
    #[error("{0} cannot be resolved: the server's answer is of no use")]
    Answer(String),
}

/// Time limit of a query.
const LIMIT: Duration = Duration::from_secs(2);
/// Larger than any datagram with a few hundred addresses.
const LARGEST: usize = 16 * 1024;

/// The addresses of a name: IPv4 ones if there are any, as `run` configures Envoy too.
///
/// # Errors
/// When there is no address.
pub async fn resolve(name: &Name) -> Result<Vec<SocketAddr>, NameError> {
    let failed = |cause| NameError::Io {
        host: name.host.clone(),
        cause,
    };
    let Some(server) = name.server else {
        let found = tokio::net::lookup_host((name.host.as_str(), name.port)).await;
        return Ok(preferred(found.map_err(failed)?.collect()));
    };
    let answer = tokio::time::timeout(LIMIT, ask(server, &name.host)).await;
    let answer = answer.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()));
    let addresses = addresses(&answer.map_err(failed)?);
    let addresses = addresses.ok_or_else(|| NameError::Answer(name.host.clone()))?;
    let at = |ip| SocketAddr::new(IpAddr::V4(ip), name.port);
    Ok(addresses.into_iter().map(at).collect())
}

fn preferred(mut found: Vec<SocketAddr>) -> Vec<SocketAddr> {
    if found.iter().any(SocketAddr::is_ipv4) {
        found.retain(SocketAddr::is_ipv4);
    }
    found
}

async fn ask(server: SocketAddr, host: &str) -> std::io::Result<Vec<u8>> {
    let own = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
    let socket = UdpSocket::bind(own).await?;
    socket.connect(server).await?;
    let id: u16 = rand::random();
    socket.send(&question(id, host)).await?;
    let mut answer = vec![0; LARGEST];
    loop {
        let size = socket.recv(&mut answer).await?;
        if answer.starts_with(&id.to_be_bytes()) {
            answer.truncate(size);
            return Ok(answer);
        }
    }
}

/// A query for IPv4 addresses, by RFC 1035.
fn question(id: u16, host: &str) -> Vec<u8> {
    let mut text = id.to_be_bytes().to_vec();
    // Recursion desired; one question, and nothing else.
    text.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    for label in host.split('.').filter(|label| !label.is_empty()) {
        text.push(u8::try_from(label.len()).unwrap_or(63).min(63));
        text.extend(label.bytes().take(63));
    }
    text.extend([0, 0, 1, 0, 1]);
    text
}

/// The IPv4 addresses in an answer. `None`: an error, or malformed.
fn addresses(answer: &[u8]) -> Option<Vec<Ipv4Addr>> {
    let count = |at: usize| Some(u16::from_be_bytes(answer.get(at..at + 2)?.try_into().ok()?));
    if answer.get(3)? & 0x0f != 0 {
        return None;
    }
    let mut at = 12;
    for _ in 0..count(4)? {
        at = after_name(answer, at)? + 4;
    }
    let mut found = Vec::new();
    for _ in 0..count(6)? {
        at = after_name(answer, at)?;
        let (kind, size) = (count(at)?, usize::from(count(at + 8)?));
        let data = answer.get(at + 10..at + 10 + size)?;
        if kind == 1 {
            found.push(Ipv4Addr::from(<[u8; 4]>::try_from(data).ok()?));
        }
        at += 10 + size;
    }
    Some(found)
}

/// Offset after the name that begins at `at`.
fn after_name(answer: &[u8], mut at: usize) -> Option<usize> {
    loop {
        match answer.get(at)? {
            0 => return Some(at + 1),
            // A pointer to the rest of the name.
            0xc0.. => return Some(at + 2),
            size => at += 1 + usize::from(*size),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(records: &[&[u8]]) -> Vec<u8> {
        let mut text = question(7, "w.test");
        text[2..4].copy_from_slice(&[0x81, 0x80]);
        text[7] = records.len() as u8;
        for record in records {
            text.extend([0xc0, 12]);
            text.extend(*record);
        }
        text
    }

    const A: &[u8] = &[0, 1, 0, 1, 0, 0, 0, 1, 0, 4, 127, 0, 0, 3];
    const CNAME: &[u8] = &[0, 5, 0, 1, 0, 0, 0, 1, 0, 2, 0xc0, 12];

    #[test]
    fn addresses_are_found_and_other_records_skipped() {
        assert_eq!(addresses(&answer(&[])), Some(vec![]));
        assert_eq!(
            addresses(&answer(&[CNAME, A])),
            Some(vec![Ipv4Addr::new(127, 0, 0, 3)])
        );
    }

    #[test]
    fn errors_and_pieces_are_none() {
        let whole = answer(&[A]);
        for size in 0..whole.len() {
            assert_eq!(addresses(&whole[..size]), None, "{size}");
        }
        let mut refused = whole;
        refused[3] |= 3;
        assert_eq!(addresses(&refused), None);
    }

    #[tokio::test]
    async fn the_system_knows_this_machine() {
        let name = Name {
            host: "localhost".to_owned(),
            port: 7,
            server: None,
        };
        let found = resolve(&name).await.unwrap();
        assert!(found.contains(&SocketAddr::from(([127, 0, 0, 1], 7))));
        assert!(found.iter().all(SocketAddr::is_ipv4));
    }
}
