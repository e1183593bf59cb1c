//! Owns the comparison of an old gateway with a fresh one: after any history, the same workers get the same answers.
//!
//! Workers come, go and change in three ways: a replaced list, registration and departure. The memory of an old gateway may
//! separate a model whose workers have left (503) from one that never existed (404), and nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
use routing::config::{Config, Destinations, ListedWorker, Pool};
use routing::discovery::{Named, Registry, RegistryChange, static_workers};
use routing::fleet::{Fleet, Role, Worker, WorkerId};
use routing::request::Generation;
use routing::route::{Plan, PlanInput, Refusal, Router};
use serde_json::{Value, json};

const MODELS: [Option<&str>; 3] = [None, Some("sim"), Some("other")];
const NAMESPACES: [&str; 2] = ["", "canary"];
const ROLES: [&str; 3] = ["prefill", "decode", "aggregated"];

/// Ids up to this one are listed, higher ones register.
const LISTED: u64 = 4;

/// One worker as its source describes it; numbers select one of the possible values.
#[derive(Debug, Clone, Copy)]
struct Described {
    id: u64,
    address: u16,
    role: usize,
    model: usize,
    namespace: usize,
    set: bool,
    draining: bool,
    adapter: bool,
}

impl Described {
    fn listed(self) -> ListedWorker {
        let mut worker = json!({"id": self.id, "role": ROLES[self.role], "namespace": NAMESPACES[self.namespace],
            "address": format!("127.0.0.1:{}", 100 + u64::from(self.address) + 10 * self.id),
            "set": if self.set { "blue" } else { "" }, "draining": self.draining});
        if let Some(model) = MODELS[self.model] {
            worker["model"] = json!(model);
        }
        if self.adapter {
            worker["adapters"] = json!(["adapter"]);
        }
        serde_json::from_value(worker).expect("a worker")
    }
}

/// The next event.
#[derive(Debug, Clone, Copy)]
enum Event {
    /// A worker comes, as described, in place of one with its id.
    Comes(Described),
    Goes(u64),
    /// A prefill worker reports where its KV is fetched.
    Tells(u64),
}

fn described() -> impl Strategy<Value = Described> {
    let seldom = prop::bool::weighted(0.1);
    let (set, adapter) = (prop::bool::weighted(0.08), prop::bool::weighted(0.1));
    (
        1..=2 * LISTED,
        0..2_u16,
        0..3_usize,
        0..3_usize,
        0..2_usize,
        set,
        seldom,
        adapter,
    )
        .prop_map(
            |(id, address, role, model, namespace, set, draining, adapter)| Described {
                id,
                address,
                role,
                model,
                namespace,
                set,
                draining,
                adapter,
            },
        )
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        5 => described().prop_map(Event::Comes),
        4 => (1..=2 * LISTED).prop_map(Event::Goes),
        3 => (1..=2 * LISTED).prop_map(Event::Tells),
    ]
}

#[derive(Debug, Clone, Copy)]
struct Setup {
    protocol: &'static str,
    absent: &'static str,
    whole: bool,
    stale: &'static str,
}

fn setup() -> impl Strategy<Value = Setup> {
    let protocol = prop_oneof![Just("nixl"), Just("sglang"), Just("direct")];
    let absent = prop_oneof![Just("aggregate"), Just("fail")];
    let stale = prop_oneof![Just("reject"), Just("ignore")];
    (protocol, absent, any::<bool>(), stale).prop_map(|(protocol, absent, whole, stale)| Setup {
        protocol,
        absent,
        whole,
        stale,
    })
}

fn pool(setup: Setup) -> Pool {
    let mut pool = json!({"name": "p", "protocol": setup.protocol, "trust_clients": true,
        "discovery": {"static": {"workers": []}}, "on_prefill_absent": setup.absent,
        "decode": {"runs_whole_requests": setup.whole},
        "on_stale_pin": setup.stale});
    match setup.protocol {
        "direct" => pool["frontends"] = json!(["127.0.0.1:1"]),
        "sglang" => pool["bootstrap"] = json!("ask"),
        _ => {}
    }
    let document = json!({ "pools": [pool] });
    let config = Config::parse(document.to_string().as_bytes()).expect("a good configuration");
    config.pools[0].clone()
}

/// A gateway, and the sources of its workers.
struct Old {
    router: Router,
    listed: BTreeMap<u64, ListedWorker>,
    registry: Registry,
    /// Workers that have reported, by the fields that end with their life.
    bound: BTreeSet<(u64, String, &'static str)>,
    version: u64,
}

fn life(worker: &Worker) -> (u64, String, &'static str) {
    let address = worker.address.expect("an address").to_string();
    (worker.id.0, address, worker.role.name())
}

const INFO: &[u8] = br#"{"disaggregation_bootstrap_port":8998}"#;

impl Old {
    fn new(pool: Pool) -> Self {
        Self {
            router: Router::new(pool, 42, 7, Duration::ZERO),
            listed: BTreeMap::new(),
            registry: Registry::default(),
            bound: BTreeSet::new(),
            version: 0,
        }
    }

    fn workers(&self) -> Vec<Worker> {
        let listed: Vec<ListedWorker> = self.listed.values().cloned().collect();
        let mut workers = static_workers(&listed);
        workers.extend(self.registry.workers(&Destinations::Members));
        workers
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Comes(described) if described.id <= LISTED => {
                self.listed.insert(described.id, described.listed());
            }
            Event::Comes(described) => {
                let change = RegistryChange::Put(vec![described.listed()]);
                self.registry.apply(&change, 100).expect("room for it");
            }
            Event::Goes(id) if id <= LISTED => {
                self.listed.remove(&id);
            }
            Event::Goes(id) => {
                let change = RegistryChange::Delete(vec![Named::Id(id)]);
                self.registry.apply(&change, 100).expect("a deletion");
            }
            Event::Tells(id) => return self.tells(id),
        }
        self.version += 1;
        let workers = self.workers();
        self.router.adopt(Fleet::new(self.version, workers));
        let lives: BTreeSet<_> = self.router.fleet().workers().map(|w| life(w)).collect();
        self.bound.retain(|bound| lives.contains(bound));
    }

    fn tells(&mut self, id: u64) {
        let worker = self.router.fleet().get(WorkerId(id)).cloned();
        if let Some(worker) = worker.filter(|worker| worker.role == Role::Prefill) {
            self.router.on_reply(&worker.incarnation(), INFO);
            self.bound.insert(life(&worker));
        }
    }

    /// A gateway that has just started, with the same workers and the same reports.
    fn fresh(&self, pool: Pool) -> Router {
        let mut router = Router::new(pool, 43, 8, Duration::ZERO);
        router.adopt(Fleet::new(1, self.workers()));
        for (id, ..) in &self.bound {
            let worker = router.fleet().get(WorkerId(*id)).expect("it is there");
            let worker = worker.incarnation();
            router.on_reply(&worker, INFO);
        }
        router
    }
}

/// Every question: for each model and one that no worker has, without a name, with each possible worker named, and with one
/// that never existed.
fn questions() -> Vec<(&'static str, Value)> {
    let mut says = vec![
        json!({}),
        json!({"annotations": ["query_instance_id:"]}),
        json!({"prefill_worker_id": 99}),
    ];
    for id in 1..=2 * LISTED {
        for field in [
            "prefill_worker_id",
            "decode_worker_id",
            "backend_instance_id",
        ] {
            says.push(json!({field: id}));
        }
    }
    let models = ["sim", "other", "unheard-of", "adapter"];
    let of_model = |model| says.iter().cloned().map(move |said| (model, said));
    models.into_iter().flat_map(of_model).collect()
}

/// An answer, without its random part.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Answer {
    Served(&'static str),
    Refused(u32, &'static str),
}

fn answer(router: &mut Router, model: &str, nvext: &Value) -> Answer {
    let body = json!({"model": model, "messages": [], "nvext": nvext}).to_string();
    let input = PlanInput {
        now: Duration::from_secs(1),
        ..PlanInput::default()
    };
    match router.plan(Generation::Chat, body.as_bytes(), input) {
        Ok(Plan::Prefill(..)) => Answer::Served("pair"),
        Ok(Plan::Forward(_, assignment)) if assignment.prefill.is_some() => Answer::Served("pair"),
        Ok(Plan::Forward(..)) => Answer::Served("whole"),
        Ok(Plan::Answer(answer)) => {
            let answer: Value = serde_json::from_str(&answer.body).expect("JSON");
            let id = |name: &str| answer["nvext"]["worker_id"][name].clone();
            match id("prefill_worker_id") == id("decode_worker_id") {
                true => Answer::Served("whole"),
                false => Answer::Served("pair"),
            }
        }
        Ok(Plan::Wait(_)) => panic!("nobody is ever too busy here"),
        Err(refusal) => Answer::Refused(refusal.status(), refusal.code()),
    }
}

/// Whether an old gateway may give this answer where a fresh one gives another: it may know a model without workers.
fn may_differ(old: &Answer, fresh: &Answer) -> bool {
    let unknown = ["no_fleet", "model_not_found"];
    let gone = ["no_worker", "model_not_found", "stale_worker_id"];
    matches!((old, fresh), (Answer::Refused(503 | 404, old), Answer::Refused(503 | 404, fresh))
        if gone.contains(old) && unknown.contains(fresh))
}

fn readiness(router: &Router, model: &str) -> Answer {
    match router.can_serve_requests(model) {
        Ok(()) => Answer::Served("ready"),
        Err(refusal) => Answer::Refused(Refusal::status(&refusal), refusal.code()),
    }
}

fn compare(old: &mut Old, pool: &Pool, setup: Setup) -> Result<(), TestCaseError> {
    let mut fresh = old.fresh(pool.clone());
    // Of two namespaces that would serve a model in different ways, one is drawn.
    let namespaces: BTreeSet<&str> = fresh.fleet().workers().map(|w| &*w.namespace).collect();
    let is_drawn = setup.absent == "aggregate" && namespaces.len() > 1;
    let loosely = |answer: Answer| match answer {
        Answer::Served(_) if is_drawn => Answer::Served("in some way"),
        other => other,
    };
    for (model, nvext) in questions() {
        let of_old = loosely(answer(&mut old.router, model, &nvext));
        let of_fresh = loosely(answer(&mut fresh, model, &nvext));
        prop_assert!(
            of_old == of_fresh || may_differ(&of_old, &of_fresh),
            "{model} {nvext}: {of_old:?}, of a fresh one {of_fresh:?}"
        );
    }
    for model in ["sim", "other", "unheard-of", "adapter"] {
        let (of_old, of_fresh) = (readiness(&old.router, model), readiness(&fresh, model));
        prop_assert!(
            of_old == of_fresh || may_differ(&of_old, &of_fresh),
            "{model} is {of_old:?}, of a fresh one {of_fresh:?}"
        );
    }
    prop_assert_eq!(old.router.can_serve_any(), fresh.can_serve_any());
    Ok(())
}

#[test]
fn found_c1_after_any_history_the_answers_are_those_of_a_fresh_gateway() {
    let config = ProptestConfig {
        cases: 10_000,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    // The same histories each time: answers drawn among several model keys are not compared, and a rare history must not
    // fail by chance.
    let random = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(config, random);
    let histories = (setup(), prop::collection::vec(event(), 1..=60));
    runner
        .run(&histories, |(setup, events)| {
            let pool = pool(setup);
            let mut old = Old::new(pool.clone());
            for event in events {
                old.happens(event);
            }
            compare(&mut old, &pool, setup)
        })
        .unwrap_or_else(|found| panic!("{found}"));
}

/// A gateway that has adopted one list of workers after the other.
fn after(lists: &[&[Described]]) -> Router {
    let setup = Setup {
        protocol: "nixl",
        absent: "aggregate",
        whole: true,
        stale: "ignore",
    };
    let mut old = Old::new(pool(setup));
    for list in lists {
        old.listed = list.iter().map(|one| (one.id, one.listed())).collect();
        old.version += 1;
        let workers = old.workers();
        old.router.adopt(Fleet::new(old.version, workers));
    }
    old.router
}

const ANY: Described = Described {
    id: 1,
    address: 0,
    role: 2,
    model: 0,
    namespace: 0,
    set: false,
    draining: false,
    adapter: false,
};

#[test]
fn found_c1_a_model_that_has_gone_does_not_decide_who_is_served() {
    let passing = Described {
        id: 2,
        model: 1,
        namespace: 1,
        ..ANY
    };
    let ask = |router: &mut Router| answer(router, "sim", &json!({}));
    let mut router = after(&[&[ANY], &[ANY, passing], &[ANY]]);
    assert_eq!(ask(&mut router), Answer::Served("whole"));
    // A draining worker is about to leave and decides as little.
    let draining = Described {
        draining: true,
        ..passing
    };
    let mut router = after(&[&[ANY, passing], &[ANY, draining]]);
    assert_eq!(ask(&mut router), Answer::Served("whole"));
    // The reverse: workers of any model do not revive a model key that is only remembered.
    let of_canary = Described {
        id: 3,
        namespace: 1,
        ..ANY
    };
    let alone = Described {
        id: 4,
        model: 1,
        role: 0,
        ..ANY
    };
    let mut router = after(&[&[of_canary, passing, alone], &[of_canary, alone]]);
    assert_eq!(ask(&mut router), Answer::Refused(503, "no_decode_worker"));
    assert_eq!(
        readiness(&router, "sim"),
        Answer::Refused(503, "no_decode_worker")
    );
    let remembered = router
        .model_states()
        .find(|(key, _)| key.model.as_deref() == Some("sim") && key.namespace == "canary");
    let (_, state) = remembered.expect("it is remembered");
    assert_eq!(state.state.name(), "vacant");
}

#[test]
fn found_c11_of_models_that_have_gone_those_gone_longest_are_forgotten() {
    let worker = |name: &str| {
        let listed =
            json!({"id": 1, "role": "aggregated", "address": "127.0.0.1:1", "model": name});
        let listed: ListedWorker = serde_json::from_value(listed).expect("a worker");
        static_workers(&[listed])
    };
    let setup = Setup {
        protocol: "nixl",
        absent: "aggregate",
        whole: false,
        stale: "ignore",
    };
    let mut router = Router::new(pool(setup), 42, 7, Duration::ZERO);
    let status = |router: &Router, name: &str| match readiness(router, name) {
        Answer::Refused(status, _) => status,
        Answer::Served(_) => 200,
    };
    // Later names come first in the alphabet.
    let name = |number: u64| format!("model-{:04}", 9_999 - number);
    for number in 0..400 {
        router.adopt(Fleet::new(number + 1, worker(&name(number))));
    }
    router.adopt(Fleet::new(500, Vec::new()));
    for number in 0..400 {
        let right = if number < 400 - 256 { 404 } else { 503 };
        assert_eq!(status(&router, &name(number)), right, "{number}");
    }
    // A model that returns and leaves again has left last.
    router.adopt(Fleet::new(501, worker(&name(144))));
    assert_eq!(status(&router, &name(144)), 200);
    router.adopt(Fleet::new(502, worker("one-more")));
    router.adopt(Fleet::new(503, Vec::new()));
    assert_eq!(status(&router, &name(144)), 503);
    assert_eq!(status(&router, &name(145)), 404);
    assert_eq!(router.model_states().count(), 256);
}
