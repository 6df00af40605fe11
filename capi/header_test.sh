#!/usr/bin/env bash
# The headers under every language standard that they promise, all warnings being errors.
set -euo pipefail
source "$TEST_SRCDIR/distgrad/capi/testing/skip.sh"
include=$TEST_SRCDIR/distgrad/capi/include
warnings=(-Wall -Wextra -Wconversion -Wshadow -Wundef -Wpadded -pedantic-errors -Werror)
failed=0
check() { # COMPILER LANGUAGE STANDARD HEADER WARNINGS...
  local compiler=$1 language=$2 standard=$3 header=$4
  shift 4
  # Twice: it can be included again.
  if printf '#include <distgrad/%s>\n' "$header" "$header" |
    "$compiler" -x "$language" -std="$standard" "${warnings[@]}" "$@" -I"$include" -fsyntax-only -; then
    echo "ok: $header as $standard by $compiler"
  else
    echo "FAILED: $header as $standard by $compiler"
    failed=1
  fi
}
for compiler in gcc clang; do
  if ! command -v $compiler >/dev/null; then
    left_out "$compiler" "no $compiler on this machine"
    continue
  fi
  for standard in c99 c11 c17; do check $compiler c $standard distgrad.h -Wstrict-prototypes -Wc++-compat; done
done
for compiler in g++ clang++; do
  if ! command -v $compiler >/dev/null; then
    left_out "$compiler" "no $compiler on this machine"
    continue
  fi
  for standard in c++11 c++14 c++17 c++20; do check $compiler c++ $standard distgrad.h -Wold-style-cast; done
  for standard in c++17 c++20; do check $compiler c++ $standard distgrad.hpp -Wold-style-cast -Wno-padded; done
done
# The rules on the first page of the C header are a list, which a formatter may take for one text.
for rule in Handles Arguments Errors Threads Forks Waiting Callbacks Options Structs Times; do
  grep -qE "^ \*   $rule +[A-Za-z]" "$include/distgrad/distgrad.h" && continue
  echo "FAILED: no line of distgrad.h begins with the rule of $rule"
  failed=1
done
exit $failed
