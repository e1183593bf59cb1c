//! Owns the hosts in a hand-off, from which decode would fetch, and whether decode may.
//!
//! A prefill engine itself reports where its KV lies. That may be another address than its HTTP server's, such as that of
//! an RDMA network card, or a name; a pool with configured networks restricts it to those.

use std::net::IpAddr;

use crate::json::elements;
use crate::network::Network;

/// The hosts in a JSON value: a string, or a list of strings. A string may be a host alone, `host:port`, or a URL. Another value
/// counts as a host of that name, which is no address: an engine may read one in it.
pub fn named(value: &str) -> Vec<String> {
    let values = elements(value).unwrap_or_else(|| vec![value]);
    values.into_iter().filter_map(host).collect()
}

fn host(value: &str) -> Option<String> {
    match serde_json::from_str::<Option<String>>(value) {
        Ok(text) => text
            .filter(|text| !text.is_empty())
            .map(|text| host_of(&text).to_owned()),
        Err(_) => Some(value.to_owned()),
    }
}

fn host_of(text: &str) -> &str {
    let after = text.split_once("://").map_or(text, |(_, rest)| rest);
    let end = after.find(['/', '?']).unwrap_or(after.len());
    let authority = after.get(..end).unwrap_or_default();
    let authority = authority
        .rsplit_once('@')
        .map_or(authority, |(_, host)| host);
    match authority.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        // Several colons without brackets: a bare IPv6 address.
        None if authority.matches(':').count() > 1 => authority,
        None => authority.split(':').next().unwrap_or_default(),
    }
}

/// A problem with the hosts of a hand-off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Oddity {
    /// A host outside the pool's configured networks, or no address.
    Outside(String),
    /// A host other than its worker's own address, in a pool without configured networks.
    Elsewhere(String),
}

/// Checks the hosts in the hand-off of a worker at `own`; none: no problem.
pub fn look(hosts: &[String], own: Option<IpAddr>, networks: &[Network]) -> Option<Oddity> {
    let address = |host: &String| host.parse::<IpAddr>().ok();
    let is_within = |host: &&String| {
        let address = address(host);
        address.is_some_and(|at| networks.iter().any(|network| network.contains(at)))
    };
    let is_own = |host: &&String| {
        let address = address(host).map(|address| address.to_canonical());
        address.is_some() && address == own.map(|own| own.to_canonical())
    };
    let mut hosts = hosts.iter();
    match networks.is_empty() {
        true => hosts
            .find(|host| !is_own(host))
            .cloned()
            .map(Oddity::Elsewhere),
        false => hosts
            .find(|host| !is_within(host))
            .cloned()
            .map(Oddity::Outside),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn found_b15_hosts_are_found_in_all_their_spellings() {
        for (value, hosts) in [
            (r#""10.0.0.1""#, &["10.0.0.1"][..]),
            (r#""10.0.0.1:5600""#, &["10.0.0.1"]),
            (r#""tcp://10.0.0.1:5600/x""#, &["10.0.0.1"]),
            (r#""[fd00::1]:5600""#, &["fd00::1"]),
            (r#""fd00::1""#, &["fd00::1"]),
            (r#""tcp://rdma-7.local:1""#, &["rdma-7.local"]),
            (r#"["10.0.0.1:1", "10.0.0.2:2"]"#, &["10.0.0.1", "10.0.0.2"]),
            ("null", &[]),
            ("7", &["7"]),
            (r#""""#, &[]),
            ("{}", &["{}"]),
            (r#""tcp://10.0.0.1:5600@rdma-7.local:1""#, &["rdma-7.local"]),
            (r#""10.0.0.1@10.9.9.9""#, &["10.9.9.9"]),
        ] {
            assert_eq!(named(value), hosts, "{value}");
        }
    }

    #[test]
    fn found_b15_a_host_lies_in_the_pools_networks_or_is_told_of() {
        let own: Option<IpAddr> = "10.0.0.1".parse().ok();
        let networks: [Network; 2] = ["10.0.0.0/8".parse().unwrap(), "fd00::/8".parse().unwrap()];
        let odd = |host: &str, networks: &[Network]| look(&[host.to_owned()], own, networks);
        for host in ["10.0.0.1", "10.9.9.9", "::ffff:10.0.0.2", "fd00::7"] {
            assert_eq!(odd(host, &networks), None, "{host}");
        }
        for host in [
            "169.254.169.254",
            "localhost",
            "127.0.0.1",
            "11.0.0.1",
            "10.0.0",
        ] {
            let outside = Some(Oddity::Outside(host.to_owned()));
            assert_eq!(odd(host, &networks), outside, "{host}");
        }
        for host in ["10.0.0.1", "::ffff:10.0.0.1"] {
            assert_eq!(odd(host, &[]), None, "{host}");
        }
        for host in ["10.0.0.2", "rdma-7.local"] {
            let elsewhere = Some(Oddity::Elsewhere(host.to_owned()));
            assert_eq!(odd(host, &[]), elsewhere, "{host}");
        }
        assert_eq!(look(&[], own, &networks), None);
    }
}
