#!/usr/bin/env bash
# Starts the gateway, after building what it needs. Variables: PROXY, CONFIG, MEMBER, CONCURRENCY, LISTEN, ADMIN, ENGINES.
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

engines=$target/engines
config=${CONFIG:-}

# start NAME KV_ROLE PORT: one vLLM in the background, which ends with this script.
start() {
    tests/engines/serve.sh "$engines/venv" "$engines/model" "$2" "$3" "$(($3 + 1))" >"$engines/$1.log" 2>&1 &
    trap 'kill $(jobs -p) 2>/dev/null' EXIT
}

# serves NAME PORT: waits until it does.
serves() {
    local ask="import urllib.request; urllib.request.urlopen('http://127.0.0.1:$2/health', timeout=5)"
    until "$engines/venv/bin/python" -c "$ask" 2>/dev/null; do
        [ "$(jobs -rp | wc -l)" = 2 ] || fail "vLLM does not start: see $engines/prefill.log and $engines/decode.log."
        sleep 1
    done
}

# Sets `config` to one with a prefill and a decode engine.
start_vllm() {
    [ -z "$config" ] || fail "ENGINES=vllm brings a configuration of its own: leave CONFIG out."
    "$root/scripts/engines.sh"
    say "starting a prefill and a decode engine, about two minutes on two cores …"
    start prefill kv_producer 18201
    start decode kv_consumer 18301
    serves prefill 18201
    serves decode 18301
    config=$engines/config.json
    cat >"$config" <<'END'
{"pools": [{"name": "vllm", "protocol": "nixl", "discovery": {"static": {"workers": [
  {"name": "prefill", "address": "127.0.0.1:18201", "role": "prefill", "model": "tiny"},
  {"name": "decode", "address": "127.0.0.1:18301", "role": "decode", "model": "tiny"}
]}}}], "response_headers": true, "status": true}
END
}

case ${ENGINES:-simulated} in
    simulated) ;;
    vllm) start_vllm ;;
    *) fail "ENGINES is vllm, or nothing for simulated ones, not \"$ENGINES\"." ;;
esac

arguments=(--proxy "$proxy")
[ -z "$config" ] || arguments+=(--config "$config")
[ -z "${CONCURRENCY:-}" ] || arguments+=(--concurrency "$CONCURRENCY")
[ -z "${LISTEN:-}" ] || arguments+=(--listen "$LISTEN")
[ -z "${ADMIN:-}" ] || arguments+=(--admin "$ADMIN")
for member in ${MEMBER:-}; do
    arguments+=(--member "$member")
done
gateway=("$target/debug/pd-harness" run "${arguments[@]}")
# What was started beside the gateway ends with this script.
[ -n "$(jobs -p)" ] || exec "${gateway[@]}"
"${gateway[@]}"
