//! Owns a fixture: a gateway over two prefill and two decode engines of one protocol, used by many tests, one at a time, since
//! starting a gateway takes longer than most tests. Each test finds other workers than the one before, with other ids.

use std::sync::{Mutex, PoisonError};

use serde_json::{Value, json};

use crate::Proxy;
use crate::client::Ask;
use crate::engine_set::{EngineSet, EngineSlot};
use crate::engines::{FAST, MODEL, RecordedRequest, Role, State, with};
use crate::gateway::Gateway;
use crate::protocols::Protocol;
use crate::wait::{GENEROUS, eventually};

/// Fixtures that no test uses now.
static IDLE: Mutex<Vec<Fixture>> = Mutex::new(Vec::new());

/// Specification of a fixture.
#[derive(Clone, Debug, PartialEq)]
pub struct FixtureSpec {
    /// The host.
    pub proxy: Proxy,
    /// The protocol.
    pub protocol: Protocol,
    /// Further fields of the pool.
    pub pool: Value,
    /// Further options of the engines.
    pub options: &'static [&'static str],
    /// Further fields of each worker's entry.
    pub line: Value,
}

impl FixtureSpec {
    /// Without further fields and options.
    pub fn of(proxy: Proxy, protocol: Protocol) -> FixtureSpec {
        FixtureSpec {
            proxy,
            protocol,
            pool: json!({}),
            options: &[],
            line: json!({}),
        }
    }

    /// Sets further fields of the pool.
    pub fn pool(mut self, pool: Value) -> FixtureSpec {
        self.pool = pool;
        self
    }

    /// Sets further options of the engines, and fields of their entries.
    pub fn engines(mut self, options: &'static [&'static str], line: Value) -> FixtureSpec {
        self.options = options;
        self.line = line;
        self
    }
}

/// A gateway and its engines.
pub struct Fixture {
    /// The engines; those in decode slots play frontends with [`Protocol::Direct`].
    pub engines: EngineSet,
    /// The gateway.
    pub gateway: Gateway,
    spec: FixtureSpec,
    processes: Vec<u32>,
    turns: u64,
}

impl Fixture {
    /// A fixture of this specification, with new engines.
    pub async fn acquire(spec: FixtureSpec) -> Fixture {
        let mut fixture = match idle(&spec) {
            Some(fixture) => fixture,
            None => Fixture::build(spec).await,
        };
        fixture.change_engines().await;
        fixture
    }

    /// Releases the fixture to the next test; after a failed test the fixture is torn down instead.
    pub fn release(mut self) {
        self.gateway.assert_never_restarted(&self.processes);
        // A frontend's only identity is its address: the gateway's knowledge of one would apply to the next.
        if self.spec.protocol != Protocol::Direct {
            let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
            idle.push(self);
        }
    }

    async fn build(spec: FixtureSpec) -> Fixture {
        let protocol = spec.protocol;
        let options = [FAST, &["--dialect", protocol.dialect()], spec.options].concat();
        let prefills = match protocol {
            Protocol::Direct | Protocol::Aggregated => 0,
            _ => 2,
        };
        let roles = (Role::Prefill, protocol.decode_role());
        let mut engines = EngineSet::with_roles(roles, (prefills, 2), &options).await;
        engines.describe(Role::Prefill, |_| spec.line.clone());
        engines.describe(Role::Decode, |_| {
            let role = protocol.decode_listed_as();
            with(json!({"role": role.as_str()}), spec.line.clone())
        });
        engines.keep_bootstrap_ports();
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
            spec,
            turns: 0,
        }
    }

    /// Puts new engines in all slots.
    async fn change_engines(&mut self) {
        self.turns += 1;
        for role in [Role::Prefill, Role::Decode] {
            self.engines.kill(role).await;
            self.engines.start(role).await;
        }
        let names = match self.spec.protocol {
            Protocol::Direct => self.list_workers_of_frontends(),
            _ => {
                self.engines.list(Role::Prefill);
                self.engines.list(Role::Decode);
                let names = [Role::Prefill, Role::Decode].map(|role| self.engines.names(role));
                names.concat()
            }
        };
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
        let names = self
            .engines
            .others
            .iter()
            .filter_map(|line| line["name"].as_str());
        names.map(str::to_owned).collect()
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
        for slot in self.engines.prefill.iter().chain(&self.engines.decode) {
            if slot.is_running() {
                sum = sum.plus(&slot.engine().state().await);
            }
        }
        sum
    }

    /// Waits until the gateway has no booking and no engine runs anything.
    pub async fn comes_to_rest(&self) {
        for role in [Role::Prefill, Role::Decode] {
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

/// An idle fixture of this specification. Idle ones of others are torn down: tests of one specification run one after the other.
fn idle(spec: &FixtureSpec) -> Option<Fixture> {
    let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
    let (mut fitting, others): (Vec<Fixture>, Vec<Fixture>) =
        idle.drain(..).partition(|fixture| fixture.spec == *spec);
    let found = fitting.pop();
    idle.append(&mut fitting);
    drop(idle);
    drop(others);
    found
}
