#!/usr/bin/env bash
# Starts the gateway, after building what it needs. Variables: PROXY, CONFIG, MEMBER, CONCURRENCY, LISTEN, ADMIN.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

proxy=${PROXY:-wasmtime}
case $proxy in
    wasmtime) ;;
    envoy) "$root/scripts/envoy.sh" ;;
    *) fail "PROXY is wasmtime or envoy, not \"$proxy\"." ;;
esac
"$root/scripts/plugin.sh"
"$root/scripts/harness.sh"

arguments=(--proxy "$proxy")
[ -z "${CONFIG:-}" ] || arguments+=(--config "$CONFIG")
[ -z "${CONCURRENCY:-}" ] || arguments+=(--concurrency "$CONCURRENCY")
[ -z "${LISTEN:-}" ] || arguments+=(--listen "$LISTEN")
[ -z "${ADMIN:-}" ] || arguments+=(--admin "$ADMIN")
for member in ${MEMBER:-}; do
    arguments+=(--member "$member")
done
exec "$target/debug/pd-harness" run "${arguments[@]}"
