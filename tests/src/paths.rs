//! Owns the locations of the parts under test, and the messages when one is missing.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The workspace's root folder.
pub fn workspace() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest).to_path_buf()
}

/// The harness binary: `PD_HARNESS`, else the debug build.
pub fn harness() -> PathBuf {
    part("PD_HARNESS", "target/debug/pd-harness", "the harness")
}

/// The built plugin: `PD_PLUGIN`, else `target/pd_router.wasm`.
pub fn plugin() -> PathBuf {
    part("PD_PLUGIN", "target/pd_router.wasm", "the plugin")
}

/// The plugin that a header can make trap: `PD_PLUGIN_TRAP`, else `target/pd_router_trap.wasm`.
pub fn trap_plugin() -> PathBuf {
    part(
        "PD_PLUGIN_TRAP",
        "target/pd_router_trap.wasm",
        "the plugin with a trap",
    )
}

/// The benchmark's smaller filters: `PD_BENCH_FILTERS`, else `target/pd_router_bench_filters.wasm`.
pub fn bench_filters() -> PathBuf {
    part(
        "PD_BENCH_FILTERS",
        "target/pd_router_bench_filters.wasm",
        "the module with filters for benchmarks",
    )
}

/// The Envoy binary: `PD_ENVOY`, else the one that `make` installs.
pub fn envoy() -> PathBuf {
    part("PD_ENVOY", "target/envoy/envoy", "Envoy")
}

/// Envoy's bootstrap: `PD_BOOTSTRAP`, else the one in the repository.
pub fn bootstrap() -> PathBuf {
    part(
        "PD_BOOTSTRAP",
        "envoy/bootstrap.yaml",
        "Envoy's bootstrap configuration",
    )
}

/// A Chromium: `PD_CHROMIUM`, else the one that Debian's package installs.
pub fn chromium() -> PathBuf {
    part("PD_CHROMIUM", "/usr/bin/chromium", "Chromium")
}

/// The Python with Dynamo: `PD_DYNAMO_PYTHON`, else the environment that `make` builds.
pub fn dynamo_python() -> PathBuf {
    part(
        "PD_DYNAMO_PYTHON",
        "target/dynamo/venv/bin/python",
        "Dynamo's Python environment",
    )
}

/// The tiny model for Dynamo's mockers: `PD_DYNAMO_MODEL`, else the one that `make` builds.
pub fn dynamo_model() -> PathBuf {
    part(
        "PD_DYNAMO_MODEL",
        "target/dynamo/model",
        "the model folder for Dynamo",
    )
}

/// The virtual environment with vLLM: `PD_VLLM_VENV`, else the one that `make` builds.
pub fn vllm_venv() -> PathBuf {
    part("PD_VLLM_VENV", "target/engines/venv", "vLLM")
}

/// The model that vLLM serves: `PD_VLLM_MODEL`, else the one that `make` builds.
pub fn vllm_model() -> PathBuf {
    part("PD_VLLM_MODEL", "target/engines/model", "vLLM's model")
}

/// The packages that make a Dynamo of vLLM's environment: `PD_VLLM_DYNAMO`, else those that make installs.
pub fn vllm_dynamo() -> PathBuf {
    part(
        "PD_VLLM_DYNAMO",
        "target/engines/dynamo",
        "Dynamo with vLLM",
    )
}

/// The clients that real engines are tried with: `PD_ENGINE_CLIENTS`, else those that make installs.
pub fn engine_clients() -> PathBuf {
    part("PD_ENGINE_CLIENTS", "target/engines/clients", "the clients")
}

/// Scratch space for one run of the tests.
pub fn scratch() -> PathBuf {
    folder("target/test-tmp")
}

/// Folder of the logs of the processes under test.
pub fn logs() -> PathBuf {
    folder("target/test-logs")
}

fn folder(relative: &str) -> PathBuf {
    let path = workspace().join(relative);
    std::fs::create_dir_all(&path)
        .unwrap_or_else(|error| panic!("cannot create {}: {error}", path.display()));
    path
}

fn part(variable: &str, default: &str, what: &str) -> PathBuf {
    let path = locate(env::var_os(variable), default);
    assert!(
        path.exists(),
        "{what} is missing at {}: run `make test`, which builds and installs it (or set {variable}).",
        path.display()
    );
    path
}

fn locate(overridden: Option<OsString>, default: &str) -> PathBuf {
    match overridden {
        Some(path) if !path.is_empty() => PathBuf::from(path),
        _ => workspace().join(default),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_variable_means_the_default() {
        assert_eq!(locate(Some(OsString::new()), "a"), workspace().join("a"));
        assert_eq!(locate(None, "a"), workspace().join("a"));
        assert_eq!(locate(Some("/x".into()), "a"), PathBuf::from("/x"));
    }

    #[test]
    #[should_panic(expected = "run `make test`")]
    fn a_missing_part_says_what_to_run() {
        part("PD_NO_SUCH_VARIABLE", "target/no-such-part", "the part");
    }
}
