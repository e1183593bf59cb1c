//! Owns the observed prefill rates of a list of worker ranks: computed anew once they are old, and shared until then.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::{Ledger, PrefillRate};

/// Time for which computed rates are reused: many prompts make up a rate, and it changes slowly.
const LASTS: Duration = Duration::from_millis(20);

/// The rates of a list of worker ranks, as last computed.
#[derive(Debug, Default)]
pub struct RateCache(Mutex<Option<(Duration, ObservedRates)>>);

/// The rates of a list of worker ranks.
#[derive(Debug, Clone)]
pub struct ObservedRates {
    /// The common rate; none if unknown.
    pub common: Option<PrefillRate>,
    /// Slowness of each rank against that rate, in the order of the list.
    pub slowness: Arc<[f32]>,
}

impl RateCache {
    /// The rates of the ranks in these slots.
    pub fn rates(
        &self,
        slots: impl Iterator<Item = usize> + Clone,
        ledger: &Ledger,
    ) -> ObservedRates {
        let now = ledger.now();
        let mut cached = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, rates)) = &*cached
            && now.saturating_sub(*at) < LASTS
        {
            return rates.clone();
        }
        let common = ledger.rate(slots.clone());
        let slowness = slots.map(|slot| ledger.slowness(slot, common) as f32);
        let rates = ObservedRates {
            common,
            slowness: slowness.collect(),
        };
        *cached = Some((now, rates.clone()));
        rates
    }
}
