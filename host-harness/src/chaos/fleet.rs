//! Owns the simulated engines of a scenario, each at a fixed address: kill, restart, faults and repair.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use routing::fleet::Role;

use super::http::{Http, HttpError};
use super::pool;
use super::scenario::{Act, Fault, Pool, Seat, Shape, Whom};
use super::wellbeing::{State, Wellbeing};
use crate::engine::{Dialect, Engine, EngineConfig, EngineError};
use crate::run::fleet::engine_role;

/// 40,000 prompt tokens per second: each client can send several requests per second.
const SPEEDUP: f64 = 5.0;
/// Milliseconds per token before the speed-up; 4 after it.
const TOKEN_MS: f64 = 20.0;
/// Longer than any late fetch, and short enough that lost hand-offs do not fill an engine.
const LEASE: Duration = Duration::from_secs(5);
/// More than all clients occupy within one lease.
const KV_BLOCKS: u32 = 50_000;
/// Longer than all deadlines of the filter.
const PARTNER_TIMEOUT: Duration = Duration::from_secs(5);

const FAULTS: &str = "/__fault";

/// Why a fleet is not in the required state.
#[derive(Debug, thiserror::Error)]
pub enum FleetError {
    /// An engine does not start.
    #[error("the {seat} engine: {source}")]
    Engine {
        /// Which engine.
        seat: Seat,
        /// Why.
        source: EngineError,
    },
    /// An engine does not obey.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// An engine died without being killed.
    #[error("the {0} engine died before it was killed")]
    NoLastCounts(Seat),
    /// The machine refused a port or a file.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The script names an engine that does not exist.
    #[error("the script speaks of an engine that is not there: {0}")]
    NoEngine(Seat),
}

/// Engines in this process, and the record of their health.
pub struct Fleet {
    dialect: Dialect,
    http: Http,
    posts: Vec<Post>,
    /// Which engines were healthy at which time.
    pub wellbeing: Wellbeing,
    /// For each kind of repaired fault, how often it was met.
    pub met: BTreeMap<String, u64>,
}

/// Position of an engine in the fleet.
struct Post {
    seat: Seat,
    config: EngineConfig,
    engine: Option<Engine>,
    /// Unfetched hand-offs of the engines killed here.
    lost: u64,
}

/// Totals reported by the running engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Requests in the engines.
    pub requests: u64,
    /// Hand-offs issued by these or by killed engines, and neither fetched nor given up.
    pub unfetched: u64,
}

impl Fleet {
    /// Starts the engines.
    ///
    /// # Errors
    /// When an engine does not start.
    pub async fn start(shape: Shape, dialect: Dialect) -> Result<Self, FleetError> {
        let ip = own_loopback();
        let seats = |role, count| (0..count).map(move |number| Seat { role, number });
        let all = seats(Role::Prefill, shape.prefill).chain(seats(Role::Decode, shape.decode));
        let mut posts = Vec::new();
        for seat in all {
            let mut post = Post::new(seat, dialect, ip);
            post.start().await?;
            posts.push(post);
        }
        Ok(Self {
            dialect,
            http: Http::new(),
            posts,
            wellbeing: Wellbeing::new(shape),
            met: BTreeMap::new(),
        })
    }

    /// The plugin's configuration for these engines, with these pool settings.
    pub fn plugin_config(&self, told: Pool) -> Vec<u8> {
        let engines = self.posts.iter();
        let engines = engines.filter_map(|post| Some((post.seat.role, post.engine.as_ref()?)));
        pool::plugin_config(self.dialect, &engines.collect::<Vec<_>>(), told)
    }

    /// Performs one step of the script.
    ///
    /// # Errors
    /// When an engine does not start or does not obey.
    pub async fn perform(&mut self, act: Act) -> Result<(), FleetError> {
        match act {
            Act::Kill(seat) => {
                self.note(seat, State::Unwell);
                self.post(seat)?.kill().await
            }
            Act::Start(seat) => {
                self.post(seat)?.start().await?;
                self.note(seat, State::Well);
                Ok(())
            }
            Act::Inject(whom, fault) => {
                for seat in self.meant(whom) {
                    self.note(seat, fault.leaves());
                    self.inject(seat, fault).await?;
                }
                Ok(())
            }
            Act::Mend(whom) => {
                for seat in self.meant(whom) {
                    self.mend(seat).await?;
                    self.note(seat, State::Well);
                }
                Ok(())
            }
        }
    }

    /// The engines' own counts.
    ///
    /// # Errors
    /// When a running engine does not answer.
    pub async fn census(&self) -> Result<Census, FleetError> {
        let mut census = Census::default();
        for post in &self.posts {
            let now = post.census(&self.http).await?;
            census.requests += now.requests;
            census.unfetched += now.unfetched;
        }
        Ok(census)
    }

    /// Ends the engines.
    pub async fn stop(self) {
        for engine in self.posts.into_iter().filter_map(|post| post.engine) {
            engine.stop().await;
        }
    }

    async fn inject(&mut self, seat: Seat, fault: Fault) -> Result<(), FleetError> {
        let address = self.post(seat)?.address();
        Ok(self.http.post(address, FAULTS, &fault.to_json()).await?)
    }

    async fn mend(&mut self, seat: Seat) -> Result<(), FleetError> {
        let address = self.post(seat)?.address();
        let faults = self.http.get_json(address, FAULTS).await?;
        for fault in faults.as_array().into_iter().flatten() {
            let kind = fault["kind"].as_str().unwrap_or_default();
            let met = self.met.entry(kind.to_owned()).or_default();
            *met += fault["hits"].as_u64().unwrap_or_default();
        }
        Ok(self.http.delete(address, FAULTS).await?)
    }

    fn note(&mut self, seat: Seat, state: State) {
        self.wellbeing.note(Instant::now(), seat, state);
    }

    fn meant(&self, whom: Whom) -> Vec<Seat> {
        match whom {
            Whom::One(seat) => vec![seat],
            Whom::All(role) => {
                let seats = self.posts.iter().map(|post| post.seat);
                seats.filter(|seat| seat.role == role).collect()
            }
        }
    }

    fn post(&mut self, seat: Seat) -> Result<&mut Post, FleetError> {
        let mut posts = self.posts.iter_mut();
        let post = posts.find(|post| post.seat == seat);
        post.ok_or(FleetError::NoEngine(seat))
    }
}

impl Post {
    fn new(seat: Seat, dialect: Dialect, ip: IpAddr) -> Self {
        Self {
            seat,
            config: engine_config(dialect, seat.role, SocketAddr::new(ip, 0)),
            engine: None,
            lost: 0,
        }
    }

    /// Address of the engine, after its first start.
    fn address(&self) -> SocketAddr {
        self.config.listen
    }

    /// Starts the engine, unless it runs already.
    async fn start(&mut self) -> Result<(), FleetError> {
        if self.engine.is_some() {
            return Ok(());
        }
        let engine = Engine::start(self.config.clone()).await;
        let engine = engine.map_err(|source| FleetError::Engine {
            seat: self.seat,
            source,
        })?;
        self.config.listen = engine.address;
        self.config.bootstrap_port = engine.bootstrap.map_or(0, |address| address.port());
        self.engine = Some(engine);
        Ok(())
    }

    /// Kills the engine like a process, if it runs.
    async fn kill(&mut self) -> Result<(), FleetError> {
        let Some(engine) = self.engine.take() else {
            return Ok(());
        };
        let last = engine.stop().await;
        let last = last.ok_or(FleetError::NoLastCounts(self.seat))?;
        self.lost += unfetched(last.issued, last.pulled, last.handoffs_aborted);
        Ok(())
    }

    async fn census(&self, http: &Http) -> Result<Census, FleetError> {
        if self.engine.is_none() {
            return Ok(Census {
                requests: 0,
                unfetched: self.lost,
            });
        }
        let state = http.get_json(self.address(), "/__state").await?;
        let count = |name: &str| state[name].as_u64().unwrap_or_default();
        let here = unfetched(count("issued"), count("pulled"), count("handoffs_aborted"));
        Ok(Census {
            requests: count("running") + count("waiting"),
            unfetched: self.lost + here,
        })
    }
}

/// Configuration of an engine, the same in all scenarios.
pub fn engine_config(dialect: Dialect, role: Role, listen: SocketAddr) -> EngineConfig {
    EngineConfig {
        dialect,
        listen,
        speedup: SPEEDUP,
        token_ms: TOKEN_MS,
        lease: LEASE,
        kv_blocks: KV_BLOCKS,
        partner_timeout: PARTNER_TIMEOUT,
        ..EngineConfig::new(engine_role(role))
    }
}

/// Hand-offs neither fetched nor given up, whether or not their lease has ended.
pub fn unfetched(issued: u64, pulled: u64, given_up: u64) -> u64 {
    issued.saturating_sub(pulled + given_up)
}

/// A loopback address that no other run uses: a port that an engine leaves for a while stays free there, since connections are
/// made from 127.0.0.1.
pub fn own_loopback() -> IpAddr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let [_, _, high, low] = std::process::id().to_be_bytes();
    // The tests' own engines take 127.1.0.0 and up; two runs of one process get the same address only after 254 others.
    let number = NEXT.fetch_add(1, Ordering::Relaxed).clamp(1, 254);
    IpAddr::V4(Ipv4Addr::new(127, high.clamp(1, 254), low, number))
}
