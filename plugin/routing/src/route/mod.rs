//! Owns one request's story: who is picked, what is booked, what each leg is sent, and what follows from prefill's answer.
//!
//! A plain request is forwarded to one worker. A request that generates text is planned once its body is there: both
//! workers are picked and booked in one step, before the next request is looked at. In direct mode it is forwarded at
//! once, with the choice in headers. With a sequential hand-off a [`PrefillPhase`] comes first, which is consumed by
//! prefill's answer.

mod prefill;
mod refusal;

pub use prefill::{AfterPrefill, PrefillAnswer, PrefillPhase};
pub use refusal::{PrefillFailure, Refusal};

use std::net::SocketAddr;
use std::rc::Rc;

use hashbrown::HashSet;

use crate::config::{Discovery, Pool, Protocol};
use crate::discovery::static_workers;
use crate::fleet::{Fleet, Role, Target, Worker, WorkerId};
use crate::handoff::{HeaderValue, direct, nixl};
use crate::json::Edits;
use crate::load::{DecodeCharge, Ledger, Load, PrefillCharge};
use crate::request::{Generation, Request};
use crate::selection::{Eligibility, Policy, Random, policy};

/// Routes the requests of one pool on one thread.
pub struct Router {
    pool: Pool,
    fleet: Fleet,
    ledger: Ledger,
    prefill_policy: Box<dyn Policy>,
    decode_policy: Box<dyn Policy>,
    next_frontend: usize,
    random: Random,
}

/// What happens with a request.
pub enum Plan {
    /// It is forwarded now.
    Forward(Dispatch, Seat),
    /// A prefill worker is called first; the client waits.
    PrefillFirst(PrefillPhase, Seat),
}

/// A leg that the proxy forwards.
#[derive(Debug)]
pub struct Dispatch {
    /// Where to, in order: the next one only if a connection could not be made, so that the same bytes fit.
    pub destinations: Vec<SocketAddr>,
    /// Headers to be set.
    pub headers: Vec<HeaderValue>,
    /// Changes of the client's body; none: as it is.
    pub edits: Option<Edits>,
}

/// What a client's stream occupies while it lasts. Dropping it frees everything.
#[derive(Debug, Default)]
pub struct Seat {
    /// The prefill worker, where there is one.
    pub prefill: Option<Rc<Worker>>,
    /// The worker that answers; none for a plain request.
    pub decode: Option<Rc<Worker>>,
    /// Direct mode only: there is no call of ours that the charge could belong to.
    prefill_charge: Option<PrefillCharge>,
    decode_charge: Option<DecodeCharge>,
}

impl Seat {
    /// The first token was seen: prefill is over.
    pub fn first_token(&mut self) {
        self.prefill_charge = None;
    }

    /// The stream ended.
    pub fn release(&mut self) {
        self.prefill_charge = None;
        self.decode_charge = None;
    }
}

/// A prefill and a decode worker that may exchange KV, and who else could decode.
struct Pair {
    prefill: Target,
    decode: Target,
    others: Vec<Target>,
}

impl Router {
    /// A router for `pool`. Its choices and rooms follow from `seed`, which must differ between threads.
    pub fn new(pool: Pool, seed: u64) -> Self {
        let workers = match &pool.discovery {
            Discovery::Static(list) => static_workers(list),
            Discovery::Dynamo(_) => Vec::new(),
        };
        Self {
            fleet: Fleet::new(0, workers),
            ledger: Ledger::default(),
            prefill_policy: policy(pool.selection.prefill),
            decode_policy: policy(pool.selection.decode),
            next_frontend: 0,
            random: Random::with_seed(seed),
            pool,
        }
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

    /// Takes over another fleet, whole.
    pub fn adopt(&mut self, fleet: Fleet) {
        self.prefill_policy.keep(&fleet);
        self.decode_policy.keep(&fleet);
        self.ledger.keep(&fleet);
        self.fleet = fleet;
    }

    /// A request that generates nothing: any worker may answer, the least busy one does.
    ///
    /// # Errors
    /// When there is no worker.
    pub fn plain(&mut self) -> Result<(Dispatch, Seat), Refusal> {
        if self.pool.protocol == Protocol::Direct {
            return Ok((self.through_frontends(Vec::new()), Seat::default()));
        }
        let mut targets = self.eligible(Role::Decode, None, &[], |_| true);
        targets.extend(self.eligible(Role::Aggregated, None, &[], |_| true));
        self.random.shuffle(&mut targets);
        targets.sort_by_key(|target| self.ledger.load(target.key()).decodes);
        let Some((first, others)) = targets.split_first() else {
            return Err(self.missing(Role::Decode));
        };
        let dispatch = Dispatch {
            destinations: self.addresses(first, others),
            headers: Vec::new(),
            edits: None,
        };
        Ok((dispatch, Seat::default()))
    }

    /// A request that generates text, its body read.
    ///
    /// # Errors
    /// [`Refusal`] says what is wrong with the request, or who is missing.
    pub fn plan(&mut self, generation: Generation, body: &[u8]) -> Result<Plan, Refusal> {
        let request = match Request::parse(generation, body) {
            Ok(request) => request,
            Err(refusal @ Refusal::NotJson { .. }) => return self.plan_unread(refusal),
            Err(refusal) => return Err(refusal),
        };
        if self.fleet.workers().next().is_none() {
            return Err(Refusal::NoFleet);
        }
        if !self.fleet.knows_model(&request.model) {
            return Err(Refusal::UnknownModel {
                model: request.model,
            });
        }
        match self.pool.protocol {
            Protocol::Direct => self.plan_direct(&request),
            Protocol::Nixl => self.plan_nixl(&request),
        }
    }

    /// A body that cannot be read goes, by load alone, where no hand-off needs to be put into it; else it is refused as
    /// `otherwise` says.
    ///
    /// # Errors
    /// `otherwise`, where there is no such worker.
    pub fn plan_unread(&mut self, otherwise: Refusal) -> Result<Plan, Refusal> {
        if let Some((first, others)) = self.pick_whole(None) {
            return Ok(self.forward_whole(first, &others, 0));
        }
        match self.pool.protocol {
            Protocol::Direct => {
                let pair = self.pick_pair(None)?;
                Ok(self.forward_pair(pair, 0))
            }
            Protocol::Nixl => Err(otherwise),
        }
    }

    fn plan_direct(&mut self, request: &Request<'_>) -> Result<Plan, Refusal> {
        let model = Some(request.model.as_str());
        match self.pick_pair(model) {
            Ok(pair) => Ok(self.forward_pair(pair, request.prompt_tokens)),
            Err(refusal) => {
                let (first, others) = self.pick_whole(model).ok_or(refusal)?;
                Ok(self.forward_whole(first, &others, request.prompt_tokens))
            }
        }
    }

    fn plan_nixl(&mut self, request: &Request<'_>) -> Result<Plan, Refusal> {
        let model = Some(request.model.as_str());
        let pair = match request.generation {
            Generation::Other => Err(Refusal::NoHandoffForPath),
            _ => self.pick_pair(model),
        };
        match pair {
            Ok(pair) => Ok(self.prefill_first(pair, request)),
            Err(refusal) => {
                let (first, others) = self.pick_whole(model).ok_or(refusal)?;
                Ok(self.forward_whole(first, &others, request.prompt_tokens))
            }
        }
    }

    fn prefill_first(&mut self, pair: Pair, request: &Request<'_>) -> Plan {
        let prompt_tokens = request.prompt_tokens;
        let seat = Seat {
            prefill: Some(Rc::clone(&pair.prefill.worker)),
            decode: Some(Rc::clone(&pair.decode.worker)),
            prefill_charge: None,
            decode_charge: Some(self.charge_decode(&pair.decode, prompt_tokens)),
        };
        let phase = PrefillPhase {
            charge: self
                .ledger
                .charge_prefill(pair.prefill.key(), prompt_tokens),
            prefill: pair.prefill,
            decode: pair.decode,
            others: pair.others,
            model: request.model.clone(),
            prompt_tokens,
            tried: Vec::new(),
            prefill_edits: nixl::prefill_edits(request),
            decode_edits: nixl::decode_edits(request),
        };
        Plan::PrefillFirst(phase, seat)
    }

    fn forward_pair(&mut self, pair: Pair, prompt_tokens: u64) -> Plan {
        let dispatch = self.through_frontends(direct::pair(&pair.prefill, &pair.decode));
        let seat = Seat {
            prefill_charge: Some(
                self.ledger
                    .charge_prefill(pair.prefill.key(), prompt_tokens),
            ),
            decode_charge: Some(self.charge_decode(&pair.decode, prompt_tokens)),
            prefill: Some(pair.prefill.worker),
            decode: Some(pair.decode.worker),
        };
        Plan::Forward(dispatch, seat)
    }

    fn forward_whole(&mut self, first: Target, others: &[Target], prompt_tokens: u64) -> Plan {
        let dispatch = match self.pool.protocol {
            Protocol::Direct => self.through_frontends(direct::whole(&first)),
            Protocol::Nixl => Dispatch {
                destinations: self.addresses(&first, others),
                headers: rank_header(&first),
                edits: None,
            },
        };
        let seat = Seat {
            prefill: None,
            prefill_charge: None,
            decode_charge: Some(self.charge_decode(&first, prompt_tokens)),
            decode: Some(first.worker),
        };
        Plan::Forward(dispatch, seat)
    }

    /// Moves the charge to the worker that really answered, when the proxy went on to another one of the list.
    pub fn served_by(&mut self, seat: &mut Seat, address: SocketAddr) {
        let Some(charge) = seat.decode_charge.take() else {
            return;
        };
        let served = self
            .fleet
            .at(address, &[Role::Decode, Role::Aggregated])
            .cloned();
        seat.decode_charge = Some(match served {
            Some(worker) if worker.id != charge.target().worker => {
                let target = crate::fleet::TargetKey {
                    worker: worker.id,
                    rank: charge.target().rank,
                };
                seat.decode = Some(worker);
                charge.moved_to(target, &mut self.ledger)
            }
            _ => charge,
        });
    }

    fn pick_pair(&mut self, model: Option<&str>) -> Result<Pair, Refusal> {
        let decodes = self.eligible(Role::Decode, model, &[], |_| true);
        if decodes.is_empty() {
            return Err(self.missing(Role::Decode));
        }
        let namespaces: HashSet<&str> = decodes
            .iter()
            .map(|target| target.worker.namespace.as_str())
            .collect();
        let prefill = self.pick_prefill(model, &[], |worker| {
            namespaces.contains(worker.namespace.as_str())
        });
        let prefill = prefill.ok_or_else(|| self.missing(Role::Prefill))?;

        let mut candidates = decodes.clone();
        candidates.retain(|target| target.worker.pairs_with(&prefill.worker));
        let index = self.decode_policy.pick(&candidates, &mut self.random);
        let (decode, others) = take(candidates, index).ok_or_else(|| self.missing(Role::Decode))?;
        Ok(Pair {
            prefill,
            decode,
            others,
        })
    }

    fn pick_prefill(
        &mut self,
        model: Option<&str>,
        tried: &[WorkerId],
        also: impl Fn(&Worker) -> bool,
    ) -> Option<Target> {
        let candidates = self.eligible(Role::Prefill, model, tried, also);
        let index = self.prefill_policy.pick(&candidates, &mut self.random);
        take(candidates, index).map(|(prefill, _)| prefill)
    }

    /// A worker that runs whole requests, and the others of its kind.
    fn pick_whole(&mut self, model: Option<&str>) -> Option<(Target, Vec<Target>)> {
        let candidates = self.eligible(Role::Aggregated, model, &[], |_| true);
        let index = self.decode_policy.pick(&candidates, &mut self.random);
        take(candidates, index)
    }

    fn eligible(
        &self,
        role: Role,
        model: Option<&str>,
        tried: &[WorkerId],
        also: impl Fn(&Worker) -> bool,
    ) -> Vec<Target> {
        Eligibility { role, model, tried }.targets(&self.fleet, also)
    }

    fn missing(&self, role: Role) -> Refusal {
        match self.fleet.workers().next() {
            Some(_) => Refusal::NoWorker { role },
            None => Refusal::NoFleet,
        }
    }

    fn charge_decode(&mut self, target: &Target, prompt_tokens: u64) -> DecodeCharge {
        let blocks = prompt_tokens
            .div_ceil(u64::from(self.pool.block_tokens.max(1)))
            .max(1);
        self.ledger.charge_decode(target.key(), blocks)
    }

    /// The chosen one, then others to whom the same bytes may go if it refuses the connection: those of the same rank,
    /// in random order.
    fn addresses(&mut self, first: &Target, others: &[Target]) -> Vec<SocketAddr> {
        let mut rest: Vec<SocketAddr> = others
            .iter()
            .filter(|other| other.rank == first.rank && other.worker.id != first.worker.id)
            .filter_map(|other| other.worker.address)
            .collect();
        self.random.shuffle(&mut rest);
        let limit = usize::try_from(self.pool.decode.attempts).unwrap_or(usize::MAX);
        first
            .worker
            .address
            .into_iter()
            .chain(rest)
            .take(limit)
            .collect()
    }

    /// To a frontend, each in turn first, the others behind it.
    fn through_frontends(&mut self, headers: Vec<HeaderValue>) -> Dispatch {
        let frontends = &self.pool.frontends;
        let first = self
            .next_frontend
            .checked_rem(frontends.len())
            .unwrap_or_default();
        self.next_frontend = self.next_frontend.wrapping_add(1);
        let limit = usize::try_from(self.pool.decode.attempts).unwrap_or(usize::MAX);
        let turned = frontends.iter().cycle().skip(first);
        Dispatch {
            destinations: turned.take(frontends.len().min(limit)).copied().collect(),
            headers,
            edits: None,
        }
    }
}

/// The header by which vLLM takes a data-parallel rank.
fn rank_header(target: &Target) -> Vec<HeaderValue> {
    let rank = target
        .rank
        .map(|rank| ("x-data-parallel-rank", rank.to_string()));
    rank.into_iter().collect()
}

/// The one at `index`, and the others.
fn take(mut targets: Vec<Target>, index: Option<usize>) -> Option<(Target, Vec<Target>)> {
    let index = index.filter(|index| *index < targets.len())?;
    let taken = targets.swap_remove(index);
    Some((taken, targets))
}

#[cfg(test)]
mod tests;
