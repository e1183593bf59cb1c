//! Owns whether now: how busy is too busy, and the requests that wait until somebody is not.
//!
//! A request waits only while all who could take it are busier than their threshold. What waits is a number that stands
//! for the request, with what its place in the order follows from; the request itself stays with whoever holds it. The
//! order is priority first, in seconds of head start, then the queue's policy, then arrival.

use std::cmp::Ordering;
use std::time::Duration;

use hashbrown::HashMap;

use crate::config::{Admission, DecodeBusy, PrefillBusy, Queue, QueuePolicy};
use crate::fleet::{Capacity, Role};
use crate::load::Standing;
use crate::prefill_router::Place;

impl Admission {
    /// Whether any threshold is set for a role: only then need anybody's load be compared with it.
    pub fn has_threshold(&self, role: Role) -> bool {
        let prefill = self.prefill.tokens.is_some() || self.prefill.fraction.is_some();
        let decode = self.decode.blocks.is_some() || self.decode.fraction.is_some();
        match role {
            Role::Prefill => prefill,
            Role::Decode => decode,
            Role::Aggregated => prefill || decode,
        }
    }

    /// Whether a worker rank is busier than its role's threshold. A fraction of a capacity that is not known is never reached.
    pub fn is_busy(&self, role: Role, standing: &Standing, capacity: Capacity) -> bool {
        let by_prefill = || self.prefill.is_passed(standing.booked_tokens, capacity);
        let by_decode = || self.decode.is_passed(standing.decode_blocks, capacity);
        match role {
            Role::Prefill => by_prefill(),
            Role::Decode => by_decode(),
            Role::Aggregated => by_prefill() || by_decode(),
        }
    }
}

impl PrefillBusy {
    /// Whether so many booked tokens are too many.
    pub fn is_passed(&self, booked_tokens: u64, capacity: Capacity) -> bool {
        let booked = booked_tokens as f64;
        let batch = capacity.batched_tokens.map(|tokens| tokens as f64);
        exceeds(booked, self.tokens.map(|tokens| tokens as f64))
            || exceeds(booked, share(self.fraction, batch))
    }
}

impl DecodeBusy {
    /// Whether so many blocks in use are too many.
    pub fn is_passed(&self, blocks: f64, capacity: Capacity) -> bool {
        let total = capacity.kv_blocks.map(f64::from);
        exceeds(blocks, self.blocks.map(|blocks| blocks as f64))
            || exceeds(blocks, share(self.fraction, total))
    }
}

fn share(fraction: Option<f64>, whole: Option<f64>) -> Option<f64> {
    Some(fraction? * whole?)
}

fn exceeds(value: f64, threshold: Option<f64>) -> bool {
    threshold.is_some_and(|threshold| value > threshold)
}

/// Stands for a request that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Waiter(pub u64);

/// What a request's place in the order follows from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Claim {
    /// Seconds of head start.
    pub priority: f64,
    /// Tokens of its prompt.
    pub tokens: u64,
    /// When it came, since 1970.
    pub since: Duration,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    waiter: Waiter,
    claim: Claim,
}

/// How many of a place are tried when a worker may have become free: each is planned anew, body and all.
const TRIED_AT_ONCE: usize = 16;

/// Why a request cannot wait: as many do already as may.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Full {
    /// How many wait.
    pub waiting: usize,
    /// How many may.
    pub allowed: usize,
}

/// The requests that wait on one thread, for each place those of its own.
#[derive(Debug, Default)]
pub struct Waiting {
    places: HashMap<Place, Vec<Entry>>,
    next: u64,
    count: usize,
}

impl Waiting {
    /// How many wait.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Takes a request in.
    ///
    /// # Errors
    /// [`Full`] when as many wait as may.
    pub fn join(&mut self, place: &Place, claim: Claim, queue: &Queue) -> Result<Waiter, Full> {
        let allowed = usize::try_from(queue.max_requests).unwrap_or(usize::MAX);
        if self.count >= allowed {
            return Err(Full {
                waiting: self.count,
                allowed,
            });
        }
        let waiter = Waiter(self.next);
        self.next = self.next.wrapping_add(1);
        self.count = self.count.saturating_add(1);
        let entry = Entry { waiter, claim };
        self.places.entry_ref(place).or_default().push(entry);
        Ok(waiter)
    }

    /// It waits no more, whatever the reason.
    pub fn leave(&mut self, waiter: Waiter) {
        let mut left = 0;
        self.places.retain(|_, entries| {
            let before = entries.len();
            entries.retain(|entry| entry.waiter != waiter);
            left = before.saturating_sub(entries.len()).max(left);
            !entries.is_empty()
        });
        self.count = self.count.saturating_sub(left);
    }

    /// Those to be tried, at each place in their order: who comes first may want a worker that is busy, while another one is
    /// free for who comes next. Only so many are told of at once.
    pub fn in_order(&self, policy: QueuePolicy) -> Vec<Waiter> {
        let mut all = Vec::new();
        for entries in self.places.values() {
            let mut here: Vec<&Entry> = entries.iter().collect();
            here.sort_by(|a, b| order(policy, a, b));
            all.extend(
                here.into_iter()
                    .take(TRIED_AT_ONCE)
                    .map(|entry| entry.waiter),
            );
        }
        all
    }

    /// Those whose time is up at `now`.
    pub fn late(&self, now: Duration, queue: &Queue) -> Vec<Waiter> {
        let deadline = Duration::from_millis(queue.deadline_ms);
        let all = self.places.values().flatten();
        all.filter(|entry| now.saturating_sub(entry.claim.since) >= deadline)
            .map(|entry| entry.waiter)
            .collect()
    }
}

/// Who comes first: `Less` is sooner.
fn order(policy: QueuePolicy, a: &Entry, b: &Entry) -> Ordering {
    let by_score = score(policy, &b.claim).total_cmp(&score(policy, &a.claim));
    by_score.then(match policy {
        QueuePolicy::Fcfs | QueuePolicy::Wspt => a.waiter.cmp(&b.waiter),
        QueuePolicy::Lcfs => b.waiter.cmp(&a.waiter),
    })
}

/// More is sooner (routing semantics, C.7).
fn score(policy: QueuePolicy, claim: &Claim) -> f64 {
    let arrival = claim.since.as_secs_f64();
    match policy {
        QueuePolicy::Fcfs => claim.priority - arrival,
        QueuePolicy::Lcfs => claim.priority + arrival,
        QueuePolicy::Wspt => (1.0 + claim.priority) / claim.tokens.max(1) as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn place(model: &str) -> Place {
        Place {
            model: Some(model.to_owned()),
            namespace: String::new(),
        }
    }

    fn claim(ms: u64, tokens: u64, priority: f64) -> Claim {
        Claim {
            priority,
            tokens,
            since: Duration::from_millis(ms),
        }
    }

    fn served(policy: QueuePolicy, claims: &[Claim]) -> Vec<u64> {
        let mut waiting = Waiting::default();
        for claim in claims {
            waiting
                .join(&place("m"), *claim, &Queue::default())
                .unwrap();
        }
        let mut order = Vec::new();
        while let Some(first) = waiting.in_order(policy).first().copied() {
            order.push(first.0);
            waiting.leave(first);
        }
        order
    }

    #[test]
    fn the_order_is_the_policys_with_head_starts() {
        let claims = [
            claim(0, 500, 0.0),
            claim(1000, 100, 0.0),
            claim(2000, 900, 0.0),
            claim(2000, 100, 0.0),
            claim(3000, 4000, 2.5),
        ];
        assert_eq!(served(QueuePolicy::Fcfs, &claims), [0, 4, 1, 2, 3]);
        assert_eq!(served(QueuePolicy::Lcfs, &claims), [4, 3, 2, 1, 0]);
        assert_eq!(served(QueuePolicy::Wspt, &claims), [1, 3, 0, 2, 4]);
    }

    #[test]
    fn no_more_wait_than_may_and_none_longer() {
        let queue = Queue {
            max_requests: 2,
            deadline_ms: 1000,
            ..Queue::default()
        };
        let mut waiting = Waiting::default();
        let first = waiting.join(&place("m"), claim(0, 1, 0.0), &queue).unwrap();
        let other = waiting
            .join(&place("n"), claim(500, 1, 0.0), &queue)
            .unwrap();
        let full = waiting.join(&place("m"), claim(500, 1, 0.0), &queue);
        assert_eq!(
            full,
            Err(Full {
                waiting: 2,
                allowed: 2
            })
        );
        assert!(waiting.late(Duration::from_millis(999), &queue).is_empty());
        assert_eq!(waiting.late(Duration::from_millis(1000), &queue), [first]);
        let mut heads = waiting.in_order(QueuePolicy::Fcfs);
        heads.sort();
        assert_eq!(heads, [first, other]);
        waiting.leave(first);
        waiting.leave(first);
        assert_eq!(waiting.count(), 1);
        assert_eq!(waiting.in_order(QueuePolicy::Fcfs), [other]);
    }

    #[test]
    fn a_threshold_is_passed_not_reached_and_needs_the_capacity_it_is_a_part_of() {
        let admission = Admission {
            prefill: PrefillBusy {
                tokens: Some(1000),
                fraction: Some(2.0),
            },
            decode: DecodeBusy {
                blocks: None,
                fraction: Some(0.5),
            },
            queue: None,
        };
        let standing = |booked_tokens, decode_blocks| Standing {
            booked_tokens,
            decode_blocks,
            ..Standing::default()
        };
        let unknown = Capacity::default();
        let known = Capacity {
            kv_blocks: Some(100),
            batched_tokens: Some(256),
        };
        let busy =
            |role, standing: Standing, capacity| admission.is_busy(role, &standing, capacity);
        assert!(!busy(Role::Prefill, standing(1000, 0.0), unknown));
        assert!(busy(Role::Prefill, standing(1001, 0.0), unknown));
        assert!(busy(Role::Prefill, standing(513, 0.0), known));
        assert!(!busy(Role::Decode, standing(9999, 50.0), known));
        assert!(busy(Role::Decode, standing(0, 50.1), known));
        assert!(!busy(Role::Decode, standing(0, 1e9), unknown));
        assert!(busy(Role::Aggregated, standing(0, 51.0), known));
        assert!(admission.has_threshold(Role::Aggregated));
        assert!(!Admission::default().has_threshold(Role::Aggregated));
    }

    proptest! {
        #[test]
        fn who_joins_leaves_once_and_the_count_is_of_those_who_wait(
            steps in proptest::collection::vec((0u8..3, 0usize..40, 0u64..5000), 0..200),
        ) {
            let queue = Queue { max_requests: 16, ..Queue::default() };
            let mut waiting = Waiting::default();
            let mut inside: Vec<Waiter> = Vec::new();
            for (kind, which, number) in steps {
                match kind {
                    0 => match waiting.join(&place(&(number % 3).to_string()), claim(number, number, 0.0), &queue) {
                        Ok(waiter) => inside.push(waiter),
                        Err(full) => prop_assert_eq!((full.waiting, inside.len()), (16, 16)),
                    },
                    1 if !inside.is_empty() => waiting.leave(inside.swap_remove(which % inside.len())),
                    _ => waiting.leave(Waiter(number + 1_000_000)),
                }
                prop_assert_eq!(waiting.count(), inside.len());
                prop_assert!(waiting.in_order(QueuePolicy::Wspt).iter().all(|head| inside.contains(head)));
            }
        }
    }
}
