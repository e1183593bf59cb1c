#!/usr/bin/env bash
# Makes sure of a Chromium, for the test of the status page: the one that PD_CHROMIUM names, else Debian's.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

[ -x "${PD_CHROMIUM:-/usr/bin/chromium}" ] || install_packages chromium
