#!/usr/bin/env bash
# Measures what one routing decision costs: natively, inside wasm, and NVIDIA Dynamo's own beside them; and what it costs
# that threads share what they know; prints a table.
# DYNAMO=0 leaves Dynamo out, and what compiling it takes. ONLY=words measures what has these words in its name.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

need_cargo
need_python
wasm=wasm32-unknown-unknown
if [ ! -d "$(rustc --print sysroot)/lib/rustlib/$wasm/lib" ]; then
    rustup target add "$wasm" >/dev/null 2>&1 ||
        fail "The $wasm standard library is missing: run \"rustup target add $wasm\"."
fi

features=()
if [ "${DYNAMO:-1}" != 0 ]; then
    command -v c++ >/dev/null || install_packages g++ # for ZeroMQ, which Dynamo's selection service is linked with
    features=(--features dynamo)
fi
[ -d "$target/release/deps" ] || say "compiling the benchmarks, the first time takes about twenty minutes on two cores …"

stamp=$target/bench.stamp
touch "$stamp"
cargo bench --package pd-router-bench --bench route --bench sharing "${features[@]}" -- --noplot ${ONLY:+"$ONLY"}
"$python" scripts/bench_table.py "$target" "$stamp"
[ -z "${ONLY:-}" ] || exit 0
cargo bench --quiet --package pd-router-bench --bench engine_metrics "${features[@]}" -- --noplot
cargo bench --quiet --package pd-router-bench --bench memory "${features[@]}"
