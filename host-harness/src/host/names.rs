//! Resolves names: by the system, or by one DNS server that is asked itself.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use tokio::net::UdpSocket;

/// What is resolved, and by whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    /// The name.
    pub host: String,
    /// The port of all its addresses.
    pub port: u16,
    /// The DNS server to ask; none: the system decides.
    pub server: Option<SocketAddr>,
}

/// Why a name is not resolved.
#[derive(Debug, thiserror::Error)]
pub enum NameError {
    /// The system or the network says no.
    #[error("{host} cannot be resolved: {cause}")]
    Io {
        /// The name.
        host: String,
        /// Why.
        cause: std::io::Error,
    },
    /// The server's answer is none, or an error.
    #[error("{0} cannot be resolved: the server's answer is of no use")]
    Answer(String),
}

/// How long a server may take.
const LIMIT: Duration = Duration::from_secs(2);
/// Far more than a datagram with a few hundred addresses has.
const LARGEST: usize = 16 * 1024;

/// The addresses of a name: those of IPv4 where it has any, as `run` has Envoy do too.
///
/// # Errors
/// When there are none to be had.
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

/// One question for IPv4 addresses, as RFC 1035 has it.
fn question(id: u16, host: &str) -> Vec<u8> {
    let mut text = id.to_be_bytes().to_vec();
    // Recursion is desired; one question, and nothing else.
    text.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    for label in host.split('.').filter(|label| !label.is_empty()) {
        text.push(u8::try_from(label.len()).unwrap_or(63).min(63));
        text.extend(label.bytes().take(63));
    }
    text.extend([0, 0, 1, 0, 1]);
    text
}

/// The IPv4 addresses in an answer. `None`: it is an error, or broken.
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

/// Where a name that begins at `at` has ended.
fn after_name(answer: &[u8], mut at: usize) -> Option<usize> {
    loop {
        match answer.get(at)? {
            0 => return Some(at + 1),
            // The rest of the name stands elsewhere.
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
