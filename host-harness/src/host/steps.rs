//! Owns the count of the guest's steps per event, instructions, and of its host calls: both are the same on every machine.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use serde::Serialize;
use wasmtime::Store;

use super::state::HostState;

/// More steps than any event takes.
const FULL: u64 = 1 << 60;

/// Whether steps are counted: counting costs time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Counting {
    /// Not counted.
    #[default]
    Off,
    /// Counted.
    On,
}

/// Steps of the events of one callback.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct StepCounts {
    /// Number of events.
    events: u64,
    /// Steps of all events.
    total: u64,
    /// Steps of the longest event.
    most: u64,
    /// Host calls of all events.
    host_calls: u64,
}

/// Steps of all events, by callback.
#[derive(Debug, Default)]
pub struct Steps {
    counting: Counting,
    taken: Mutex<BTreeMap<&'static str, StepCounts>>,
}

impl Steps {
    /// Empty counts.
    pub fn new(counting: Counting) -> Steps {
        Steps {
            counting,
            taken: Mutex::default(),
        }
    }

    /// Whether steps are counted.
    pub fn counting(&self) -> Counting {
        self.counting
    }

    /// Runs a call into the guest and counts its steps.
    pub fn count<T>(
        &self,
        event: &'static str,
        store: &mut Store<HostState>,
        call: impl FnOnce(&mut Store<HostState>) -> wasmtime::Result<T>,
    ) -> wasmtime::Result<T> {
        if self.counting == Counting::Off {
            return call(store);
        }
        let calls_before = store.data().host_calls;
        store.set_fuel(FULL)?;
        let outcome = call(store);
        let steps = FULL.saturating_sub(store.get_fuel()?);
        let host_calls = store.data().host_calls.saturating_sub(calls_before);
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let known = taken.entry(event).or_default();
        known.events += 1;
        known.total += steps;
        known.host_calls += host_calls;
        known.most = known.most.max(steps);
        outcome
    }

    /// Counts since the start, or since [`Steps::reset`].
    pub fn taken(&self) -> BTreeMap<&'static str, StepCounts> {
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.clone()
    }

    /// Resets all counts.
    pub fn reset(&self) {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.clear();
    }
}
