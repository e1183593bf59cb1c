//! Owns the workers that have registered themselves, and their leases.
//!
//! The registry lies on the board that all threads share, under [`Registry::key`]: whoever takes a registration reads it,
//! applies the change and writes it back, if nobody was quicker. A lease is judged by a counter that stands still, and by the
//! ticks of the one who looks: the clock may be set.

use std::net::SocketAddr;

use hashbrown::{HashMap, HashSet};
use serde::{Deserialize, Serialize};

use super::fixed::identity;
use super::static_workers;
use crate::config::{Destinations, ListedWorker};
use crate::fleet::{Worker, WorkerId};

/// Bytes of a registry at most: it is read by every thread.
const MAX_BYTES: usize = 4 * 1024 * 1024;

/// The workers that have registered.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Registry {
    /// Grows with every change that lists somebody, so that no counter ever has a value twice.
    beats: u64,
    entries: Vec<Entry>,
}

/// One that has registered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// What it said of itself.
    pub worker: ListedWorker,
    /// Grows whenever it registers again.
    pub renewal: u64,
}

/// What changes in a registry.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// These are there, or there still. One at a known address with another id is another worker, and so is one of a known id
    /// at another address: the one that was there is gone.
    Put(Vec<ListedWorker>),
    /// These are gone.
    Delete(Vec<Named>),
}

/// How a worker is named that is to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Named {
    /// By where it is.
    Address(SocketAddr),
    /// By its id, also by one that follows from its address.
    Id(u64),
}

/// Why a registry cannot be read, changed or written.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// Not what [`Registry::encode`] wrote.
    #[error("registry: {0}")]
    Format(#[from] serde_json::Error),
    /// There would be more workers than there may be.
    #[error("{max} workers may be registered at once, and that many are")]
    Full {
        /// How many may.
        max: usize,
    },
    /// What the workers say of themselves takes too much room.
    #[error("the registered workers take more than {MAX_BYTES} bytes")]
    TooLarge,
}

impl Registry {
    /// Where a pool's registry lies on the board.
    pub fn key(pool: &str) -> String {
        format!("pd_router.registry.{pool}")
    }

    /// Those who have registered, in the order in which they came.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The same as workers, but for those whom requests may not go to.
    pub fn workers(&self, destinations: &Destinations) -> Vec<Worker> {
        let listed: Vec<ListedWorker> = self.entries.iter().map(|e| e.worker.clone()).collect();
        let mut workers = static_workers(&listed);
        workers.retain(|worker| {
            let address = worker.address;
            address.is_none_or(|address| destinations.allow(address))
        });
        workers
    }

    /// Changes it whole or not at all, and tells how many workers the change was about.
    ///
    /// # Errors
    /// [`RegistryError::Full`] where it would grow beyond `max_workers`.
    pub fn apply(&mut self, change: &Change, max_workers: usize) -> Result<usize, RegistryError> {
        match change {
            Change::Put(workers) => self.put(workers, max_workers),
            Change::Delete(named) => Ok(self.delete(named)),
        }
    }

    fn put(&mut self, workers: &[ListedWorker], max: usize) -> Result<usize, RegistryError> {
        let renewal = self.beats.saturating_add(1);
        let mut coming: HashMap<WorkerId, &ListedWorker> =
            workers.iter().map(|w| (identity(w), w)).collect();
        let taken: HashSet<SocketAddr> = workers.iter().filter_map(|w| w.address).collect();
        let mut entries = Vec::with_capacity(self.entries.len().saturating_add(workers.len()));
        for entry in &self.entries {
            let id = identity(&entry.worker);
            let address = entry.worker.address;
            let same = coming.get(&id).copied().filter(|w| w.address == address);
            if let Some(worker) = same {
                coming.remove(&id);
                let worker = worker.clone();
                entries.push(Entry { worker, renewal });
                continue;
            }
            let is_replaced =
                coming.contains_key(&id) || address.is_some_and(|address| taken.contains(&address));
            if !is_replaced {
                entries.push(entry.clone());
            }
        }
        let new = workers
            .iter()
            .filter(|worker| coming.remove(&identity(worker)).is_some());
        entries.extend(new.map(|worker| Entry {
            worker: worker.clone(),
            renewal,
        }));
        // A smaller bound than before drives nobody away.
        if entries.len() > max.max(self.entries.len()) {
            return Err(RegistryError::Full { max });
        }
        self.beats = renewal;
        self.entries = entries;
        Ok(workers.len())
    }

    fn delete(&mut self, named: &[Named]) -> usize {
        let named: HashSet<Name> = named.iter().map(|named| Name::of(*named)).collect();
        let before = self.entries.len();
        self.entries.retain(|entry| {
            let by_address = entry.worker.address.map(|address| Name(Some(address), 0));
            let by_id = Name(None, identity(&entry.worker).0);
            !named.contains(&by_id) && !by_address.is_some_and(|name| named.contains(&name))
        });
        before.saturating_sub(self.entries.len())
    }

    /// The form in which it lies on the board.
    ///
    /// # Errors
    /// [`RegistryError::TooLarge`] beyond 4 MiB: it is not to be written then.
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

/// A name that can be looked up.
#[derive(PartialEq, Eq, Hash)]
struct Name(Option<SocketAddr>, u64);

impl Name {
    fn of(named: Named) -> Self {
        match named {
            Named::Address(address) => Self(Some(address), 0),
            Named::Id(id) => Self(None, id),
        }
    }
}

/// What one VM has seen of the counters: who has not registered again for how long.
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
    /// Looks at the registry at the observer's `tick`, and tells whose counter has stood still for `lease_ticks`. Only a VM that
    /// leads may take them out, from the very registry that was looked at. One that begins to look gives everyone a whole lease.
    pub fn look(&mut self, registry: &Registry, tick: u64, lease_ticks: u64) -> Vec<Named> {
        let mut expired = Vec::new();
        let before = std::mem::take(&mut self.seen);
        for entry in registry.entries() {
            let id = identity(&entry.worker);
            let renewal = entry.renewal;
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

    /// How many ticks ago a worker was seen to register; none where this VM has not looked since.
    pub fn age(&self, entry: &Entry, tick: u64) -> Option<u64> {
        let seen = self.seen.get(&identity(&entry.worker))?;
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
        registry.apply(&Change::Put(workers.to_vec()), 8).unwrap();
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
        // A new start at the same address.
        put(&mut registry, &[worker("10.0.0.1:1", Some(3))]);
        assert_eq!(who(&registry), ["10.0.0.2:1", "10.0.0.1:1 3"]);
        // The same id elsewhere.
        put(&mut registry, &[worker("10.0.0.9:1", Some(3))]);
        assert_eq!(who(&registry), ["10.0.0.2:1", "10.0.0.9:1 3"]);
        // Two exchange their addresses.
        put(
            &mut registry,
            &[worker("10.0.0.2:1", Some(3)), worker("10.0.0.9:1", Some(4))],
        );
        assert_eq!(who(&registry), ["10.0.0.2:1 3", "10.0.0.9:1 4"]);
    }

    #[test]
    fn it_takes_a_change_whole_or_not_at_all_and_only_so_many() {
        let mut registry = Registry::default();
        put(&mut registry, &[worker("10.0.0.1:1", None)]);
        let before = registry.clone();
        let more = [worker("10.0.0.2:1", None), worker("10.0.0.3:1", None)];
        let full = registry.apply(&Change::Put(more.to_vec()), 2);
        assert!(matches!(full, Err(RegistryError::Full { max: 2 })));
        assert_eq!(registry, before);
        put(&mut registry, &more);
        // Those who are there stay, whatever the bound has become.
        assert_eq!(registry.apply(&Change::Put(more.to_vec()), 1).unwrap(), 2);
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
        let gone = registry.apply(&Change::Delete(named.to_vec()), 8).unwrap();
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
        registry.apply(&Change::Delete(expired), 8).unwrap();
        assert_eq!(leases.look(&registry, 111, 10), []);
        // Gone and back between two looks, it has a lease of its own.
        registry
            .apply(&Change::Delete(vec![Named::Id(2)]), 8)
            .unwrap();
        put(&mut registry, &[two]);
        assert_eq!(leases.look(&registry, 120, 10), []);
        assert_eq!(leases.look(&registry, 130, 10), [Named::Id(2)]);
        // Another leader has seen nothing yet.
        assert_eq!(Leases::default().look(&registry, 9_000, 10), []);
    }

    #[test]
    fn it_is_read_as_it_was_written_and_never_too_large() {
        let mut registry = Registry::default();
        put(&mut registry, &[worker("10.0.0.1:1", Some(u64::MAX))]);
        let bytes = registry.encode().unwrap();
        assert_eq!(Registry::decode(&bytes).unwrap(), registry);
        // 4,096 of them are half a megabyte.
        assert!(bytes.len() < 160, "{}", String::from_utf8_lossy(&bytes));
        let mut large = worker("10.0.0.1:1", None);
        large.adapters = vec!["a".repeat(MAX_BYTES)];
        put(&mut registry, &[large]);
        assert!(matches!(registry.encode(), Err(RegistryError::TooLarge)));
        assert!(Registry::decode(&vec![b' '; MAX_BYTES + 1]).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(128) })]

        /// Whatever is registered in whatever order: no address and no id is there twice, and the last one to come is there.
        #[test]
        fn nobody_is_there_twice(steps in prop::collection::vec((1_u16..5, prop::option::of(1_u64..4), any::<bool>()), 1..40)) {
            let mut registry = Registry::default();
            for (port, id, goes) in steps {
                let listed = worker(&format!("10.0.0.1:{port}"), id);
                match goes {
                    false => put(&mut registry, std::slice::from_ref(&listed)),
                    true => {
                        let named = vec![Named::Address(listed.address.unwrap())];
                        registry.apply(&Change::Delete(named), 8).unwrap();
                    }
                }
                let addresses: HashSet<_> = registry.entries().iter().map(|e| e.worker.address).collect();
                let ids: HashSet<_> = registry.entries().iter().map(|e| identity(&e.worker)).collect();
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
