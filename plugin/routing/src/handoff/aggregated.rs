//! Owns engines without a hand-off: each worker runs whole requests, whose bodies stay unchanged.

use super::protocol::{LegOrder, Protocol, ProtocolRules};
use crate::request::Generation;

/// Any engine that runs whole requests.
#[derive(Debug)]
pub struct Aggregated;

impl Protocol for Aggregated {
    fn rules(&self) -> &'static ProtocolRules {
        &ProtocolRules {
            name: "aggregated",
            order: LegOrder::NoHandoff,
            reaches_workers: true,
            split: &Generation::ALL,
            split_if_configured: &[],
            has_generate_api: false,
            unserved: &[],
            refuses_too_long: false,
        }
    }
}
