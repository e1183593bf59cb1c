//! Owns the wasm side of the benchmarks: the same code as natively, behind plain functions. The arguments are numbers made from
//! the benchmarks' own types; any others trap.

use std::cell::RefCell;

use pd_router_bench::ours::{Memory, Ours, Work};
use pd_router_bench::situation::Situation;

thread_local! {
    /// State of the functions, which have no receiver in a wasm module.
    static OURS: RefCell<Option<Ours>> = const { RefCell::new(None) };
    static MEMORY: RefCell<Option<Memory>> = const { RefCell::new(None) };
}

/// Prepares a router for this situation.
#[unsafe(no_mangle)]
pub extern "C" fn put_in(
    fleet: u32,
    workers: u32,
    block_tokens: u32,
    prompt_tokens: u32,
    holders: u32,
) {
    let situation = Situation::from_numbers(fleet, workers, block_tokens, prompt_tokens, holders);
    OURS.set(Some(Ours::put_in(&situation)));
}

/// Does this work `times` times.
#[unsafe(no_mangle)]
pub extern "C" fn run(work: u32, times: u64) {
    OURS.with_borrow_mut(|ours| {
        let ours = ours.as_mut().expect("a router in a situation");
        ours.run(Work::from_number(work), times);
    });
}

/// Fills an index for this many workers and keeps it; returns its number of pairs of worker and block.
#[unsafe(no_mangle)]
pub extern "C" fn fill_index(workers: u32) -> u64 {
    let memory = Memory::of_index(workers);
    let pairs = memory.pairs;
    MEMORY.set(Some(memory));
    pairs
}

/// Bytes held by the filled index.
#[unsafe(no_mangle)]
pub extern "C" fn index_bytes() -> u64 {
    MEMORY.with_borrow(|memory| memory.as_ref().expect("a filled index").bytes)
}
