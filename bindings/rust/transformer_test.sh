#!/usr/bin/env bash
# transformer_test PROGRAM TOOL
#
# The example `transformer` learns the same with steps in flight as with one step at a time, and goes
# on from its checkpoints, which //tools:checkpoint reads, after an end of each kind.
set -euo pipefail
source "$TEST_SRCDIR/$TEST_WORKSPACE/capi/testing/skip.sh"
program=$PWD/$1 tool=$PWD/$2
[[ -e $program ]] || skip "the crate is not built here; its other tests say why"
find_libraries
cd "$TEST_TMPDIR"
fail() { echo "FAILED: $*" >&2; exit 1; }

for ((i = 0; i < 2000; ++i)); do echo "line $i says $((i * 7919 % 1000))"; done >text.txt
# As many processes in all runs that are compared: so each has as many threads, on which the last bits
# of a product of matrices depend.
train() { "$program" text.txt --batch=8 --micro-batches=4 --width=32 --context=16 --steps=60 "$@"; }

echo "== errors"
for wrong in --resume --in-flight=0 --width=33; do
  if train "$wrong" >said 2>&1; then fail "$wrong is taken"; fi
done

echo "== steps in flight are those of one at a time"
for schedule in interleaved zb_h2; do
  train --schedule=$schedule --in-flight=1 --output=one >said
  train --schedule=$schedule --in-flight=3 --output=several >said
  [[ $(wc -l <several/training.csv) == 61 ]] || fail "the table: $(cat several/training.csv)"
  cmp one/training.csv several/training.csv || fail "$schedule learns something else"
  cmp one/sample.txt several/sample.txt || fail "$schedule writes something else"
done
train --replicas=2 --micro-batches=2 --in-flight=1 --output=one >said
train --replicas=2 --micro-batches=2 --output=several >said
cmp one/training.csv several/training.csv || fail "replicas learn something else"

echo "== checkpoints"
long=(--steps=120 --every=20)
train "${long[@]}" --output=whole --checkpoint=whole.saved >said
"$tool" show whole.saved >said
grep -q "step 120, " said && grep -q "all checksums are right" said || fail "show: $(cat said)"
losses_from() { tail -n +$(($2 + 1)) "$1/training.csv"; }
# Begins a run, which "$1" ends when it has saved the checkpoint of step 40; once more where it was
# over before that.
stop() {
  local line=
  status=0
  while ((status == 0)); do
    rm -rf stopped.saved
    coproc { exec "$program" text.txt --batch=8 --micro-batches=4 --width=32 --context=16 \
      "${long[@]}" --checkpoint=stopped.saved --output=stopped "${@:2}" 2>&1; }
    pid=$COPROC_PID
    until [[ $line == "saved the checkpoint of step 40" ]]; do
      read -r line <&"${COPROC[0]}" || fail "it ended"
    done
    "$1"
    rest=$(cat <&"${COPROC[0]}")
    wait "$pid" || status=$?
    line=
  done
}
kill_all() { kill -KILL "$pid" $(cat "/proc/$pid/task/$pid/children") || true; }
kill_second() {
  for child in $(cat "/proc/$pid/task/$pid/children"); do
    if grep -qz "^DISTGRAD_EXAMPLE_MEMBER=1:" "/proc/$child/environ"; then kill -KILL "$child" || true; fi
  done
}
interrupt() { kill -INT "$pid"; }
resume() {
  train "${long[@]}" --output=stopped --checkpoint=stopped.saved --resume "$@" >said
  first=$(sed -n 's/^going on from step //p' said)
  ((first >= 40 && first <= 120)) || fail "it went on from step $first: $(cat said)"
}
compare() {
  "$tool" diff whole.saved stopped.saved || fail "the resumed run has learnt something else"
  cmp <(losses_from whole $((first + 1))) <(losses_from stopped 1) || fail "the losses differ"
}

echo "== all is killed"
stop kill_all
if train "${long[@]}" --checkpoint=stopped.saved >said 2>&1; then fail "it removes the checkpoints"; fi
grep -q -- "--resume" said || fail "said $(cat said)"
if train "${long[@]}" --batch=16 --checkpoint=stopped.saved --resume >said 2>&1; then
  fail "it goes on with another batch"
fi
grep -q -- "--batch=8" said || fail "said $(cat said)"
resume --schedule=gpipe
compare

echo "== a stage's worker is killed"
stop kill_second
((status == 1)) || fail "status $status: $rest"
grep -q "replica0\.1" <<<"$rest" || fail "the lost worker is not named: $rest"
resume
compare

echo "== Ctrl-C ends replicas after the same step, and saves; and other stages go on from there"
stop interrupt --replicas=2 --micro-batches=2
((status == 130)) || fail "status $status: $rest"
resume --stages=3
grep -q "^test loss" said || fail "said $(cat said)"
echo "all passed"
