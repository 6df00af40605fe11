#!/usr/bin/env bash
# reach_test MAP PROGRAM...
#
# The crate's tests call every function of the C interface. A function that they need not call would
# stand below, with the reason.
set -euo pipefail
source "$TEST_SRCDIR/$TEST_WORKSPACE/capi/testing/skip.sh"
declare -A without=(
  [dg_error_create]="errors of the crate are made by dg_error_create_with_origin, and keep theirs"
  [dg_completions_create]="futures of the crate wake their tasks by dg_future_then"
  [dg_completions_descriptor]="as above"
  [dg_completions_destroy]="as above"
  [dg_completions_take]="as above"
  [dg_completions_watch]="as above"
)
map=$1
shift
[[ -e $1 ]] || skip "the crate is not built here; its other tests say why"
scratch=$(mktemp -d "$TEST_TMPDIR/reach.XXXXXX")
sed -nE 's/^ +(dg_[a-z0-9_]+);$/\1/p' "$map" | sort >"$scratch/map"
nm -D --undefined-only "$@" | sed -nE 's/^ +U (dg_[a-z0-9_]+).*$/\1/p' | sort -u >"$scratch/called"

failed=0
while read -r function; do
  if [[ -n ${without[$function]:-} ]]; then
    echo "without $function: ${without[$function]}"
  else
    echo "FAILED: no test of the crate calls $function" >&2
    failed=1
  fi
done < <(comm -23 "$scratch/map" "$scratch/called")
for function in "${!without[@]}"; do
  if grep -qx "$function" "$scratch/called"; then
    echo "FAILED: $function is called, and stands among those that are not" >&2
    failed=1
  fi
done
echo "$(wc -l <"$scratch/called") of $(wc -l <"$scratch/map") functions are called"
exit $failed
