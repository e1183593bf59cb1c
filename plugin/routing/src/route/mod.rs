//! Owns the routing of one request: which workers are picked, what is booked, what each leg is sent, and what follows from
//! the prefill answer.
//!
//! A plain request is forwarded to one worker. A request that generates text is planned once its body has arrived: the state
//! of its model key (its model, in one namespace) decides whether it gets a pair of workers, one aggregated worker, or a
//! refusal; both workers are picked and booked in one step, before the next request is handled. In direct mode the request
//! is forwarded at once, with the choice in headers. Otherwise a [`PrefillPhase`] comes first, or runs concurrently, and is
//! consumed by the prefill answer.
//!
//! A [`Router`] is composed of members, each of which answers for itself. What needs one or two of them is a method of one;
//! a step that leads through more is a function of the step's module, and takes the router.

mod after_prefill;
mod assignment;
mod binding;
mod choice;
mod chooser;
mod conditional;
mod dispatch;
mod eligible;
mod ending;
mod explain;
pub mod fate;
mod forward;
mod health;
mod model_workers;
mod models;
mod notes;
mod picker;
mod pinned;
mod planning;
mod prefill;
mod prefixes;
mod query;
mod recovery;
mod reports;
mod retry;
mod selection_request;
mod serving;
mod split;
mod trail;
mod waiting;
mod workers;

pub use crate::handoff::MAX_CALL_ANSWER;
pub use crate::refusal::{PinProblem, PrefillFailure, Refusal};
pub use after_prefill::{AbortLeg, AfterPrefill, CleanUpLeg, Client, PrefillEnd};
pub use assignment::{Assignment, Fallback};
pub use binding::{Question, queries_workers};
pub use dispatch::{Dispatch, Patience};
pub use health::{Ejection, Outcome};
pub use models::{AboutModels, Model, Models};
pub use notes::{Facts, Lost, Picks, Tally};
pub use prefill::{CallEnd, PrefillPhase};
pub use query::LocalAnswer;
pub use recovery::{Failed, Recovery};
pub use reports::Report;
pub use selection_request::SelectionRequest;
pub use waiting::{QueueTicket, QueuedRequest};

use std::sync::Arc;
use std::time::Duration;

use crate::admission::Waiting;
use crate::config::{Discovery, OnPrefillAbsent, Pool};
use crate::discovery::static_workers;
use crate::fleet::{Fleet, Incarnation, Worker, WorkerId};
use crate::handoff::binding::Binding;
use crate::load::{Ledger, Load, ThreadLoad};
use crate::model_state::{ModelKey, ModelState, Transition};
use crate::prefix::Decision;
use crate::selection::eligibility::Subset;
use chooser::Chooser;
use health::HealthRecords;
use notes::Notes;
use prefixes::Prefixes;
use reports::News;
use workers::Workers;

/// Routes the requests of one pool on one thread.
pub struct Router {
    pool: Pool,
    workers: Workers,
    ledger: Ledger,
    prefixes: Prefixes,
    health: HealthRecords,
    queue: Waiting,
    chooser: Chooser,
    notes: Notes,
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
            workers: Workers::default(),
            ledger: Ledger::default(),
            prefixes: Prefixes::new(&pool),
            health: HealthRecords::new(pool.health.clone()),
            queue: Waiting::default(),
            chooser: Chooser::new(&pool, seed, owner),
            notes: Notes::default(),
            pool,
        };
        router.advance(now);
        router.adopt(Fleet::new(0, workers));
        router
    }

    /// Advances the router's clock to `now`, since 1970. To be called before anything that depends on time: a choice, an
    /// answer, a tick.
    pub fn advance(&mut self, now: Duration) {
        let patience = Duration::from_millis(self.pool.booking_expiry_ms);
        self.ledger.advance(now, patience);
        self.health.expire(self.ledger.now());
        let (reports, fleet) = self.workers.reports_mut();
        reports.expire(fleet, &self.pool, &mut self.ledger);
    }

    /// Applies the configuration `pool`. Known workers stay until their source says otherwise, unless they are listed in the
    /// configuration itself, or are reached in another way now. Bookings stay, and so does the prefix index, unless the
    /// block size or the index's bounds have changed. Requests under way end as they began.
    pub fn reconfigure(&mut self, pool: Pool) {
        let before = std::mem::replace(&mut self.pool, pool);
        let pool = &self.pool;
        self.chooser.reconfigure(&before, pool);
        self.health.follow(pool.health.clone());
        self.workers.bindings_mut().reconfigure(&before, pool);
        self.prefixes.reconfigure(&before, pool);
        let fleet = self.workers.fleet();
        let workers = match &pool.discovery {
            Discovery::Static(list) => static_workers(&list.workers),
            _ if before.rules().reaches_workers == pool.rules().reaches_workers => {
                fleet.workers().map(|worker| (**worker).clone()).collect()
            }
            _ => Vec::new(),
        };
        let version = fleet.version();
        self.adopt(Fleet::new(version, workers));
    }

    /// Adopts another fleet as a whole.
    pub fn adopt(&mut self, fleet: Fleet) {
        let ended = self.workers.adopt(fleet);
        self.forget(&ended);
        self.settle();
    }

    /// Forgets all that was learned of these ended incarnations, even if their ids live on; no other place does so. `settle`
    /// must follow.
    fn forget(&mut self, ended: &[WorkerId]) {
        if ended.is_empty() {
            return;
        }
        let fleet = self.workers.fleet();
        let staying = fleet.without(ended);
        let lives_on = |id: &&WorkerId| fleet.contains(**id);
        let ids_live_on: Vec<WorkerId> = ended.iter().filter(lives_on).copied().collect();
        self.chooser.keep(&staying);
        self.health.keep(&staying, self.ledger.now());
        self.workers.keep(&staying);
        self.notes.keep(&staying);
        self.prefixes.keep(|key| staying.contains(key.worker));
        self.ledger.retire(&ids_live_on);
    }

    /// Recomputes what follows from the fleet and from what is known of its workers.
    fn settle(&mut self) {
        self.open_ranks();
        for (id, binding) in binding::without_query(self.workers.fleet(), &self.pool) {
            self.bind(id, binding);
        }
        // Of new workers, only the load of their peers is known.
        self.believe();
        self.workers.update_states(&self.pool);
    }

    /// Forgets the blocks of ranks that left, and opens slots for new ones.
    fn open_ranks(&mut self) {
        self.workers.clear_lists();
        let ranks = self.workers.ranks(&self.pool);
        self.prefixes.keep(|key| ranks.contains_key(key));
        self.ledger.keep(self.workers.fleet());
        self.prefixes.open(ranks.into_iter(), &mut self.ledger);
    }

    /// Estimates the external load of every worker.
    fn believe(&mut self) {
        let (reports, fleet) = self.workers.reports_mut();
        reports.believe(fleet, &self.pool, &mut self.ledger);
    }

    /// Sets the binding of a worker; returns whether it is new. Another port or other engines than before belong to another
    /// process: everything learned of the worker is forgotten.
    fn bind(&mut self, id: WorkerId, binding: Binding) -> bool {
        let before = self.workers.bindings().get(id);
        let is_known = before.is_some_and(|before| *before == binding);
        if before.is_some_and(|before| !binding.continues(before)) {
            self.forget(&[id]);
            self.open_ranks();
        }
        self.workers.bindings_mut().set(id, binding);
        !is_known
    }

    /// The periodic queries to prefill workers.
    pub fn questions(&self) -> Vec<Question> {
        let fleet = self.workers.fleet();
        self.workers.bindings().questions(fleet, &self.pool)
    }

    /// Takes a worker's answer to a query; false if the answer lacks the binding. The answer of an incarnation that has
    /// ended meanwhile is discarded.
    pub fn on_reply(&mut self, life: &Incarnation, answer: &[u8]) -> bool {
        let Some(worker) = self.workers.fleet().alive(life) else {
            return true;
        };
        // The earlier binding stands: a server that does not answer need not have restarted.
        let Some(binding) = binding::read(worker, answer, &self.pool) else {
            return false;
        };
        if self.bind(life.id, binding) {
            self.workers.update_states(&self.pool);
        }
        true
    }

    /// Age at which an engine's report is stale.
    pub fn stale_after(&self) -> Duration {
        reports::stale_after(self.workers.fleet(), &self.pool)
    }

    /// Takes reports of engines, timed by this router's clock. Only a report that is newer than the last one of its worker
    /// counts.
    pub fn apply_reports(&mut self, reports: &[Report]) {
        self.apply_each(reports, |report| report.at);
    }

    /// The same, from another VM whose clock shows `at` now. The clocks need not agree.
    pub fn apply_reports_at(&mut self, at: Duration, reports: &[Report]) {
        let now = self.ledger.now();
        let ago = |report: &Report| at.saturating_sub(report.at);
        self.apply_each(reports, |report| now.saturating_sub(ago(report)));
    }

    fn apply_each(&mut self, reports: &[Report], asked_at: impl Fn(&Report) -> Duration) {
        let mean_prompt = reports::mean_prompt(&self.ledger);
        let stale_after = self.stale_after();
        let mut has_capacity_changed = false;
        for report in reports {
            let Some(worker) = self.workers.fleet().get(report.worker).cloned() else {
                continue;
            };
            match self.workers.reports().news(report, stale_after) {
                News::Nothing => continue,
                News::Figures => {}
                News::AnotherLife => {
                    self.forget(&[worker.id]);
                    self.settle();
                }
            }
            let at = asked_at(report);
            let (reports, _) = self.workers.reports_mut();
            let (pool, ledger) = (&self.pool, &self.ledger);
            has_capacity_changed |= reports.take(&worker, *report, at, mean_prompt, pool, ledger);
        }
        if has_capacity_changed {
            self.open_ranks();
        }
        self.believe();
    }

    /// The newest report of a worker, however old.
    pub fn report_of(&self, worker: WorkerId) -> Option<&Report> {
        self.workers.reports().get(worker)
    }

    /// Takes the warnings on reports since the last call; each is given once for each worker.
    pub fn take_warnings(&mut self) -> Vec<String> {
        self.workers.reports_mut().0.take_warnings()
    }

    /// The adopted fleet.
    pub fn fleet(&self) -> &Fleet {
        self.workers.fleet()
    }

    /// The pool's configuration.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// A random number, for ids that a client did not send.
    pub fn random(&mut self) -> u64 {
        self.chooser.random().u64(..)
    }

    /// Sets the owner of the rooms to come, a number that no other VM has. To be called before the first request.
    pub fn own_rooms(&mut self, owner: u64) {
        self.chooser.own_rooms(owner);
    }

    /// Takes the changes of state since the last call.
    pub fn take_transitions(&mut self) -> Vec<Transition> {
        self.workers.take_transitions()
    }

    /// The model keys and their states.
    pub fn model_states(&self) -> impl Iterator<Item = (&ModelKey, &ModelState)> + Clone {
        self.workers.states().states()
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
        self.workers.can_serve(model, &self.pool)
    }

    /// The policy on absent prefill workers, for tables and readiness.
    pub fn absent_policy(&self) -> OnPrefillAbsent {
        self.pool.prefill_absent()
    }

    /// The models whose requests would be served now, with their adapters and rewritten names: an empty list while there is
    /// no worker. None if workers do not declare their model: then one of them is asked.
    pub fn models(&self) -> Option<Models> {
        self.workers.models(&self.pool)
    }

    /// The entry of the model of this name; none if workers do not declare their model: then one of them is asked.
    ///
    /// # Errors
    /// [`Refusal`] if no worker serves the model now, or none ever did.
    pub fn named(&self, name: &str) -> Option<Result<Model, Refusal>> {
        self.workers.named(name, &self.pool)
    }

    /// The total of this VM's bookings.
    pub fn total_load(&self) -> Load {
        self.ledger.total()
    }

    /// This VM's bookings on a worker, over all its ranks.
    pub fn worker_load(&self, worker: &Arc<Worker>) -> Load {
        self.ledger.worker_load(worker)
    }

    /// Bookings of other VMs on a worker, over all its ranks, as last received.
    pub fn worker_load_elsewhere(&self, worker: &Arc<Worker>) -> Load {
        self.ledger.worker_load_elsewhere(worker)
    }

    /// The load of a worker over all its ranks, from all sources: this VM, the other VMs as last received, and the engine's
    /// external load.
    pub fn worker_load_in_all(&self, worker: &Arc<Worker>) -> Load {
        self.ledger.worker_load_in_all(worker)
    }

    /// This VM's bookings on every worker rank that has any, with the estimated tokens left now. To be shared with other VMs.
    pub fn shares(&self) -> Vec<ThreadLoad> {
        self.workers.shares(&self.ledger)
    }

    /// Replaces the bookings of all other VMs: choices, thresholds and back-pressure add them to this VM's own. Ranks
    /// unknown here are skipped.
    pub fn apply_shares(&mut self, others: &[ThreadLoad]) {
        self.ledger.apply_shares(others);
    }

    /// KV blocks that a worker is estimated to hold, over all its ranks.
    pub fn remembered_blocks(&self, worker: &Arc<Worker>) -> usize {
        self.prefixes.held(worker)
    }

    /// Starts to keep decisions for [`Router::take_decisions`], those that were new to the worker.
    pub fn keep_decisions(&mut self) {
        self.prefixes.keep_decisions();
    }

    /// Takes the decisions since the last call. To be shared with other VMs.
    pub fn take_decisions(&mut self) -> Vec<Decision> {
        self.prefixes.take_decisions()
    }

    /// Records a decision of another VM in the prefix index, without sharing it again. A rank unknown here is skipped.
    pub fn apply_decision(&mut self, decision: &Decision) {
        self.prefixes.apply(decision, self.ledger.now());
    }

    /// Takes the ejections since the last call.
    pub fn take_ejections(&mut self) -> Vec<Ejection> {
        self.health.take_ejections()
    }

    /// Number of ejected workers, including those whose trial is due or under way.
    pub fn ejected(&self) -> usize {
        self.health.ejected()
    }

    /// Whether a worker is ejected, also while its trial is due or under way.
    pub fn is_ejected(&self, worker: WorkerId) -> bool {
        self.health.is_ejected(worker)
    }

    /// Takes the counts since the last call.
    pub fn take_tally(&mut self) -> Tally {
        self.notes.take_tally()
    }

    /// Takes the hand-offs lost since the last call.
    pub fn take_lost(&mut self) -> Lost {
        self.notes.take_lost()
    }

    /// Takes the remarks on hand-offs since the last call.
    pub fn take_remarks(&mut self) -> Vec<String> {
        self.notes.take_remarks()
    }
}

#[cfg(test)]
mod tests;
