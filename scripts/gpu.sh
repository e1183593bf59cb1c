#!/usr/bin/env bash
# Checks the gateway in front of a real engine, on a GPU where there is one: tests/gpu/check.py, after what it needs.
# PYTHON=… names a Python that has PyTorch; PD_HARNESS, PD_PLUGIN and PD_ENVOY name files that are not to be built.
# Arguments go to every engine: --device cpu, --dtype bfloat16.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

requirements=tests/gpu/requirements.txt
venv=$target/gpu/venv

has_torch() { "$1" -c 'import sys, torch; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi --list-gpus >/dev/null 2>&1; }

# Sets `torch` to a Python that has PyTorch: the one named, one that is there, or one that is made. PyPI's build for
# Linux does not start without gigabytes of CUDA, even on a CPU: where there is no GPU, Debian's is taken.
find_torch() {
    if [ -n "${PYTHON:-}" ]; then
        torch=$PYTHON
        has_torch "$torch" || fail "$PYTHON has no PyTorch, or is older than Python 3.10."
        return
    fi
    for torch in python3 /usr/bin/python3 "$venv/bin/python"; do
        ! has_torch "$torch" || return 0
    done
    if ! has_gpu && command -v apt-get >/dev/null; then
        install_packages python3-torch libopenblas0-pthread
        torch=/usr/bin/python3
    else
        need_python
        say "downloading PyTorch (on Linux with CUDA, 3 GB) …"
        fill_venv "$venv" "$requirements"
        torch=$venv/bin/python
    fi
    has_torch "$torch" || fail "PyTorch was installed but does not run on this machine."
}

# The absolute path of a file that the caller names.
named() { realpath -e "$1" || fail "There is no $1."; }

find_torch
if [ -z "${PD_PLUGIN:-}" ]; then
    "$root/scripts/plugin.sh"
fi
if [ -z "${PD_HARNESS:-}" ]; then
    "$root/scripts/harness.sh"
fi
files=(
    --harness "$(named "${PD_HARNESS:-$target/debug/pd-harness}")"
    --plugin "$(named "${PD_PLUGIN:-$target/pd_router.wasm}")"
    --envoy "${PD_ENVOY:-$target/envoy/envoy}" # left out where there is none
)
cd tests/gpu
"$torch" -m unittest --quiet
"$torch" check.py "${files[@]}" -- "$@"
