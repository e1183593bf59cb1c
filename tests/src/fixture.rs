//! Owns a fixture: a gateway over up to two prefill and two decode engines of one protocol, used by many tests, one at a time,
//! since starting a gateway takes longer than most tests. Each test finds other workers than the one before, with other ids.

use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};

use serde_json::{Value, json};

use crate::Proxy;
use crate::client::{Ask, Reply};
use crate::engine_set::{EngineSet, EngineSlot};
use crate::engines::{Engine, FAST, MODEL, RecordedRequest, Role, State, with};
use crate::gateway::Gateway;
use crate::protocols::Protocol;
use crate::scripted::{Answer, HttpVersion, ScriptedWorker};
use crate::wait::{GENEROUS, eventually};

/// Fixtures that no test uses now, the longest idle first.
static IDLE: Mutex<Vec<Fixture>> = Mutex::new(Vec::new());

/// Most idle fixtures: two tests at a time, and a gateway of every protocol for each. One takes some 100 MB.
const MOST_IDLE: usize = 12;

/// Roles of the slots.
const ROLES: [Role; 2] = [Role::Prefill, Role::Decode];

/// Slots of each role: two workers of a role are enough to choose between.
const SLOTS: usize = 2;

/// Ids in the slots, prefill's first: more than a signed number, a float, or both can hold, and a small one.
const FIRST_IDS: [u64; 2 * SLOTS] = [
    u64::MAX - 1_000_000,
    9_007_199_254_740_993,
    10_786_370_784_182_999_275,
    7,
];

/// Specification of a fixture. The first three fields are the gateway's, the others only the engines', which each test has
/// anew.
#[derive(Clone, Debug)]
pub struct FixtureSpec {
    /// The host.
    pub proxy: Proxy,
    /// The protocol.
    pub protocol: Protocol,
    /// Further fields of the pool.
    pub pool: Value,
    /// Number of prefill engines, and of engines that get the decode leg.
    pub workers: (usize, usize),
    /// Number of aggregated engines beside them, where the protocol has workers of both kinds.
    pub aggregated: usize,
    /// Options of the engines.
    pub options: Vec<&'static str>,
    /// Further fields of the entries: two of prefill, then two of the others.
    pub lines: [Value; 2 * SLOTS],
}

impl FixtureSpec {
    /// Two fast workers of each role that the protocol has.
    pub fn of(proxy: Proxy, protocol: Protocol) -> FixtureSpec {
        let prefills = match protocol {
            Protocol::Direct | Protocol::Aggregated => 0,
            _ => SLOTS,
        };
        FixtureSpec {
            proxy,
            protocol,
            pool: json!({}),
            workers: (prefills, SLOTS),
            aggregated: 0,
            options: FAST.to_vec(),
            lines: std::array::from_fn(|_| json!({})),
        }
    }

    /// This many workers of prefill and of decode, whose hand-offs are vLLM's.
    pub fn nixl(proxy: Proxy, workers: (usize, usize)) -> FixtureSpec {
        FixtureSpec::of(proxy, Protocol::Nixl).workers(workers)
    }

    /// Sets the number of prefill engines, and of engines that get the decode leg.
    pub fn workers(mut self, workers: (usize, usize)) -> FixtureSpec {
        self.workers = workers;
        self
    }

    /// Adds aggregated workers to those of an NIXL pool; there are two slots for them and for decode.
    pub fn aggregated(mut self, count: usize) -> FixtureSpec {
        self.aggregated = count;
        self
    }

    /// Sets further fields of the pool.
    pub fn pool(mut self, pool: Value) -> FixtureSpec {
        self.pool = pool;
        self
    }

    /// Sets further options of the engines, and fields of their entries.
    pub fn engines(mut self, options: &[&'static str], line: Value) -> FixtureSpec {
        self.options.extend_from_slice(options);
        self.lines = std::array::from_fn(|_| line.clone());
        self
    }

    /// Sets the options of the engines, which are not fast then.
    pub fn only_options(mut self, options: &[&'static str]) -> FixtureSpec {
        self.options = options.to_vec();
        self
    }

    /// Sets further fields of each entry.
    pub fn lines(mut self, lines: [Value; 2 * SLOTS]) -> FixtureSpec {
        self.lines = lines;
        self
    }

    fn has_gateway_of(&self, other: &FixtureSpec) -> bool {
        let this = (self.proxy, self.protocol, &self.pool);
        this == (other.proxy, other.protocol, &other.pool)
    }

    /// Role of the engine in this slot, and the role under which it is listed.
    fn roles(&self, role: Role, at: usize) -> (Role, Role) {
        match role {
            Role::Prefill => (role, role),
            _ if at < self.workers.1 => (
                self.protocol.decode_role(),
                self.protocol.decode_listed_as(),
            ),
            _ => (Role::Aggregated, Role::Aggregated),
        }
    }

    /// Number of engines in this role's slots.
    fn count(&self, role: Role) -> usize {
        match role {
            Role::Prefill => self.workers.0,
            _ => self.workers.1 + self.aggregated,
        }
    }

    /// Whether these workers can serve.
    fn is_complete(&self) -> bool {
        let has_prefill = self.workers.0 > 0 || self.protocol.decode_role() == Role::Aggregated;
        self.aggregated > 0 || (self.workers.1 > 0 && has_prefill)
    }

    /// Options of each engine.
    fn all_options(&self) -> Vec<&'static str> {
        let dialect = ["--dialect", self.protocol.dialect()];
        [self.options.as_slice(), &dialect].concat()
    }
}

/// A gateway and its engines.
pub struct Fixture {
    /// The engines; those in decode slots play frontends with [`Protocol::Direct`].
    pub engines: EngineSet,
    /// The gateway.
    pub gateway: Gateway,
    /// Workers whose answers the test gives, in their order.
    pub scripted: Vec<ScriptedWorker>,
    spec: FixtureSpec,
    processes: Vec<u32>,
    turns: u64,
}

impl Fixture {
    /// A fixture of this specification, with new engines.
    pub async fn acquire(spec: FixtureSpec) -> Fixture {
        let mut fixture = match idle(&spec) {
            Some(fixture) => fixture,
            None => Fixture::build(spec.clone()).await,
        };
        fixture.spec = spec;
        fixture.change_engines().await;
        fixture
    }

    /// One worker of prefill and one of decode, whose hand-offs are vLLM's.
    pub async fn one_of_each(proxy: Proxy) -> Fixture {
        Fixture::acquire(FixtureSpec::nixl(proxy, (1, 1))).await
    }

    /// Releases the fixture to the next test; after a failed test the fixture is torn down instead.
    pub fn release(mut self) {
        self.gateway.assert_never_restarted(&self.processes);
        // A frontend's only identity is its address: the gateway's knowledge of one would apply to the next.
        if self.spec.protocol == Protocol::Direct {
            return;
        }
        let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
        idle.push(self);
        let surplus = idle.len().saturating_sub(MOST_IDLE);
        let surplus: Vec<Fixture> = idle.drain(..surplus).collect();
        drop(idle);
        drop(surplus);
    }

    async fn build(spec: FixtureSpec) -> Fixture {
        let protocol = spec.protocol;
        let prefills = match protocol {
            Protocol::Direct | Protocol::Aggregated => 0,
            _ => SLOTS,
        };
        let roles = (Role::Prefill, protocol.decode_role());
        let options = spec.all_options();
        let mut engines = EngineSet::with_roles(roles, (prefills, SLOTS), &options).await;
        for (role, ids) in ROLES.into_iter().zip(FIRST_IDS.chunks(SLOTS)) {
            for (slot, id) in engines.slots_mut(role).iter_mut().zip(ids) {
                slot.first_id = *id;
            }
        }
        if protocol == Protocol::Mooncake {
            let servers = engines.prefill.iter().filter_map(|slot| slot.bootstrap);
            engines.further_members = servers.map(|at| format!("bootstrap={at}")).collect();
        }
        let frontends = engines.decode.iter().map(|slot| slot.address.to_string());
        let frontends: Vec<String> = frontends.collect();
        let frontends = match protocol {
            Protocol::Direct => json!({"frontends": frontends}),
            _ => json!({}),
        };
        let pool = with(with(protocol.pool(), frontends), spec.pool.clone());
        let gateway = engines.gateway(spec.proxy, pool).await;
        Fixture {
            processes: gateway.processes(),
            engines,
            gateway,
            scripted: Vec::new(),
            spec,
            turns: 0,
        }
    }

    /// Puts new engines in the slots that this test uses, and waits until the gateway knows them and no others.
    async fn change_engines(&mut self) {
        self.turns += 1;
        self.engines.others.clear();
        for worker in self.scripted.drain(..) {
            worker.close().await;
        }
        for role in ROLES {
            self.engines.kill(role).await;
        }
        self.refit_slots();
        for role in ROLES {
            self.engines.start_first(role, self.spec.count(role)).await;
        }
        let names = match self.spec.protocol {
            Protocol::Direct => self.list_workers_of_frontends(),
            _ => self.engines.list_running(),
        };
        self.until_all_know(&names).await;
        match self.spec.is_complete() {
            true => self.gateway.is_ready().await,
            false => self.gateway.is_not_ready().await,
        }
        // Requests that the test before left behind end with its engines.
        self.gateway.assert_comes_to_rest().await;
    }

    /// Prepares the empty slots for the engines of this test.
    fn refit_slots(&mut self) {
        let options = self.spec.all_options();
        for (role, lines) in ROLES.into_iter().zip(self.spec.lines.chunks(SLOTS)) {
            let slots = self.engines.slots_mut(role).iter_mut();
            for (at, (slot, line)) in slots.zip(lines).enumerate() {
                slot.refit(self.spec.roles(role, at), &options, line.clone());
            }
        }
        self.engines.keep_bootstrap_ports();
    }

    /// Starts a worker with this script, which [`Fixture::list_scripted`] lists under this role, in a slot without an engine.
    pub async fn play(
        &mut self,
        role: Role,
        script: impl Fn(&RecordedRequest) -> Answer + Send + Sync + 'static,
    ) {
        let taken: Vec<SocketAddr> = self.scripted.iter().map(|worker| worker.address).collect();
        let free = |slot: &&EngineSlot| !slot.is_running() && !taken.contains(&slot.address);
        let slot = self.slots(role).iter().find(free);
        let address = slot.map(|slot| slot.address);
        let address = address.unwrap_or_else(|| panic!("every slot of {role:?} is taken"));
        let worker = ScriptedWorker::start_on(address, HttpVersion::Http1, script).await;
        let number = self.scripted.len() as u64;
        let identity = json!({
            "id": 1000 * self.turns + number,
            "name": format!("scripted-{}-{number}", self.turns),
        });
        self.engines
            .others
            .push(with(worker.listed(role), identity));
        self.scripted.push(worker);
    }

    /// Lists the scripted workers, and waits until the gateway is ready with them.
    pub async fn list_scripted(&mut self) {
        self.engines.list_running();
        let names = names_of(&self.engines.others);
        self.until_all_know(&names).await;
        self.gateway.is_ready().await;
    }

    /// Two workers of each role that only a frontend reaches.
    fn list_workers_of_frontends(&mut self) -> Vec<String> {
        let turn = self.turns;
        let worker = |(number, role): (u64, Role)| {
            json!({
                "id": 1000 * turn + number,
                "name": format!("{}-{turn}-{number}", role.as_str()),
                "role": role.as_str(),
                "model": MODEL,
            })
        };
        let roles = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];
        self.engines.others = (1..).zip(roles).map(worker).collect();
        // Lists no engine of this role: only the others are published.
        self.engines.list(Role::Prefill);
        names_of(&self.engines.others)
    }

    async fn until_all_know(&self, names: &[String]) {
        eventually("all threads know the workers", GENEROUS, || async {
            // One connection reaches one thread.
            for _ in 0..self.gateway.enough_connections() {
                let page = self.gateway.try_send(Ask::get("/pd-router/status")).await;
                let page = page.map_err(|failure| failure.to_string())?;
                let page = page.text().into_owned();
                let unknown = names.iter().find(|name| !page.contains(name.as_str()));
                if let Some(name) = unknown {
                    return Err(format!("{name} is not in {page}"));
                }
            }
            Ok(())
        })
        .await;
    }

    /// Sends one request over its own connection; fails without an answer.
    pub async fn send(&self, ask: Ask) -> Reply {
        self.gateway.send(ask).await
    }

    /// The prefill engine in this slot.
    pub fn prefill(&self, at: usize) -> &Engine {
        self.engines.prefill[at].engine()
    }

    /// The engine in this of the other slots.
    pub fn decode(&self, at: usize) -> &Engine {
        self.engines.decode[at].engine()
    }

    /// The living engines.
    pub fn living(&self) -> impl Iterator<Item = &Engine> {
        let slots = self.engines.prefill.iter().chain(&self.engines.decode);
        slots
            .filter(|slot| slot.is_running())
            .map(EngineSlot::engine)
    }

    /// Counters of all engines in this role's slots, those included that the test has killed.
    pub async fn total(&self, role: Role) -> State {
        self.engines.total(role).await
    }

    /// The slots of the engines that get this leg.
    pub fn slots(&self, role: Role) -> &[EngineSlot] {
        self.engines.slots(role)
    }

    /// Injects a fault into one engine of this role.
    pub async fn inject_one(&self, role: Role, what: &Value) {
        if let Some(slot) = self.slots(role).first() {
            slot.engine().fault(what).await;
        }
    }

    /// Injects a fault into all engines of this role.
    pub async fn inject_all(&self, role: Role, what: &Value) {
        for slot in self.slots(role) {
            slot.engine().fault(what).await;
        }
    }

    /// Number of requests of each living engine of this role.
    pub async fn requests(&self, role: Role) -> Vec<usize> {
        let mut counts = Vec::new();
        for slot in self.slots(role) {
            counts.push(match slot.is_running() {
                true => slot.engine().requests().await.len(),
                false => 0,
            });
        }
        counts
    }

    /// All requests to the living engines of this role, engine by engine.
    pub async fn recorded(&self, role: Role) -> Vec<RecordedRequest> {
        let mut all = Vec::new();
        for slot in self.slots(role).iter().filter(|slot| slot.is_running()) {
            all.extend(slot.engine().requests().await);
        }
        all
    }

    /// The sum of all living engines' counters.
    pub async fn state(&self) -> State {
        let mut sum = State::default();
        for engine in self.living() {
            sum = sum.plus(&engine.state().await);
        }
        sum
    }

    /// Waits until the gateway has no booking and no engine runs anything.
    pub async fn comes_to_rest(&self) {
        for role in ROLES {
            self.engines.is_idle(role).await;
        }
        self.gateway.assert_comes_to_rest().await;
    }

    /// Fails if a living engine refused a hand-off or a decode engine computed a prompt.
    pub async fn assert_good_hand_offs(&self) {
        let state = self.state().await;
        assert_eq!((state.refused, state.recomputed), (0, 0), "{state:?}");
    }
}

/// The names in these entries.
fn names_of(entries: &[Value]) -> Vec<String> {
    let names = entries.iter().filter_map(|entry| entry["name"].as_str());
    names.map(str::to_owned).collect()
}

/// An idle fixture with the gateway of this specification.
fn idle(spec: &FixtureSpec) -> Option<Fixture> {
    let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
    let fits = |fixture: &Fixture| fixture.spec.has_gateway_of(spec);
    let at = idle.iter().rposition(fits)?;
    Some(idle.remove(at))
}
