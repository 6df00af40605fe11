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
run=(text.txt --batch=8 --micro-batches=4 --width=32 --context=16 --steps=60 --sample=20 --every=10)
train() { "$program" "${run[@]}" "$@" >said 2>&1; }
refuse() {
  if train "${@:2}"; then fail "it takes ${*:2}"; fi
  grep -q -- "$1" said || fail "said $(cat said)"
}

# What a run leaves there that was killed would stay.
mkdir temporary
export TMPDIR=$PWD/temporary

echo "== errors"
refuse --checkpoint --resume
refuse --in-flight --in-flight=0
refuse --in-flight --in-flight=9
echo >file
refuse "cannot write to file: " --output=file
refuse "what is --help? transformer FILE" --help
refuse "what is other.txt?" other.txt
refuse "--width lacks its value" --width
refuse --width --width 33
refuse --width --width=33

echo "== steps in flight are those of one at a time"
compare_in_flight() {
  train --in-flight=1 --output=one "$@" || fail "$(cat said)"
  train --in-flight=3 --output=several "$@" || fail "$(cat said)"
  [[ $(wc -l <several/training.csv) == 61 ]] || fail "the table: $(cat several/training.csv)"
  cmp one/training.csv several/training.csv || fail "it learns something else: $*"
  cmp one/sample.txt several/sample.txt || fail "it writes something else: $*"
}
compare_in_flight --schedule=zb_h2
compare_in_flight --schedule=interleaved --replicas=2

echo "== checkpoints"
train --output=whole --checkpoint=whole.saved || fail "$(cat said)"
"$tool" show whole.saved >said
grep -q "step 60, " said && grep -q "all checksums are right" said || fail "show: $(cat said)"
# Begins a run of $1 steps, which "$2" ends when it has saved the checkpoint of step 20; once more where
# that came after the last step.
mkfifo pipe
stop() {
  local line
  status=0 rest=
  while ((status == 0)) || grep -q "saved the checkpoint of step $1$" <<<"$rest"; do
    status=0
    rm -rf stopped.saved
    "$program" "${run[@]}" --steps="$1" --output=stopped --checkpoint=stopped.saved "${@:3}" \
      >pipe 2>&1 &
    pid=$! line=
    exec 3<pipe
    until [[ $line == "saved the checkpoint of step 20" ]]; do
      read -r line <&3 || fail "it ended; the last line: $line"
    done
    "$2"
    rest=$(cat <&3)
    exec 3<&-
    wait "$pid" || status=$?
  done
}
resume() {
  train --output=stopped --checkpoint=stopped.saved --resume "$@" || fail "$(cat said)"
  first=$(sed -n 's/^going on from step //p' said)
  ((first >= 20)) || fail "it went on from step $first: $(cat said)"
}

echo "== a stage's worker is killed: the job ends with its name, and another one goes on"
kill_second() {
  for child in $(cat "/proc/$pid/task/$pid/children"); do
    if grep -qz "^DISTGRAD_EXAMPLE_MEMBER=1:" "/proc/$child/environ"; then kill -KILL "$child" || true; fi
  done
}
stop 60 kill_second
((status == 1)) || fail "status $status: $rest"
grep -q "replica0\.1" <<<"$rest" || fail "the lost worker is not named: $rest"
refuse --resume --checkpoint=stopped.saved
cp -r stopped.saved three.saved
refuse --batch=8 --batch=16 --checkpoint=stopped.saved --resume
resume --schedule=gpipe
"$tool" diff whole.saved stopped.saved || fail "the resumed run has learnt something else"
cmp whole/training.csv stopped/training.csv || fail "the table differs"

cp stopped/training.csv before.csv
resume
cmp before.csv stopped/training.csv || fail "a run that was over has taken its table"

echo "== other stages go on from there"
resume --stages=3 --output=three --checkpoint=three.saved
[[ $(tail -n 1 three/training.csv) == 60,* ]] || fail "the table: $(cat three/training.csv)"
grep -q "^test loss" said || fail "said $(cat said)"

echo "== Ctrl-C ends replicas after the same step, and saves"
interrupt() { kill -INT "$pid"; }
stop 1000000 interrupt --replicas=2
((status == 130)) || fail "status $status: $rest"
last=$(sed -nE 's/^saved the checkpoint of step //p' <<<"$rest" | tail -n 1)
"$tool" show stopped.saved | grep "^step ${last:-20}, " || fail "saved $(ls -a stopped.saved): $rest"

echo "== one that is killed leaves nothing"
kill_first() { kill -KILL "$pid"; }
stop 1000000 kill_first
((status == 137)) || fail "status $status: $rest"
[[ -z $(ls -A temporary) ]] || fail "left $(ls -A temporary)"
echo "all passed"
