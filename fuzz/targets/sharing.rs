//! Owns the target of the store that all threads share: blobs, segments of decisions, reports, fleets.
#![no_main]

use std::cell::RefCell;
use std::collections::HashMap;

use fuzz::{Callers, Choices, NOW, input, router};
use libfuzzer_sys::fuzz_target;
use routing::fleet::Fleet;
use routing::request::Generation;
use routing::sharing::{SharedStore, ThreadSync, WriteResult, decode_reports, pool_number};

/// A shared store in memory.
#[derive(Default)]
struct Memory(RefCell<HashMap<String, (Vec<u8>, u32)>>);

impl SharedStore for Memory {
    fn read(&self, key: &str) -> Option<(Vec<u8>, u32)> {
        self.0.borrow().get(key).cloned()
    }

    fn write(&self, key: &str, value: &[u8], version: Option<u32>) -> WriteResult {
        let mut all = self.0.borrow_mut();
        let there = all.get(key).map(|(_, version)| *version);
        if version.is_some() && there.is_some() && version != there {
            return WriteResult::Stale;
        }
        let next = there.unwrap_or(0) + 1;
        all.insert(key.to_owned(), (value.to_vec(), next));
        WriteResult::Done
    }
}

const OWNER: u64 = 99;

/// The head of a blob or a segment, then arbitrary bytes.
fn headed(magic: &[u8; 4], numbers: &[u64], rest: &[u8]) -> Vec<u8> {
    let numbers = numbers.iter().flat_map(|number| number.to_le_bytes());
    let mut bytes: Vec<u8> = magic.iter().copied().chain(numbers).collect();
    bytes.extend_from_slice(rest);
    bytes
}

/// Another thread's blob and segments, chosen by the input.
fn write_foreign(board: &Memory, beat: u64, choices: &mut Choices<'_>) {
    let slot = choices.one(&[0, 1, 2]);
    let next = u64::from(choices.byte() % 20);
    let length = choices.length();
    let blob = choices.bytes(length);
    let length = choices.length();
    let segment = choices.bytes(length);
    let is_headed = !choices.byte().is_multiple_of(4);
    let (blob, segment) = match is_headed {
        true => (
            headed(b"pdv2", &[OWNER, beat, next], blob),
            headed(b"pdl1", &[OWNER, next.saturating_sub(1)], segment),
        ),
        false => (blob.to_vec(), segment.to_vec()),
    };
    board.write(&format!("pd_router.vm.{slot}"), &blob, None);
    let number = next.saturating_sub(1) % 16;
    board.write(&format!("pd_router.log.{slot}.{number}"), &segment, None);
}

fuzz_target!(|data: &[u8]| {
    let mut choices = Choices(data);
    let board = Memory::default();
    let mut desk = ThreadSync::new(1);
    let mut router = router("nixl", Callers::Strangers, "");
    router.keep_decisions();
    let body = br#"{"model":"m","messages":[{"role":"user","content":"hello hello hello hello hello hello hello hello hello hello"}]}"#;
    for tick in 0..3 {
        let _held = router.plan(Generation::Chat, body, input());
        let decisions: Vec<_> = router
            .take_decisions()
            .into_iter()
            .map(|decision| (pool_number("p"), decision))
            .collect();
        let shares = [routing::sharing::PoolShares {
            pool: pool_number("p"),
            shares: router.shares(),
        }];
        desk.publish(&board, &Default::default(), &shares, &decisions);
        write_foreign(&board, tick, &mut choices);
        let heard = desk.listen(&board, tick);
        for pool in &heard.shares {
            router.apply_shares(&pool.shares);
        }
        for (_, decision) in &heard.decisions {
            router.apply_decision(decision);
        }
        router.advance(NOW);
    }
    let rest = choices.0;
    let read = decode_reports(rest).into_iter();
    let read = read.chain(decode_reports(&headed(b"pdr2", &[7], rest)));
    let reports: Vec<_> = read.flat_map(|(_, reports)| reports).collect();
    router.apply_reports(&reports);
    let _ = router.take_warnings();
    if let Ok(fleet) = Fleet::decode(rest) {
        router.adopt(fleet);
    }
    let _ = router.plan(Generation::Chat, body, input());
    desk.leave(&board);
});
