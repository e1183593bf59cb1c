#!/usr/bin/env bash
# Runs a command in a network namespace of its own that holds a loopback interface and nothing else, where this user may
# make one: no port clashes, and Dynamo's event sockets, which bind every address, are seen by nobody.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

for namespace in "--net" "--user --map-root-user --net"; do
    # shellcheck disable=SC2086 # each word is an option
    if unshare $namespace "${PYTHON:-python3}" scripts/loopback_up.py true 2>/dev/null; then
        exec unshare $namespace "${PYTHON:-python3}" scripts/loopback_up.py "$@"
    fi
done
say "no network namespace may be made here: running without one"
exec "$@"
