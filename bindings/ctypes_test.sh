#!/usr/bin/env bash
# Runs ctypes_test.py over the library.
set -euo pipefail
root=$TEST_SRCDIR/distgrad
source "$root/capi/testing/skip.sh"
library=$(readlink -f "$root/capi/libdistgrad.so.1")
skip_if_sanitized "$library"
command -v python3 >/dev/null || skip "no python3 on this machine"
exec python3 "$root/bindings/ctypes_test.py" "$library"
