#!/usr/bin/env bash
# fuzz.sh SECONDS [TARGET…]: runs the fuzz targets of fuzz/ for so many seconds each, all of them where none is named.
#
# libFuzzer guides them by coverage, on the stable toolchain. Each goes on from fuzz/corpus/TARGET and from what earlier runs
# here have found, in target/fuzz/corpus/TARGET; an input that breaks one is made smaller, printed, and left in
# target/fuzz/found/TARGET.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

seconds=${1:-}
[[ $seconds =~ ^[0-9]+$ ]] || fail "usage: scripts/fuzz.sh SECONDS [TARGET…]"
shift
targets=("$@")
if [ "${#targets[@]}" = 0 ]; then
    for path in fuzz/targets/*.rs; do
        targets+=("$(basename "$path" .rs)")
    done
fi

# Half of what a VM may hold; a unit's time on a busy machine; no input is longer than a few blocks of a prompt.
limits=(-rss_limit_mb=512 -timeout=20 -max_len=4096)
work=$target/fuzz

build() {
    need_cargo
    command -v c++ >/dev/null || install_packages g++
    host=$(rustc -vV | sed -n 's/^host: //p')
    built=$work/build/$host/fuzz
    local coverage=(
        -Cpasses=sancov-module
        -Cllvm-args=-sanitizer-coverage-level=4
        -Cllvm-args=-sanitizer-coverage-inline-8bit-counters
        -Cllvm-args=-sanitizer-coverage-pc-table
        -Cllvm-args=-sanitizer-coverage-trace-compares
    )
    # A folder and a target of its own: neither these flags nor what they build touches other builds.
    RUSTFLAGS="--cfg fuzzing ${coverage[*]}" CARGO_TARGET_DIR=$work/build \
        cargo build --quiet --package pd-router-fuzz --profile fuzz --target "$host" "${bins[@]}"
}

# run TARGET: leaves libFuzzer's words in its log, and its exit status in a file beside it.
run() {
    local name=$1 status=0
    local found=$work/found/$name corpus=$work/corpus/$name
    mkdir -p "$found" "$corpus"
    touch "$work/$name.started"
    local words=()
    [ ! -e "fuzz/dictionary/$name" ] || words=("-dict=fuzz/dictionary/$name")
    "$built/$name" "${limits[@]}" "${words[@]}" -max_total_time="$seconds" -print_final_stats=1 \
        -artifact_prefix="$found/" "$corpus" "fuzz/corpus/$name" >"$work/$name.log" 2>&1 || status=$?
    echo "$status" >"$work/$name.status"
}

# How many of a figure; a dash where the run did not tell.
figure() { sed -nE "s/^stat::$2: *([0-9]+).*/\1/p" "$work/$1.log" | tail -n 1 | grep . || echo "–"; }
coverage() { grep -oE 'cov: [0-9]+' "$work/$1.log" | tail -n 1 | grep -oE '[0-9]+' || echo "–"; }

# Prints what broke a target, as small as half a minute can make it.
show() {
    local name=$1 input
    input=$(sed -nE 's/.*Test unit written to (.*)/\1/p' "$work/$name.log" | tail -n 1)
    say "$name: $(grep -m 1 -E "panicked|ERROR: libFuzzer" -A 3 "$work/$name.log" || tail -n 3 "$work/$name.log")"
    [ -n "$input" ] || return 0
    "$built/$name" "${limits[@]}" -minimize_crash=1 -max_total_time=30 -exact_artifact_path="$input.small" "$input" >/dev/null 2>&1 || true
    [ ! -e "$input.small" ] || input=$input.small
    say "$name: $input"
    head -c 2048 "$input" | od -c | head -n 40 >&2
}

bins=()
for name in "${targets[@]}"; do
    [ -e "fuzz/targets/$name.rs" ] || fail "there is no fuzz target $name"
    bins+=(--bin "$name")
done
mkdir -p "$work"
build || fail "the fuzz targets could not be built"

# As many at a time as there are processors.
for name in "${targets[@]}"; do
    while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do
        wait -n || true
    done
    run "$name" &
done
wait

passed=0 failed=0
printf '%-16s %10s %8s %10s %8s %9s\n' target executions 'exec/s' coverage corpus findings
for name in "${targets[@]}"; do
    findings=$(find "$work/found/$name" -type f ! -name '*.small' -newer "$work/$name.started" 2>/dev/null | wc -l)
    printf '%-16s %10s %8s %10s %8s %9s\n' "$name" "$(figure "$name" number_of_executed_units)" \
        "$(figure "$name" average_exec_per_sec)" "$(coverage "$name")" \
        "$(find "$work/corpus/$name" -type f | wc -l)" "$findings"
done
for name in "${targets[@]}"; do
    if [ "$(cat "$work/$name.status")" = 0 ]; then
        echo "test fuzz::$name ... ok"
        passed=$((passed + 1))
    else
        echo "test fuzz::$name ... FAILED"
        failed=$((failed + 1))
        show "$name"
    fi
done
result=ok
[ "$failed" = 0 ] || result=FAILED
echo "test result: $result. $passed passed; $failed failed; 0 ignored; $seconds seconds each"
[ "$failed" = 0 ]
