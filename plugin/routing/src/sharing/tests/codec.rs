//! Tests of the bytes: written values are read back, and anything else is rejected.

use proptest::collection::vec;
use proptest::prelude::*;

use super::world::{Map, key, share};
use crate::fleet::{TargetKey, WorkerId};
use crate::load::Occupied;
use crate::sharing::blob::{self, Blob, BlobHead};
use crate::sharing::log::{self, Log};
use crate::sharing::store::log_key;
use crate::sharing::{
    BLOB_BYTES, Decision, PoolShares, SEGMENT_BYTES, SEGMENTS, SharedStore, ThreadLoad, Totals,
};

fn shares() -> impl Strategy<Value = ThreadLoad> {
    let numbers = any::<[u32; 5]>();
    (any::<u64>(), any::<u32>(), numbers, any::<u32>()).prop_map(|(worker, rank, it, decodes)| {
        ThreadLoad {
            key: TargetKey {
                worker: WorkerId(worker),
                rank,
            },
            booked_tokens: it[0].into(),
            queued_tokens: it[1].into(),
            prefills: it[2],
            decoding: Occupied {
                blocks: it[3].into(),
                weight: it[4].into(),
            },
            decodes,
        }
    })
}

fn pools() -> impl Strategy<Value = Vec<PoolShares>> {
    let pool = (any::<u64>(), vec(shares(), 0..20));
    vec(
        pool.prop_map(|(pool, shares)| PoolShares { pool, shares }),
        0..5,
    )
}

fn decisions() -> impl Strategy<Value = Vec<(u64, Decision)>> {
    let decision = (any::<u64>(), any::<u32>(), vec(any::<u32>(), 0..300));
    let decision = decision.prop_map(|(worker, rank, path)| Decision {
        key: TargetKey {
            worker: WorkerId(worker),
            rank,
        },
        path,
    });
    vec((any::<u64>(), decision), 0..40)
}

fn totals() -> impl Strategy<Value = Totals> {
    any::<[u64; 5]>().prop_map(|[streams, prefills, decodes, waiting, ejected]| Totals {
        streams,
        prefills,
        decodes,
        waiting,
        ejected,
    })
}

const HEAD: BlobHead = BlobHead {
    owner: 7,
    beat: 9,
    next_segment: 11,
};

/// The bytes of all segments that a log writes for these decisions.
fn segments(decisions: &[(u64, Decision)]) -> Vec<Vec<u8>> {
    let store = Map::default();
    let mut log = Log::default();
    log.add(decisions);
    while log.has_waiting() {
        log.write(&store, 0, 7);
    }
    let read = |number| store.read(&log_key(0, number));
    (0..log.next()).filter_map(read).map(|it| it.0).collect()
}

proptest! {
    #[test]
    fn a_blob_is_read_as_it_was_written(totals in totals(), pools in pools()) {
        let bytes = HEAD.encode(&blob::body(&totals, &pools));
        prop_assert_eq!(Blob::decode(&bytes), Some(Blob { head: HEAD, totals, pools }));
        prop_assert_eq!(BlobHead::decode(&bytes), Some(HEAD));
    }

    #[test]
    fn a_log_is_read_as_it_was_written(decisions in decisions()) {
        let read: Option<Vec<_>> = (0..)
            .zip(segments(&decisions))
            .map(|(number, segment)| log::decode(&segment, 7, number))
            .collect();
        prop_assert_eq!(read.map(|all| all.concat()), Some(decisions));
    }

    #[test]
    fn any_bytes_are_read_or_not_and_nothing_worse(
        bytes in vec(any::<u8>(), 0..400),
        cut in any::<prop::sample::Index>(),
        at in any::<prop::sample::Index>(),
        pools in pools(),
        decisions in decisions(),
    ) {
        let _ = Blob::decode(&bytes);
        let _ = log::decode(&bytes, 7, 0);
        for mut whole in [HEAD.encode(&blob::body(&Totals::default(), &pools))]
            .into_iter()
            .chain(segments(&decisions))
        {
            let patch = bytes.iter().take(8);
            let start = at.index(whole.len());
            whole.iter_mut().skip(start).zip(patch).for_each(|(to, from)| *to = *from);
            let _ = Blob::decode(&whole);
            let _ = log::decode(&whole, 7, 0);
            whole.truncate(cut.index(whole.len()));
            prop_assert_eq!(Blob::decode(&whole), None);
        }
    }
}

#[test]
fn counts_that_are_made_up_reserve_nothing() {
    let mut bytes = HEAD.encode(&[0; 40]);
    bytes.extend_from_slice(&u32::MAX.to_le_bytes());
    bytes.extend_from_slice(&[0xff; 64]);
    assert_eq!(Blob::decode(&bytes), None);
}

#[test]
fn of_too_many_shares_those_that_weigh_least_are_left_out() {
    let light = |count: u64| (0..count).map(|worker| share(worker, 1)).collect();
    let pool = |pool, shares: Vec<ThreadLoad>| PoolShares { pool, shares };
    let mut first = pool(1, light(9_000));
    let mut heavy = share(1 << 40, 1);
    heavy.decodes = 40;
    first.shares.push(heavy);
    let pools = [first, pool(2, light(10)), pool(3, vec![share(5, 100_000)])];
    let bytes = HEAD.encode(&blob::body(&Totals::default(), &pools));
    assert!(bytes.len() <= BLOB_BYTES && bytes.len() > BLOB_BYTES - 2048);
    let pools = Blob::decode(&bytes).unwrap().pools;
    assert!(pools[0].shares.contains(&heavy));
    assert_eq!(pools[2].shares, [share(5, 100_000)]);
    let count: usize = pools.iter().map(|pool| pool.shares.len()).sum();
    assert!(count > 7_000 && count < 9_012, "{count}");
}

#[test]
fn what_is_more_than_can_be_said_is_said_as_the_most() {
    let most = ThreadLoad {
        booked_tokens: u64::MAX,
        queued_tokens: 1 << 32,
        decoding: Occupied {
            blocks: u64::MAX,
            weight: u64::MAX,
        },
        ..share(1, 0)
    };
    let pools = [PoolShares {
        pool: 0,
        shares: vec![most],
    }];
    let bytes = HEAD.encode(&blob::body(&Totals::default(), &pools));
    let share = Blob::decode(&bytes).unwrap().pools[0].shares[0];
    let all = u64::from(u32::MAX);
    let Occupied { blocks, weight } = share.decoding;
    assert_eq!(
        [share.booked_tokens, share.queued_tokens, blocks, weight],
        [all; 4]
    );
}

#[test]
fn segments_and_what_waits_are_bounded() {
    let long = (
        1,
        Decision {
            key: key(1),
            path: vec![5; 100_000],
        },
    );
    let all = segments(&vec![long.clone(); 5]);
    assert!(all.iter().all(|segment| segment.len() <= SEGMENT_BYTES));
    let decisions = log::decode(&all[0], 7, 0).unwrap();
    assert_eq!(decisions[0].1.path.len(), 8192);
    let mut log = Log::default();
    log.add(&vec![long; 100]);
    assert!(log.dropped() > 0);
    let store = Map::default();
    for _ in 0..10 {
        log.write(&store, 3, 7);
    }
    assert_eq!(store.keys().len() as u64, SEGMENTS);
    assert!(!log.has_waiting());
}
