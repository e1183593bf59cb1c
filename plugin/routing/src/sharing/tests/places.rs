//! Tests of slots: how they are taken, lost and left, and which updates follow.

use std::cell::RefCell;

use super::world::{Interrupted, Map, decision, in_pool, share, sorted};
use crate::sharing::{
    BLOB_BYTES, DEAD_TICKS, SEGMENTS, SLOTS, SharedStore, ThreadLoad, ThreadSync, Totals,
};

const STREAMS: Totals = Totals {
    streams: 3,
    prefills: 0,
    decodes: 0,
    waiting: 1,
    ejected: 0,
};

fn publish(sync: &mut ThreadSync, store: &dyn SharedStore, shares: &[ThreadLoad]) {
    sync.publish(store, &STREAMS, &in_pool(1, shares), &[]);
}

fn decide(sync: &mut ThreadSync, store: &dyn SharedStore, numbers: impl IntoIterator<Item = u32>) {
    let decisions: Vec<_> = numbers.into_iter().map(decision).collect();
    sync.publish(store, &STREAMS, &[], &decisions);
}

#[test]
fn loads_are_summed_over_all_others_and_totals_over_all() {
    let store = Map::default();
    let mut syncs: Vec<ThreadSync> = (1..=3).map(ThreadSync::new).collect();
    for (sync, tokens) in syncs.iter_mut().zip([10, 200, 3000]) {
        publish(sync, &store, &[share(1, tokens), share(tokens, 4)]);
    }
    let update = syncs[0].listen(&store, 1);
    let mut both = share(1, 200);
    both.add(&share(1, 3000));
    let expected = in_pool(1, &[both, share(200, 4), share(3000, 4)]);
    assert_eq!(sorted(update.shares), expected);
    assert_eq!(
        (update.vms, update.totals.streams, update.totals.waiting),
        (3, 9, 3)
    );
}

#[test]
fn of_two_who_take_a_place_at_once_one_moves_and_none_is_counted_twice() {
    let store = Map::default();
    let (mut late, early) = (ThreadSync::new(1), RefCell::new(ThreadSync::new(2)));
    let mut other = ThreadSync::new(3);
    let meanwhile = Interrupted::new(&store, || {
        publish(&mut early.borrow_mut(), &store, &[share(2, 20)]);
    });
    publish(&mut late, &meanwhile, &[share(1, 10)]);
    drop(meanwhile);
    let mut early = early.into_inner();
    assert_eq!(store.keys(), ["pd_router.vm.0"]);
    assert_eq!(other.listen(&store, 1).shares, in_pool(1, &[share(1, 10)]));
    // Unchanged bookings, but the slot is not confirmed yet, so the blob is written again.
    publish(&mut early, &store, &[share(2, 20)]);
    publish(&mut late, &store, &[share(1, 10)]);
    assert_eq!(store.keys(), ["pd_router.vm.0", "pd_router.vm.1"]);
    let both = in_pool(1, &[share(1, 10), share(2, 20)]);
    let update = (2..10)
        .map(|tick| other.listen(&store, tick))
        .last()
        .unwrap();
    assert_eq!(sorted(update.shares), both);
    assert_eq!(early.listen(&store, 1).shares, in_pool(1, &[share(1, 10)]));
    assert_eq!(late.listen(&store, 1).shares, in_pool(1, &[share(2, 20)]));
}

#[test]
fn one_whose_beat_stands_still_counts_no_more_until_it_moves() {
    let store = Map::default();
    let (mut mute, mut other) = (ThreadSync::new(1), ThreadSync::new(2));
    publish(&mut mute, &store, &[share(1, 10)]);
    for tick in 0..DEAD_TICKS {
        assert_eq!(other.listen(&store, tick).vms, 2, "{tick}");
    }
    let update = other.listen(&store, DEAD_TICKS);
    assert_eq!((update.shares, update.vms), (Vec::new(), 1));
    publish(&mut mute, &store, &[share(1, 11)]);
    let update: Vec<_> = (1..=8)
        .map(|tick| other.listen(&store, DEAD_TICKS + tick))
        .collect();
    assert_eq!(update[7].shares, in_pool(1, &[share(1, 11)]));
}

#[test]
fn an_idle_vm_writes_its_beat_only_now_and_then_and_is_not_taken_for_dead() {
    let store = Map::default();
    let (mut idle, mut other) = (ThreadSync::new(1), ThreadSync::new(2));
    publish(&mut idle, &store, &[]);
    publish(&mut idle, &store, &[]);
    let (writes, reads) = (store.writes.get(), store.reads.get());
    for tick in 0..1000 {
        publish(&mut idle, &store, &[]);
        assert_eq!(other.listen(&store, tick).vms, 2);
    }
    assert_eq!(store.writes.get() - writes, 100);
    // One slot per read, some free ones at every eighth, and the own slot with each beat.
    assert!(store.reads.get() - reads < 1000 + 5 * 125 + 100);
}

#[test]
fn the_place_of_one_who_died_is_taken_only_when_there_is_no_free_one_before_it() {
    let store = Map::default();
    let mut dead: Vec<ThreadSync> = (0..SLOTS)
        .map(|owner| ThreadSync::new(owner.into()))
        .collect();
    for sync in &mut dead {
        publish(sync, &store, &[share(1, 1)]);
    }
    let mut late = ThreadSync::new(100);
    publish(&mut late, &store, &[share(2, 1)]);
    assert_eq!(store.keys().len(), usize::from(SLOTS));
    for tick in 0..=DEAD_TICKS {
        late.listen(&store, tick);
        publish(&mut late, &store, &[share(2, 1)]);
    }
    for _ in 0..8 {
        publish(&mut late, &store, &[share(2, 1)]);
    }
    assert_eq!(store.keys().len(), usize::from(SLOTS));
    let mut other = ThreadSync::new(101);
    let update = other.listen(&store, 0);
    let shares = sorted(update.shares).remove(0).shares;
    assert_eq!(shares[1], share(2, 1));
    assert_eq!(shares[0].decodes, 63);
    // A VM that counted as dead notices its loss, and waits for a slot.
    publish(&mut dead[0], &store, &[share(1, 2)]);
    assert_eq!(dead[0].listen(&store, 0).vms, 65);
}

#[test]
fn a_log_is_heard_once_from_wherever_one_begins() {
    let store = Map::default();
    let (mut writer, mut reader, mut late) =
        (ThreadSync::new(1), ThreadSync::new(2), ThreadSync::new(3));
    let numbers = |update: Vec<(u64, crate::sharing::Decision)>| -> Vec<u32> {
        update
            .iter()
            .map(|(_, decision)| decision.path[0])
            .collect()
    };
    decide(&mut writer, &store, [1, 2]);
    assert_eq!(reader.listen(&store, 0).decisions, []);
    decide(&mut writer, &store, [3]);
    assert_eq!(numbers(reader.listen(&store, 1).decisions), [1, 2, 3]);
    assert_eq!(reader.listen(&store, 2).decisions, []);
    decide(&mut writer, &store, [4]);
    assert_eq!(numbers(reader.listen(&store, 3).decisions), [4]);
    assert_eq!(numbers(late.listen(&store, 0).decisions), [1, 2, 3, 4]);
    assert_eq!((reader.lapped(), late.lapped()), (0, 0));
}

#[test]
fn a_reader_that_was_lapped_skips_and_counts() {
    let store = Map::default();
    let (mut writer, mut reader) = (ThreadSync::new(1), ThreadSync::new(2));
    decide(&mut writer, &store, []);
    decide(&mut writer, &store, [0]);
    assert_eq!(reader.listen(&store, 0).decisions.len(), 1);
    for number in 1..=30 {
        decide(&mut writer, &store, [number]);
    }
    let update = reader.listen(&store, 1).decisions;
    assert_eq!(update.len() as u64, SEGMENTS);
    assert_eq!(update[0], decision(15));
    assert_eq!(reader.lapped(), 14);
    assert_eq!(reader.listen(&store, 2).decisions, []);
}

#[test]
fn what_the_board_does_not_take_is_told_later() {
    let store = Map::default();
    let (mut writer, mut reader) = (ThreadSync::new(1), ThreadSync::new(2));
    decide(&mut writer, &store, []);
    decide(&mut writer, &store, []);
    reader.listen(&store, 0);
    store.failing.set(3);
    publish(&mut writer, &store, &[share(1, 5)]);
    decide(&mut writer, &store, [1]);
    assert_eq!(store.failing.get(), 0);
    assert_eq!(reader.listen(&store, 1).shares, []);
    decide(&mut writer, &store, [2]);
    let update = reader.listen(&store, 2).decisions;
    assert_eq!(update, [decision(1), decision(2)]);
    assert_eq!((reader.lapped(), writer.dropped()), (0, 0));
}

#[test]
fn one_who_leaves_counts_no_more_at_once_and_its_place_is_free() {
    let store = Map::default();
    let (mut leaver, mut other) = (ThreadSync::new(1), ThreadSync::new(2));
    publish(&mut leaver, &store, &[share(1, 10)]);
    assert_eq!(other.listen(&store, 0).vms, 2);
    leaver.leave(&store);
    let update = other.listen(&store, 1);
    assert_eq!((update.vms, update.shares), (1, Vec::new()));
    publish(&mut ThreadSync::new(3), &store, &[share(3, 10)]);
    assert_eq!(store.keys(), ["pd_router.vm.0"]);
}

#[test]
fn a_place_with_other_bytes_is_left_alone_while_somebody_writes_them() {
    let store = Map::default();
    let mut sync = ThreadSync::new(1);
    store.put("pd_router.vm.0", b"another format");
    publish(&mut sync, &store, &[share(1, 1)]);
    assert_eq!(store.keys(), ["pd_router.vm.0", "pd_router.vm.1"]);
    for tick in 0..200 {
        store.put("pd_router.vm.0", b"another format");
        assert_eq!(sync.listen(&store, tick).vms, 1);
    }
    let mut next = ThreadSync::new(2);
    for tick in 0..=DEAD_TICKS {
        next.listen(&store, tick);
    }
    publish(&mut next, &store, &[share(2, 1)]);
    assert_eq!(store.keys().len(), 2);
}

#[test]
fn everything_is_bounded() {
    let store = Map::default();
    let mut syncs: Vec<ThreadSync> = (0..70).map(ThreadSync::new).collect();
    let many: Vec<ThreadLoad> = (0..20_000).map(|worker| share(worker, worker)).collect();
    for round in 0..3 {
        for sync in &mut syncs {
            publish(sync, &store, &many[round..]);
            decide(sync, &store, 0..2_000);
        }
    }
    assert!(store.keys().len() <= 64 * 17);
    assert!(store.most_bytes() <= BLOB_BYTES);
}
