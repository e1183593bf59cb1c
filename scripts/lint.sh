#!/usr/bin/env bash
# Formatting, clippy for both targets, the scripts, and what is depended on.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

need_cargo
cargo fmt --all --check
for_wasm=(--package pd-router-filter --package pd-router-filter-trap --package pd-router-bench-guest)
left_out=(--exclude pd-router-filter --exclude pd-router-filter-trap --exclude pd-router-bench --exclude pd-router-bench-guest --exclude pd-router-fuzz)
cargo clippy --quiet --workspace --all-targets "${left_out[@]}" -- -D warnings
cargo clippy --quiet --package pd-router-fuzz --bins -- -D warnings
cargo clippy --quiet --package pd-router-bench --all-targets -- -D warnings # without Dynamo, which takes minutes
if [ -d "$(rustc --print sysroot)/lib/rustlib/wasm32-unknown-unknown/lib" ]; then
    cargo clippy --quiet "${for_wasm[@]}" --target wasm32-unknown-unknown -- -D warnings
else
    cargo clippy --quiet "${for_wasm[@]}" -- -D warnings
fi

"${PYTHON:-python3}" - scripts/*.py tests/dynamo/*.py tests/gpu/*.py tests/gpu/engine/*.py <<'PYTHON'
import ast, pathlib, sys
for path in sys.argv[1:]:
    ast.parse(pathlib.Path(path).read_text(encoding="utf-8"), path)
PYTHON
for script in scripts/*.sh .ci/run; do
    bash -n "$script"
done
if command -v shellcheck >/dev/null; then
    shellcheck -x scripts/*.sh .ci/run
else
    say "shellcheck is not installed: the scripts were only parsed"
fi

# Licences, sources and bans of what is built in, as deny.toml says. What it would fetch is known already: cargo has it.
if command -v cargo-deny >/dev/null; then
    cargo deny --offline --log-level error check licenses bans sources
else
    say "cargo-deny is not installed: licences, sources and bans were not checked (cargo install cargo-deny --locked)"
fi
