#!/usr/bin/env bash
# hardening_test LIBRARY
#
# The library has what Linux offers against the misuse of a memory error: a stack that is not
# executable, tables of functions that are read-only once it is loaded (full RELRO), canaries on the
# stack, and the C library's checked functions (FORTIFY).
set -euo pipefail
library=$1
source "$TEST_SRCDIR/$TEST_WORKSPACE/capi/testing/skip.sh"
skip_if_sanitized "$library"
segments=$(readelf -lW "$library") dynamic=$(readelf -dW "$library") symbols=$(nm -D --undefined-only "$library")

failed=0
need() { # WHAT PATTERN TEXT
  if ! grep -qE "$2" <<<"$3"; then
    echo "FAILED: $1: nothing like '$2' in $library" >&2
    failed=1
  fi
}
need "a stack that is not executable" 'GNU_STACK .* RW +0x' "$segments"
need "RELRO" 'GNU_RELRO' "$segments"
need "all of it, for symbols are bound when it is loaded" 'BIND_NOW|FLAGS_1.*NOW' "$dynamic"
need "canaries (-fstack-protector)" ' U __stack_chk_fail(@|$)' "$symbols"
need "checked functions (-D_FORTIFY_SOURCE)" ' U __[a-z]+_chk(@|$)' "$symbols"
if grep -E 'LOAD .* RWE ' <<<"$segments"; then
  echo "FAILED: a segment is both writable and executable" >&2
  failed=1
fi
if grep -E 'TEXTREL' <<<"$dynamic"; then
  echo "FAILED: code is relocated when it is loaded" >&2
  failed=1
fi
exit $failed
