//! Owns how many steps the guest takes for one event: instructions, which are the same on every machine.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use serde::Serialize;
use wasmtime::Store;

/// More than any event takes.
const FULL: u64 = 1 << 60;

/// Whether steps are counted: they cost time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Counting {
    /// They are not.
    #[default]
    Off,
    /// They are.
    On,
}

/// What the events of one callback took.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Taken {
    /// How many there were.
    events: u64,
    /// Steps of all of them.
    total: u64,
    /// The most steps of one.
    most: u64,
}

/// What all events took, by callback.
#[derive(Debug, Default)]
pub struct Steps {
    counting: Counting,
    taken: Mutex<BTreeMap<&'static str, Taken>>,
}

impl Steps {
    /// None counted yet.
    pub fn new(counting: Counting) -> Steps {
        Steps {
            counting,
            taken: Mutex::default(),
        }
    }

    /// Whether they are counted.
    pub fn counting(&self) -> Counting {
        self.counting
    }

    /// Runs a call into the guest, and counts what it takes.
    pub fn count<State, T>(
        &self,
        event: &'static str,
        store: &mut Store<State>,
        call: impl FnOnce(&mut Store<State>) -> wasmtime::Result<T>,
    ) -> wasmtime::Result<T> {
        if self.counting == Counting::Off {
            return call(store);
        }
        store.set_fuel(FULL)?;
        let outcome = call(store);
        let steps = FULL.saturating_sub(store.get_fuel()?);
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let known = taken.entry(event).or_default();
        known.events += 1;
        known.total += steps;
        known.most = known.most.max(steps);
        outcome
    }

    /// What they took since the start, or since [`Steps::reset`].
    pub fn taken(&self) -> BTreeMap<&'static str, Taken> {
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.clone()
    }

    /// Forgets what was counted.
    pub fn reset(&self) {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.clear();
    }
}
