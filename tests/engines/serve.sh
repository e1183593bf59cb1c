#!/usr/bin/env bash
# serve.sh VENV MODEL ROLE PORT SIDE_PORT: one vLLM on the CPU, at 127.0.0.1:PORT, its NIXL side channel at SIDE_PORT. The role
# is kv_producer, kv_consumer or kv_both; with `none` it hands nothing over. Where DYNAMO names the folder with Dynamo's packages,
# it is Dynamo's prefill worker (kv_producer) or decode worker, and PORT is that of its metrics.
set -euo pipefail

venv=$1 model=$2 role=$3 port=$4 side_port=$5

# GiB, the least that it takes.
export VLLM_CPU_KVCACHE_SPACE=1
# One thread each: several engines share a few cores.
export OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind
# All is local.
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_HOST_IP=127.0.0.1
export UCX_TLS=tcp,self,sm UCX_NET_DEVICES=lo
export VLLM_NIXL_SIDE_CHANNEL_HOST=${SIDE_CHANNEL_HOST:-127.0.0.1} VLLM_NIXL_SIDE_CHANNEL_PORT=$side_port
# Without it the first request for log-probabilities compiles for minutes, --enforce-eager or not.
export TORCHDYNAMO_DISABLE=1

options=(
    --served-model-name tiny
    --dtype float32 --enforce-eager
    --block-size 32 # the CPU's attention takes multiples of 32
    --max-model-len 4096
    --num-gpu-blocks-override 1024 # what KV cache is for, on a CPU too: 32,768 tokens
)
if [ "$role" != none ]; then
    # Seconds, for 30: a decode engine that gets no CPU for longer than the lease reads blocks that may be another request's.
    lease='"kv_connector_extra_config": {"kv_lease_duration": 120}'
    connector='"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"'
    options+=(--kv-transfer-config "{$connector, \"kv_role\": \"$role\", $lease}")
fi
if [ -n "${DYNAMO:-}" ]; then
    export PYTHONPATH=$DYNAMO DYN_SYSTEM_HOST=127.0.0.1 DYN_SYSTEM_PORT=$port
    mode=decode
    [ "$role" != kv_producer ] || mode=prefill
    engine=("$venv/bin/python" -m dynamo.vllm --model "$model" --disaggregation-mode "$mode")
else
    engine=("$venv/bin/vllm" serve "$model" --host 127.0.0.1 --port "$port")
    engine+=(--enable-prompt-tokens-details --enable-auto-tool-choice --tool-call-parser hermes)
fi
# Even an idle engine with a connector polls, a core's worth of it where there is one: what asks it goes first. Between
# sessions the kernel may weigh the sessions, and not their processes.
if [ "$(ps -o sid= -p $$ | tr -d ' ')" = $$ ] && [ -w /proc/self/autogroup ]; then
    echo 10 >/proc/self/autogroup || true
fi
exec nice -n 10 "${engine[@]}" "${options[@]}"
