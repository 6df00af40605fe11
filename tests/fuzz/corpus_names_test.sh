#!/usr/bin/env bash
# Each file of a corpus is named by the SHA-1 of what it has, as libFuzzer names what it finds: so no
# two are the same, and a corpus that is merged with new finds keeps its names.
set -euo pipefail

(($# > 0)) || { echo "no files" >&2; exit 1; }
sha1sum "$@" | while read -r sum path; do
  if [[ ${path##*/} != "$sum" ]]; then
    echo "$path: git mv it to $sum, which is the SHA-1 of its content" >&2
    exit 1
  fi
done
