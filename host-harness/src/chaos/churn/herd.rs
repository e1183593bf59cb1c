//! Owns the churning workers: which exist, what happens next, and what reached those that were gone.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use routing::fleet::Role;
use serde_json::Value;

use super::herald::{DiscoveryPublisher, Line};
use super::source::Source;
use super::{Churned, GRACE, LOOK};
use crate::chaos::fleet::{Census, FleetError, engine_config, unfetched};
use crate::chaos::http::Http;
use crate::chaos::play::Counted;
use crate::chaos::scenario::Seat;
use crate::engine::{Dialect, Engine, State};
use crate::run::fleet::Members;

/// Initial workers of each role.
const FIRST: usize = 3;
/// Maximum workers of each role, leaving ones not counted.
const MOST: usize = 5;
/// A worker may leave only if this many others of its role remain, healthy and known to the gateway.
const STAY: usize = 2;
/// Time after listing at which the gateway certainly knows a worker.
const KNOWN: Duration = GRACE.saturating_add(Duration::from_millis(500));
/// How long a removed worker keeps running, to count what still reaches it.
const WATCHED: Duration = Duration::from_millis(1500);
/// How long a draining worker waits for its last requests.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time between two events, in milliseconds.
const PACE: std::ops::Range<u64> = 150..500;
/// How long a dead worker stays listed, in milliseconds, until its death is noticed or it returns.
const UNNOTICED: std::ops::Range<u64> = 300..1500;
/// Addresses of each role: `FEW` if the clusters hold a fixed set, `MANY` if not.
const FEW: usize = 10;
const MANY: usize = 150;

/// The workers and the publisher that announces them to the gateway.
pub struct ChurnFleet {
    source: Source,
    dialect: Dialect,
    herald: DiscoveryPublisher,
    http: Http,
    workers: Vec<Worker>,
    places: Vec<Place>,
    last_id: u64,
    next_deed: Instant,
    lost: u64,
    churned: Churned,
    dice: StdRng,
}

/// An address, used by one worker of a role after another.
struct Place {
    role: Role,
    address: SocketAddr,
    bootstrap: u16,
    used: bool,
    taken: bool,
}

struct Worker {
    id: u64,
    role: Role,
    place: usize,
    address: SocketAddr,
    bootstrap: Option<u16>,
    engine: Option<Engine>,
    stand: Stand,
}

/// State of a worker.
#[derive(Clone, Copy, Debug)]
enum Stand {
    /// Listed.
    There { since: Instant },
    /// Listed as draining.
    Draining {
        since: Instant,
        requests: Option<u64>,
    },
    /// No longer listed, but still running.
    Removed {
        since: Instant,
        requests: Option<u64>,
    },
    /// Dead, but still listed.
    Dead { until: Instant },
}

/// What can happen to a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deed {
    Join,
    Drain,
    Remove,
    Die,
}

impl ChurnFleet {
    /// Starts the first workers.
    ///
    /// # Errors
    /// When an engine does not start.
    pub async fn start(
        source: Source,
        dialect: Dialect,
        ip: IpAddr,
        seed: u64,
    ) -> Result<Self, FleetError> {
        let count = if source.finds_addresses() { MANY } else { FEW };
        let places = free_places(ip, count)?;
        let mut herd = Self {
            source,
            dialect,
            herald: DiscoveryPublisher::of(source).await?,
            http: Http::new(),
            workers: Vec::new(),
            places,
            last_id: 0,
            next_deed: Instant::now(),
            lost: 0,
            churned: Churned::default(),
            dice: StdRng::seed_from_u64(seed),
        };
        for role in [Role::Prefill, Role::Decode] {
            for _ in 0..FIRST {
                herd.join(role).await?;
            }
        }
        herd.churned = Churned::default();
        herd.tell().await?;
        Ok(herd)
    }

    /// The pool's `discovery`.
    pub fn discovery(&self) -> Value {
        self.herald.discovery(&self.lines())
    }

    /// Adds the workers to the proxy's configuration.
    pub fn add_to(&self, members: &mut Members) {
        self.herald.add_to(members);
        if self.source == Source::Document {
            for place in &self.places {
                members.enlist(place.role.name(), [place.address]);
            }
        }
    }

    /// Announces the workers to the gateway, if the source does so by calls.
    ///
    /// # Errors
    /// When the gateway does not listen.
    pub async fn introduce_to(&mut self, gateway: SocketAddr) -> Result<(), FleetError> {
        self.herald.introduce_to(gateway);
        // Again: the gateway's address is known only now.
        self.tell().await
    }

    /// Keeps announcing the workers and causes no event. Ends with the first failure.
    pub async fn stay(&mut self) -> FleetError {
        loop {
            if let Err(error) = self.tell().await {
                return error;
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Advances the workers that are leaving, and causes the next event when it is due.
    ///
    /// # Errors
    /// When an engine does not start or does not answer, or the gateway does not listen.
    pub async fn live(&mut self) -> Result<(), FleetError> {
        let now = Instant::now();
        let mut at = 0;
        while at < self.workers.len() {
            match self.go_on(at, now).await? {
                true => at += 1,
                false => {
                    let gone = self.workers.swap_remove(at);
                    self.places[gone.place].taken = false;
                }
            }
        }
        if now >= self.next_deed {
            self.act(now).await?;
            self.next_deed = now + Duration::from_millis(self.dice.random_range(PACE));
        }
        self.tell().await
    }

    async fn counted(&self) -> Result<Census, FleetError> {
        let mut census = Census {
            requests: 0,
            unfetched: self.lost,
        };
        for worker in &self.workers {
            let Some(now) = worker.ask(&self.http).await? else {
                continue;
            };
            census.requests += now.under_way;
            census.unfetched += now.unfetched;
        }
        Ok(census)
    }

    /// Ends all workers and returns the counts.
    pub async fn stop(mut self) -> Churned {
        for worker in &mut self.workers {
            let Some(engine) = worker.engine.take() else {
                continue;
            };
            let last = engine.stop().await;
            if let (Some(last), Stand::Removed { requests, .. }) = (last, worker.stand) {
                self.churned.removed_worker_requests += later(&last, requests);
            }
        }
        self.churned
    }

    fn lines(&self) -> Vec<Line> {
        let listed = self
            .workers
            .iter()
            .filter(|worker| !matches!(worker.stand, Stand::Removed { .. }));
        let mut lines: Vec<_> = listed.map(Worker::line).collect();
        lines.sort_by_key(|line| line.id);
        lines
    }

    async fn tell(&mut self) -> Result<(), FleetError> {
        let lines = self.lines();
        self.herald.say(lines).await
    }

    /// One step of a leaving worker. `false`: the worker is gone.
    async fn go_on(&mut self, at: usize, now: Instant) -> Result<bool, FleetError> {
        match self.workers[at].stand {
            Stand::There { .. } => Ok(true),
            Stand::Dead { until } if now < until => Ok(true),
            Stand::Dead { .. } => {
                let returns = self.source == Source::Static || self.dice.random_bool(0.5);
                if returns {
                    self.return_to(at).await?;
                }
                Ok(returns)
            }
            Stand::Draining { since, requests } => {
                self.drain_on(at, now - since, requests).await?;
                Ok(true)
            }
            Stand::Removed { since, requests } => self.watch(at, now - since, requests).await,
        }
    }

    /// A worker that has drained for `late`: removed from the list when it has no requests left.
    async fn drain_on(
        &mut self,
        at: usize,
        late: Duration,
        requests: Option<u64>,
    ) -> Result<(), FleetError> {
        let worker = &mut self.workers[at];
        if late < GRACE {
            return Ok(());
        }
        let Some(seen) = worker.ask(&self.http).await? else {
            return Ok(());
        };
        let Some(before) = requests else {
            if let Stand::Draining { requests, .. } = &mut worker.stand {
                *requests = Some(seen.requests);
            }
            return Ok(());
        };
        if seen.under_way == 0 || late >= PATIENCE {
            self.churned.draining_worker_requests += seen.requests - before;
            worker.stand = Stand::Removed {
                since: Instant::now(),
                requests: None,
            };
        }
        Ok(())
    }

    /// A worker removed `late` ago: counts the requests that still reach it, then ends it. `false`: ended.
    async fn watch(
        &mut self,
        at: usize,
        late: Duration,
        requests: Option<u64>,
    ) -> Result<bool, FleetError> {
        let worker = &mut self.workers[at];
        if late < GRACE {
            return Ok(true);
        }
        let Some(seen) = worker.ask(&self.http).await? else {
            return Ok(false);
        };
        if requests.is_none() {
            if let Stand::Removed { requests, .. } = &mut worker.stand {
                *requests = Some(seen.requests);
            }
            return Ok(true);
        }
        let over = late >= GRACE + WATCHED && seen.under_way == 0;
        if !over && late < PATIENCE {
            return Ok(true);
        }
        let last = self.end(at).await?;
        self.churned.removed_worker_requests += later(&last, requests);
        Ok(false)
    }

    /// Causes one event.
    async fn act(&mut self, now: Instant) -> Result<(), FleetError> {
        let role = match self.dice.random_bool(0.5) {
            true => Role::Prefill,
            false => Role::Decode,
        };
        let Some(deed) = self.possible(role, now).choose(&mut self.dice).copied() else {
            return Ok(());
        };
        if deed == Deed::Join {
            return self.join(role).await;
        }
        let known: Vec<usize> = self.known(role, now).collect();
        let Some(at) = known.choose(&mut self.dice).copied() else {
            return Ok(());
        };
        match deed {
            Deed::Join => {}
            Deed::Drain => {
                self.churned.drained += 1;
                self.workers[at].stand = Stand::Draining {
                    since: now,
                    requests: None,
                };
            }
            Deed::Remove => {
                self.churned.removed += 1;
                self.workers[at].stand = Stand::Removed {
                    since: now,
                    requests: None,
                };
            }
            Deed::Die => {
                self.churned.died += 1;
                self.end(at).await?;
                let unnoticed = Duration::from_millis(self.dice.random_range(UNNOTICED));
                self.workers[at].stand = Stand::Dead {
                    until: now + unnoticed,
                };
            }
        }
        Ok(())
    }

    /// Events that are possible in this role while enough workers remain.
    fn possible(&self, role: Role, now: Instant) -> Vec<Deed> {
        let of_role = || self.workers.iter().filter(|worker| worker.role == role);
        let there = of_role().filter(|worker| matches!(worker.stand, Stand::There { .. }));
        let dead = of_role().any(|worker| matches!(worker.stand, Stand::Dead { .. }));
        let lists = self.source != Source::Static;
        let mut deeds = Vec::new();
        if lists && there.count() < MOST {
            deeds.push(Deed::Join);
        }
        if self.known(role, now).count() <= STAY {
            return deeds;
        }
        if lists {
            deeds.extend([Deed::Drain, Deed::Remove]);
        }
        if !dead {
            deeds.push(Deed::Die);
        }
        deeds
    }

    /// Healthy workers of this role that the gateway has known for a while.
    fn known(&self, role: Role, now: Instant) -> impl Iterator<Item = usize> {
        let workers = self.workers.iter().enumerate();
        workers.filter_map(move |(at, worker)| match worker.stand {
            Stand::There { since } if worker.role == role && now - since >= KNOWN => Some(at),
            _ => None,
        })
    }

    async fn join(&mut self, role: Role) -> Result<(), FleetError> {
        let of_role = |place: &Place| place.role == role && !place.taken;
        let free = self.places.iter().enumerate();
        let free = free.filter(|(_, place)| of_role(place));
        let (used, fresh): (Vec<_>, Vec<_>) = free.partition(|(_, place)| place.used);
        let from = match used.is_empty() || (!fresh.is_empty() && self.dice.random_bool(0.5)) {
            true => fresh,
            false => used,
        };
        let Some((place, _)) = from.choose(&mut self.dice) else {
            return Ok(());
        };
        let place = *place;
        let worker = self.take(place).await?;
        self.workers.push(worker);
        Ok(())
    }

    /// Starts another worker at the address of this dead one.
    async fn return_to(&mut self, at: usize) -> Result<(), FleetError> {
        let place = self.workers[at].place;
        self.workers[at] = self.take(place).await?;
        Ok(())
    }

    async fn take(&mut self, place: usize) -> Result<Worker, FleetError> {
        let at = &mut self.places[place];
        match std::mem::replace(&mut at.used, true) {
            true => self.churned.returned += 1,
            false => self.churned.joined += 1,
        }
        at.taken = true;
        // The ids of a static list stay: they are part of the configuration.
        let id = match self.source {
            Source::Static => place as u64 + 1,
            _ => self.last_id + 1,
        };
        self.last_id = id.max(self.last_id);
        let mut config = engine_config(self.dialect, at.role, at.address);
        config.bootstrap_port = at.bootstrap;
        let engine = Engine::start(config).await.map_err(|source| {
            let number = place;
            FleetError::Engine {
                seat: Seat {
                    role: at.role,
                    number,
                },
                source,
            }
        })?;
        let bootstrap = engine.bootstrap.map(|address| address.port());
        Ok(Worker {
            id,
            role: at.role,
            place,
            address: engine.address,
            bootstrap,
            engine: Some(engine),
            stand: Stand::There {
                since: Instant::now(),
            },
        })
    }

    /// Ends a worker abruptly, like a killed process.
    async fn end(&mut self, at: usize) -> Result<State, FleetError> {
        let worker = &mut self.workers[at];
        let seat = Seat {
            role: worker.role,
            number: worker.place,
        };
        let engine = worker.engine.take().ok_or(FleetError::NoEngine(seat))?;
        let last = engine.stop().await.ok_or(FleetError::NoLastCounts(seat))?;
        self.lost += unfetched(last.issued, last.pulled, last.handoffs_aborted);
        Ok(last)
    }
}

impl Counted for ChurnFleet {
    async fn census(&self) -> Result<Census, FleetError> {
        self.counted().await
    }
}

/// A worker's own report.
#[derive(Clone, Copy, Debug)]
struct Now {
    /// Requests received since the start.
    requests: u64,
    /// Requests that have not ended.
    under_way: u64,
    /// Hand-offs neither fetched nor given up.
    unfetched: u64,
}

impl Worker {
    fn line(&self) -> Line {
        Line {
            id: self.id,
            role: self.role,
            address: self.address,
            bootstrap: self.bootstrap,
            draining: matches!(self.stand, Stand::Draining { .. }),
            alive: self.engine.is_some(),
        }
    }

    /// `None`: the worker does not run.
    async fn ask(&self, http: &Http) -> Result<Option<Now>, FleetError> {
        if self.engine.is_none() {
            return Ok(None);
        }
        let state = http.get_json(self.address, "/__state").await?;
        let count = |name: &str| state[name].as_u64().unwrap_or_default();
        Ok(Some(Now {
            requests: count("requests"),
            under_way: count("running") + count("waiting"),
            unfetched: unfetched(count("issued"), count("pulled"), count("handoffs_aborted")),
        }))
    }
}

/// Requests that came after the first `before`.
fn later(last: &State, before: Option<u64>) -> u64 {
    before.map_or(0, |before| last.counts.requests.saturating_sub(before))
}

/// `count` addresses of each role, at free ports of `ip`; the ports stay free, since no other process uses this IP. All sockets
/// are held until the last is found, so that no port is found twice.
fn free_places(ip: IpAddr, count: usize) -> std::io::Result<Vec<Place>> {
    let roles = [Role::Prefill, Role::Decode];
    let held = (0..2 * roles.len() * count).map(|_| TcpListener::bind((ip, 0)));
    let held = held.collect::<std::io::Result<Vec<_>>>()?;
    let roles = roles
        .into_iter()
        .flat_map(|role| (0..count).map(move |_| role));
    let places = held.chunks_exact(2).zip(roles).map(|(pair, role)| {
        Ok(Place {
            role,
            address: pair[0].local_addr()?,
            bootstrap: pair[1].local_addr()?.port(),
            used: false,
            taken: false,
        })
    });
    places.collect()
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use serde_json::json;

    use super::*;

    async fn herd(source: Source) -> ChurnFleet {
        let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let mut herd = ChurnFleet::start(source, Dialect::Vllm, ip, 1)
            .await
            .unwrap();
        // Postpones the next random event beyond the test.
        herd.next_deed = Instant::now() + Duration::from_secs(3600);
        herd
    }

    async fn ask(herd: &ChurnFleet, address: SocketAddr) {
        // Refused, since the request is no leg; but it is counted.
        let asked = herd.http.post(address, "/v1/completions", &json!({})).await;
        assert!(asked.is_err());
    }

    #[tokio::test]
    async fn a_request_that_comes_long_after_a_removal_is_counted_and_an_earlier_one_is_not() {
        let mut herd = herd(Source::Document).await;
        let removed = herd.workers[0].address;
        herd.workers[0].stand = Stand::Removed {
            since: Instant::now(),
            requests: None,
        };
        ask(&herd, removed).await;
        let begin = Instant::now();
        let mut late = false;
        while herd.workers.iter().any(|worker| worker.address == removed) {
            herd.live().await.unwrap();
            assert!(herd.lines().iter().all(|line| line.address != removed));
            if !late && begin.elapsed() > GRACE + 4 * LOOK {
                late = true;
                ask(&herd, removed).await;
            }
            tokio::time::sleep(LOOK).await;
        }
        assert_eq!(herd.stop().await.removed_worker_requests, 1);
    }

    #[test]
    fn no_port_is_given_twice() {
        let places = free_places(IpAddr::V4(Ipv4Addr::new(127, 9, 9, 9)), MANY).unwrap();
        let ports = places
            .iter()
            .flat_map(|place| [place.address.port(), place.bootstrap]);
        let ports: std::collections::BTreeSet<_> = ports.collect();
        assert_eq!((places.len(), ports.len()), (2 * MANY, 4 * MANY));
        let prefill = places.iter().filter(|place| place.role == Role::Prefill);
        assert_eq!(prefill.count(), MANY);
    }

    #[tokio::test]
    async fn enough_stay_and_whoever_is_written_down_only_dies() {
        let herd = herd(Source::Static).await;
        let later = Instant::now() + 2 * KNOWN;
        assert_eq!(herd.possible(Role::Prefill, later), [Deed::Die]);
        assert_eq!(herd.possible(Role::Prefill, Instant::now()), []);
        herd.stop().await;
    }
}
