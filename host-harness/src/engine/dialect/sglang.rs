//! Owns SGLang's bootstrap: three fields in both legs that name the prefill engine's bootstrap server and a room there.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};

use hyper::header::HeaderMap;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use super::{below, header_rank, read_rank};
use crate::engine::refusal::Refusal;
use crate::engine::request::{BootstrapFields, Generation};

/// Meeting point of a request's legs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoomAddress {
    /// Host of the prefill engine's bootstrap server, an IPv6 address without brackets.
    pub host: String,
    /// Port of the bootstrap server.
    pub port: u16,
    /// The room, at most 2^63 - 1.
    pub room: u64,
}

/// The request's id: from the body, else from the header, else a new one.
///
/// # Errors
/// [`Refusal::BadRequest`] for a `rid` that is no string.
pub fn rid(bootstrap: &BootstrapFields, headers: &HeaderMap) -> Result<String, Refusal> {
    if let Some(rid) = &bootstrap.rid {
        // A batch may have one per prompt; the first stands for all.
        let first = || read::<Vec<String>>(rid)?.into_iter().next();
        let invalid = || Refusal::BadRequest("Invalid `rid`: not a string".into());
        return read(rid).or_else(first).ok_or_else(invalid);
    }
    let given = headers.get("x-request-id").and_then(|id| id.to_str().ok());
    Ok(match given {
        Some(given) if !given.is_empty() => given.to_owned(),
        _ => format!("{:032x}", rand::random::<u128>()),
    })
}

/// Parses the meeting points: one room per sequence. For a batch, or several choices, the fields are lists.
///
/// # Errors
/// [`Refusal::MissingRoom`], [`Refusal::BadRoom`] or [`Refusal::WrongBootstrap`].
pub fn room_addresses(generation: &Generation, rid: &str) -> Result<Vec<RoomAddress>, Refusal> {
    let bootstrap = &generation.bootstrap;
    let sequences = generation.sequences();
    let Some(room) = &bootstrap.room else {
        return Err(Refusal::MissingRoom(rid.to_owned()));
    };
    let (host, port) = (bootstrap.host.as_deref(), bootstrap.port.as_deref());
    let Some(rooms) = list(room) else {
        if sequences > 1 {
            let why = format!("{room} is one for {sequences} sequences");
            return Err(Refusal::BadRoom(why));
        }
        return Ok(vec![RoomAddress::read(host, port, room)?]);
    };
    let several = generation.batch || generation.choices > 1;
    if !several || rooms.len() as u64 != sequences {
        let why = format!("is a list of {} for {sequences} sequences", rooms.len());
        return Err(Refusal::BadRoom(why));
    }
    let addresses = |name: &str, value: Option<&RawValue>| match value.and_then(list) {
        Some(list) if list.len() == rooms.len() => Ok(list),
        _ => Err(Refusal::WrongBootstrap(format!(
            "has no {name} for each of {} rooms",
            rooms.len()
        ))),
    };
    let hosts = addresses("bootstrap_host", host)?;
    let ports = addresses("bootstrap_port", port)?;
    let room_addresses: Vec<RoomAddress> = hosts
        .iter()
        .zip(&ports)
        .zip(&rooms)
        .map(|((host, port), room)| RoomAddress::read(Some(host), Some(port), room))
        .collect::<Result<_, _>>()?;
    let distinct: HashSet<u64> = room_addresses
        .iter()
        .map(|room_address| room_address.room)
        .collect();
    match distinct.len() == room_addresses.len() {
        true => Ok(room_addresses),
        false => Err(Refusal::BadRoom("is the same for two sequences".into())),
    }
}

fn list(value: &RawValue) -> Option<Vec<Box<RawValue>>> {
    read(value)
}

impl RoomAddress {
    fn read(
        host: Option<&RawValue>,
        port: Option<&RawValue>,
        room: &RawValue,
    ) -> Result<Self, Refusal> {
        let room = read_room(room)?;
        let host: Option<String> = read_address("bootstrap_host", host)?;
        let port: Option<u16> = read_address("bootstrap_port", port)?;
        let (Some(host), Some(port)) = (host, port) else {
            return Err(Refusal::WrongBootstrap("is missing".into()));
        };
        let inside = host
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'));
        Ok(Self {
            host: inside.unwrap_or(&host).to_owned(),
            port,
            room,
        })
    }

    /// Checks that the meeting point is at `own`, a prefill engine's bootstrap server as the client can reach it.
    ///
    /// # Errors
    /// [`Refusal::WrongBootstrap`].
    pub fn check_at(&self, own: SocketAddr) -> Result<(), Refusal> {
        let own_ip = own.ip().to_canonical();
        let named: Option<IpAddr> = self.host.parse().ok();
        let same = match named {
            Some(ip) => ip.to_canonical() == own_ip,
            None => self.host == "localhost" && own_ip.is_loopback(),
        };
        if same && self.port == own.port() {
            return Ok(());
        }
        Err(Refusal::WrongBootstrap(format!(
            "{}:{} is not this engine's, {own}",
            self.host, self.port
        )))
    }

    /// The rank, below `dp_size`, that the room implies.
    pub fn rank(&self, dp_size: u32) -> u64 {
        self.room % u64::from(dp_size)
    }

    /// Checks a requested rank against the rank that the room implies.
    ///
    /// # Errors
    /// [`Refusal::RankConflict`].
    pub fn check_rank(&self, requested: Option<u64>, dp_size: u32) -> Result<(), Refusal> {
        let implied = self.rank(dp_size);
        match requested {
            Some(requested) if requested != implied => Err(Refusal::RankConflict {
                requested,
                room: self.room,
                implied,
            }),
            _ => Ok(()),
        }
    }
}

/// The rank, below `dp_size`, that is requested for a leg.
///
/// # Errors
/// [`Refusal::BadRank`] if the engine has no such rank, or the body's and the header's differ.
pub fn routed_rank(
    bootstrap: &BootstrapFields,
    headers: &HeaderMap,
    dp_size: u32,
) -> Result<Option<u64>, Refusal> {
    let body = bootstrap.routed_dp_rank.as_deref();
    let body = body.map(|rank| read_rank(rank.get())).transpose()?;
    let header = header_rank(headers)?;
    if let (Some(body), Some(header)) = (body, header)
        && body != header
    {
        return Err(Refusal::BadRank(format!(
            "{header} in the header, {body} in the body"
        )));
    }
    let rank = body.or(header);
    below(rank, dp_size)
}

/// The prefill's rank, as a decode leg names it.
///
/// # Errors
/// [`Refusal::BadRank`].
pub fn prefill_rank(bootstrap: &BootstrapFields) -> Result<Option<u64>, Refusal> {
    let rank = bootstrap.disagg_prefill_dp_rank.as_deref();
    rank.map(|rank| read_rank(rank.get())).transpose()
}

fn read_room(room: &RawValue) -> Result<u64, Refusal> {
    let bad = || Refusal::BadRoom(format!("{room} is not a whole number from 0 to 2^63 - 1"));
    let number: i64 = room.get().parse().map_err(|_| bad())?;
    u64::try_from(number).map_err(|_| bad())
}

fn read_address<T: DeserializeOwned>(
    name: &str,
    value: Option<&RawValue>,
) -> Result<Option<T>, Refusal> {
    let Some(value) = value else {
        return Ok(None);
    };
    match read(value) {
        Some(read) => Ok(Some(read)),
        None => Err(Refusal::WrongBootstrap(format!("has {name} {value}"))),
    }
}

fn read<T: DeserializeOwned>(value: &RawValue) -> Option<T> {
    serde_json::from_str(value.get()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::request::Endpoint;

    fn read_meeting(fields: &str) -> Result<RoomAddress, Refusal> {
        let body = format!(r#"{{"model":"m","prompt":"x",{fields}}}"#);
        let generation = Generation::parse(Endpoint::Completions, body.as_bytes()).expect("valid");
        let mut room_addresses = room_addresses(&generation, "r")?;
        Ok(room_addresses.remove(0))
    }

    fn room(text: &str) -> Result<u64, Refusal> {
        let address = r#""bootstrap_host":"127.0.0.1","bootstrap_port":8998"#;
        let room_address = read_meeting(&format!(r#"{address},"bootstrap_room":{text}"#));
        room_address.map(|room_address| room_address.room)
    }

    #[test]
    fn a_room_is_any_int63() {
        assert_eq!(room("0").ok(), Some(0));
        let most = i64::MAX.to_string();
        assert_eq!(room(&most).ok(), Some(i64::MAX as u64));
        assert!(matches!(room("null"), Err(Refusal::MissingRoom(_))));
        for bad in [
            "-1",
            "9223372036854775808",
            "1.0",
            "1e3",
            "\"1\"",
            "[1]",
            "-0.0",
        ] {
            assert!(matches!(room(bad), Err(Refusal::BadRoom(_))), "{bad}");
        }
    }

    #[test]
    fn the_address_must_be_the_engines_own() {
        let at = |host: &str, port: &str| {
            read_meeting(&format!(
                r#""bootstrap_room":1,"bootstrap_host":{host},"bootstrap_port":{port}"#
            ))
        };
        let v4: SocketAddr = "127.0.0.1:8998".parse().expect("an address");
        let v6: SocketAddr = "[::1]:8998".parse().expect("an address");
        for (host, own) in [
            (r#""127.0.0.1""#, v4),
            (r#""localhost""#, v4),
            (r#""[::1]""#, v6),
            (r#""::1""#, v6),
        ] {
            let room_address = at(host, "8998").expect(host);
            assert!(room_address.check_at(own).is_ok(), "{host}");
        }
        for (host, port) in [(r#""127.0.0.2""#, "8998"), (r#""127.0.0.1""#, "8999")] {
            assert!(at(host, port).expect(host).check_at(v4).is_err());
        }
        for (host, port) in [
            ("null", "8998"),
            (r#""127.0.0.1""#, "null"),
            ("1", "8998"),
            (r#""127.0.0.1""#, "\"8998\""),
            (r#""127.0.0.1""#, "65536"),
        ] {
            let refused = at(host, port);
            assert!(
                matches!(refused, Err(Refusal::WrongBootstrap(_))),
                "{host} {port}"
            );
        }
    }

    #[test]
    fn several_sequences_have_a_room_each() {
        let rooms = |body: &str, fields: [&str; 3]| {
            let [host, port, room] = fields;
            let body = format!(
                r#"{{"model":"m",{body},"bootstrap_host":{host},"bootstrap_port":{port},"bootstrap_room":{room}}}"#
            );
            let generation =
                Generation::parse(Endpoint::Completions, body.as_bytes()).expect("valid");
            let room_addresses = room_addresses(&generation, "r")?;
            Ok::<_, Refusal>(
                room_addresses
                    .iter()
                    .map(|one| one.room)
                    .collect::<Vec<_>>(),
            )
        };
        let hosts = r#"["a","b"]"#;
        for several in [r#""prompt":["x","y"]"#, r#""prompt":"x","n":2"#] {
            assert_eq!(
                rooms(several, [hosts, "[1,2]", "[7,9]"]).ok(),
                Some(vec![7, 9])
            );
            for room in ["7", "[7]", "[7,8,9]", "[7,7]", "[7,null]", "[]"] {
                let refused = rooms(several, [hosts, "[1,2]", room]);
                assert!(matches!(refused, Err(Refusal::BadRoom(_))), "{room}");
            }
            for (hosts, ports) in [("\"a\"", "[1,2]"), (hosts, "[1]"), (hosts, "null")] {
                let refused = rooms(several, [hosts, ports, "[7,9]"]);
                assert!(
                    matches!(refused, Err(Refusal::WrongBootstrap(_))),
                    "{ports}"
                );
            }
        }
        let one = r#""prompt":["x"]"#;
        assert_eq!(rooms(one, [r#"["a"]"#, "[1]", "[7]"]).ok(), Some(vec![7]));
        assert_eq!(rooms(one, [r#""a""#, "1", "7"]).ok(), Some(vec![7]));
    }
}
