//! Owns networks: ranges of IP addresses.

use std::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;
use serde::Deserialize;

/// A range of IP addresses, as `10.0.0.0/8` or `fd00::/8`. An address without a prefix length is a range of one address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(try_from = "String")]
pub struct Network(#[cfg_attr(feature = "schema", schemars(with = "String"))] IpNet);

/// Why a text is not a network.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a network: write it as \"10.0.0.0/8\" or \"fd00::/8\"")]
pub struct NetworkError(String);

impl Network {
    /// Whether an address lies within. An IPv4 address that is written as an IPv6 one is an IPv4 address.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.contains(&address.to_canonical())
    }
}

impl FromStr for Network {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Self, NetworkError> {
        read(text)
            .map(Self)
            .ok_or_else(|| NetworkError(text.to_owned()))
    }
}

/// Reads a network, or one address. The address is read by the standard library: no octet has a leading zero, which some read as
/// octal.
fn read(text: &str) -> Option<IpNet> {
    let Some((address, bits)) = text.split_once('/') else {
        return text.parse().ok().map(|address: IpAddr| address.into());
    };
    let is_number = bits.bytes().all(|byte| byte.is_ascii_digit());
    let bits = bits.parse().ok().filter(|_| is_number)?;
    IpNet::new(address.parse().ok()?, bits).ok()
}

impl TryFrom<String> for Network {
    type Error = NetworkError;

    fn try_from(text: String) -> Result<Self, NetworkError> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holds(network: &str, address: &str) -> bool {
        let network: Network = network.parse().unwrap();
        network.contains(address.parse().unwrap())
    }

    #[test]
    fn a_network_holds_its_own_and_nobody_else() {
        for (network, address, is_in) in [
            ("10.0.0.0/8", "10.255.0.1", true),
            ("10.0.0.0/8", "11.0.0.1", false),
            ("10.1.2.3/8", "10.9.9.9", true),
            ("10.0.0.0/31", "10.0.0.1", true),
            ("10.0.0.0/31", "10.0.0.2", false),
            ("0.0.0.0/0", "192.0.2.1", true),
            ("0.0.0.0/0", "::1", false),
            ("::/0", "::1", true),
            ("::/0", "192.0.2.1", false),
            ("fd00::/8", "fd12::1", true),
            ("fd00::/8", "fe80::1", false),
            ("::1", "::1", true),
            ("192.0.2.7", "192.0.2.7", true),
            ("192.0.2.7", "192.0.2.8", false),
            // Written as IPv6, it is IPv4 all the same.
            ("10.0.0.0/8", "::ffff:10.0.0.1", true),
            ("::/0", "::ffff:169.254.169.254", false),
        ] {
            assert_eq!(holds(network, address), is_in, "{network} {address}");
        }
    }

    #[test]
    fn what_is_no_network_is_refused() {
        for text in [
            "",
            "10.0.0.0/33",
            "fd00::/129",
            "10.0.0.0/",
            "10.0.0.0/-1",
            "10.0.0.0/+8",
            "10.0.0/8",
            "host/8",
            "10.0.0.0/8/8",
            "10.0.0.0/300",
            "010.0.0.0/8",
            "192.168.001.0/24",
            "1:2:3:4:5:6:7::8/64",
        ] {
            assert!(text.parse::<Network>().is_err(), "{text}");
        }
    }
}
