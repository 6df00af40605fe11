#!/usr/bin/env bash
# resume_test PROGRAM TOOL DATA
#
# The example `split` saves checkpoints that //tools:checkpoint reads, and a run that was stopped and
# resumed ends with the bytes of one that was not.
set -euo pipefail
source "$TEST_SRCDIR/$TEST_WORKSPACE/capi/testing/skip.sh"
program=$PWD/$1 tool=$PWD/$2 data=$PWD/$3
[[ -e $program ]] || skip "the crate is not built here; its other tests say why"
find_libraries
cd "$TEST_TMPDIR"
fail() { echo "FAILED: $*" >&2; exit 1; }
sums() { (cd "$1" && sha256sum ./*.safetensors); }

"$program" "$data" 6000 --checkpoint whole --every 40
"$tool" show whole | tee shown
grep -q "step 120, " shown && grep -q "all checksums are right" shown || fail "show"
[[ $(ls whole) == $(printf 'step-000%s\n' 040 080 120) ]] || fail "kept $(ls whole)"

echo "== stopped before its end"
"$program" "$data" 5000 --checkpoint stopped --every 1000
if "$program" "$data" 6000 --checkpoint stopped 2>said; then fail "it removes what another run saved"; fi
grep -q -- "--resume" said || fail "said $(cat said)"
"$program" "$data" 6000 --checkpoint stopped --every 1000 --resume | tee said
[[ $(grep -c "^saved the checkpoint" said) == 1 ]] || fail "it has not gone on where it was"
diff <(sums whole/step-000120) <(sums stopped/step-000120) || fail "it has learnt something else"
"$tool" diff whole stopped

echo "== Ctrl-C saves"
coproc { exec "$program" "$data" 60000 --checkpoint interrupted --every 20 2>&1; }
pid=$COPROC_PID
exec {output}<&"${COPROC[0]}" # for bash closes its own when the program has ended
until [[ ${line:-} == "saved the checkpoint of step "* ]]; do read -r line <&"$output"; done
kill -INT "$pid"
rest=$(cat <&"$output")
status=0; wait "$pid" || status=$?
((status == 130)) || fail "status $status: $rest"
last=$(sed -nE 's/^saved the checkpoint of step //p' <<<"$rest" | tail -n 1)
"$tool" show interrupted | grep "^step ${last:-20}, " || fail "saved $(ls -a interrupted): $rest"

echo "== errors"
for wrong in "--resume" "--checkpoint" "--every 0" "--wrong" "a 1 b"; do
  # shellcheck disable=SC2086
  if "$program" $wrong 2>said; then fail "$wrong is taken"; fi
done
echo "all passed"
