//! Owns admission: the busy thresholds, and the queue of requests that wait for a worker below its threshold.
//!
//! A request waits only while every worker that could take it is above its threshold. The queue holds a number for the
//! request and its queue key; the request itself stays with the caller. Order: priority first, in seconds of head start,
//! then the queue's policy, then arrival.

use std::cmp::{Ordering, Reverse};
use std::time::Duration;

use hashbrown::HashMap;

use crate::config::{Admission, DecodeBusy, PrefillBusy, Queue, QueuePolicy};
use crate::fleet::{Capacity, Role};
use crate::load::LoadSnapshot;
use crate::model_state::ModelKey;

impl Admission {
    /// Whether any threshold is set for a role: only then must loads be compared.
    pub fn has_threshold(&self, role: Role) -> bool {
        let prefill = self.prefill.tokens.is_some() || self.prefill.fraction.is_some();
        let decode = self.decode.blocks.is_some() || self.decode.fraction.is_some();
        match role {
            Role::Prefill => prefill,
            Role::Decode => decode,
            Role::Aggregated => prefill || decode,
        }
    }

    /// Whether a worker rank is above its role's threshold. A fraction of an unknown capacity is never reached.
    pub fn is_busy(&self, role: Role, snapshot: &LoadSnapshot, capacity: Capacity) -> bool {
        let by_prefill = || self.prefill.is_passed(snapshot.booked_tokens, capacity);
        let by_decode = || self.decode.is_passed(snapshot.decode_blocks, capacity);
        match role {
            Role::Prefill => by_prefill(),
            Role::Decode => by_decode(),
            Role::Aggregated => by_prefill() || by_decode(),
        }
    }
}

impl PrefillBusy {
    /// Whether the booked tokens exceed the threshold.
    pub fn is_passed(&self, booked_tokens: u64, capacity: Capacity) -> bool {
        let booked = booked_tokens as f64;
        let batch = capacity.batched_tokens.map(|tokens| tokens as f64);
        exceeds(booked, self.tokens.map(|tokens| tokens as f64))
            || exceeds(booked, share(self.fraction, batch))
    }
}

impl DecodeBusy {
    /// Whether the blocks in use exceed the threshold.
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

/// Number of a waiting request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Waiter(pub u64);

/// Sort key of a waiting request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueueKey {
    /// Rank of the request's objective: a higher rank comes first, before any other rule.
    pub rank: i32,
    /// Flow of the request, as a number; 0: no flow.
    pub flow: u64,
    /// Seconds of head start.
    pub priority: f64,
    /// Prompt tokens.
    pub tokens: u64,
    /// Arrival, since 1970.
    pub since: Duration,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    waiter: Waiter,
    queue_key: QueueKey,
}

impl Entry {
    fn flow(&self) -> (i32, u64) {
        (self.queue_key.rank, self.queue_key.flow)
    }
}

/// The requests that wait for one model key.
#[derive(Debug, Default)]
struct Line {
    entries: Vec<Entry>,
    /// Turns that each waiting flow has had, within one rank. A new flow starts at the minimum of the others, so that it
    /// neither waits for their earlier turns nor gains an advantage.
    turns: HashMap<(i32, u64), u64>,
}

/// Why a request has left the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    /// Its turn came.
    Served,
    /// Timed out, or the client left: not counted as a turn.
    Unserved,
}

impl Line {
    fn join(&mut self, entry: Entry) {
        let QueueKey { rank, flow, .. } = entry.queue_key;
        let of_rank = self.turns.iter().filter(|((of, _), _)| *of == rank);
        let begins_at = of_rank.map(|(_, turns)| *turns).min().unwrap_or_default();
        self.turns.entry((rank, flow)).or_insert(begins_at);
        self.entries.push(entry);
    }

    fn leave(&mut self, waiter: Waiter, left: Left) -> bool {
        let Some(at) = self.entries.iter().position(|entry| entry.waiter == waiter) else {
            return false;
        };
        let key = self.entries.remove(at).flow();
        if !self.entries.iter().any(|entry| entry.flow() == key) {
            self.turns.remove(&key);
        } else if left == Left::Served {
            let turns = self.turns.entry(key).or_default();
            *turns = turns.saturating_add(1);
        }
        true
    }

    /// The waiting requests, in order.
    fn in_order(&self, policy: QueuePolicy) -> Vec<Entry> {
        let mut all = self.entries.clone();
        all.sort_by(|a, b| {
            let by_rank = b.queue_key.rank.cmp(&a.queue_key.rank);
            by_rank.then_with(|| order(policy, a, b))
        });
        if self.turns.len() > 1 {
            self.take_turns(&mut all);
        }
        all
    }

    /// Interleaves the flows of each rank so that none gets more turns than another; the order within a flow stays.
    fn take_turns(&self, ordered: &mut [Entry]) {
        let mut next = self.turns.clone();
        let mut turn_of = |entry: &Entry| {
            let turn = next.entry(entry.flow()).or_default();
            std::mem::replace(turn, turn.saturating_add(1))
        };
        let mut turns: Vec<(u64, Entry)> = Vec::with_capacity(ordered.len());
        for entry in ordered.iter() {
            turns.push((turn_of(entry), *entry));
        }
        turns.sort_by_key(|(turn, entry)| (Reverse(entry.queue_key.rank), *turn));
        for (place, (_, entry)) in ordered.iter_mut().zip(turns) {
            *place = entry;
        }
    }
}

/// Requests tried per model key when a worker may have become free: planning one takes as long as a look at all workers.
const TRIED_AT_ONCE: usize = 16;

/// Why a request cannot wait: the queue is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Full {
    /// Requests that wait.
    pub waiting: usize,
    /// Maximum that may wait.
    pub allowed: usize,
}

/// The requests that wait on one thread, by model key.
#[derive(Debug, Default)]
pub struct Waiting {
    lines: HashMap<ModelKey, Line>,
    next: u64,
    count: usize,
}

impl Waiting {
    /// Number of waiting requests.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Adds a request to the queue.
    ///
    /// # Errors
    /// [`Full`] when the queue is full.
    pub fn join(
        &mut self,
        key: &ModelKey,
        queue_key: QueueKey,
        queue: &Queue,
    ) -> Result<Waiter, Full> {
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
        let entry = Entry { waiter, queue_key };
        self.lines.entry_ref(key).or_default().join(entry);
        Ok(waiter)
    }

    /// Removes a request whose turn came.
    pub fn serve(&mut self, waiter: Waiter) {
        self.take_out(waiter, Left::Served);
    }

    /// Removes a request without counting a turn.
    pub fn leave(&mut self, waiter: Waiter) {
        self.take_out(waiter, Left::Unserved);
    }

    fn take_out(&mut self, waiter: Waiter, why: Left) {
        let mut left = 0;
        self.lines.retain(|_, line| {
            left = usize::from(line.leave(waiter, why)).max(left);
            !line.entries.is_empty()
        });
        self.count = self.count.saturating_sub(left);
    }

    /// Requests to be tried, per model key in order: the first may want a busy worker while another is free for the next.
    /// At most `TRIED_AT_ONCE` per model key.
    pub fn in_order(&self, policy: QueuePolicy) -> Vec<Waiter> {
        let mut all = Vec::new();
        for line in self.lines.values() {
            let here = line.in_order(policy).into_iter();
            all.extend(here.take(TRIED_AT_ONCE).map(|entry| entry.waiter));
        }
        all
    }

    /// Requests whose deadline has passed at `now`.
    pub fn late(&self, now: Duration, queue: &Queue) -> Vec<Waiter> {
        let deadline = Duration::from_millis(queue.deadline_ms);
        let all = self.lines.values().flat_map(|line| &line.entries);
        all.filter(|entry| now.saturating_sub(entry.queue_key.since) >= deadline)
            .map(|entry| entry.waiter)
            .collect()
    }
}

/// Compares two entries: `Less` is served sooner.
fn order(policy: QueuePolicy, a: &Entry, b: &Entry) -> Ordering {
    let by_score = score(policy, &b.queue_key).total_cmp(&score(policy, &a.queue_key));
    by_score.then(match policy {
        QueuePolicy::Fcfs | QueuePolicy::Wspt => a.waiter.cmp(&b.waiter),
        QueuePolicy::Lcfs => b.waiter.cmp(&a.waiter),
    })
}

/// A higher score is served sooner (routing semantics, C.7).
fn score(policy: QueuePolicy, queue_key: &QueueKey) -> f64 {
    let arrival = queue_key.since.as_secs_f64();
    match policy {
        QueuePolicy::Fcfs => queue_key.priority - arrival,
        QueuePolicy::Lcfs => queue_key.priority + arrival,
        QueuePolicy::Wspt => (1.0 + queue_key.priority) / queue_key.tokens.max(1) as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(model: &str) -> ModelKey {
        ModelKey {
            model: Some(model.to_owned()),
            namespace: String::new(),
        }
    }

    fn queue_key(ms: u64, tokens: u64, priority: f64) -> QueueKey {
        QueueKey {
            rank: 0,
            flow: 0,
            priority,
            tokens,
            since: Duration::from_millis(ms),
        }
    }

    fn served(policy: QueuePolicy, queue_keys: &[QueueKey]) -> Vec<u64> {
        let mut waiting = Waiting::default();
        for queue_key in queue_keys {
            waiting
                .join(&key("m"), *queue_key, &Queue::default())
                .unwrap();
        }
        let mut order = Vec::new();
        while let Some(first) = waiting.in_order(policy).first().copied() {
            order.push(first.0);
            waiting.serve(first);
        }
        order
    }

    #[test]
    fn the_order_is_the_policys_with_head_starts() {
        let queue_keys = [
            queue_key(0, 500, 0.0),
            queue_key(1000, 100, 0.0),
            queue_key(2000, 900, 0.0),
            queue_key(2000, 100, 0.0),
            queue_key(3000, 4000, 2.5),
        ];
        assert_eq!(served(QueuePolicy::Fcfs, &queue_keys), [0, 4, 1, 2, 3]);
        assert_eq!(served(QueuePolicy::Lcfs, &queue_keys), [4, 3, 2, 1, 0]);
        assert_eq!(served(QueuePolicy::Wspt, &queue_keys), [1, 3, 0, 2, 4]);
    }

    #[test]
    fn objectives_come_first_and_flows_of_one_take_turns() {
        let of = |rank, flow, ms| QueueKey {
            rank,
            flow,
            ..queue_key(ms, 1, 0.0)
        };
        // A greedy flow, a later flow with two requests, requests without a flow, and a last request of a higher objective.
        let queue_keys = [
            of(0, 1, 0),
            of(0, 1, 1),
            of(0, 1, 2),
            of(0, 1, 3),
            of(0, 2, 4),
            of(0, 2, 5),
            of(0, 0, 6),
            of(5, 1, 7),
            of(-1, 3, 0),
        ];
        assert_eq!(
            served(QueuePolicy::Fcfs, &queue_keys),
            [7, 0, 4, 6, 1, 5, 2, 3, 8]
        );
        // Without flows only the policy counts.
        let plain: Vec<_> = queue_keys
            .iter()
            .map(|one| QueueKey {
                rank: 0,
                flow: 0,
                ..*one
            })
            .collect();
        assert_eq!(
            served(QueuePolicy::Fcfs, &plain),
            [0, 8, 1, 2, 3, 4, 5, 6, 7]
        );
    }

    #[test]
    fn a_flow_that_comes_anew_is_owed_nothing_and_waits_for_nothing() {
        let mut line = Line::default();
        let entry = |number, flow| Entry {
            waiter: Waiter(number),
            queue_key: QueueKey {
                flow,
                ..queue_key(number, 1, 0.0)
            },
        };
        let first = |line: &Line| line.in_order(QueuePolicy::Fcfs)[0].waiter.0;
        (0..6).for_each(|number| line.join(entry(number, 1)));
        for number in 0..4 {
            assert_eq!(first(&line), number);
            assert!(line.leave(Waiter(number), Left::Served));
        }
        line.join(entry(6, 2));
        line.join(entry(7, 2));
        let mut order = Vec::new();
        while !line.entries.is_empty() {
            let next = first(&line);
            order.push(next);
            assert!(line.leave(Waiter(next), Left::Served));
            assert!(!line.leave(Waiter(next), Left::Served));
        }
        assert_eq!(order, [4, 6, 5, 7]);
        assert!(line.turns.is_empty());
        // Turns are counted per rank, and a request that gives up has had no turn.
        (0..3).for_each(|number| line.join(entry(number, 1)));
        line.join(Entry {
            waiter: Waiter(9),
            queue_key: QueueKey {
                rank: 1,
                ..entry(9, 1).queue_key
            },
        });
        assert!(line.leave(Waiter(9), Left::Served) && line.leave(Waiter(0), Left::Unserved));
        assert_eq!(line.turns.get(&(0, 1)), Some(&0));
    }

    #[test]
    fn no_more_wait_than_may_and_none_longer() {
        let queue = Queue {
            max_requests: 2,
            deadline_ms: 1000,
            ..Queue::default()
        };
        let mut waiting = Waiting::default();
        let first = waiting
            .join(&key("m"), queue_key(0, 1, 0.0), &queue)
            .unwrap();
        let other = waiting
            .join(&key("n"), queue_key(500, 1, 0.0), &queue)
            .unwrap();
        let full = waiting.join(&key("m"), queue_key(500, 1, 0.0), &queue);
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
        let snapshot = |booked_tokens, decode_blocks| LoadSnapshot {
            booked_tokens,
            decode_blocks,
            ..LoadSnapshot::default()
        };
        let unknown = Capacity::default();
        let known = Capacity {
            kv_blocks: Some(100),
            batched_tokens: Some(256),
            ..Capacity::default()
        };
        let busy =
            |role, snapshot: LoadSnapshot, capacity| admission.is_busy(role, &snapshot, capacity);
        assert!(!busy(Role::Prefill, snapshot(1000, 0.0), unknown));
        assert!(busy(Role::Prefill, snapshot(1001, 0.0), unknown));
        assert!(busy(Role::Prefill, snapshot(513, 0.0), known));
        assert!(!busy(Role::Decode, snapshot(9999, 50.0), known));
        assert!(busy(Role::Decode, snapshot(0, 50.1), known));
        assert!(!busy(Role::Decode, snapshot(0, 1e9), unknown));
        assert!(busy(Role::Aggregated, snapshot(0, 51.0), known));
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
                    0 => match waiting.join(&key(&(number % 3).to_string()), QueueKey { flow: number % 4, rank: (number % 2) as i32, ..queue_key(number, number, 0.0) }, &queue) {
                        Ok(waiter) => inside.push(waiter),
                        Err(full) => prop_assert_eq!((full.waiting, inside.len()), (16, 16)),
                    },
                    1 if !inside.is_empty() => waiting.leave(inside.swap_remove(which % inside.len())),
                    _ => waiting.leave(Waiter(number + 1_000_000)),
                }
                prop_assert_eq!(waiting.count(), inside.len());
                let order = waiting.in_order(QueuePolicy::Wspt);
                prop_assert!(order.iter().all(|head| inside.contains(head)));
                prop_assert_eq!(order.len(), inside.len());
            }
        }
    }
}
