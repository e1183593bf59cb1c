//! Owns the subject under test: it receives news and gives answers; the real router is one.

use std::collections::BTreeMap;
use std::time::Duration;

use routing::config::{Config, OnPrefillAbsent, ProtocolName};
use routing::fleet::{Fleet, Incarnation, Role, WorkerId};
use routing::model_state::ModelKey;
use routing::rendezvous::State;
use routing::request::Generation;
use routing::route::{Plan, PlanInput, Refusal, Router};
use serde_json::{Value, json};

use crate::oracle::Setup;
use crate::world::{News, SPACES, World};

/// A question: a request for a model, with or without named workers, or only a query for the workers that would be picked.
#[derive(Debug, Clone, Default)]
pub struct Ask {
    pub model: String,
    pub query: bool,
    pub prefill: Option<u64>,
    pub decode: Option<u64>,
}

/// An answer, without the differences between engines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Got {
    Pair { prefill: u64, decode: u64 },
    Whole { worker: u64 },
    Refused { status: u32, code: String },
}

/// A router under test.
pub trait Subject {
    /// Takes in a change of the world.
    fn on_news(&mut self, news: News, world: &World);

    fn ask(&mut self, ask: &Ask) -> Got;

    /// Why a normal request would not be served now.
    fn ready(&self, model: &str) -> Result<(), String>;

    /// Workers still to be bound, in order.
    fn unbound(&self) -> Vec<u64>;

    /// The name of a namespace's state, where the subject has states.
    fn state(&self, space: usize) -> Option<&'static str>;

    /// The subject's memory of a namespace, without ids.
    fn memory(&self, space: usize) -> String;

    /// Whether requests may name workers.
    fn hears_pins(&self) -> bool;

    /// Another error that the subject has found.
    fn complaint(&self) -> Option<String>;
}

/// The router.
pub struct Real {
    pub router: Router,
    setup: Setup,
    version: u64,
    reported: BTreeMap<ModelKey, State>,
    complaint: Option<String>,
    /// Every worker that has been there.
    lives: BTreeMap<u64, Incarnation>,
}

pub fn pool(setup: &Setup, fields: &str) -> routing::config::Pool {
    let protocol = match setup.protocol {
        ProtocolName::Sglang => r#""sglang","bootstrap":"ask""#,
        ProtocolName::Nixl => r#""nixl""#,
        ProtocolName::Direct => r#""direct","frontends":["127.0.0.1:1"]"#,
        other => panic!("the walk does not go over {}", other.rules().name),
    };
    let absent = match setup.absent {
        OnPrefillAbsent::Aggregate => "aggregate",
        OnPrefillAbsent::Fail => "fail",
    };
    let document = format!(
        r#"{{"pools":[{{"name":"p","protocol":{protocol},"discovery":{{"static":{{"workers":[]}}}},"trust_clients":true,
            "on_prefill_absent":"{absent}","decode":{{"runs_whole_requests":{}}}{fields}}}]}}"#,
        setup.whole
    );
    let config = Config::parse(document.as_bytes()).expect("a good configuration");
    config.pools[0].clone()
}

impl Real {
    pub fn new(setup: Setup) -> Self {
        Self::with(setup, "")
    }

    pub fn with(setup: Setup, fields: &str) -> Self {
        Self {
            router: Router::new(pool(&setup, fields), 42, 7, Duration::ZERO),
            setup,
            version: 0,
            reported: BTreeMap::new(),
            complaint: None,
            lives: BTreeMap::new(),
        }
    }

    /// Checks that each change of state is reported once, and that the reports match the state.
    fn record_transitions(&mut self) {
        for transition in self.router.take_transitions() {
            let known = self.reported.insert(transition.key.clone(), transition.to);
            if known != transition.from || transition.from == Some(transition.to) {
                self.complaint = Some(format!("{transition:?} after {known:?}"));
            }
        }
        let now: BTreeMap<ModelKey, State> = self
            .router
            .model_states()
            .map(|(key, state)| (key.clone(), state.state))
            .collect();
        if now != self.reported {
            self.complaint = Some(format!("told {:?}, is {now:?}", self.reported));
        }
    }

    fn of_space(&self, space: usize) -> Option<&routing::model_state::ModelState> {
        let mut states = self.router.model_states();
        states
            .find(|(key, _)| key.namespace == SPACES[space])
            .map(|(_, state)| state)
    }
}

impl Subject for Real {
    fn on_news(&mut self, news: News, world: &World) {
        match news {
            News::Fleet => {
                self.version += 1;
                let workers = world.workers(|space| self.setup.model(space));
                let lives = workers
                    .iter()
                    .map(|worker| (worker.id.0, worker.incarnation()));
                self.lives.extend(lives);
                self.router.adopt(Fleet::new(self.version, workers));
            }
            News::Bound(id) => {
                let info = br#"{"disaggregation_bootstrap_port":8998}"#;
                // Bootstrap information about an unknown worker must have no effect.
                let unknown = Incarnation {
                    id: WorkerId(id),
                    address: None,
                    role: Role::Prefill,
                    dp_size: 1,
                };
                let worker = self.lives.get(&id).copied().unwrap_or(unknown);
                assert!(self.router.on_reply(&worker, info));
            }
            // No news for the router: the worker is still among those to be asked.
            News::Failed => {}
        }
        self.record_transitions();
    }

    fn ask(&mut self, ask: &Ask) -> Got {
        let body = ask.body();
        let input = PlanInput {
            headers: &[],
            now: Duration::from_secs(1),
            ..PlanInput::default()
        };
        match self.router.plan(Generation::Chat, &body, input) {
            Ok(plan) => planned(&plan),
            Err(refusal) => refused(&refusal),
        }
    }

    fn ready(&self, model: &str) -> Result<(), String> {
        let ready = self.router.can_serve_requests(model);
        ready.map_err(|refusal| refusal.code().to_owned())
    }

    fn unbound(&self) -> Vec<u64> {
        let questions = self.router.questions();
        let unbound = questions.iter().filter(|asked| !asked.is_bound);
        let mut ids: Vec<u64> = unbound.map(|asked| asked.worker.id.0).collect();
        ids.sort_unstable();
        ids
    }

    fn state(&self, space: usize) -> Option<&'static str> {
        self.of_space(space).map(|model| model.state.name())
    }

    fn memory(&self, space: usize) -> String {
        format!("{:?}", self.of_space(space))
    }

    fn hears_pins(&self) -> bool {
        true
    }

    fn complaint(&self) -> Option<String> {
        self.complaint.clone()
    }
}

impl Ask {
    pub fn body(&self) -> Vec<u8> {
        let mut nvext = json!({});
        if self.query {
            nvext["annotations"] = json!(["query_instance_id:"]);
        }
        if let Some(id) = self.prefill {
            nvext["prefill_worker_id"] = json!(id);
        }
        if let Some(id) = self.decode {
            nvext["decode_worker_id"] = json!(id);
        }
        json!({"model": self.model, "messages": [], "nvext": nvext})
            .to_string()
            .into_bytes()
    }
}

pub fn refused(refusal: &Refusal) -> Got {
    Got::Refused {
        status: refusal.status(),
        code: refusal.code().to_owned(),
    }
}

pub fn planned(plan: &Plan) -> Got {
    match plan {
        Plan::Prefill(phase, assignment) => Got::Pair {
            prefill: phase.worker().id.0,
            decode: assignment.decode.as_ref().expect("a decode worker").id.0,
        },
        Plan::Forward(_, assignment) => Got::Whole {
            worker: assignment.decode.as_ref().expect("a worker").id.0,
        },
        Plan::Answer(answer) => {
            let answer: Value = serde_json::from_str(&answer.body).expect("JSON");
            let id = |name: &str| answer["nvext"]["worker_id"][name].as_u64().expect("an id");
            match (id("prefill_worker_id"), id("decode_worker_id")) {
                (prefill, decode) if prefill == decode => Got::Whole { worker: decode },
                (prefill, decode) => Got::Pair { prefill, decode },
            }
        }
        Plan::Wait(_) => panic!("nobody is ever too busy here"),
    }
}
