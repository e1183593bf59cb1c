#!/usr/bin/env bash
# test.sh SUITE…: runs the suites `unit`, `lives`, `e2e`, `engines` and `fuzz`, then says in one line how many tests there were.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

log=$target/test.log
status=0
: >"$log"

run_tests() { "$@" 2>&1 | tee -a "$log" || status=1; }

# All native crates at once, so that both suites are compiled against the same dependencies. The filter's crate links only
# for wasm: the end-to-end tests are its tests. The benchmarks bring dependencies of their own.
left_out=(--exclude pd-router-filter --exclude pd-router-filter-trap --exclude pd-router-bench-filters --exclude pd-router-bench --exclude pd-router-bench-guest --exclude pd-router-fuzz)
cargo_test() { cargo test --no-fail-fast --workspace "${left_out[@]}" "$@"; }

unit() {
    run_tests cargo_test --lib --bins
    # The example of the crate's first page.
    run_tests cargo test --package routing --doc
}

# Ten million lives of requests, a hundred million events: a quarter of an hour.
lives() { run_tests env PD_SOAK=1 cargo test --package routing --lib session::tests::lives; }

export PD_HARNESS=$target/debug/pd-harness
export PD_PLUGIN=$target/pd_router.wasm
export PD_PLUGIN_TRAP=$target/pd_router_trap.wasm
export PD_BENCH_FILTERS=$target/pd_router_bench_filters.wasm
export PD_ENVOY=$target/envoy/envoy

e2e() {
    "$root/scripts/chromium.sh"
    "$root/scripts/dynamo.sh"
    "$root/scripts/plugin.sh" trap
    "$root/scripts/plugin.sh" bench
    export PD_DYNAMO_PYTHON=$target/dynamo/venv/bin/python
    export PD_DYNAMO_MODEL=$target/dynamo/model
    # Compiled first: inside the namespace there is no network for cargo to use.
    cargo_test --test '*' --no-run
    # Dynamo's tests mostly wait, for it to notice who has come and gone: beside the others they take no time of their own.
    "$root/scripts/netns.sh" cargo test --no-fail-fast --package pd-router-e2e --test dynamo >"$target/dynamo.log" 2>&1 &
    local dynamo=$! others=() path name
    for path in tests/tests/* plugin/*/tests/*; do
        [ -e "$path/main.rs" ] || [[ $path == *.rs ]] || continue
        name=$(basename "$path" .rs)
        [ "$name" = dynamo ] || [ "$name" = engines ] || others+=(--test "$name")
    done
    run_tests "$root/scripts/netns.sh" cargo test --no-fail-fast --workspace "${left_out[@]}" "${others[@]}"
    wait "$dynamo" || status=1
    tee -a "$log" <"$target/dynamo.log"
}

without_engines=

# In front of a real vLLM: the short part, unless PD_ENGINES=all or a soak asks for everything. Without them where they cannot
# be had, but for a run that is about them.
engines() {
    local part=${PD_ENGINES:-short}
    [ "${PD_SOAK:-}" != 1 ] || part=all
    if ! "$root/scripts/engines.sh"; then
        [ "${PD_ENGINES:-}" != all ] || fail "There is no vLLM to try the gateway with."
        without_engines="not tried: in front of a real vLLM, which could not be set up (above)"
        return
    fi
    if [ "$part" = all ]; then
        "$root/scripts/engine_clients.sh"
        "$root/scripts/engine_dynamo.sh"
    fi
    export PD_VLLM_VENV=$target/engines/venv PD_VLLM_MODEL=$target/engines/model
    cargo_test --test engines --no-run
    run_tests env PD_ENGINES="$part" "$root/scripts/netns.sh" cargo test --workspace "${left_out[@]}" --test engines
}

# Each target is a test: five seconds, or ten minutes where there is time.
fuzz() {
    local seconds=5
    [ "${PD_SOAK:-}" != 1 ] || seconds=600
    run_tests "$root/scripts/fuzz.sh" "$seconds"
}

"$root/scripts/envoy.sh"
"$root/scripts/plugin.sh"
"$root/scripts/harness.sh"
for suite in "$@"; do
    case $suite in
        unit) unit ;;
        lives) lives ;;
        e2e) e2e ;;
        engines) engines ;;
        fuzz) fuzz ;;
        *) fail "no such suite: $suite" ;;
    esac
done

sum() { sed -nE "s/^test result: .* ([0-9]+) $1;.*/\1/p" "$log" | awk '{ total += $1 } END { print total + 0 }'; }
skipped=$(sum ignored)
if [ "${CI:-}" = true ] && [ "$skipped" != 0 ]; then
    say "tests were skipped, and CI=true allows none"
    status=1
fi
sed -nE 's/^test (.*) \.\.\. FAILED$/failed: \1/p' "$log"
[ -z "$without_engines" ] || echo "$without_engines"
echo "total: $(sum passed) passed, $(sum failed) failed, $skipped skipped"
exit "$status"
