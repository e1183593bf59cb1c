//! Owns what the limits of a configuration come to: the most memory that one thread's VM takes for what comes from outside.

use super::{Config, Pool};
use crate::handoff::MAX_PREFILL_ANSWER;

const MIB: usize = 1024 * 1024;

/// What is there whatever is configured: the module itself, a fleet of a thousand workers, metrics, what threads tell each other.
const FIXED: usize = 64 * MIB;

/// What a block that is remembered takes.
const BLOCK: usize = 32;

/// While a body is read, its text, and the text of its prompt with its blocks, are held beside it.
const COPIES_OF_A_BODY: usize = 7;

/// While an answer is read, what is handed to decode, or told as a stream, is held beside it.
const COPIES_OF_AN_ANSWER: usize = 4;

/// What is held beside a body or an answer whatever its length.
const BESIDE: usize = 4 * MIB;

impl Config {
    /// Bytes that one thread's VM takes at most, what each open request takes beside its body (its headers and some 2 KiB) left
    /// out. Envoy allows a VM 1 GiB, and a VM gives no memory back: what it has taken once it keeps for later.
    pub fn most_vm_bytes(&self) -> usize {
        let of_pools = self.pools.iter().map(of_pool);
        let kept = of_pools.fold(FIXED, usize::saturating_add);
        let has_queue = |pool: &Pool| pool.admission.queue.is_some();
        let waiting = match self.pools.iter().any(has_queue) {
            // Each body that waits with what was read of it.
            true => self.limits.bodies_in_flight_bytes.saturating_mul(5) / 4,
            false => 0,
        };
        kept.saturating_add(waiting).saturating_add(self.at_once())
    }

    /// Bytes that a proxy of so many worker threads takes at most beyond what it takes at rest: its VMs, and the bodies that it holds
    /// outside of them.
    pub fn most_bytes(&self, threads: usize) -> usize {
        let of_thread = self.most_vm_bytes().saturating_add(self.most_body_bytes());
        of_thread.saturating_mul(threads)
    }

    /// Bytes that the proxy holds of bodies at most, for each thread: a client's request, and the call that is made for it.
    fn most_body_bytes(&self) -> usize {
        self.limits.bodies_in_flight_bytes.saturating_mul(2)
    }

    /// What is taken for the one body or answer that is looked at: one at a time.
    fn at_once(&self) -> usize {
        let body = self.limits.body_bytes;
        let reading = body.saturating_mul(COPIES_OF_A_BODY);
        let answer = MAX_PREFILL_ANSWER.saturating_mul(COPIES_OF_AN_ANSWER);
        reading
            .max(answer.saturating_add(body))
            .saturating_add(BESIDE)
    }
}

fn of_pool(pool: &Pool) -> usize {
    pool.prefixes
        .max_blocks
        .saturating_mul(BLOCK)
        .saturating_add(pool.decode.recovery_bytes)
        .saturating_add(pool.cleanup.held_bytes)
}
