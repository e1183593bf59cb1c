//! Owns engines without a hand-off: each worker runs whole requests, whose bodies stay unchanged.

use super::protocol::{Handoff, HandoffPair, LegOrder, NoHandoff, Protocol, Splits};
use super::rooms::Rooms;
use super::unserved::Unserved;
use crate::request::{Generation, Request};

/// Any engine that runs whole requests.
#[derive(Debug)]
pub struct Aggregated;

impl Protocol for Aggregated {
    fn name(&self) -> &'static str {
        "aggregated"
    }

    fn order(&self) -> LegOrder {
        LegOrder::NoHandoff
    }

    fn splits(&self, _generation: Generation) -> Splits {
        Splits::Yes
    }

    fn unserved(&self) -> &'static [&'static Unserved] {
        &[]
    }

    fn refuses_too_long(&self) -> bool {
        false
    }

    fn handoff(
        &self,
        _pair: &HandoffPair<'_>,
        _request: &Request<'_>,
        _rooms: &mut Rooms,
    ) -> Result<Option<Box<dyn Handoff>>, NoHandoff> {
        Ok(None)
    }
}
