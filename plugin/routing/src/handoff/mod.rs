//! Owns what each leg of a hand-off is sent, one file per protocol.

pub mod direct;
pub mod nixl;

/// A header to be set on a leg: set, never added, so that a client's own value does not survive beside it.
pub type HeaderValue = (&'static str, String);
