#!/usr/bin/env bash
# Writes target/image, an OCI image layout that holds the plugin, without a container engine.
# IMAGE_ARCHITECTURE=arm64 says another one than amd64: the module is the same, but whoever mounts the image looks.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

"$root/scripts/plugin.sh"
need_python
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml)
[ -n "$version" ] || fail "Cargo.toml names no version."
named=$("$python" scripts/image.py "$target/pd_router.wasm" "$target/image" "$version" "${IMAGE_ARCHITECTURE:-amd64}")
say "target/image: $named"
say "push it with: skopeo copy oci:target/image:$version docker://REGISTRY/pd-router:$version"
