//! Owns the memory bound of a configuration: the maximum that one thread's VM takes for data from outside, by the configured
//! limits.

use super::{Config, Pool};
use crate::handoff::MAX_CALL_ANSWER;

const MIB: usize = 1024 * 1024;

/// Bytes in use whatever is configured: the module itself, a fleet of a thousand workers, metrics, the data that threads share.
const FIXED: usize = 64 * MIB;

/// Bytes of one remembered block.
const BLOCK: usize = 32;

/// Copies of a body held while the body is read: its text, and the text of its prompt with its blocks, stand beside it.
const COPIES_OF_A_BODY: usize = 7;

/// Copies of an answer held while the answer is read: the part that is handed to decode, or sent as a stream, stands beside it.
const COPIES_OF_AN_ANSWER: usize = 4;

/// Bytes held beside a body or an answer, whatever its length.
const BESIDE: usize = 4 * MIB;

impl Config {
    /// Maximum bytes of one thread's VM, without the bytes of each open request beside its body (its headers and some 2 KiB).
    /// Envoy allows a VM 1 GiB. A VM gives no memory back: memory that was taken once is kept for later.
    pub fn most_vm_bytes(&self) -> usize {
        let of_pools = self.pools.iter().map(of_pool);
        let kept = of_pools.fold(FIXED, usize::saturating_add);
        let has_queue = |pool: &Pool| pool.admission.queue.is_some();
        let waiting = match self.pools.iter().any(has_queue) {
            // Each waiting body, with the data read from it.
            true => self.limits.bodies_in_flight_bytes.saturating_mul(5) / 4,
            false => 0,
        };
        kept.saturating_add(waiting).saturating_add(self.at_once())
    }

    /// Maximum bytes of a proxy with this number of worker threads, beyond its bytes at rest: its VMs, and the bodies that the
    /// proxy holds outside of them.
    pub fn most_bytes(&self, threads: usize) -> usize {
        let of_thread = self.most_vm_bytes().saturating_add(self.most_body_bytes());
        of_thread.saturating_mul(threads)
    }

    /// Maximum bytes of bodies that the proxy holds for each thread: a client's request, and the call that is made for the
    /// request.
    fn most_body_bytes(&self) -> usize {
        self.limits.bodies_in_flight_bytes.saturating_mul(2)
    }

    /// Bytes for the body or the answer that is being read: one at a time.
    fn at_once(&self) -> usize {
        let body = self.limits.body_bytes;
        let reading = body.saturating_mul(COPIES_OF_A_BODY);
        let answer = MAX_CALL_ANSWER.saturating_mul(COPIES_OF_AN_ANSWER);
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
