//! Owns the wasm side: the guest is compiled like the plugin, and its functions are called through wasmtime.
#![allow(dead_code, reason = "each benchmark calls some of it")]

use std::path::{Path, PathBuf};
use std::process::Command;

use pd_router_bench::ours::Work;
use pd_router_bench::situation::Situation;
use wasmtime::{Engine, Instance, Module, Store, WasmParams, WasmResults};

const PACKAGE: &str = "pd-router-bench-guest";
const TARGET: &str = "wasm32-unknown-unknown";
const PROFILE: &str = "plugin";

/// The compiled guest, from which instances are made.
pub struct Guest {
    module: Module,
}

/// Our router inside wasm.
pub struct Inside {
    store: Store<()>,
    instance: Instance,
}

impl Guest {
    /// Compiles the guest, or loads the module that `PD_BENCH_GUEST` names.
    pub fn compile() -> Self {
        let path = std::env::var_os("PD_BENCH_GUEST").map_or_else(build, PathBuf::from);
        let module = Module::from_file(&Engine::default(), path).expect("a module");
        Self { module }
    }

    /// An instance in this situation.
    pub fn put_in(&self, situation: &Situation) -> Inside {
        let mut inside = self.instance();
        inside.call::<_, ()>("put_in", situation.numbers());
        inside
    }

    /// A full index for this many workers: its pairs, the bytes that it counts itself, and the growth of the memory in bytes.
    pub fn index_memory(&self, workers: u32) -> (u64, u64, u64) {
        let mut inside = self.instance();
        let before = inside.size();
        let pairs = inside.call::<_, u64>("fill_index", workers);
        let bytes = inside.call::<_, u64>("index_bytes", ());
        (pairs, bytes, inside.size() - before)
    }

    fn instance(&self) -> Inside {
        let mut store = Store::new(self.module.engine(), ());
        let instance = Instance::new(&mut store, &self.module, &[]).expect("an instance");
        Inside { store, instance }
    }
}

impl Inside {
    /// Does this work `times` times, in one call.
    pub fn run(&mut self, work: Work, times: u64) {
        self.call::<_, ()>("run", (work as u32, times));
    }

    fn call<P: WasmParams, R: WasmResults>(&mut self, name: &str, parameters: P) -> R {
        self.instance
            .get_typed_func::<P, R>(&mut self.store, name)
            .and_then(|function| function.call(&mut self.store, parameters))
            .unwrap_or_else(|error| panic!("the guest's {name}: {error:?}"))
    }

    /// Bytes of its linear memory.
    fn size(&mut self) -> u64 {
        let memory = self.instance.get_memory(&mut self.store, "memory");
        memory.expect("a memory").data_size(&self.store) as u64
    }
}

/// Compiles the guest in a separate target folder: cargo holds the lock of the benchmarks' own.
fn build() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("guest");
    let status = Command::new(env!("CARGO"))
        .args([
            "build",
            "--package",
            PACKAGE,
            "--target",
            TARGET,
            "--profile",
            PROFILE,
        ])
        .arg("--target-dir")
        .arg(&folder)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .expect("cargo");
    assert!(
        status.success(),
        "the guest does not compile: {TARGET} missing?"
    );
    folder
        .join(TARGET)
        .join(PROFILE)
        .join("pd_router_bench.wasm")
}
