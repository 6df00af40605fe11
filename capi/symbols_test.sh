#!/usr/bin/env bash
# symbols_test LIBRARY MAP HEADER WRAPPER PROGRAM...
#
# The library exports what the map names and the header declares, the C++ wrapper has all of it, and
# the test programs in C call all of it; and the library stays in memory once it is loaded.
set -euo pipefail
library=$1 map=$2 header=$3 wrapper=$4
shift 4
scratch=$(mktemp -d "${TEST_TMPDIR:-/tmp}/symbols.XXXXXX")
# Symbols in lower case are local ones, but for u: relocations of thread-local variables name them.
nm -D --defined-only "$library" | awk '$2 ~ /[B-Zu]/ {print $3}' | sort >"$scratch/versioned"
sed 's/@.*//' "$scratch/versioned" >"$scratch/exported"
sed -nE 's/^ +(dg_[a-z0-9_]+);$/\1/p' "$map" | sort >"$scratch/map"
# Each declaration is one DG_API ... name(...);
tr '\n' ' ' <"$header" | grep -oE 'DG_API [^;(]*\(' | grep -oE 'dg_[a-z0-9_]+ *\($' | tr -d ' (' |
  sort >"$scratch/header"
grep -oE 'dg_[a-z0-9_]+' "$wrapper" | sort -u | comm -12 - "$scratch/header" >"$scratch/wrapped"
nm -D --undefined-only "$@" | sed -nE 's/^ +U (dg_[a-z0-9_]+).*$/\1/p' | sort -u >"$scratch/called"

failed=0
same() {
  if ! diff "$scratch/$1" "$scratch/$2"; then
    echo "FAILED: '$1' (<) and '$2' (>) are not the same" >&2
    failed=1
  fi
}
same exported map
same map header
same header called
same header wrapped
if grep -vE '@@DISTGRAD_[0-9]+\.[0-9]+$' "$scratch/versioned"; then
  echo "FAILED: exported without a version" >&2
  failed=1
fi
if ! readelf -d "$library" | grep -q 'Flags:.*NODELETE'; then
  echo "FAILED: dlclose() could unmap what libtorch still calls" >&2
  failed=1
fi
echo "$(wc -l <"$scratch/exported") functions"
exit $failed
