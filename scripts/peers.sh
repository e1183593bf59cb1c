#!/usr/bin/env bash
# Puts the routers that pd-router is measured beside at target/peers/{sglang-router,smg,vllm-router}, each in a virtual environment.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

# The requirements of a peer, and those that they name.
requirements() {
    local named
    cat "scripts/peers/$1-requirements.txt"
    named=$(sed -n 's/^-r //p' "scripts/peers/$1-requirements.txt")
    [ -z "$named" ] || cat "scripts/peers/$named"
}

# fetch NAME ARGUMENT…: makes sure of one peer. Its requirements are kept beside it once it runs with these arguments.
fetch() {
    local name=$1 folder=$target/peers/$1
    shift
    requirements "$name" | cmp --silent - "$folder/requirements.txt" && return
    need_python
    say "downloading $name …"
    rm -rf "$folder"
    fill_venv "$folder" "scripts/peers/$name-requirements.txt"
    "$folder/bin/$name" "$@" >/dev/null || fail "$name was downloaded but does not run on this machine."
    requirements "$name" >"$folder/requirements.txt"
}

fetch sglang-router launch --help
fetch smg launch --help
fetch vllm-router --help
