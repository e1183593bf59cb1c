#!/usr/bin/env bash
# Measures pd-router in Envoy beside other routers, under load: target/bench/report.html. Then what one routing decision costs: natively,
# inside wasm, and NVIDIA Dynamo's own beside them; and what it costs that threads share what they know; prints a table.
# PROXIES=1 only the first, QUICK=1 a few rows of it; ROUTING=1 only the second.
# Of the second: DYNAMO=0 leaves Dynamo out, and what compiling it takes. ONLY=words measures what has these words in its name.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

routing() {
    local wasm=wasm32-unknown-unknown features=() stamp=$target/bench.stamp
    need_python
    if [ ! -d "$(rustc --print sysroot)/lib/rustlib/$wasm/lib" ]; then
        rustup target add "$wasm" >/dev/null 2>&1 ||
            fail "The $wasm standard library is missing: run \"rustup target add $wasm\"."
    fi
    if [ "${DYNAMO:-1}" != 0 ]; then
        command -v c++ >/dev/null || install_packages g++ # for ZeroMQ, which Dynamo's selection service is linked with
        features=(--features dynamo)
    fi
    [ -d "$target/release/deps" ] || say "compiling the benchmarks, the first time takes about twenty minutes on two cores …"

    touch "$stamp"
    cargo bench --package pd-router-bench --bench route --bench sharing "${features[@]}" -- --noplot ${ONLY:+"$ONLY"}
    "$python" scripts/bench_table.py "$target" "$stamp"
    [ -z "${ONLY:-}" ] || return 0
    cargo bench --quiet --package pd-router-bench --bench engine_metrics "${features[@]}" -- --noplot
    cargo bench --quiet --package pd-router-bench --bench memory "${features[@]}"
}

# proxies ARGUMENT…: those of `pd-harness bench`.
proxies() {
    scripts/envoy.sh
    scripts/peers.sh
    scripts/plugin.sh
    scripts/plugin.sh bench
    [ -x "$target/release/pd-harness" ] || say "compiling the harness for speed, the first time takes about ten minutes on two cores …"
    cargo build --quiet --release --package pd-harness
    "$target/release/pd-harness" bench "$@"
}

need_cargo
if [ "${ROUTING:-}" = 1 ] || [ -n "${ONLY:-}" ]; then
    routing
elif [ "${QUICK:-}" = 1 ]; then
    proxies --quick
elif [ "${PROXIES:-}" = 1 ]; then
    proxies
else
    say "measuring proxies beside each other, which takes about an hour …"
    proxies
    routing
fi
