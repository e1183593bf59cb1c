//! Owns the registered workers and their leases.
//!
//! The registry lies in the store that all threads share, under [`Registry::key`]: the thread that takes a registration
//! reads it, applies the change and writes it back, unless another thread has written meanwhile. A lease is measured by a
//! counter that stands still, in the observer's ticks: the clock may be set.

use std::net::SocketAddr;

use hashbrown::{HashMap, HashSet};
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

use super::fixed::identity;
use super::static_workers;
use crate::config::{Destinations, ListedWorker, MAX_RANKS, ranks};
use crate::fleet::{Worker, WorkerId};

/// Largest registry, in bytes: every thread reads it.
const MAX_BYTES: usize = 4 * 1024 * 1024;

/// The registered workers.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Registry {
    /// Grows with every change, so that no counter has the same value twice.
    beats: u64,
    /// The beat of the last change other than a renewal.
    revision: u64,
    entries: Vec<Entry>,
}

/// One registered worker. Its registration stays text: a thousand workers register again every few seconds, and each time
/// the whole registry is read and written.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Entry {
    id: WorkerId,
    address: Option<SocketAddr>,
    renewal: u64,
    /// Number of ranks. Absent in what other versions of the gateway wrote.
    #[serde(default)]
    ranks: u32,
    worker: Box<RawValue>,
}

/// A change of a registry.
#[derive(Debug, Clone, PartialEq)]
pub enum RegistryChange {
    /// Workers that register or renew. A known address with another id is another worker, and so is a known id at another
    /// address: the former worker is removed.
    Put(Vec<ListedWorker>),
    /// Workers to be removed.
    Delete(Vec<Named>),
}

/// Name of a worker to be removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Named {
    /// By its address.
    Address(SocketAddr),
    /// By its id, given or derived from the address.
    Id(u64),
}

/// Why a registry cannot be read, changed or written.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// Not what [`Registry::encode`] wrote.
    #[error("registry: {0}")]
    Format(#[from] serde_json::Error),
    /// More workers than allowed.
    #[error("{max} workers may be registered at once, and that many are")]
    Full {
        /// Maximum number of workers.
        max: usize,
    },
    /// More ranks of workers than allowed.
    #[error("the registered workers would have more than {MAX_RANKS} data-parallel ranks together")]
    TooManyRanks,
    /// The registrations are too large.
    #[error("the registered workers take more than {MAX_BYTES} bytes")]
    TooLarge,
}

impl Entry {
    /// The id: the worker's own, else one derived from the address.
    pub fn id(&self) -> WorkerId {
        self.id
    }

    /// The registration.
    ///
    /// # Errors
    /// Where the registration cannot be read: another version of the gateway wrote it.
    pub fn worker(&self) -> Result<ListedWorker, RegistryError> {
        Ok(serde_json::from_str(self.worker.get())?)
    }
}

impl Registry {
    /// Key of a pool's registry in the shared store.
    pub fn key(pool: &str) -> String {
        format!("pd_router.registry.{pool}")
    }

    /// The registered workers, in the order of registration.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Changes whenever [`Registry::workers`] may have changed: not with a mere renewal.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// The registered workers, without those that requests may not go to.
    pub fn workers(&self, destinations: &Destinations) -> Vec<Worker> {
        let entries = self.entries.iter();
        let listed: Vec<ListedWorker> = entries.filter_map(|entry| entry.worker().ok()).collect();
        let mut workers = static_workers(&listed);
        workers.retain(|worker| {
            let address = worker.address;
            address.is_none_or(|address| destinations.allow(address))
        });
        workers
    }

    /// Applies a change entirely or not at all, and returns how many workers it concerned.
    ///
    /// # Errors
    /// [`RegistryError::Full`] beyond `max_workers`, [`RegistryError::TooManyRanks`] beyond the ranks that a pool may have.
    pub fn apply(
        &mut self,
        change: &RegistryChange,
        max_workers: usize,
    ) -> Result<usize, RegistryError> {
        match change {
            RegistryChange::Put(workers) => self.put(workers, max_workers),
            RegistryChange::Delete(named) => Ok(self.delete(named)),
        }
    }

    fn put(&mut self, workers: &[ListedWorker], max: usize) -> Result<usize, RegistryError> {
        let beat = self.beats.saturating_add(1);
        let mut upserts = Upserts::of(workers, beat)?;
        let count = |is: &dyn Fn(&Entry) -> bool| self.entries.iter().filter(|e| is(e)).count();
        let renewed = count(&|entry| upserts.renew(entry));
        let kept = count(&|entry| upserts.renew(entry) || !upserts.replace(entry));
        let new = upserts.order.len().saturating_sub(renewed);
        // A bound lower than before removes no worker.
        if kept.saturating_add(new) > max.max(self.entries.len()) {
            return Err(RegistryError::Full { max });
        }
        let staying = self.entries.iter().filter(|entry| !upserts.replace(entry));
        let all = staying.chain(upserts.entries.values());
        let ranks = ranks(all.map(|entry| entry.ranks));
        if ranks > MAX_RANKS {
            return Err(RegistryError::TooManyRanks);
        }
        let mut is_changed = kept < self.entries.len() || new > 0;
        self.entries
            .retain(|entry| upserts.renew(entry) || !upserts.replace(entry));
        for entry in &mut self.entries {
            if let Some(new) = upserts.entries.remove(&entry.id) {
                is_changed |= new.worker.get() != entry.worker.get();
                *entry = new;
            }
        }
        let order = upserts.order.iter();
        let new = order.filter_map(|id| upserts.entries.remove(id));
        self.entries.extend(new);
        self.beats = beat;
        if is_changed {
            self.revision = beat;
        }
        Ok(workers.len())
    }

    fn delete(&mut self, named: &[Named]) -> usize {
        let named: HashSet<&Named> = named.iter().collect();
        let before = self.entries.len();
        self.entries.retain(|entry| {
            let by_address = entry.address.map(Named::Address);
            let mut names = by_address.into_iter().chain([Named::Id(entry.id.0)]);
            !names.any(|name| named.contains(&name))
        });
        let gone = before.saturating_sub(self.entries.len());
        if gone > 0 {
            self.beats = self.beats.saturating_add(1);
            self.revision = self.beats;
        }
        gone
    }

    /// The bytes for the shared store.
    ///
    /// # Errors
    /// [`RegistryError::TooLarge`] beyond 4 MiB: such a registry must not be written.
    pub fn encode(&self) -> Result<Vec<u8>, RegistryError> {
        let bytes = serde_json::to_vec(self)?;
        match bytes.len() <= MAX_BYTES {
            true => Ok(bytes),
            false => Err(RegistryError::TooLarge),
        }
    }

    /// Reads what [`Registry::encode`] wrote.
    ///
    /// # Errors
    /// When the bytes are something else.
    pub fn decode(bytes: &[u8]) -> Result<Self, RegistryError> {
        if bytes.len() > MAX_BYTES {
            return Err(RegistryError::TooLarge);
        }
        Ok(serde_json::from_slice(bytes)?)
    }
}

/// Workers that register.
struct Upserts {
    entries: HashMap<WorkerId, Entry>,
    /// Their ids, each once.
    order: Vec<WorkerId>,
    addresses: HashSet<SocketAddr>,
}

impl Upserts {
    fn of(workers: &[ListedWorker], renewal: u64) -> Result<Self, RegistryError> {
        let mut upserts = Self {
            entries: HashMap::with_capacity(workers.len()),
            order: Vec::with_capacity(workers.len()),
            addresses: workers.iter().filter_map(|w| w.address).collect(),
        };
        for listed in workers {
            let id = identity(listed);
            let entry = Entry {
                id,
                address: listed.address,
                renewal,
                ranks: listed.dp_size,
                worker: to_raw_value(listed)?,
            };
            if upserts.entries.insert(id, entry).is_none() {
                upserts.order.push(id);
            }
        }
        Ok(upserts)
    }

    /// Whether a registered worker renews with this change.
    fn renew(&self, entry: &Entry) -> bool {
        let new = self.entries.get(&entry.id);
        new.is_some_and(|new| new.address == entry.address)
    }

    /// Whether this change takes over the entry's id or address.
    fn replace(&self, entry: &Entry) -> bool {
        let address = entry.address;
        self.entries.contains_key(&entry.id)
            || address.is_some_and(|address| self.addresses.contains(&address))
    }
}

/// One VM's view of the counters: how long each worker has not registered again.
#[derive(Debug, Default)]
pub struct Leases {
    seen: HashMap<WorkerId, Seen>,
}

#[derive(Debug, Clone, Copy)]
struct Seen {
    renewal: u64,
    tick: u64,
}

impl Leases {
    /// Reads the registry at the observer's `tick` and returns the workers whose counter has stood still for `lease_ticks`.
    /// Only the leading VM may remove them, from the very registry that it read. A new observer starts every worker with a
    /// full lease.
    pub fn look(&mut self, registry: &Registry, tick: u64, lease_ticks: u64) -> Vec<Named> {
        let mut expired = Vec::new();
        let before = std::mem::take(&mut self.seen);
        for entry in registry.entries() {
            let (id, renewal) = (entry.id, entry.renewal);
            let seen = before.get(&id).copied();
            let seen = seen.filter(|seen| seen.renewal == renewal);
            let seen = seen.unwrap_or(Seen { renewal, tick });
            if tick.saturating_sub(seen.tick) >= lease_ticks {
                expired.push(Named::Id(id.0));
            }
            self.seen.insert(id, seen);
        }
        expired
    }

    /// Ticks since a worker was seen to register; none where this VM has not looked since.
    pub fn age(&self, entry: &Entry, tick: u64) -> Option<u64> {
        let seen = self.seen.get(&entry.id)?;
        (seen.renewal == entry.renewal).then(|| tick.saturating_sub(seen.tick))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn worker(address: &str, id: Option<u64>) -> ListedWorker {
        let id = id.map(|id| format!(r#","id":{id}"#)).unwrap_or_default();
        let json = format!(r#"{{"address":"{address}","role":"decode"{id}}}"#);
        serde_json::from_str(&json).unwrap()
    }

    fn put(registry: &mut Registry, workers: &[ListedWorker]) {
        registry
            .apply(&RegistryChange::Put(workers.to_vec()), 8)
            .unwrap();
    }

    fn who(registry: &Registry) -> Vec<String> {
        let workers = registry.workers(&Destinations::Members);
        let name = |worker: &Worker| match worker.id.0 {
            small @ 0..100 => format!("{} {small}", worker.name),
            _ => worker.name.clone(),
        };
        workers.iter().map(name).collect()
    }

    #[test]
    fn who_registers_again_renews_and_who_has_changed_is_another() {
        let mut registry = Registry::default();
        put(
            &mut registry,
            &[worker("10.0.0.1:1", Some(1)), worker("10.0.0.2:1", None)],
        );
        assert_eq!(who(&registry), ["10.0.0.1:1 1", "10.0.0.2:1"]);
        let first = registry.entries()[1].renewal;
        put(&mut registry, &[worker("10.0.0.2:1", None)]);
        assert!(registry.entries()[1].renewal > first);
        assert_eq!(registry.entries()[0].renewal, first);
        // A restart at the same address.
        put(&mut registry, &[worker("10.0.0.1:1", Some(3))]);
        assert_eq!(who(&registry), ["10.0.0.2:1", "10.0.0.1:1 3"]);
        // The same id at another address.
        put(&mut registry, &[worker("10.0.0.9:1", Some(3))]);
        assert_eq!(who(&registry), ["10.0.0.2:1", "10.0.0.9:1 3"]);
        // Two workers exchange their addresses.
        put(
            &mut registry,
            &[worker("10.0.0.2:1", Some(3)), worker("10.0.0.9:1", Some(4))],
        );
        assert_eq!(who(&registry), ["10.0.0.2:1 3", "10.0.0.9:1 4"]);
    }

    #[test]
    fn a_renewal_alone_is_no_revision() {
        let mut registry = Registry::default();
        let (one, two) = (worker("10.0.0.1:1", None), worker("10.0.0.2:1", Some(2)));
        let mut steps = vec![registry.revision()];
        let draining = ListedWorker {
            draining: true,
            ..one.clone()
        };
        let again = ListedWorker {
            id: Some(3),
            ..two.clone()
        };
        for (said, is_new) in [
            (&one, true),
            (&one, false),
            (&two, true),
            (&one, false),
            (&draining, true),
            (&two, false),
            (&again, true),
            (&again, false),
        ] {
            put(&mut registry, std::slice::from_ref(said));
            assert_eq!(!steps.contains(&registry.revision()), is_new, "{said:?}");
            steps.push(registry.revision());
        }
        let unknown = RegistryChange::Delete(vec![Named::Id(99)]);
        registry.apply(&unknown, 8).unwrap();
        assert!(steps.contains(&registry.revision()));
        registry
            .apply(&RegistryChange::Delete(vec![Named::Id(3)]), 8)
            .unwrap();
        assert!(!steps.contains(&registry.revision()));
    }

    #[test]
    fn it_takes_a_change_whole_or_not_at_all_and_only_so_many() {
        let mut registry = Registry::default();
        put(&mut registry, &[worker("10.0.0.1:1", None)]);
        let before = registry.clone();
        let more = [worker("10.0.0.2:1", None), worker("10.0.0.3:1", None)];
        let full = registry.apply(&RegistryChange::Put(more.to_vec()), 2);
        assert!(matches!(full, Err(RegistryError::Full { max: 2 })));
        assert_eq!(registry.encode().unwrap(), before.encode().unwrap());
        put(&mut registry, &more);
        // Registered workers stay, even beyond a lowered bound.
        assert_eq!(
            registry
                .apply(&RegistryChange::Put(more.to_vec()), 1)
                .unwrap(),
            2
        );
    }

    #[test]
    fn together_they_have_only_so_many_ranks() {
        let wide = |address: &str| ListedWorker {
            dp_size: 1024,
            ..worker(address, None)
        };
        let all: Vec<ListedWorker> = (1..=64).map(|n| wide(&format!("10.0.0.{n}:1"))).collect();
        let mut registry = Registry::default();
        let change = |workers: &[ListedWorker]| RegistryChange::Put(workers.to_vec());
        registry.apply(&change(&all), 100).unwrap();
        // All may renew, and one may take another's place.
        registry.apply(&change(&all), 100).unwrap();
        let more = registry.apply(&change(&[worker("10.0.1.1:1", None)]), 100);
        assert!(matches!(more, Err(RegistryError::TooManyRanks)));
        registry
            .apply(
                &RegistryChange::Delete(vec![Named::Address("10.0.0.1:1".parse().unwrap())]),
                100,
            )
            .unwrap();
        registry.apply(&change(&[wide("10.0.1.1:1")]), 100).unwrap();
    }

    #[test]
    fn they_go_by_address_and_by_either_kind_of_id() {
        let mut registry = Registry::default();
        let derived = identity(&worker("10.0.0.2:1", None)).0;
        put(
            &mut registry,
            &[
                worker("10.0.0.1:1", Some(1)),
                worker("10.0.0.2:1", None),
                worker("[fd00::1]:1", None),
                worker("10.0.0.4:1", None),
            ],
        );
        let named = [
            Named::Id(1),
            Named::Id(derived),
            Named::Address("[fd00::1]:1".parse().unwrap()),
            Named::Address("10.9.9.9:1".parse().unwrap()),
        ];
        let gone = registry
            .apply(&RegistryChange::Delete(named.to_vec()), 8)
            .unwrap();
        assert_eq!((gone, who(&registry)), (3, vec!["10.0.0.4:1".to_owned()]));
    }

    #[test]
    fn a_lease_ends_when_its_counter_has_stood_still() {
        let (mut registry, mut leases) = (Registry::default(), Leases::default());
        let (one, two) = (worker("10.0.0.1:1", Some(1)), worker("10.0.0.2:1", Some(2)));
        put(&mut registry, &[one.clone(), two.clone()]);
        for tick in 100..110 {
            assert_eq!(leases.look(&registry, tick, 10), [], "{tick}");
        }
        assert_eq!(leases.age(&registry.entries()[0], 109), Some(9));
        put(&mut registry, std::slice::from_ref(&two));
        assert_eq!(leases.age(&registry.entries()[1], 109), None);
        let expired = leases.look(&registry, 110, 10);
        assert_eq!(expired, [Named::Id(1)]);
        registry.apply(&RegistryChange::Delete(expired), 8).unwrap();
        assert_eq!(leases.look(&registry, 111, 10), []);
        // A worker that left and came back between two looks has a new lease.
        registry
            .apply(&RegistryChange::Delete(vec![Named::Id(2)]), 8)
            .unwrap();
        put(&mut registry, &[two]);
        assert_eq!(leases.look(&registry, 120, 10), []);
        assert_eq!(leases.look(&registry, 130, 10), [Named::Id(2)]);
        // A new leader has seen no counter yet.
        assert_eq!(Leases::default().look(&registry, 9_000, 10), []);
    }

    #[test]
    fn it_is_read_as_it_was_written_and_never_too_large() {
        let mut registry = Registry::default();
        put(&mut registry, &[worker("10.0.0.1:1", Some(u64::MAX))]);
        let bytes = registry.encode().unwrap();
        let read = Registry::decode(&bytes).unwrap();
        assert_eq!(read.encode().unwrap(), bytes);
        assert_eq!(read.entries()[0].worker().unwrap().id, Some(u64::MAX));
        // 4,096 such entries are less than a megabyte.
        assert!(bytes.len() < 240, "{}", String::from_utf8_lossy(&bytes));
        let mut large = worker("10.0.0.1:1", None);
        large.adapters = vec!["a".repeat(MAX_BYTES)];
        put(&mut registry, &[large]);
        assert!(matches!(registry.encode(), Err(RegistryError::TooLarge)));
        assert!(Registry::decode(&vec![b' '; MAX_BYTES + 1]).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(128) })]

        /// In any order of registrations, no address and no id occurs twice, and the last registered worker is there.
        #[test]
        fn nobody_is_there_twice(steps in prop::collection::vec((1_u16..5, prop::option::of(1_u64..4), any::<bool>()), 1..40)) {
            let mut registry = Registry::default();
            for (port, id, goes) in steps {
                let listed = worker(&format!("10.0.0.1:{port}"), id);
                match goes {
                    false => put(&mut registry, std::slice::from_ref(&listed)),
                    true => {
                        let named = vec![Named::Address(listed.address.unwrap())];
                        registry.apply(&RegistryChange::Delete(named), 8).unwrap();
                    }
                }
                let addresses: HashSet<_> = registry.entries().iter().map(|e| e.address).collect();
                let ids: HashSet<_> = registry.entries().iter().map(Entry::id).collect();
                prop_assert_eq!(addresses.len(), registry.entries().len());
                prop_assert_eq!(ids.len(), registry.entries().len());
                prop_assert_eq!(addresses.contains(&listed.address), !goes);
            }
        }

        #[test]
        fn garbage_is_no_registry(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Registry::decode(&bytes);
        }
    }
}
