//! Owns the headers of a request that matter to the router.

use routing::route::Explain;
use routing::selection::eligibility::Subset;

use crate::headers;
use crate::host::{self, Header};
use crate::vm::InStream;

/// Properties with the subset hint of the endpoint picker protocol: in the stream's metadata, else in its route's.
const SUBSET_HINTS: [&[&str]; 2] = [
    &[
        "metadata",
        "filter_metadata",
        "envoy.lb.subset_hint",
        headers::SUBSET,
    ],
    &[
        "xds",
        "route_metadata",
        "filter_metadata",
        "envoy.lb.subset_hint",
        headers::SUBSET,
    ],
];

/// Headers of a request that matter to the router, kept until the request is planned.
#[derive(Default)]
pub struct RoutingHeaders {
    /// Routing overrides of a trusted caller.
    pub overrides: Vec<Header>,
    /// The session that the request names.
    pub session: Option<Vec<u8>>,
    /// The tenant that the request names.
    pub tenant: Option<Vec<u8>>,
}

impl RoutingHeaders {
    fn overrides(&self, wanted: &str) -> Option<&[u8]> {
        let named = |(name, _): &&Header| name.eq_ignore_ascii_case(wanted.as_bytes());
        let found = self.overrides.iter().find(named);
        found.map(|(_, value)| value.as_slice())
    }

    /// The endpoints that the gateway in front allows: by metadata, which no client can write, else by a header.
    pub fn subset(&self, _in: &InStream) -> Option<Subset> {
        let mut hints = SUBSET_HINTS.iter().copied();
        if let Some(hint) = hints.find_map(host::property) {
            return Some(Subset::of_metadata(&hint));
        }
        let text = self.overrides(headers::SUBSET)?;
        // A value that is not text names no endpoint, and so allows none.
        Some(Subset::parse(std::str::from_utf8(text).unwrap_or_default()))
    }

    /// Whether the choices are to be explained.
    pub fn explain(&self) -> Explain {
        let asked = self.overrides(headers::EXPLAIN);
        match asked.is_some_and(|value| value == b"1" || value.eq_ignore_ascii_case(b"true")) {
            true => Explain::ForCaller,
            false if log::log_enabled!(log::Level::Debug) => Explain::ForLog,
            false => Explain::No,
        }
    }
}
