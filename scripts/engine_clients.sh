#!/usr/bin/env bash
# Puts the clients that the gateway is tried with at target/engines/clients: venv for Python, node_modules for node.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

sources=tests/engines/clients
clients=$target/engines/clients
mkdir -p "$clients"

if ! cmp --silent "$sources/requirements.txt" "$clients/requirements.txt"; then
    need_python_for_vllm
    say "downloading clients for Python (95 MB) …"
    fill_venv "$clients/venv" "$sources/requirements.txt"
    cp "$sources/requirements.txt" "$clients/requirements.txt"
fi

if ! cmp --silent "$sources/package-lock.json" "$clients/package-lock.json"; then
    command -v npm >/dev/null || install_packages nodejs npm
    say "downloading clients for node (3 MB) …"
    rm -f "$clients/package-lock.json"
    mkdir -p "$clients/new"
    cp "$sources/package.json" "$sources/package-lock.json" "$clients/new"
    npm ci --prefix "$clients/new" --ignore-scripts --no-audit --no-fund >"$clients/npm.log" 2>&1 ||
        fail "The packages in $sources/package-lock.json could not be downloaded: see $clients/npm.log"
    rm -rf "$clients/node_modules"
    mv "$clients/new/node_modules" "$clients/node_modules"
    rm -rf "$clients/new"
    cp "$sources/package-lock.json" "$clients/package-lock.json"
fi
