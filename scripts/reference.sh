#!/usr/bin/env bash
# Writes what is made from the configuration's types: envoy/config.schema.json, and the tables of envoy/config-reference.md.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

need_cargo
cargo run --quiet --package xtask -- reference
