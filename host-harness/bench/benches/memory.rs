//! Measures the memory of a full prefix index per pair of worker and block, natively and inside wasm.

#[path = "support/guest.rs"]
mod guest;

use guest::Guest;
use pd_router_bench::ours::Memory;

fn main() {
    let guest = Guest::compile();
    println!("full prefix index: bytes for each (worker, block) pair");
    println!(
        "{:>8} {:>12} {:>8} {:>8} {:>22}",
        "workers", "pairs", "native", "wasm", "wasm, memory's growth"
    );
    for workers in [8, 64, 512, 1_000] {
        let native = Memory::of_index(workers);
        let (pairs, bytes, grown) = guest.index_memory(workers);
        assert_eq!(pairs, native.pairs, "one index, two sizes");
        let each = |bytes| bytes as f64 / pairs as f64;
        println!(
            "{workers:>8} {pairs:>12} {:>8.1} {:>8.1} {:>22.1}",
            each(native.bytes),
            each(bytes),
            each(grown)
        );
    }
}
