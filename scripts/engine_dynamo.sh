#!/usr/bin/env bash
# Puts the packages that make a Dynamo of vLLM's environment at target/engines/dynamo; after engines.sh.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

requirements=tests/engines/dynamo.txt
engines=$target/engines

if ! cmp --silent "$requirements" "$engines/dynamo.txt"; then
    say "downloading Dynamo and the vLLM that it is made for (300 MB; 1 GB on disk) …"
    rm -rf "$engines/dynamo"
    install_pinned "$engines/venv/bin/python" "$requirements" --target "$engines/dynamo"
    name_vllm "$engines/dynamo" "$requirements"
    cp "$requirements" "$engines/dynamo.txt"
fi
