#!/usr/bin/env bash
# Formatting, clippy for both targets, the scripts, and what is depended on.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

need_cargo
cargo fmt --all --check
for_wasm=(--package pd-router-filter --package pd-router-filter-trap --package pd-router-bench-filters --package pd-router-bench-guest)
left_out=(--exclude pd-router-filter --exclude pd-router-filter-trap --exclude pd-router-bench-filters --exclude pd-router-bench --exclude pd-router-bench-guest --exclude pd-router-fuzz)
cargo clippy --quiet --workspace --all-targets "${left_out[@]}" -- -D warnings
cargo clippy --quiet --package pd-router-fuzz --bins -- -D warnings
cargo clippy --quiet --package pd-router-bench --all-targets -- -D warnings # without Dynamo, which takes minutes
if [ -d "$(rustc --print sysroot)/lib/rustlib/wasm32-unknown-unknown/lib" ]; then
    cargo clippy --quiet "${for_wasm[@]}" --target wasm32-unknown-unknown -- -D warnings
else
    cargo clippy --quiet "${for_wasm[@]}" -- -D warnings
fi

"${PYTHON:-python3}" - scripts/*.py tests/dynamo/*.py tests/gpu/*.py tests/gpu/engine/*.py tests/engines/*.py tests/engines/clients/*.py <<'PYTHON'
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

# Licences, sources and bans of what is built in, as deny.toml says; nothing is fetched for it.
if command -v cargo-deny >/dev/null; then
    host=$(rustc -vV | sed -n 's/^host: //p')
    cargo metadata --locked --format-version 1 --filter-platform "$host" >"$target/metadata.json"
    ask_deny() {
        cargo deny --offline --metadata-path "$target/metadata.json" --log-level "$1" check licenses bans sources
    }
    # Quietly first, for it complains of what it could not fetch for other machines; of what it has found it tells then.
    ask_deny off || ask_deny error
else
    say "cargo-deny is not installed: licences, bans and sources were not checked (cargo install cargo-deny --locked)"
fi
