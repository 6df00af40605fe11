#!/usr/bin/env bash
# clang_tidy_finds_test CHECK FILE...: CHECK is a clang_tidy_test over the files, whose comments say
# what it has to find.
set -euo pipefail
check=$1
shift
scratch=$(mktemp -d "$TEST_TMPDIR/clang_tidy_finds.XXXXXX")
for file in "$@"; do
  sed -nE "s|^.*// finds ([a-z-]+)$|\1|;T;=;p" "$file" | sed "N;s|\n| |;s|^|${file##*/}:|"
done | sort >"$scratch/wanted"
[[ -s $scratch/wanted ]]
status=0
"$check" >"$scratch/said" || status=$?
cat "$scratch/said"
sed -nE 's|^.*/([^/]+:[0-9]+):[0-9]+: warning: .* \[([^]]+)\]$|\1 \2|p' "$scratch/said" | sort |
  diff "$scratch/wanted" -
[[ $status == 1 ]]
