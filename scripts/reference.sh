#!/usr/bin/env bash
# Writes what is made from the configuration's types: envoy/config.schema.json, and the tables of envoy/config-reference.md.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

scripts/harness.sh
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
"$target/debug/pd-harness" check --schema >"$made/config.schema.json"
"$target/debug/pd-harness" check --reference >"$made/config-reference.md"
for file in config.schema.json config-reference.md; do
    cmp --silent "$made/$file" "envoy/$file" && continue
    cp "$made/$file" "envoy/$file"
    say "envoy/$file"
done
