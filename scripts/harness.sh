#!/usr/bin/env bash
# Builds target/debug/pd-harness.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

need_cargo
quiet=()
if [ ! -x "$target/debug/pd-harness" ]; then
    say "compiling the harness, the first time takes about ten minutes on two cores …"
elif changed_since "$target/harness.stamp" host-harness plugin/routing Cargo.toml Cargo.lock; then
    say "compiling the harness …"
else
    quiet=(--quiet)
fi
touch "$target/harness.stamp.$$"
cargo build "${quiet[@]}" --package pd-harness
mv "$target/harness.stamp.$$" "$target/harness.stamp"
