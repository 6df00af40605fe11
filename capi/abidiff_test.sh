#!/usr/bin/env bash
# abidiff_test HEADER [RELEASED]
#
# Compares what a program sees of the library by two headers: no type of a function or of a struct's
# field has changed. abidiff compares two libraries by what the compiler wrote into them; these are of
# the headers alone, with nothing behind their functions, so that it takes no debug build of the real
# one, of which symbols_test knows the names.
#
# Until version 1.0 is released there is nothing to compare with: HEADER is compared with itself, and
# with itself after changes that break programs, which shows that the comparison finds them. From the
# release on RELEASED is the header at the release's tag (docs/abi.md, "At a release").
#
# A struct that grows after its release has to be suppressed here by its name, for abidiff has no rule
# for growth that lets nothing else through; layout_test holds what it had.
set -euo pipefail
header=$1 golden=${2:-$1}
source "$TEST_SRCDIR/distgrad/capi/testing/skip.sh"
command -v abidiff >/dev/null || skip "no abidiff on this machine: apt-get install abigail-tools"
cd "$(mktemp -d "$TEST_TMPDIR/abidiff.XXXXXX")"

library() { # NAME <HEADER
  sed 's/ DG_NOEXCEPT;/ { __builtin_trap(); }/' >"$1.c"
  cc -std=c99 -g -w -shared -fPIC -o "$1.so" "$1.c"
}
differ() { # NAME: from the released one
  abidiff --no-added-syms golden.so "$1.so" >"$1.txt" && return 1
  return 0
}

library golden <"$TEST_SRCDIR/distgrad/$golden"
library today <"$TEST_SRCDIR/distgrad/$header"
failed=0
if differ today; then
  cat today.txt
  echo "FAILED: the interface has changed"
  failed=1
fi

# That it would say so.
broken() { # WHAT SED-SCRIPT
  sed -z "$2" "$TEST_SRCDIR/distgrad/$golden" >broken.h
  if cmp -s broken.h "$TEST_SRCDIR/distgrad/$golden"; then
    echo "FAILED: $1: the header has no such place any more" && failed=1
  fi
  library broken <broken.h
  if differ broken; then echo "found: $1"; else echo "FAILED: not found: $1" && failed=1; fi
}
broken "a field of another type" 's/int64_t heartbeat_limit_ms;/uint64_t heartbeat_limit_ms;/'
broken "a field inserted" 's/  dg_str job; /  int64_t inserted;\n  dg_str job; /'
broken "an argument of another type" 's/int64_t timeout_ms,\n/int32_t timeout_ms,\n/'
broken "an argument less" 's/const dg_future\* future, int64_t timeout_ms,/const dg_future* future,/'
broken "a callback of another type" 's/void (\*done)(void\* user_data)/int (*done)(void* user_data)/'
broken "a function gone" 's/DG_API uint32_t dg_worker_rank[^;]*;//'


# Functions may come.
{
  cat "$TEST_SRCDIR/distgrad/$golden"
  echo 'DG_API void dg_added(void) DG_NOEXCEPT;'
} >grown.h
library grown <grown.h
if differ grown; then
  cat grown.txt
  echo "FAILED: a function that was added is no change"
  failed=1
fi
exit $failed
