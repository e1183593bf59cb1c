//! Owns round robin: everyone once per turn.
//!
//! The order is drawn anew each turn. In a fixed order two policies of related lengths move in lock-step, so that the
//! same prefill worker always meets the same decode worker, and the threads of one proxy march together.

use super::{Policy, Random};
use crate::fleet::{Fleet, Target, TargetKey};

/// The targets that still have their turn to come.
#[derive(Debug, Default)]
pub struct RoundRobin {
    turn: Vec<TargetKey>,
}

impl Policy for RoundRobin {
    fn pick(&mut self, candidates: &[Target], random: &mut Random) -> Option<usize> {
        if candidates.is_empty() {
            return None;
        }
        if let Some(index) = self.take_next(candidates) {
            return Some(index);
        }
        let mut turn: Vec<TargetKey> = candidates.iter().map(Target::key).collect();
        random.shuffle(&mut turn);
        self.turn.extend(turn);
        self.take_next(candidates)
    }

    fn keep(&mut self, fleet: &Fleet) {
        self.turn.retain(|target| fleet.contains(target.worker));
    }
}

impl RoundRobin {
    /// The first whose turn it is and who is eligible now; the others keep their turn.
    fn take_next(&mut self, candidates: &[Target]) -> Option<usize> {
        let found = self.turn.iter().enumerate().find_map(|(at, key)| {
            let index = candidates.iter().position(|target| target.key() == *key)?;
            Some((at, index))
        });
        let (at, index) = found?;
        self.turn.remove(at);
        Some(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::{Role, Worker, WorkerId};
    use std::collections::{HashMap, HashSet};
    use std::rc::Rc;

    fn targets(ids: std::ops::Range<u64>) -> Vec<Target> {
        ids.map(|id| {
            Target::whole(&Rc::new(Worker {
                id: WorkerId(id),
                name: id.to_string(),
                address: None,
                role: Role::Prefill,
                model: None,
                namespace: String::new(),
                dp_size: 1,
            }))
        })
        .collect()
    }

    #[test]
    fn everyone_has_one_turn_per_round() {
        let mut random = Random::with_seed(1);
        for size in 1..7u64 {
            let all = targets(0..size);
            let mut policy = RoundRobin::default();
            for _ in 0..20 {
                let round: HashSet<usize> = (0..size)
                    .map(|_| policy.pick(&all, &mut random).unwrap())
                    .collect();
                assert_eq!(round.len() as u64, size);
            }
        }
    }

    #[test]
    fn all_pairs_meet_whatever_the_sizes() {
        for (prefills, decodes) in [(1, 1), (2, 2), (2, 3), (4, 2), (3, 6)] {
            let mut random = Random::with_seed(7);
            let (p, d) = (targets(0..prefills), targets(0..decodes));
            let (mut of_p, mut of_d) = (RoundRobin::default(), RoundRobin::default());
            let mut pairs: HashMap<(usize, usize), u32> = HashMap::new();
            for _ in 0..200 * prefills * decodes {
                let pair = (
                    of_p.pick(&p, &mut random).unwrap(),
                    of_d.pick(&d, &mut random).unwrap(),
                );
                *pairs.entry(pair).or_default() += 1;
            }
            assert_eq!(pairs.len() as u64, prefills * decodes);
            assert!(
                pairs.values().all(|count| (120..=280).contains(count)),
                "{pairs:?}"
            );
        }
    }

    #[test]
    fn one_who_is_not_eligible_now_keeps_its_turn() {
        let mut random = Random::with_seed(3);
        let all = targets(0..3);
        let mut policy = RoundRobin::default();
        let first = policy.pick(&all, &mut random).unwrap();
        let others: Vec<Target> = (0..3)
            .filter(|i| *i != first)
            .map(|i| all[i].clone())
            .collect();
        let only = policy.pick(&others[..1], &mut random).unwrap();
        assert_eq!(only, 0);
        assert_eq!(
            policy.pick(&all, &mut random).map(|i| all[i].key()),
            Some(others[1].key())
        );
    }

    #[test]
    fn nothing_to_pick_from_is_none() {
        assert_eq!(
            RoundRobin::default().pick(&[], &mut Random::with_seed(0)),
            None
        );
    }
}
