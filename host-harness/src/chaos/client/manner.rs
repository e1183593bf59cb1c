//! Owns how a client behaves during one request: how it reads, and where it leaves.

use std::time::Duration;

use crate::chaos::asks::reads_slowly;
use crate::chaos::judge::Conduct;
use crate::chaos::pool::SILENCE;
use crate::chaos::scenario::Crowd;

/// How a client behaves during one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Manner {
    /// How it reads.
    pub reads: Reads,
    /// Where it leaves, if it does.
    pub leaves: Option<Leaves>,
}

/// How a client reads an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// As it comes.
    AtOnce,
    /// Slowly, with one long pause.
    Slowly {
        /// After each piece.
        pause: Duration,
        /// Once, after this many pieces.
        stalls_after: usize,
        /// For so long.
        stall: Duration,
    },
}

/// Where a client leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaves {
    /// When half of the body was sent.
    InBody,
    /// So long after the request was sent: in prefill, or while decode begins, or later.
    After(Duration),
    /// When the headers have come.
    AtHeaders,
    /// When so many events, or pieces of a whole answer, have come.
    AfterPieces(usize),
    /// When the last token has come, before the end was read.
    AtLastToken,
}

/// Bytes that the system buffers for one who reads slowly, so that others have to wait.
const SMALL_WINDOW: u32 = 4096;

const SLOW_PAUSE: Duration = Duration::from_millis(1);
const STALLS_AFTER: usize = 60;

/// How often a worker's silence fits into the pause of one who hardly reads.
const LONG_STALL: u32 = 4;
const STALLS_SOON: usize = 2;
/// In which time such ones begin.
const LONG_BEGINNING: Duration = Duration::from_millis(1500);

/// Those who leave do so in these ways, one after the other. The times hit prefill and the beginning of decode.
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

impl Manner {
    /// Of one that reads at once, to the end.
    pub const GOOD: Self = Self {
        reads: Reads::AtOnce,
        leaves: None,
    };

    /// The manner of this client in its `turn`th request.
    pub fn of(crowd: Crowd, client: usize, turn: usize) -> Self {
        let reads = match (reads_slowly(crowd, client), crowd) {
            (false, _) => Reads::AtOnce,
            (true, Crowd::SlowReaders) => Reads::Slowly {
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
        // Pairs of clients, so that those who leave ask for streams as often as not.
        let leaver = crowd == Crowd::WithLeavers && client % 4 < 2;
        let way = || WAYS.get((client / 4 + turn) % WAYS.len()).copied();
        Self {
            reads,
            leaves: leaver.then(way).flatten(),
        }
    }

    /// Whether nothing that goes wrong can be its doing.
    pub fn conduct(&self) -> Conduct {
        match (self.reads, self.leaves) {
            (Reads::AtOnce, None) => Conduct::Good,
            _ => Conduct::Bad,
        }
    }
}

/// In which time all like this client begin, where that is to be long: so that those who hardly read are not silent all at once.
pub fn all_begin_within(crowd: Crowd, client: usize) -> Option<Duration> {
    let hardly_reads = crowd == Crowd::SlowReaders && reads_slowly(crowd, client);
    hardly_reads.then_some(LONG_BEGINNING)
}

/// What the system may buffer for this client, where it is to be little.
pub fn window(crowd: Crowd, client: usize) -> Option<u32> {
    reads_slowly(crowd, client).then_some(SMALL_WINDOW)
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
                .filter_map(|client| Manner::of(Crowd::WithLeavers, client, 0).leaves)
                .collect();
            assert!(WAYS.iter().all(|way| taken.contains(way)), "{taken:?}");
            assert_eq!(taken.len(), CLIENTS / 4);
        }
    }

    #[test]
    fn who_reads_slowly_does_not_leave_and_others_do_neither() {
        let of = |crowd, client| Manner::of(crowd, client, 3);
        assert_ne!(of(Crowd::WithSlowReaders, 1).reads, Reads::AtOnce);
        assert!(window(Crowd::WithSlowReaders, 1).is_some());
        for client in 0..CLIENTS {
            let patient = of(Crowd::Patient, client);
            assert_eq!((patient.reads, patient.leaves), (Reads::AtOnce, None));
            assert_eq!(of(Crowd::WithSlowReaders, client).leaves, None);
        }
    }
}
