#!/usr/bin/env bash
# recover_test PROGRAM
#
# The sample `recover`: a job that loses a process and goes on from its last checkpoint ends with the
# numbers of one that has not, and a second run goes on where the first has ended.
set -euo pipefail
source "$TEST_SRCDIR/$TEST_WORKSPACE/capi/testing/skip.sh"
program=$PWD/$1
[[ -e $program ]] || skip "the crate is not built here; its other tests say why"
find_libraries
cd "$TEST_TMPDIR"
fail() { echo "FAILED: $*" >&2; exit 1; }
# The numbers of the steps that were saved.
losses() { grep "^step [0-9]*: " "$1"; }

"$program" whole | tee whole.txt
grep -q "^going on from step 0$" whole.txt || fail "it has not begun at step 0"
! grep -q "has failed" whole.txt || fail "a step has failed where nothing is killed"
(($(losses whole.txt | wc -l) > 1)) || fail "it has said no losses"

echo "== a process is killed"
"$program" killed 50 | tee killed.txt
grep -q "^step 50 has failed: .* is gone\|^step 50 has failed: .*broke" killed.txt || fail "said $(cat killed.txt)"
[[ $(grep "^going on" killed.txt) == $'going on from step 0\ngoing on from step 40' ]] || fail "it went on elsewhere"
diff <(losses whole.txt) <(losses killed.txt) || fail "it has learnt something else"

echo "== a second run"
[[ $("$program" killed) == "going on from step 100" ]] || fail "it has begun again"
echo "all passed"
