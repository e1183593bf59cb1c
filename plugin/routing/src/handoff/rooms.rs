//! Owns numbers that are used once: bootstrap rooms, in which SGLang's two legs find each other, and the ids of transfers.
//!
//! SGLang recovers the prefill rank as `room % dp_size`, so a room is aligned to the picked rank, and is at most 2^63 − 1.
//! Rooms of different VMs differ in their upper bits: a number unique to the VM in this proxy, mixed with one that differs
//! between proxies.

/// Bits that count the rooms of one VM: 2^39 of them last for years.
const COUNTER_BITS: u32 = 39;

/// Bits that separate VMs: together with the counter 63.
const OWNER_BITS: u32 = 24;

/// Draws rooms.
#[derive(Debug, Clone)]
pub struct Rooms {
    owner: u64,
    next: u64,
}

impl Rooms {
    /// The rooms of the VM with the number `owner`.
    pub fn new(owner: u64) -> Self {
        Self {
            owner: owner & ((1 << OWNER_BITS) - 1),
            next: 0,
        }
    }

    /// An unused room for the picked rank of a worker with `dp_size` ranks.
    pub fn draw(&mut self, rank: u32, dp_size: u32) -> u64 {
        let size = u64::from(dp_size.max(1));
        let rank = u64::from(rank) % size;
        let base = (self.owner << COUNTER_BITS) | self.next;
        // Rooms below `base` may be used up: the room is the first aligned one from `base` on, and the next base follows
        // the whole aligned group.
        let aligned = base.next_multiple_of(size);
        let used = aligned
            .saturating_add(size)
            .saturating_sub(self.owner << COUNTER_BITS);
        self.next = used & ((1 << COUNTER_BITS) - 1);
        aligned.saturating_add(rank) & (i64::MAX as u64)
    }

    /// An unused number, for a hand-off that is not bound to a rank.
    pub fn draw_any(&mut self) -> u64 {
        self.draw(0, 1)
    }

    /// An unused number, at least 2^62 and below 2^63: far from those that an engine counts itself. TensorRT-LLM requires a
    /// number above 2^42.
    pub fn draw_high(&mut self) -> u64 {
        // The bit that marks it is taken from the counter, which still lasts for years, not from the owner.
        let counter_bits = COUNTER_BITS - 1;
        let counted = self.draw_any() & ((1 << counter_bits) - 1);
        1 << 62 | self.owner << counter_bits | counted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    proptest! {
        #[test]
        fn rooms_are_aligned_bounded_and_never_used_twice(
            owner in any::<u64>(),
            draws in proptest::collection::vec((0u32..16, 1u32..16), 1..500),
        ) {
            let mut rooms = Rooms::new(owner);
            let mut seen = HashSet::new();
            for (rank, size) in draws {
                let rank = rank % size;
                let room = rooms.draw(rank, size);
                prop_assert_eq!(room % u64::from(size), u64::from(rank));
                prop_assert!(room <= i64::MAX as u64);
                prop_assert!(seen.insert(room));
            }
        }

        #[test]
        fn high_numbers_are_high_and_never_used_twice(a in 0u64..1 << 24, b in 0u64..1 << 24) {
            prop_assume!(a != b);
            let (mut of_a, mut of_b) = (Rooms::new(a), Rooms::new(b));
            let mut seen = HashSet::new();
            for number in (0..100).flat_map(|_| [of_a.draw_high(), of_b.draw_high()]) {
                prop_assert!((1 << 62..1 << 63).contains(&number));
                prop_assert!(seen.insert(number));
            }
        }

        #[test]
        fn rooms_of_different_vms_differ(a in 0u64..1 << 24, b in 0u64..1 << 24) {
            prop_assume!(a != b);
            let (mut of_a, mut of_b) = (Rooms::new(a), Rooms::new(b));
            let first: HashSet<u64> = (0..100).map(|_| of_a.draw(1, 3)).collect();
            prop_assert!((0..100).all(|_| !first.contains(&of_b.draw(2, 5))));
        }
    }
}
