//! Owns self-registration of workers: requests to the registry, and the expiry of leases.

use std::rc::Rc;
use std::time::Duration;

use routing::config::{Discovery, RegistrationDiscovery};
use routing::discovery::{
    self, Leases, MAX_BODY, Named, Problem, RegistrationPool, Registry, RegistryChange, Reply,
};
use routing::request::Head;

use crate::discovery::publish;
use crate::host::{self, Header, WriteOutcome};
use crate::vm::PoolRuntime;
use crate::vm::Pools;

const PATH: &[u8] = b"/pd-router/workers";

/// Attempts at updating a registry while other threads update it too.
const ATTEMPTS: u32 = 16;

/// A request to the registry, kept until its body is complete.
pub struct RegistrationRequest {
    method: Method,
    path: String,
    authorization: Option<Vec<u8>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Method {
    List,
    Put,
    Delete,
    Other,
}

impl RegistrationRequest {
    /// The registry request with this `head`; `None` for any other path, or if no pool takes registrations.
    pub fn of(pools: &Pools, head: Head<'_>, headers: &[Header]) -> Option<Self> {
        let end = head.path.iter().position(|byte| *byte == b'?');
        let path = head.path.get(..end.unwrap_or(head.path.len()))?;
        let takes =
            |pool: &routing::config::Pool| matches!(pool.discovery, Discovery::Registration(_));
        if path != PATH || !pools.config.pools.iter().any(takes) {
            return None;
        }
        let authorization = headers
            .iter()
            .find_map(|(name, value)| (name == b"authorization").then(|| value.clone()));
        Some(Self {
            method: match head.method {
                b"GET" | b"HEAD" => Method::List,
                b"POST" => Method::Put,
                b"DELETE" => Method::Delete,
                _ => Method::Other,
            },
            path: String::from_utf8_lossy(head.path).into_owned(),
            authorization,
        })
    }

    /// The reply that needs no body, so that no body is sent in vain; `None`: the body is needed.
    pub fn early_answer(&self, pools: &Pools) -> Option<Reply> {
        let registration_pool = match self.registration_pool(pools) {
            Ok(registration_pool) => registration_pool,
            Err(problem) => return Some(problem.reply()),
        };
        match self.method {
            Method::List => Some(list(pools, &registration_pool)),
            Method::Put | Method::Delete => None,
            Method::Other => Some(Problem::Method.reply()),
        }
    }

    /// Whether a body of `size` bytes is over the limit.
    pub fn is_too_long(size: usize) -> bool {
        size > MAX_BODY
    }

    /// The reply to the complete request.
    pub fn answer(&self, pools: &Pools, body: &[u8]) -> Reply {
        match self.change(pools, body) {
            Ok(reply) => reply,
            Err(problem) => problem.reply(),
        }
    }

    fn registration_pool<'p>(&self, pools: &'p Pools) -> Result<RegistrationPool<'p>, Problem> {
        let all = pools.config.pools.iter();
        discovery::registration_pool(all, &self.path, self.authorization.as_deref())
    }

    fn change(&self, pools: &Pools, body: &[u8]) -> Result<Reply, Problem> {
        let registration_pool = self.registration_pool(pools)?;
        let change = match self.method {
            Method::Put => discovery::read_put(body, registration_pool)?,
            Method::Delete => discovery::read_delete(body)?,
            Method::List | Method::Other => return Err(Problem::Method),
        };
        let key = Registry::key(&registration_pool.pool.name);
        let changed = apply(&key, &change, registration_pool.rules.max_workers)?;
        Ok(match change {
            RegistryChange::Put(_) => registration_pool.registered(changed),
            RegistryChange::Delete(_) => registration_pool.removed(changed),
        })
    }
}

fn list(pools: &Pools, registration_pool: &RegistrationPool<'_>) -> Reply {
    let registry = read(&Registry::key(&registration_pool.pool.name)).0;
    let Some(runtime) = pools.named(registration_pool.pool.name.as_bytes()) else {
        return registration_pool.list(&registry, &Leases::default(), 0, 0);
    };
    let registry_view = runtime.registry_view.borrow();
    let round = u64::try_from(registry_view.round.as_millis()).unwrap_or(0);
    registration_pool.list(
        &registry,
        &registry_view.leases,
        registry_view.rounds,
        round,
    )
}

fn read(key: &str) -> (Registry, Option<u32>) {
    let Some((bytes, version)) = host::shared(key) else {
        return (Registry::default(), None);
    };
    (Registry::decode(&bytes).unwrap_or_default(), Some(version))
}

/// Applies a change to the registry at `key`, retried while other threads write there.
fn apply(key: &str, change: &RegistryChange, max_workers: usize) -> Result<usize, Problem> {
    for _ in 0..ATTEMPTS {
        let (mut registry, version) = read(key);
        let changed = registry.apply(change, max_workers)?;
        let bytes = registry.encode()?;
        if host::set_shared(key, &bytes, version) == Ok(WriteOutcome::Yes) {
            return Ok(changed);
        }
    }
    Err(Problem::Contended)
}

/// Expires a pool's leases while this VM leads, and publishes the registered workers as the fleet.
pub struct Registrar {
    rules: RegistrationDiscovery,
    key: String,
    /// The registry revision that the fleet was last made from.
    seen: Option<u64>,
}

/// Rounds between two reads of the registry by a VM that does not lead: often enough to report the age of leases.
const LOOKS: u64 = 10;

impl Registrar {
    /// The registrar of a pool that takes registrations; `None` for other pools.
    pub fn new(runtime: &PoolRuntime) -> Option<Self> {
        let Discovery::Registration(rules) = &runtime.pool.discovery else {
            return None;
        };
        Some(Self {
            rules: rules.clone(),
            key: Registry::key(&runtime.pool.name),
            seen: None,
        })
    }

    /// Called in each round; `round` is the length of one.
    pub fn tick(&mut self, runtime: &Rc<PoolRuntime>, round: Duration) {
        let mut registry_view = runtime.registry_view.borrow_mut();
        registry_view.rounds = registry_view.rounds.wrapping_add(1);
        registry_view.round = round;
        let leads = runtime.vm.leads();
        if !leads {
            self.seen = None;
        }
        if !leads && !registry_view.rounds.is_multiple_of(LOOKS) {
            return;
        }
        let lease = u128::from(self.rules.lease_ms) / round.as_millis().max(1);
        let expired = registry_view.look(&self.key, u64::try_from(lease).unwrap_or(u64::MAX));
        if !leads {
            return;
        }
        match (registry_view.version, expired.is_empty()) {
            // The first write of a key is not protected against another first write: the key is created before any worker
            // registers.
            (None, _) => {
                let _ = host::set_shared(
                    &self.key,
                    &registry_view.registry.encode().unwrap_or_default(),
                    None,
                );
            }
            (Some(version), false) => {
                log::warn!(
                    "pool {}: {} leases are over",
                    runtime.pool.name,
                    expired.len()
                );
                self.take_out(registry_view.registry.clone(), expired, version);
            }
            (Some(_), true) => self.make_fleet(runtime, &registry_view.registry),
        }
    }

    fn make_fleet(&mut self, runtime: &PoolRuntime, registry: &Registry) {
        let revision = registry.revision();
        if revision == 0 {
            // No worker has ever registered: workers known from before stay.
            return;
        }
        if self.seen.replace(revision) == Some(revision) {
            return;
        }
        let router = runtime.router();
        let workers = registry.workers(&router.pool().destinations);
        let known = router.fleet().workers().map(|worker| &**worker);
        let is_new = !known.eq(workers.iter());
        drop(router);
        if is_new {
            publish(runtime, workers);
        }
    }

    /// Removes workers with expired leases. After a concurrent registration the next round tries again.
    fn take_out(&self, mut registry: Registry, expired: Vec<Named>, version: u32) {
        let changed = registry.apply(&RegistryChange::Delete(expired), self.rules.max_workers);
        if changed.is_ok()
            && let Ok(bytes) = registry.encode()
        {
            let _ = host::set_shared(&self.key, &bytes, Some(version));
        }
    }
}
