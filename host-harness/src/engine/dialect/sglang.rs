//! SGLang's bootstrap: three fields in both legs that name the prefill engine's bootstrap server and a room there.

use std::net::{IpAddr, SocketAddr};

use hyper::header::HeaderMap;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use super::{below, header_rank, read_rank};
use crate::engine::refusal::Refusal;
use crate::engine::request::{Bootstrap, Generation};

/// Where the legs of a request meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meeting {
    /// Host of the prefill engine's bootstrap server, an IPv6 address without brackets.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// The room, at most 2^63 - 1.
    pub room: u64,
}

/// The request's id: its own, else that of the header, else a new one.
///
/// # Errors
/// [`Refusal::BadRequest`] for a `rid` that is no text.
pub fn rid(bootstrap: &Bootstrap, headers: &HeaderMap) -> Result<String, Refusal> {
    if let Some(rid) = &bootstrap.rid {
        return read(rid).ok_or_else(|| Refusal::BadRequest("Invalid `rid`: not a string".into()));
    }
    let given = headers.get("x-request-id").and_then(|id| id.to_str().ok());
    Ok(match given {
        Some(given) if !given.is_empty() => given.to_owned(),
        _ => format!("{:032x}", rand::random::<u128>()),
    })
}

/// Reads where the legs meet. A room serves one sequence.
///
/// # Errors
/// [`Refusal::MissingRoom`], [`Refusal::BadRoom`] or [`Refusal::WrongBootstrap`].
pub fn meeting(generation: &Generation, rid: &str) -> Result<Meeting, Refusal> {
    let bootstrap = &generation.bootstrap;
    let room = match &bootstrap.room {
        None => return Err(Refusal::MissingRoom(rid.to_owned())),
        Some(room) => read_room(room)?,
    };
    if generation.sequences() > 1 {
        return Err(Refusal::BadRoom(format!(
            "{room} is one for {} sequences",
            generation.sequences()
        )));
    }
    let host: Option<String> = read_address("bootstrap_host", bootstrap.host.as_deref())?;
    let port: Option<u16> = read_address("bootstrap_port", bootstrap.port.as_deref())?;
    let (Some(host), Some(port)) = (host, port) else {
        return Err(Refusal::WrongBootstrap("is missing".into()));
    };
    let inside = host
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    Ok(Meeting {
        host: inside.unwrap_or(&host).to_owned(),
        port,
        room,
    })
}

impl Meeting {
    /// Whether this is at `own`, a prefill engine's bootstrap server as the client can reach it.
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

    /// The rank that the room stands for, of `dp_size`.
    pub fn rank(&self, dp_size: u32) -> u64 {
        self.room % u64::from(dp_size)
    }

    /// Whether a rank asked for is the one the room stands for.
    ///
    /// # Errors
    /// [`Refusal::RankConflict`].
    pub fn check_rank(&self, asked: Option<u64>, dp_size: u32) -> Result<(), Refusal> {
        let implied = self.rank(dp_size);
        match asked {
            Some(asked) if asked != implied => Err(Refusal::RankConflict {
                asked,
                room: self.room,
                implied,
            }),
            _ => Ok(()),
        }
    }
}

/// The rank, of `dp_size`, that is asked to run a leg.
///
/// # Errors
/// [`Refusal::BadRank`] where it is no rank of the engine, or the body's and the header's differ.
pub fn routed_rank(
    bootstrap: &Bootstrap,
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

/// The rank of the prefill, as a decode leg names it.
///
/// # Errors
/// [`Refusal::BadRank`].
pub fn prefill_rank(bootstrap: &Bootstrap) -> Result<Option<u64>, Refusal> {
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

    fn read_meeting(fields: &str) -> Result<Meeting, Refusal> {
        let body = format!(r#"{{"model":"m","prompt":"x",{fields}}}"#);
        let generation = Generation::parse(Endpoint::Completions, body.as_bytes()).expect("valid");
        meeting(&generation, "r")
    }

    fn room(text: &str) -> Result<u64, Refusal> {
        let address = r#""bootstrap_host":"127.0.0.1","bootstrap_port":8998"#;
        let meeting = read_meeting(&format!(r#"{address},"bootstrap_room":{text}"#));
        meeting.map(|meeting| meeting.room)
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
            let meeting = at(host, "8998").expect(host);
            assert!(meeting.check_at(own).is_ok(), "{host}");
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
}
