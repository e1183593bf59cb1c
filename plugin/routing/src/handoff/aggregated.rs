//! Owns engines without a hand-off: each worker runs whole requests, whose bodies stay unchanged.

use super::protocol::{Handoff, HandoffPair, LegOrder, Protocol, ProtocolRules};
use super::rooms::Rooms;
use crate::refusal::Refusal;
use crate::request::{Generation, Request};

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

    fn handoff(
        &self,
        _pair: &HandoffPair<'_>,
        _request: &Request<'_>,
        _rooms: &mut Rooms,
    ) -> Result<Option<Box<dyn Handoff>>, Refusal> {
        Ok(None)
    }
}
