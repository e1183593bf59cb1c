//! Owns round robin: every worker once per round.
//!
//! The order is drawn anew each round. In a fixed order two policies of related lengths move in lock-step, so that the same
//! prefill worker always meets the same decode worker, and the threads of one proxy move together.

use super::{Candidate, Policy, Random, Task};
use crate::fleet::{Fleet, TargetKey};

/// The targets left in the current round.
#[derive(Debug, Default)]
pub struct RoundRobin {
    turn: Vec<TargetKey>,
}

impl Policy for RoundRobin {
    fn peek(
        &mut self,
        _task: &Task<'_>,
        candidates: &[Candidate<'_>],
        random: &mut Random,
    ) -> Option<usize> {
        if candidates.is_empty() {
            return None;
        }
        if let Some(index) = self.next_of(candidates) {
            return Some(index);
        }
        // A new round is drawn here and stays: another peek finds the same target.
        let mut turn: Vec<TargetKey> = candidates.iter().map(|c| c.target.key()).collect();
        random.shuffle(&mut turn);
        self.turn.extend(turn);
        self.next_of(candidates)
    }

    fn commit(&mut self, taken: TargetKey) {
        if let Some(at) = self.turn.iter().position(|key| *key == taken) {
            self.turn.remove(at);
        }
    }

    fn keep(&mut self, fleet: &Fleet) {
        self.turn.retain(|target| fleet.contains(target.worker));
    }
}

impl RoundRobin {
    /// The first target of the round that is eligible now; the others keep their turn.
    fn next_of(&self, candidates: &[Candidate<'_>]) -> Option<usize> {
        self.turn
            .iter()
            .find_map(|key| candidates.iter().position(|c| c.target.key() == *key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::Target;
    use crate::selection::tests::{TASK, idle, targets};
    use std::collections::{HashMap, HashSet};

    fn peek(policy: &mut RoundRobin, targets: &[Target], random: &mut Random) -> Option<usize> {
        policy.peek(&TASK, &idle(targets), random)
    }

    fn pick(policy: &mut RoundRobin, targets: &[Target], random: &mut Random) -> Option<usize> {
        let index = peek(policy, targets, random)?;
        policy.commit(targets[index].key());
        Some(index)
    }

    #[test]
    fn looking_twice_finds_the_same_and_taking_moves_on_once() {
        let mut random = Random::with_seed(5);
        let all = targets(0..4);
        let mut policy = RoundRobin::default();
        for _ in 0..40 {
            let first = peek(&mut policy, &all, &mut random).unwrap();
            assert!((0..5).all(|_| peek(&mut policy, &all, &mut random) == Some(first)));
            policy.commit(all[first].key());
            let left = policy.turn.len();
            policy.commit(all[first].key());
            assert_eq!(policy.turn.len(), left);
        }
    }

    #[test]
    fn everyone_has_one_turn_per_round() {
        let mut random = Random::with_seed(1);
        for size in 1..7u64 {
            let all = targets(0..size);
            let mut policy = RoundRobin::default();
            for _ in 0..20 {
                let round: HashSet<usize> = (0..size)
                    .map(|_| pick(&mut policy, &all, &mut random).unwrap())
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
                    pick(&mut of_p, &p, &mut random).unwrap(),
                    pick(&mut of_d, &d, &mut random).unwrap(),
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
        let first = pick(&mut policy, &all, &mut random).unwrap();
        let others: Vec<Target> = (0..3)
            .filter(|i| *i != first)
            .map(|i| all[i].clone())
            .collect();
        let only = pick(&mut policy, &others[..1], &mut random).unwrap();
        assert_eq!(only, 0);
        assert_eq!(
            pick(&mut policy, &all, &mut random).map(|i| all[i].key()),
            Some(others[1].key())
        );
    }

    #[test]
    fn nothing_to_pick_from_is_none() {
        assert_eq!(
            pick(&mut RoundRobin::default(), &[], &mut Random::with_seed(0)),
            None
        );
    }
}
