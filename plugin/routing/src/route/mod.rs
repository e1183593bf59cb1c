//! Owns one request's story: who is picked, what is booked, what each leg is sent, and what follows from prefill's answer.
//!
//! A plain request is forwarded to one worker. A request that generates text is planned once its body is there: the place
//! (its model, in one namespace) answers whether it gets a pair of workers, one that runs it whole, or a refusal; both
//! workers are picked and booked in one step, before the next request is looked at. In direct mode the request is
//! forwarded at once, with the choice in headers. Otherwise a [`PrefillPhase`] comes first, or beside, which is consumed
//! by prefill's answer.

mod choice;
mod dispatch;
mod prefill;
mod query;
mod refusal;
mod seat;

pub use choice::Resolution;
pub use dispatch::Dispatch;
pub use prefill::{AbortLeg, AfterPrefill, CleanUpLeg, Client, PrefillAnswer, PrefillPhase};
pub use query::LocalAnswer;
pub use refusal::{PinProblem, PrefillFailure, Refusal};
pub use seat::{Fallback, Seat};

use std::rc::Rc;

use hashbrown::HashMap;

use crate::config::{BootstrapSource, Discovery, OnPrefillAbsent, Pool, Protocol};
use crate::discovery::static_workers;
use crate::fleet::{Fleet, Role, Target, Worker, WorkerId};
use crate::handoff::rooms::Rooms;
use crate::handoff::sglang::Bootstrap;
use crate::json::Edits;
use crate::load::{DecodeCharge, Ledger, Load};
use crate::prefill_router::{Place, PlaceState, PrefillRouters, Transition};
use crate::rendezvous::{Mode, NotServed, Verdict};
use crate::request::{Generation, Request, Steering};
use crate::selection::{Policy, Random, policy};

use choice::Pair;

/// Routes the requests of one pool on one thread.
pub struct Router {
    pool: Pool,
    fleet: Fleet,
    places: PrefillRouters,
    bindings: HashMap<WorkerId, Bootstrap>,
    ledger: Ledger,
    prefill_policy: Box<dyn Policy>,
    decode_policy: Box<dyn Policy>,
    next_frontend: usize,
    rooms: Rooms,
    random: Random,
    transitions: Vec<Transition>,
}

/// What happens with a request.
#[allow(
    clippy::large_enum_variant,
    reason = "one a request, moved once or twice: cheaper than a box"
)]
pub enum Plan {
    /// It is forwarded now.
    Forward(Dispatch, Seat),
    /// A prefill worker is called; the client waits, at least until the call has been made.
    Prefill(PrefillPhase, Seat),
    /// It is answered here, and no backend is touched.
    Answer(LocalAnswer),
}

/// What a request says beside its body.
#[derive(Debug, Clone, Copy)]
pub struct Told<'a> {
    /// The headers that steer, where the pool trusts its callers; empty otherwise.
    pub headers: &'a [(Vec<u8>, Vec<u8>)],
    /// Seconds since 1970, for answers given here.
    pub now_s: u64,
}

impl Router {
    /// A router for `pool`. Its choices follow from `seed`, its rooms from `owner`, which no other VM of this proxy has.
    pub fn new(pool: Pool, seed: u64, owner: u64) -> Self {
        let workers = match &pool.discovery {
            Discovery::Static(list) => static_workers(&list.workers),
            Discovery::Dynamo(_) | Discovery::Document(_) => Vec::new(),
        };
        let mut router = Self {
            fleet: Fleet::default(),
            places: PrefillRouters::default(),
            bindings: HashMap::new(),
            ledger: Ledger::default(),
            prefill_policy: policy(pool.selection.prefill),
            decode_policy: policy(pool.selection.decode),
            next_frontend: 0,
            rooms: Rooms::new(owner),
            random: Random::with_seed(seed),
            transitions: Vec::new(),
            pool,
        };
        router.adopt(Fleet::new(0, workers));
        router
    }

    /// The workers as they are known here.
    pub fn fleet(&self) -> &Fleet {
        &self.fleet
    }

    /// The pool's configuration.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// What is booked on a worker, on all its ranks together.
    pub fn worker_load(&self, worker: WorkerId) -> Load {
        self.ledger.worker_load(worker)
    }

    /// What is booked in all.
    pub fn total_load(&self) -> Load {
        self.ledger.total()
    }

    /// A random number, for ids that a client did not send.
    pub fn random(&mut self) -> u64 {
        self.random.u64(..)
    }

    /// Takes a number that no other VM has for the rooms to come. To be called before the first request.
    pub fn own_rooms(&mut self, owner: u64) {
        self.rooms = Rooms::new(owner);
    }

    /// Takes over another fleet, whole.
    pub fn adopt(&mut self, fleet: Fleet) {
        self.prefill_policy.keep(&fleet);
        self.decode_policy.keep(&fleet);
        self.ledger.keep(&fleet);
        self.bindings.retain(|id, _| fleet.contains(*id));
        self.fleet = fleet;
        self.bind_what_is_known();
        self.recompute();
    }

    /// The changes of state since this was last asked, each told once.
    pub fn take_transitions(&mut self) -> Vec<Transition> {
        std::mem::take(&mut self.transitions)
    }

    /// The places and their states.
    pub fn places(&self) -> impl Iterator<Item = (&Place, &PlaceState)> + Clone {
        self.places.places()
    }

    fn recompute(&mut self) {
        let Self {
            places,
            fleet,
            bindings,
            pool,
            ..
        } = self;
        let needs_binding = pool.protocol == Protocol::Sglang;
        let changed = places.update(
            fleet,
            |id| !needs_binding || bindings.contains_key(&id),
            |worker| runs_whole(pool, worker),
        );
        self.transitions.extend(changed);
    }

    /// Bindings that need no asking: where the bootstrap server's port is configured, or told by discovery.
    fn bind_what_is_known(&mut self) {
        if self.pool.protocol != Protocol::Sglang {
            return;
        }
        let common = match self.pool.bootstrap {
            BootstrapSource::Port(port) => Some(port),
            BootstrapSource::Ask => None,
        };
        for worker in self.fleet.of_role(Role::Prefill) {
            if let (Some(address), Some(port)) = (worker.address, worker.bootstrap_port.or(common))
            {
                self.bindings
                    .insert(worker.id, Bootstrap::beside(address, port));
            }
        }
    }

    /// The prefill workers whose binding is yet to be built: they must be asked for their bootstrap server's port.
    pub fn unbound(&self) -> Vec<Rc<Worker>> {
        if self.pool.protocol != Protocol::Sglang {
            return Vec::new();
        }
        let unbound = self
            .fleet
            .of_role(Role::Prefill)
            .filter(|worker| !self.bindings.contains_key(&worker.id));
        unbound.cloned().collect()
    }

    /// A binding has been built. One for a worker that has left meanwhile is discarded.
    pub fn bound(&mut self, id: WorkerId, port: u16) {
        let Some(address) = self.fleet.get(id).and_then(|worker| worker.address) else {
            return;
        };
        self.bindings.insert(id, Bootstrap::beside(address, port));
        self.recompute();
    }

    /// Whether some model's normal request would be served now.
    pub fn can_serve_any(&self) -> bool {
        let absent = self.absent_policy();
        self.places()
            .any(|(_, place)| place.can_serve_requests(absent).is_ok())
    }

    /// Whether a model's normal request would be served now; why not, else.
    ///
    /// # Errors
    /// The refusal that a request would get.
    pub fn can_serve_requests(&self, model: &str) -> Result<(), Refusal> {
        self.check_model(model)?;
        let absent = self.absent_policy();
        let places = self.places.of_model(Some(model));
        let outcomes = places
            .into_iter()
            .map(|(_, place)| place.can_serve_requests(absent));
        best(outcomes)
    }

    /// The policy on absent prefill workers, for tables and readiness.
    pub fn absent_policy(&self) -> OnPrefillAbsent {
        self.pool.prefill_absent()
    }

    /// A request that generates nothing: any worker may answer, the least busy one does.
    ///
    /// # Errors
    /// When there is no worker.
    pub fn plain(&mut self) -> Result<(Dispatch, Seat), Refusal> {
        if self.pool.protocol == Protocol::Direct {
            return Ok((self.through_frontends(Vec::new()), Seat::default()));
        }
        let decoders = self
            .fleet
            .workers()
            .filter(|worker| worker.role != Role::Prefill);
        let mut targets: Vec<Target> = decoders.map(Target::whole).collect();
        self.random.shuffle(&mut targets);
        targets.sort_by_key(|target| self.ledger.worker_load(target.worker.id).decodes);
        let Some((first, others)) = targets.split_first() else {
            return Err(Refusal::NotServed(NotServed::Vacant));
        };
        Ok((self.dispatch_to(first, others), Seat::default()))
    }

    /// A request that generates text, its body read.
    ///
    /// # Errors
    /// [`Refusal`] says what is wrong with the request, or who is missing.
    pub fn plan(
        &mut self,
        generation: Generation,
        body: &[u8],
        told: Told<'_>,
    ) -> Result<Plan, Refusal> {
        let request = match Request::parse(generation, body) {
            Ok(request) => request,
            Err(refusal @ (Refusal::NotJson { .. } | Refusal::NoHandoffForPath)) => {
                return self.plan_unread(refusal);
            }
            Err(refusal) => return Err(refusal),
        };
        let steering = self.steering(&request, told)?;
        self.check_model(&request.model)?;
        let (place, verdict) = self.choose_place(Some(&request.model), &steering)?;
        let splittable = generation != Generation::Other || self.pool.protocol == Protocol::Direct;
        match verdict {
            Verdict::Refused(reason) => Err(Refusal::NotServed(reason)),
            Verdict::Pair if !splittable => {
                self.plan_whole(&place, &request, &steering, told, Refusal::NoHandoffForPath)
            }
            Verdict::Pair => self.plan_pair(&place, &request, &steering, told),
            Verdict::Whole => {
                let otherwise = Refusal::NotServed(NotServed::NotActivated);
                self.plan_whole(&place, &request, &steering, told, otherwise)
            }
        }
    }

    /// A body that cannot be read goes, by load alone, where no hand-off needs to be put into it; else it is refused as
    /// `otherwise` says.
    ///
    /// # Errors
    /// `otherwise`, where there is no such worker.
    pub fn plan_unread(&mut self, otherwise: Refusal) -> Result<Plan, Refusal> {
        let nothing = Steering::default();
        let absent = self.absent_policy();
        let places: Vec<(Place, PlaceState)> = self
            .places
            .of_model(None)
            .into_iter()
            .map(|(place, state)| (place.clone(), *state))
            .collect();
        // A pool that says "fail" wants no request to run whole.
        let may_run_whole = absent == OnPrefillAbsent::Aggregate;
        for (place, _) in places.iter().filter(|_| may_run_whole) {
            if let Ok(whole) = self.pick_whole(place, &nothing) {
                return Ok(self.forward_whole(whole, 0, None, None));
            }
        }
        if self.pool.protocol != Protocol::Direct {
            return Err(otherwise);
        }
        let served = places
            .iter()
            .find(|(_, state)| state.verdict(Mode::Normal, absent) == Verdict::Pair);
        let (place, _) = served.ok_or(otherwise)?;
        let pair = self.pick_pair(place, &nothing)?;
        Ok(self.forward_pair(pair, 0, None))
    }

    /// What the caller says of where the request goes: heard only where the pool trusts its callers.
    fn steering(&self, request: &Request<'_>, told: Told<'_>) -> Result<Steering, Refusal> {
        if !self.pool.trust_clients {
            return Ok(Steering::default());
        }
        let headers = told
            .headers
            .iter()
            .map(|(name, value)| (name.as_slice(), value.as_slice()));
        Steering::read(
            headers,
            request.body.get("nvext").map(|member| member.value),
        )
    }

    fn check_model(&self, model: &str) -> Result<(), Refusal> {
        if self.places.places().next().is_none() {
            return Err(Refusal::NoFleet);
        }
        match self.places.of_model(Some(model)).is_empty() {
            true => Err(Refusal::UnknownModel {
                model: model.to_owned(),
            }),
            false => Ok(()),
        }
    }

    fn plan_pair(
        &mut self,
        place: &Place,
        request: &Request<'_>,
        steering: &Steering,
        told: Told<'_>,
    ) -> Result<Plan, Refusal> {
        if steering.query {
            let (prefill, decode) = self.look_at_pair(place, steering)?;
            let answer = query::answer(
                request,
                steering,
                Some(&prefill),
                &decode,
                self.pool.block_tokens,
                told.now_s,
            );
            return Ok(Plan::Answer(answer));
        }
        let resolution = self.resolve(place, steering, request.prompt_tokens)?;
        let (pair, bootstrap) = match resolution {
            Resolution::Resolved { pair, bootstrap } => (pair, Some(bootstrap)),
            Resolution::NoBootstrapEndpoint { pair } => (pair, None),
            Resolution::Backpressure {
                queued_tokens,
                allowed_tokens,
            } => {
                return Err(Refusal::Backpressure {
                    queued_tokens,
                    allowed_tokens,
                });
            }
        };
        match self.pool.protocol {
            Protocol::Direct => Ok(self.forward_pair(pair, request.prompt_tokens, Some(request))),
            Protocol::Nixl | Protocol::Sglang => {
                Ok(self.prefill_phase(place, pair, bootstrap, request, steering))
            }
        }
    }

    fn plan_whole(
        &mut self,
        place: &Place,
        request: &Request<'_>,
        steering: &Steering,
        told: Told<'_>,
        otherwise: Refusal,
    ) -> Result<Plan, Refusal> {
        let whole = match self.pick_whole(place, steering) {
            Ok(whole) => whole,
            Err(Refusal::NotServed(_)) => return Err(otherwise),
            Err(refusal) => return Err(refusal),
        };
        if steering.query {
            let block_tokens = self.pool.block_tokens;
            let answer = query::answer(
                request,
                steering,
                None,
                &whole.decode,
                block_tokens,
                told.now_s,
            );
            return Ok(Plan::Answer(answer));
        }
        let fallback =
            (whole.decode.worker.role == Role::Decode).then_some(Fallback::PrefillAbsent);
        Ok(self.forward_whole(whole, request.prompt_tokens, fallback, Some(request)))
    }

    fn charge_decode(&mut self, target: &Target, prompt_tokens: u64) -> DecodeCharge {
        let blocks = prompt_tokens
            .div_ceil(u64::from(self.pool.block_tokens.max(1)))
            .max(1);
        self.ledger.charge_decode(target.key(), blocks)
    }

    fn forward_pair(
        &mut self,
        pair: Pair,
        prompt_tokens: u64,
        request: Option<&Request<'_>>,
    ) -> Plan {
        let mut dispatch =
            self.through_frontends(crate::handoff::direct::pair(&pair.prefill, &pair.decode));
        dispatch.edits = self.unheard(request);
        let seat = Seat {
            prefill_charge: Some(
                self.ledger
                    .charge_prefill(pair.prefill.key(), prompt_tokens),
            ),
            decode_charge: Some(self.charge_decode(&pair.decode, prompt_tokens)),
            prefill: Some(pair.prefill.worker),
            decode: Some(pair.decode.worker),
            fallback: None,
        };
        Plan::Forward(dispatch, seat)
    }

    /// What a frontend must not hear from a caller who is not trusted.
    fn unheard(&self, request: Option<&Request<'_>>) -> Option<Edits> {
        match self.pool.trust_clients {
            true => None,
            false => request.and_then(crate::handoff::direct::without_steering),
        }
    }

    fn forward_whole(
        &mut self,
        whole: choice::Whole,
        prompt_tokens: u64,
        fallback: Option<Fallback>,
        request: Option<&Request<'_>>,
    ) -> Plan {
        let dispatch = match self.pool.protocol {
            Protocol::Direct => {
                let mut dispatch =
                    self.through_frontends(crate::handoff::direct::whole(&whole.decode));
                dispatch.edits = self.unheard(request);
                dispatch
            }
            Protocol::Nixl | Protocol::Sglang => self.dispatch_to(&whole.decode, &whole.others),
        };
        let seat = Seat {
            decode_charge: Some(self.charge_decode(&whole.decode, prompt_tokens)),
            decode: Some(whole.decode.worker),
            fallback,
            ..Seat::default()
        };
        Plan::Forward(dispatch, seat)
    }
}

/// Whether a worker runs whole requests.
fn runs_whole(pool: &Pool, worker: &Worker) -> bool {
    match worker.role {
        Role::Aggregated => true,
        Role::Decode => pool.decode.runs_whole_requests,
        Role::Prefill => false,
    }
}

/// Served if any place serves; else the reason nearest to being served.
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
