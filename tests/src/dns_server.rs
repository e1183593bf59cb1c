//! Owns a small DNS server: it answers the names that the test sets with their IPv4 addresses.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// A running server over UDP. Ends when dropped.
pub struct DnsServer {
    /// Address of the server.
    pub address: SocketAddr,
    known: Arc<Mutex<BTreeMap<String, Vec<Ipv4Addr>>>>,
    over: Arc<AtomicBool>,
}

/// Bytes of a question before the name.
const HEADER: usize = 12;
const BEHIND_NAME: usize = 4;
/// Record type of an IPv4 address.
const A: [u8; 2] = [0, 1];
/// Interval at which the server checks for its end.
const LOOK: Duration = Duration::from_millis(100);

impl DnsServer {
    /// A server without names.
    pub fn start() -> DnsServer {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))
            .and_then(|socket| socket.set_read_timeout(Some(LOOK)).map(|()| socket))
            .unwrap_or_else(|error| panic!("no port for a DNS server: {error}"));
        let address = socket.local_addr();
        let address = address.unwrap_or_else(|error| panic!("no address: {error}"));
        let server = DnsServer {
            address,
            known: Arc::default(),
            over: Arc::default(),
        };
        let (known, over) = (Arc::clone(&server.known), Arc::clone(&server.over));
        std::thread::spawn(move || {
            let mut question = [0; 512];
            while !over.load(Ordering::Relaxed) {
                let Ok((size, client)) = socket.recv_from(&mut question) else {
                    continue;
                };
                let known = known.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(answer) = answer(&question[..size], &known) {
                    let _ = socket.send_to(&answer, client);
                }
            }
        });
        server
    }

    /// Sets the addresses of the name.
    pub fn set(&self, name: &str, addresses: &[Ipv4Addr]) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.insert(name.to_owned(), addresses.to_vec());
    }
}

impl Drop for DnsServer {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

/// The answer to a question, by RFC 1035. `None`: not a valid question.
fn answer(question: &[u8], known: &BTreeMap<String, Vec<Ipv4Addr>>) -> Option<Vec<u8>> {
    let (name, size) = name(question.get(HEADER..)?)?;
    let question_section = question.get(HEADER..HEADER + size + BEHIND_NAME)?;
    let addresses = known.get(&name.to_ascii_lowercase());
    let of_type = question_section.get(size..size + 2)? == A;
    let listed = addresses.filter(|_| of_type).map_or(&[][..], Vec::as_slice);
    let mut answer = question.get(..2)?.to_vec();
    // Flags of an authoritative answer: no error, or no such name.
    answer.extend([0x85, if addresses.is_some() { 0x80 } else { 0x83 }]);
    answer.extend([0, 1]);
    answer.extend(u16::try_from(listed.len()).ok()?.to_be_bytes());
    answer.extend([0, 0, 0, 0]);
    answer.extend(question_section);
    for address in listed {
        // The name as above, an internet address, a time to live of 0, four bytes of data.
        answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4]);
        answer.extend(address.octets());
    }
    Some(answer)
}

/// A name in dotted form, and its length in bytes.
fn name(text: &[u8]) -> Option<(String, usize)> {
    let mut labels = Vec::new();
    let mut at = 0;
    loop {
        let size = usize::from(*text.get(at)?);
        at += 1;
        if size == 0 {
            return Some((labels.join("."), at));
        }
        let label = text.get(at..at + size)?;
        labels.push(String::from_utf8_lossy(label).into_owned());
        at += size;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUESTION: &[u8] =
        b"\x07\x07\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x01W\x04test\x00\x00\x01\x00\x01";

    #[test]
    fn a_known_name_has_addresses_and_an_unknown_one_does_not_exist() {
        let mut known = BTreeMap::new();
        let unknown = answer(QUESTION, &known).expect("an answer");
        assert_eq!((unknown[3] & 0x0f, unknown[7]), (3, 0));
        known.insert("w.test".to_owned(), vec![Ipv4Addr::new(127, 0, 0, 9)]);
        let found = answer(QUESTION, &known).expect("an answer");
        assert_eq!((found[3] & 0x0f, found[7]), (0, 1));
        assert!(found.ends_with(&[127, 0, 0, 9]));
        for size in 0..QUESTION.len() {
            assert_eq!(answer(&QUESTION[..size], &known), None);
        }
    }
}
