//! Owns a client's behaviour during one request: how it reads, and when it leaves.

use std::time::Duration;

use crate::chaos::asks::reads_slowly;
use crate::chaos::judge::Conduct;
use crate::chaos::pool::SILENCE;
use crate::chaos::scenario::ClientMix;

/// How a client behaves during one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientBehaviour {
    /// How the client reads.
    pub reads: Reads,
    /// When the client leaves, if at all.
    pub leaves: Option<Leaves>,
}

/// How a client reads an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// At once.
    AtOnce,
    /// Slowly, with one long pause.
    Slowly {
        /// Pause after each piece.
        pause: Duration,
        /// Number of pieces before the one long stall.
        stalls_after: usize,
        /// Length of the stall.
        stall: Duration,
    },
}

/// When a client leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaves {
    /// After half of the body was sent.
    InBody,
    /// That long after the request was sent: during prefill, at the start of decode, or later.
    After(Duration),
    /// After the headers have come.
    AtHeaders,
    /// After that many events, or pieces of an unstreamed answer.
    AfterPieces(usize),
    /// After the last token, before the end of the answer.
    AtLastToken,
}

/// Bytes that the system buffers for a slow reader, so that the senders have to wait.
const SMALL_WINDOW: u32 = 4096;

const SLOW_PAUSE: Duration = Duration::from_millis(1);
const STALLS_AFTER: usize = 60;

/// Stall of the slowest readers, as a multiple of the allowed silence of a worker.
const LONG_STALL: u32 = 4;
const STALLS_SOON: usize = 2;
/// Time over which the slowest readers begin.
const LONG_BEGINNING: Duration = Duration::from_millis(1500);

/// The ways of leaving, used in turn. The times hit prefill and the start of decode.
const WAYS: [Leaves; 10] = [
    Leaves::InBody,
    Leaves::After(Duration::from_millis(1)),
    Leaves::AtHeaders,
    Leaves::After(Duration::from_millis(4)),
    Leaves::AfterPieces(1),
    Leaves::After(Duration::from_millis(8)),
    Leaves::AfterPieces(5),
    Leaves::After(Duration::from_millis(16)),
    Leaves::AtLastToken,
    Leaves::After(Duration::from_millis(40)),
];

impl ClientBehaviour {
    /// Reads at once, to the end.
    pub const GOOD: Self = Self {
        reads: Reads::AtOnce,
        leaves: None,
    };

    /// The client's behaviour in its request number `turn`.
    pub fn of(mix: ClientMix, client: usize, turn: usize) -> Self {
        let reads = match (reads_slowly(mix, client), mix) {
            (false, _) => Reads::AtOnce,
            (true, ClientMix::SlowReaders) => Reads::Slowly {
                pause: SLOW_PAUSE,
                stalls_after: STALLS_SOON,
                stall: SILENCE * LONG_STALL,
            },
            (true, _) => Reads::Slowly {
                pause: SLOW_PAUSE,
                stalls_after: STALLS_AFTER,
                stall: SILENCE.mul_f64(1.5),
            },
        };
        // Pairs of clients, so that half of the leavers ask for streams.
        let leaver = mix == ClientMix::WithLeavers && client % 4 < 2;
        let way = || WAYS.get((client / 4 + turn) % WAYS.len()).copied();
        Self {
            reads,
            leaves: leaver.then(way).flatten(),
        }
    }

    /// Whether a failure may be the client's own fault.
    pub fn conduct(&self) -> Conduct {
        match (self.reads, self.leaves) {
            (Reads::AtOnce, None) => Conduct::Good,
            _ => Conduct::Bad,
        }
    }
}

/// Time over which all clients of this kind begin, if it is to be long: the slowest readers must not stall all at once.
pub fn all_begin_within(mix: ClientMix, client: usize) -> Option<Duration> {
    let hardly_reads = mix == ClientMix::SlowReaders && reads_slowly(mix, client);
    hardly_reads.then_some(LONG_BEGINNING)
}

/// Bytes that the system may buffer for this client, if limited.
pub fn window(mix: ClientMix, client: usize) -> Option<u32> {
    reads_slowly(mix, client).then_some(SMALL_WINDOW)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chaos::client::CLIENTS;

    #[test]
    fn every_way_to_leave_is_taken_with_and_without_a_stream() {
        for parity in [0, 1] {
            let clients = (0..CLIENTS).filter(|client| client % 2 == parity);
            let taken: Vec<_> = clients
                .filter_map(|client| ClientBehaviour::of(ClientMix::WithLeavers, client, 0).leaves)
                .collect();
            assert!(WAYS.iter().all(|way| taken.contains(way)), "{taken:?}");
            assert_eq!(taken.len(), CLIENTS / 4);
        }
    }

    #[test]
    fn who_reads_slowly_does_not_leave_and_others_do_neither() {
        let of = |mix, client| ClientBehaviour::of(mix, client, 3);
        assert_ne!(of(ClientMix::WithSlowReaders, 1).reads, Reads::AtOnce);
        assert!(window(ClientMix::WithSlowReaders, 1).is_some());
        for client in 0..CLIENTS {
            let patient = of(ClientMix::Patient, client);
            assert_eq!((patient.reads, patient.leaves), (Reads::AtOnce, None));
            assert_eq!(of(ClientMix::WithSlowReaders, client).leaves, None);
        }
    }
}
