//! Owns the routing of one request: which workers are picked, what is booked, what each leg is sent, and what follows from
//! the prefill answer.
//!
//! A plain request is forwarded to one worker. A request that generates text is planned once its body has arrived: the state
//! of its model key (its model, in one namespace) decides whether it gets a pair of workers, one aggregated worker, or a
//! refusal; both workers are picked and booked in one step, before the next request is handled. In direct mode the request
//! is forwarded at once, with the choice in headers. Otherwise a [`PrefillPhase`] comes first, or runs concurrently, and is
//! consumed by the prefill answer.

mod after_prefill;
mod assignment;
mod binding;
mod choice;
mod conditional;
mod dispatch;
mod eligible;
mod explain;
pub mod fate;
mod forward;
mod handed;
mod health;
mod length;
mod model_workers;
mod models;
mod picker;
mod pinned;
mod prefill;
mod query;
mod reconfigure;
mod recovery;
mod reports;
mod reserve;
mod retry;
mod selection_request;
mod serving;
mod sharing;
mod split;
mod stale;
mod surface;
mod tally;
mod trail;
mod waiting;
mod workers;

pub use crate::handoff::MAX_PREFILL_ANSWER;
pub use crate::refusal::{PinProblem, PrefillFailure, Refusal};
pub use after_prefill::{AbortLeg, AfterPrefill, CleanUpLeg, Client, PrefillEnd};
pub use assignment::{Assignment, Fallback};
pub use binding::{Question, queries_workers};
pub use dispatch::{Dispatch, Patience};
pub use handed::Lost;
pub use health::{Ejection, Outcome};
pub use models::{AboutModels, Model, Models};
pub use prefill::{PrefillAnswer, PrefillPhase};
pub use query::LocalAnswer;
pub use recovery::{Failed, Recovery};
pub use reports::Report;
pub use selection_request::SelectionRequest;
pub use tally::{Facts, Picks, Tally};
pub use waiting::{QueueTicket, QueuedRequest};

use std::rc::Rc;
use std::time::Duration;

use hashbrown::HashMap;

use crate::admission::{QueueKey, Waiting};
use crate::config::{Discovery, OnPrefillAbsent, Pool};
use crate::discovery::static_workers;
use crate::fleet::{Capacity, Condition, Fleet, Role, Target, TargetKey, Worker, WorkerId};
use crate::handoff::binding::Binding;
use crate::handoff::rooms::Rooms;
use crate::handoff::{HandoffPair, Prefill};
use crate::load::{Ledger, Load};
use crate::model_state::{ModelKey, ModelState, ModelStates, Transition};
use crate::prefix::index::Index;
use crate::rendezvous::{NotServed, ServingDecision};
use crate::request::{Generation, Request, check_unread};
use crate::selection::eligibility::{Filter, Subset};
use crate::selection::{Policy, Random, policy};
use explain::Explained;
use handed::Noted;
use health::HealthRecords;
use model_workers::ModelWorkers;
use pinned::Pinned;
use recovery::{RetryBudget, Way};
use reports::Reports;
use retry::RetrySnapshot;
use selection_request::SelectionContext;
use serving::ServingChoice;
use sharing::Kept;
use waiting::QueuedChoice;
use workers::Opened;

/// Routes the requests of one pool on one thread.
pub struct Router {
    pool: Pool,
    fleet: Fleet,
    model_states: ModelStates,
    bindings: HashMap<WorkerId, Binding>,
    ledger: Ledger,
    reports: Reports,
    prefixes: Index,
    /// The decisions to be shared with other VMs.
    kept: Kept,
    /// The ranks with a slot in `prefixes`.
    opened: HashMap<TargetKey, Opened>,
    models_workers: HashMap<ModelKey, Rc<ModelWorkers>>,
    /// Adapters by name, each with its base model.
    adapters: HashMap<String, Option<String>>,
    health: HealthRecords,
    waiting: Waiting,
    /// Number of fleets adopted so far.
    adopted: u64,
    /// The explanations of the choices for the current request, if its caller wants them.
    explained: Option<Vec<Explained>>,
    prefill_policy: Box<dyn Policy>,
    decode_policy: Box<dyn Policy>,
    next_frontend: usize,
    rooms: Rooms,
    random: Random,
    transitions: Vec<Transition>,
    tally: Tally,
    noted: Noted,
    /// Scratch, kept between choices to reuse its memory.
    depths: Vec<u32>,
}

/// The outcome of planning a request.
#[allow(
    clippy::large_enum_variant,
    reason = "one a request, moved once or twice: cheaper than a box"
)]
#[derive(Debug)]
#[must_use = "the plan's bookings end with it"]
pub enum Plan {
    /// The request is forwarded now.
    Forward(Dispatch, Assignment),
    /// A prefill worker is called; the client waits, at least until the call has been made.
    Prefill(PrefillPhase, Assignment),
    /// The router answers itself, and no backend is touched.
    Answer(LocalAnswer),
    /// All workers that could take the request are too busy: the request queues, and is tried again on its turn.
    Wait(Box<QueueTicket>),
}

/// The input of a plan beside the body.
#[derive(Debug, Clone, Copy, Default)]
pub struct PlanInput<'a> {
    /// The headers with routing overrides, if the pool trusts its callers; empty otherwise.
    pub headers: &'a [(Vec<u8>, Vec<u8>)],
    /// The time since 1970.
    pub now: Duration,
    /// The session that a header names.
    pub session: Option<&'a [u8]>,
    /// The tenant that a header names: tenants share no cache.
    pub tenant: Option<&'a [u8]>,
    /// The endpoints that the gateway allows; none: all.
    pub subset: Option<&'a Subset>,
    /// Whether the choices are to be explained.
    pub explain: Explain,
}

/// Whether the choices for a request are to be explained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Explain {
    /// No explanation.
    #[default]
    No,
    /// For the log, for any caller.
    ForLog,
    /// For the caller, if the pool trusts its callers.
    ForCaller,
}

impl Router {
    /// A router for `pool` at `now`, since 1970. Its choices follow from `seed`, its rooms from `owner`, a number that no other VM
    /// of this proxy has.
    pub fn new(pool: Pool, seed: u64, owner: u64, now: Duration) -> Self {
        let workers = match &pool.discovery {
            Discovery::Static(list) => static_workers(&list.workers),
            _ => Vec::new(),
        };
        let mut router = Self {
            fleet: Fleet::default(),
            model_states: ModelStates::default(),
            bindings: HashMap::new(),
            ledger: Ledger::default(),
            reports: Reports::default(),
            kept: Kept::default(),
            prefixes: reconfigure::index(&pool),
            opened: HashMap::new(),
            models_workers: HashMap::new(),
            adapters: HashMap::new(),
            health: HealthRecords::new(pool.health.clone()),
            waiting: Waiting::default(),
            adopted: 0,
            explained: None,
            prefill_policy: policy(pool.selection.prefill),
            decode_policy: policy(pool.selection.decode),
            next_frontend: 0,
            rooms: Rooms::new(owner),
            random: Random::with_seed(seed),
            transitions: Vec::new(),
            tally: Tally::default(),
            noted: Noted::default(),
            depths: Vec::new(),
            pool,
        };
        router.advance(now);
        router.adopt(Fleet::new(0, workers));
        router
    }

    /// The adopted fleet.
    pub fn fleet(&self) -> &Fleet {
        &self.fleet
    }

    /// The pool's configuration.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The total of this VM's bookings.
    pub fn total_load(&self) -> Load {
        self.ledger.total()
    }

    /// A random number, for ids that a client did not send.
    pub fn random(&mut self) -> u64 {
        self.random.u64(..)
    }

    /// Sets the owner of the rooms to come, a number that no other VM has. To be called before the first request.
    pub fn own_rooms(&mut self, owner: u64) {
        self.rooms = Rooms::new(owner);
    }

    /// Takes the changes of state since the last call.
    pub fn take_transitions(&mut self) -> Vec<Transition> {
        std::mem::take(&mut self.transitions)
    }

    /// The model keys and their states.
    pub fn model_states(&self) -> impl Iterator<Item = (&ModelKey, &ModelState)> + Clone {
        self.model_states.states()
    }

    /// Whether some model's normal request would be served now.
    pub fn can_serve_any(&self) -> bool {
        let absent = self.absent_policy();
        self.model_states()
            .any(|(_, state)| state.can_serve_requests(absent).is_ok())
    }

    /// Whether a model's normal request would be served now.
    ///
    /// # Errors
    /// The refusal that a request would get.
    pub fn can_serve_requests(&self, model: &str) -> Result<(), Refusal> {
        let (model, _) = self.model_of(model)?;
        let absent = self.absent_policy();
        let states = self.model_states.of_model(Some(&model));
        let outcomes = states
            .into_iter()
            .map(|(_, state)| state.can_serve_requests(absent));
        best(outcomes)
    }

    /// The policy on absent prefill workers, for tables and readiness.
    pub fn absent_policy(&self) -> OnPrefillAbsent {
        self.pool.prefill_absent()
    }

    /// A request that generates nothing: sent to the least loaded healthy worker.
    ///
    /// # Errors
    /// When there is no worker.
    pub fn plain(&mut self, subset: Option<&Subset>) -> Result<(Dispatch, Assignment), Refusal> {
        let outcome = self.plain_to_one(subset);
        self.or_anywhere(outcome, subset)
    }

    fn plain_to_one(&mut self, subset: Option<&Subset>) -> Result<(Dispatch, Assignment), Refusal> {
        if !self.pool.rules().reaches_workers {
            return Ok((self.through_frontends(Vec::new()), Assignment::default()));
        }
        let decoders = self
            .fleet
            .open()
            .filter(|worker| worker.role != Role::Prefill)
            .filter(|worker| subset.is_none_or(|subset| subset.holds(worker.address)));
        let mut targets: Vec<Target> = decoders.map(Target::whole).collect();
        self.random.shuffle(&mut targets);
        let now = self.ledger.now();
        targets.sort_by_cached_key(|target| {
            let held = self.health.held(target.worker.id, now);
            let is_ready = target.worker.condition == Condition::Ready;
            let load = self.ledger.worker_load_in_all(&target.worker);
            (!is_ready, held, load.decodes)
        });
        let Some((first, others)) = targets.split_first() else {
            return Err(match subset {
                None => Refusal::NotServed(NotServed::Vacant),
                Some(_) => Refusal::NoneEligible {
                    role: Role::Decode,
                    filter: Filter::Subset,
                },
            });
        };
        let assignment = Assignment {
            errand_charge: Some(self.charge_errand(first)),
            ..Assignment::default()
        };
        Ok((self.dispatch_to(first, others), assignment))
    }

    /// Plans a request that generates text, from its body.
    ///
    /// # Errors
    /// [`Refusal`] says what is wrong with the request, or which worker is missing.
    pub fn plan(
        &mut self,
        generation: Generation,
        body: &[u8],
        input: PlanInput<'_>,
    ) -> Result<Plan, Refusal> {
        self.advance(input.now);
        self.explain(input.explain);
        let outcome = self.plan_read(generation, body, input);
        self.or_forward_anywhere(outcome, input.subset)
    }

    /// The same, without the pass-through of an open pool.
    fn plan_read(
        &mut self,
        generation: Generation,
        body: &[u8],
        input: PlanInput<'_>,
    ) -> Result<Plan, Refusal> {
        let generation = match generation {
            Generation::Generate if !self.pool.rules().has_generate_api => Generation::Other,
            known => known,
        };
        if body.is_empty() {
            return self.plan_empty(generation, input.subset);
        }
        self.tally.read(body.len());
        let request = match Request::read(generation, body) {
            Ok(request) => request,
            Err(refusal @ (Refusal::NotJson { .. } | Refusal::NoHandoffForPath)) => {
                if !self.pool.trust_clients {
                    check_unread(body)?;
                }
                return self.plan_unread(refusal, input.subset);
            }
            Err(refusal) => return Err(refusal),
        };
        if !self.pool.trust_clients {
            request.check_handoff_is_ours()?;
        }
        let mut overrides = self.overrides(&request, input)?;
        let ServingChoice {
            key,
            decision,
            model,
            adapter,
        } = self.choose_serving(&request, &mut overrides, input.subset)?;
        let demand = self.demand(&request, &overrides, input, adapter);
        let rank = self.objective(input.headers);
        let queue_key = QueueKey {
            rank,
            flow: picker::flow(input.headers),
            priority: overrides.hints.priority,
            tokens: demand.prompt_tokens,
            since: input.now,
        };
        let context = self.context(&key, &overrides, &demand);
        let mut outcome = self.plan_at(&context, decision, &request, input.now);
        if let Ok(Plan::Forward(_, assignment) | Plan::Prefill(_, assignment)) = &mut outcome {
            assignment.facts = Facts::of(&key, &demand);
        }
        match outcome {
            // A sheddable request does not wait.
            Err(overloaded @ Refusal::Overloaded { .. }) if !overrides.query && rank >= 0 => {
                let terms = QueuedChoice {
                    adopted: self.adopted,
                    overrides,
                    demand,
                    model,
                };
                self.wait(&key, queue_key, &request, terms, overloaded)
            }
            outcome => outcome,
        }
    }

    /// The plan of a request for its model key.
    fn plan_at(
        &mut self,
        context: &SelectionContext<'_>,
        decision: ServingDecision,
        request: &Request<'_>,
        now: Duration,
    ) -> Result<Plan, Refusal> {
        match decision {
            ServingDecision::Refused(reason) => Err(Refusal::NotServed(reason)),
            ServingDecision::Pair if request.hands_off_itself() => {
                self.plan_decode(context, request)
            }
            ServingDecision::Pair => match split::obstacle(&self.pool, request) {
                Some(obstacle) => self.plan_whole(context, request, now, obstacle),
                None => {
                    length::check(self.pool.rules(), context.model_workers.longest, request)?;
                    self.plan_pair(context, request, now)
                }
            },
            ServingDecision::Whole => {
                let otherwise = Refusal::NotServed(NotServed::NotActivated);
                self.plan_whole(context, request, now, otherwise)
            }
        }
    }

    /// Plans a body that its headers declare encoded, like one that cannot be read. An engine may read it all the same: the
    /// header is only the client's claim.
    ///
    /// # Errors
    /// As [`Router::plan_unread`], and if the body names a hand-off, which a client must not set.
    pub fn plan_encoded(&mut self, body: &[u8], subset: Option<&Subset>) -> Result<Plan, Refusal> {
        if body.is_empty() {
            return self.plan_empty(Generation::Other, subset);
        }
        if !self.pool.trust_clients {
            check_unread(body)?;
        }
        self.plan_unread(Refusal::Encoded, subset)
    }

    /// Plans a body that cannot be read: by load alone, to a worker that needs no hand-off in the body; else refuses it with
    /// `otherwise`.
    ///
    /// # Errors
    /// `otherwise`, if there is no such worker.
    pub fn plan_unread(
        &mut self,
        otherwise: Refusal,
        subset: Option<&Subset>,
    ) -> Result<Plan, Refusal> {
        // A body that is not read cannot be at fault.
        let otherwise = match self.is_open() {
            true => Refusal::NoFleet,
            false => otherwise,
        };
        let outcome = self.plan_by_load(otherwise, subset);
        self.or_forward_anywhere(outcome, subset)
    }

    fn plan_pair(
        &mut self,
        context: &SelectionContext<'_>,
        request: &Request<'_>,
        now: Duration,
    ) -> Result<Plan, Refusal> {
        if context.overrides.query {
            let (prefill, decode) = self.look_at_pair(context)?;
            let block_tokens = self.pool.block_tokens;
            let answer =
                query::answer(request, context, Some(&prefill), &decode, block_tokens, now);
            return Ok(Plan::Answer(answer));
        }
        if let Some(whole) = self.stays(context) {
            let why = Some(Fallback::NotWorthIt);
            return Ok(self.forward_whole(whole, context, why, Some(request)));
        }
        self.book_pair(context, request)
    }

    /// Picks and books a pair.
    fn book_pair(
        &mut self,
        context: &SelectionContext<'_>,
        request: &Request<'_>,
    ) -> Result<Plan, Refusal> {
        let pair = self.admitted_pair(context)?;
        if !self.pool.rules().order.is_ours() {
            return Ok(self.forward_pair(pair, context, Some(request)));
        }
        let prefill = &pair.prefill.target;
        let partners = HandoffPair {
            prefill: Prefill {
                target: prefill,
                binding: self.bindings.get(&prefill.worker.id),
            },
            decode_rank: pair.decode.target.rank,
        };
        let engine = self.pool.engine();
        let handoff = engine.handoff(&partners, request, &mut self.rooms)?;
        Ok(self.prefill_phase(context, pair, handoff, request))
    }

    /// A trusted caller has had its prompt prefilled already: the request goes to a decode worker unchanged.
    fn plan_decode(
        &mut self,
        context: &SelectionContext<'_>,
        request: &Request<'_>,
    ) -> Result<Plan, Refusal> {
        Pinned::check_unused(context.overrides, &self.fleet)?;
        let (decode, others) = self.look_at_decode(context)?;
        self.take(
            Role::Decode,
            context,
            context.overrides.decode_pin(),
            &decode,
        );
        let mut dispatch = self.dispatch_to(&decode.target, &others);
        let snapshot = Rc::new(RetrySnapshot::of(context, request));
        dispatch.patience = snapshot.patience(self, decode.target.worker.id, Duration::ZERO);
        let assignment = Assignment {
            trail: Some(Rc::clone(&snapshot.trail)),
            decode_charge: Some(self.charge_decode(&decode, context.demand)),
            // A hand-off can be used only once.
            recovery: Some(Recovery::new(snapshot, Way::Whole, RetryBudget::default())),
            decode: Some(decode.target.worker),
            ..Assignment::default()
        };
        Ok(Plan::Forward(dispatch, assignment))
    }

    fn plan_whole(
        &mut self,
        context: &SelectionContext<'_>,
        request: &Request<'_>,
        now: Duration,
        otherwise: Refusal,
    ) -> Result<Plan, Refusal> {
        Pinned::check_unused(context.overrides, &self.fleet)?;
        let whole = match self.pick_whole(context) {
            Ok(whole) => whole,
            Err(Refusal::NotServed(_)) => return Err(otherwise),
            Err(refusal) => return Err(refusal),
        };
        let decode = &whole.decode.target;
        if context.overrides.query {
            let block_tokens = self.pool.block_tokens;
            let answer = query::answer(request, context, None, decode, block_tokens, now);
            return Ok(Plan::Answer(answer));
        }
        let fallback = (decode.worker.role == Role::Decode).then_some(Fallback::PrefillAbsent);
        Ok(self.forward_whole(whole, context, fallback, Some(request)))
    }
}

/// The capacity of a rank of a worker: from its source, else from its engine's report, else from the pool.
fn capacity(pool: &Pool, reports: &Reports, worker: &Worker) -> Capacity {
    let reported = || reports.kv_blocks_of_rank(worker, pool.block_tokens);
    Capacity {
        kv_blocks: worker
            .capacity
            .kv_blocks
            .or_else(reported)
            .or(pool.kv_blocks),
        max_model_len: worker.capacity.max_model_len.or(pool.max_model_len),
        ..worker.capacity
    }
}

/// Whether a worker runs requests aggregated.
fn runs_whole(pool: &Pool, worker: &Worker) -> bool {
    match worker.role {
        Role::Aggregated => true,
        Role::Decode => pool.decode.runs_whole_requests,
        Role::Prefill => false,
    }
}

/// Served if any model key serves; else the reason nearest to being served.
fn best(outcomes: impl Iterator<Item = Result<(), NotServed>>) -> Result<(), Refusal> {
    let mut nearest = NotServed::Vacant;
    for outcome in outcomes {
        match outcome {
            Ok(()) => return Ok(()),
            Err(reason) => nearest = nearest.min(reason),
        }
    }
    Err(Refusal::NotServed(nearest))
}

#[cfg(test)]
mod tests;
