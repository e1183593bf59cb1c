#!/usr/bin/env bash
# Puts a real Dynamo at target/dynamo/venv, and the model that its mockers pretend to serve at target/dynamo/model.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

requirements=tests/dynamo/requirements.txt
dynamo=$target/dynamo

if ! cmp --silent "$requirements" "$dynamo/requirements.txt"; then
    need_python
    say "downloading Dynamo (80 MB) …"
    mkdir -p "$dynamo"
    fill_venv "$dynamo/venv" "$requirements"
    cp "$requirements" "$dynamo/requirements.txt"
fi

if changed_since "$dynamo/model/tokenizer.json" tests/dynamo/mkmodel.py; then
    "$dynamo/venv/bin/python" tests/dynamo/mkmodel.py "$dynamo/model"
fi
