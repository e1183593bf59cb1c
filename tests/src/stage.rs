//! Owns a fixture: a gateway over two prefill and two decode engines of one protocol, used by many tests, one at a time, since
//! starting a gateway takes longer than most tests. Each test finds other workers than the one before, with other ids.

use std::sync::{Mutex, PoisonError};

use serde_json::{Value, json};

use crate::Proxy;
use crate::client::Ask;
use crate::crew::{Crew, Post};
use crate::engines::{FAST, MODEL, Recorded, Role, State, with};
use crate::gateway::Gateway;
use crate::protocols::Protocol;
use crate::wait::{GENEROUS, eventually};

/// Fixtures that no test uses now.
static IDLE: Mutex<Vec<Stage>> = Mutex::new(Vec::new());

/// Specification of a fixture.
#[derive(Clone, Debug, PartialEq)]
pub struct Plot {
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

impl Plot {
    /// Without further fields and options.
    pub fn of(proxy: Proxy, protocol: Protocol) -> Plot {
        Plot {
            proxy,
            protocol,
            pool: json!({}),
            options: &[],
            line: json!({}),
        }
    }

    /// Sets further fields of the pool.
    pub fn pool(mut self, pool: Value) -> Plot {
        self.pool = pool;
        self
    }

    /// Sets further options of the engines, and fields of their entries.
    pub fn engines(mut self, options: &'static [&'static str], line: Value) -> Plot {
        self.options = options;
        self.line = line;
        self
    }
}

/// A gateway and its engines.
pub struct Stage {
    /// The engines; those in decode slots play frontends with [`Protocol::Direct`].
    pub crew: Crew,
    /// The gateway.
    pub gateway: Gateway,
    plot: Plot,
    processes: Vec<u32>,
    turns: u64,
}

impl Stage {
    /// A fixture of this specification, with new engines.
    pub async fn take(plot: Plot) -> Stage {
        let mut stage = match idle(&plot) {
            Some(stage) => stage,
            None => Stage::build(plot).await,
        };
        stage.change_engines().await;
        stage
    }

    /// Releases the fixture to the next test; after a failed test the fixture is torn down instead.
    pub fn leave(mut self) {
        self.gateway.assert_never_restarted(&self.processes);
        // A frontend's only identity is its address: the gateway's knowledge of one would apply to the next.
        if self.plot.protocol != Protocol::Direct {
            let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
            idle.push(self);
        }
    }

    async fn build(plot: Plot) -> Stage {
        let protocol = plot.protocol;
        let options = [FAST, &["--dialect", protocol.dialect()], plot.options].concat();
        let prefills = match protocol {
            Protocol::Direct | Protocol::Aggregated => 0,
            _ => 2,
        };
        let roles = (Role::Prefill, protocol.decode_role());
        let mut crew = Crew::hire_as(roles, (prefills, 2), &options).await;
        crew.describe(Role::Prefill, |_| plot.line.clone());
        crew.describe(Role::Decode, |_| {
            let role = protocol.decode_listed_as();
            with(json!({"role": role.as_str()}), plot.line.clone())
        });
        crew.keep_bootstrap_ports();
        if protocol == Protocol::Mooncake {
            let servers = crew.prefill.iter().filter_map(|post| post.bootstrap);
            crew.further_members = servers.map(|at| format!("bootstrap={at}")).collect();
        }
        let frontends = crew.decode.iter().map(|post| post.address.to_string());
        let frontends: Vec<String> = frontends.collect();
        let frontends = match protocol {
            Protocol::Direct => json!({"frontends": frontends}),
            _ => json!({}),
        };
        let pool = with(with(protocol.pool(), frontends), plot.pool.clone());
        let gateway = crew.gateway(plot.proxy, pool).await;
        Stage {
            processes: gateway.processes(),
            crew,
            gateway,
            plot,
            turns: 0,
        }
    }

    /// Puts new engines in all slots.
    async fn change_engines(&mut self) {
        self.turns += 1;
        for role in [Role::Prefill, Role::Decode] {
            self.crew.kill(role).await;
            self.crew.start(role).await;
        }
        let names = match self.plot.protocol {
            Protocol::Direct => self.list_workers_of_frontends(),
            _ => {
                self.crew.list(Role::Prefill);
                self.crew.list(Role::Decode);
                let names = [Role::Prefill, Role::Decode].map(|role| self.crew.names(role));
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
        self.crew.others = (1..).zip(roles).map(worker).collect();
        // Lists no engine of this role: only the others are published.
        self.crew.list(Role::Prefill);
        let names = self
            .crew
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
    pub fn posts(&self, role: Role) -> &[Post] {
        self.crew.posts(role)
    }

    /// Injects a fault into one engine of this role.
    pub async fn one_does(&self, role: Role, what: &Value) {
        if let Some(post) = self.posts(role).first() {
            post.engine().fault(what).await;
        }
    }

    /// Injects a fault into all engines of this role.
    pub async fn all_do(&self, role: Role, what: &Value) {
        for post in self.posts(role) {
            post.engine().fault(what).await;
        }
    }

    /// Number of requests of each living engine of this role.
    pub async fn requests(&self, role: Role) -> Vec<usize> {
        let mut counts = Vec::new();
        for post in self.posts(role) {
            counts.push(match post.lives() {
                true => post.engine().requests().await.len(),
                false => 0,
            });
        }
        counts
    }

    /// All requests to the living engines of this role, engine by engine.
    pub async fn recorded(&self, role: Role) -> Vec<Recorded> {
        let mut all = Vec::new();
        for post in self.posts(role).iter().filter(|post| post.lives()) {
            all.extend(post.engine().requests().await);
        }
        all
    }

    /// The sum of all living engines' counters.
    pub async fn state(&self) -> State {
        let mut sum = State::default();
        for post in self.crew.prefill.iter().chain(&self.crew.decode) {
            if post.lives() {
                sum = sum.plus(&post.engine().state().await);
            }
        }
        sum
    }

    /// Waits until the gateway has no booking and no engine runs anything.
    pub async fn comes_to_rest(&self) {
        for role in [Role::Prefill, Role::Decode] {
            self.crew.is_idle(role).await;
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
fn idle(plot: &Plot) -> Option<Stage> {
    let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
    let (mut fitting, others): (Vec<Stage>, Vec<Stage>) =
        idle.drain(..).partition(|stage| stage.plot == *plot);
    let found = fitting.pop();
    idle.append(&mut fitting);
    drop(idle);
    drop(others);
    found
}
