#!/usr/bin/env bash
# Builds target/pd_router.wasm; with trap or bench another module, which tests or benchmarks need.
#
# The wasm32 standard library comes with rustup. Where rustup is absent or may install nothing, Debian's packages build
# it from source. PLUGIN_TOOLCHAIN=rustup or =debian insists on one of the two.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

wasm=wasm32-unknown-unknown
debian_target=$target/wasm-debian
case ${1:-} in
    '') package=pd-router-filter module=pd_router ;;
    trap) package=pd-router-filter-trap module=pd_router_trap ;;
    bench) package=pd-router-bench-filters module=pd_router_bench_filters ;;
    *) fail "plugin.sh takes nothing, trap or bench." ;;
esac
stamp=$target/$module.stamp

rustup_has_std() { [ -d "$(rustc --print sysroot 2>/dev/null)/lib/rustlib/$wasm/lib" ]; }

rustup_can_build() {
    command -v cargo >/dev/null || return 1
    rustup_has_std && return
    command -v rustup >/dev/null || return 1
    say "asking rustup for the $wasm standard library …"
    timeout 300 rustup target add "$wasm" >/dev/null 2>&1 && rustup_has_std
}

choose_toolchain() {
    if [ -n "${PLUGIN_TOOLCHAIN:-}" ]; then
        echo "$PLUGIN_TOOLCHAIN"
    elif rustup_has_std; then
        echo rustup
    elif [ -d "$debian_target" ]; then
        echo debian # decided before: rustup is not asked at every build
    elif rustup_can_build; then
        echo rustup
    else
        echo debian
    fi
}

# No path of this machine belongs in the module, nor the name of the place where its cargo downloads from.
remap_paths() {
    local cargo_home=${CARGO_HOME:-$HOME/.cargo} sources
    local flags=("--remap-path-prefix=$root=/pd-router" "--remap-path-prefix=$1=/rust")
    for sources in "$cargo_home/registry/src"/*; do
        flags+=("--remap-path-prefix=$sources=/cargo")
    done
    local IFS=$'\x1f'
    export CARGO_ENCODED_RUSTFLAGS="${flags[*]}"
}

build_with_rustup() {
    rustup_can_build || fail "The $wasm standard library is missing: run \"rustup target add $wasm\"."
    cargo fetch --quiet --target "$wasm" # so that `remap_paths` sees every folder of sources
    remap_paths "$(rustc --print sysroot)"
    cargo build "$@" --package "$package" --profile plugin --target "$wasm"
    built=$target/$wasm/plugin/$module.wasm
}

build_with_debian() {
    local packages=(rustc-web cargo-web rust-web-src lld-22)
    dpkg --status "${packages[@]}" >/dev/null 2>&1 || install_packages "${packages[@]}"
    RUSTC=/usr/bin/rustc /usr/bin/cargo fetch --quiet --target "$wasm"
    remap_paths /usr/src
    # The standard library is compiled once and kept in a target folder of its own: another compiler must not meet it.
    CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER=/usr/bin/wasm-ld-22 RUSTC=/usr/bin/rustc RUSTC_BOOTSTRAP=1 \
        /usr/bin/cargo build "$@" --package "$package" --profile plugin --target "$wasm" \
        --target-dir "$debian_target" -Zbuild-std=std,panic_abort
    built=$debian_target/$wasm/plugin/$module.wasm
}

toolchain=$(choose_toolchain)
[ "$toolchain" != rustup ] || need_cargo
quiet=(--quiet)
if changed_since "$stamp" plugin tests/trap host-harness/bench/filters Cargo.toml Cargo.lock || [ ! -e "$target/$module.wasm" ]; then
    say "building the plugin with $toolchain's Rust …"
    quiet=()
fi
touch "$stamp.$$" # before the build, so that an edit made meanwhile is seen next time

case $toolchain in
    rustup) build_with_rustup "${quiet[@]}" ;;
    debian) build_with_debian "${quiet[@]}" ;;
    *) fail "PLUGIN_TOOLCHAIN is rustup or debian, not \"$toolchain\"." ;;
esac

if ! cmp --silent "$built" "$target/$module.wasm"; then
    cp "$built" "$target/$module.wasm.new"
    mv "$target/$module.wasm.new" "$target/$module.wasm"
    say "target/$module.wasm: $(wc -c <"$target/$module.wasm") bytes"
fi
mv "$stamp.$$" "$stamp"
