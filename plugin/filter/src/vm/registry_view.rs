//! Owns a pool's registry as this VM has seen it.

use std::time::Duration;

use routing::discovery::{Leases, Named, Registry};

use crate::host;

/// A pool's registry as this VM has seen it.
#[derive(Default)]
pub struct RegistryView {
    /// The registry, at `version`.
    pub registry: Registry,
    /// The version that was read last.
    pub version: Option<u32>,
    /// How long each registration has stood still.
    pub leases: Leases,
    /// Rounds so far.
    pub rounds: u64,
    /// Length of a round.
    pub round: Duration,
}

impl RegistryView {
    /// Reads the registry at `key`. Returns the workers whose counter has stood still for `lease` rounds.
    pub fn look(&mut self, key: &str, lease: u64) -> Vec<Named> {
        if let Some((bytes, version)) = host::shared(key)
            && self.version.replace(version) != Some(version)
        {
            self.registry = Registry::decode(&bytes).unwrap_or_default();
        }
        self.leases.look(&self.registry, self.rounds, lease)
    }
}
