#!/usr/bin/env bash
# Puts a real vLLM for the CPU at target/engines/venv, and the model that it serves at target/engines/model.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

requirements=tests/engines/requirements.txt
engines=$target/engines

if ! cmp --silent "$requirements" "$engines/requirements.txt"; then
    need_python_for_vllm
    say "downloading vLLM and PyTorch (2.3 GB; 5.7 GB on disk) …"
    mkdir -p "$engines"
    fill_venv "$engines/venv" "$requirements"
    packages=$("$engines/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    name_vllm "$packages" "$requirements"
    cp "$requirements" "$engines/requirements.txt"
fi

if changed_since "$engines/model/model.safetensors" tests/engines/mkmodel.py tests/dynamo/mkmodel.py; then
    "$engines/venv/bin/python" tests/engines/mkmodel.py "$engines/model"
fi
