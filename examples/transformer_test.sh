#!/usr/bin/env bash
# Runs the example as its users do, on a small text.
set -euo pipefail
source capi/testing/skip.sh
program=$PWD/examples/transformer check=$PWD/tests/testing/trace_check
checkpoint=$PWD/tools/checkpoint
cd "$TEST_TMPDIR"
# The last bits of a product of matrices depend on the number of threads.
export OMP_NUM_THREADS=1

fail() { echo "FAILED: $*" >&2; exit 1; }

# Runs the program with the arguments behind $1 and $2; it must end with status $1, having written
# one line, which contains $2, to stderr.
expect_error() {
  local status=0
  "$program" "${@:3}" >stdout 2>stderr || status=$?
  ((status == $1)) || fail "${*:3}: status $status, not $1: $(cat stderr)"
  [[ $(wc -l <stderr) == 1 && $(cat stderr) == *"$2"* ]] || fail "${*:3}: said $(cat stderr)"
  [[ ! -s stdout ]] || fail "${*:3}: wrote $(cat stdout)"
}

echo "== errors: one line each"
expect_error 2 "--stages" --stages=0
expect_error 2 "--schedule" --schedule=pigeon
expect_error 2 "--schedule=interleaved makes 6 stages, and --blocks=4" --stages=3 --schedule=interleaved
expect_error 2 "--single" --single --stages=2
expect_error 2 "--single" --single --replicas=2
expect_error 2 "--micro-batches=8" --batch=4
expect_error 2 "--replicas=3" --batch=8 --replicas=3
expect_error 2 "--width=30" --width=30
expect_error 2 "--checkpoint" --resume
expect_error 1 "/nowhere/text" --single --data=/nowhere/text
echo "too short" >short.txt
expect_error 2 "short.txt" --single --data=short.txt
RANK=0 WORLD_SIZE=3 LOCAL_RANK=0 LOCAL_WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 \
  expect_error 2 "need 2 workers, and this job has 3" --stages=2
"$program" --help >stdout
grep -q -- "--schedule NAME" stdout

for ((i = 0; i < 2000; ++i)); do echo "line $i says $((i * 7919 % 1000))"; done >text.txt
expect_error 2 "--context=4096" --single --data=text.txt --context=4096 --output=small

steps=7
run=(--data=text.txt --steps=$steps --batch=8 --width=16 --context=16)
train() { "$program" "${run[@]}" --micro-batches=4 "$@"; }
# All columns but the times.
losses() { cut -d, -f1,2,5- "$1/training.csv"; }

echo "== one process"
train --single --output=single >stdout
grep -q "after $steps steps" stdout && grep -q "tokens/s" stdout || fail "said: $(cat stdout)"
# A row of each step, and of each evaluation.
[[ $(wc -l <single/training.csv) == $((1 + 2 * steps)) ]] || fail "the table: $(cat single/training.csv)"
[[ $(wc -c <single/sample.txt) == $((4 * 301)) ]] || fail "the sample: $(wc single/sample.txt)"
if [[ ! -s single/training.svg ]]; then
  grep "gnuplot is not installed" stdout
  left_out picture "no gnuplot on this machine"
fi
train --single --output=other --seed=2 >stdout
! cmp -s <(losses single) <(losses other) || fail "the seed changes nothing"

echo "== each schedule is the same as one process, to the last digit"
for schedule in gpipe 1f1b interleaved zb_h1 zb_h2; do
  train --schedule=$schedule --output=$schedule >stdout
  cmp <(losses single) <(losses $schedule) || fail "$schedule learns something else"
  cmp single/sample.txt $schedule/sample.txt || fail "$schedule writes something else"
done
train --stages=3 --output=three --transport=tcp >stdout
cmp <(losses single) <(losses three) || fail "three stages learn something else"

echo "== replicas: the same, but for the order of sums"
"$program" "${run[@]}" --replicas=2 --micro-batches=2 --output=replicas >stdout
paste -d, <(losses single) <(losses replicas) | awk -F, '
  NR > 1 { ++rows; for (i = 1; i <= 4; ++i) if (($i - $(i + 5)) ^ 2 > 1e-6) wrong = 1 }
  END { exit wrong || rows < 7 }' ||
  fail "replicas learn something else: $(losses replicas), not $(losses single)"

echo "== traces"
train --stages=2 --output=traced --trace=trace.json >stdout
"$check" trace.0.json trace.1.json >spans
for line in "worker0 client learning rate $((2 * steps))" "worker1 server learning rate $steps" \
  "worker1 pipeline step $steps" "worker0 pipeline backward 0 $steps" "worker1 pipeline backward of weights 3 $steps"; do
  grep -qx "$line" spans || fail "the traces lack: $line; they have: $(cat spans)"
done

echo "== checkpoints"
long=(--data=text.txt --steps=60 --width=16 --context=16 --every=10)
train() { "$program" "${long[@]}" --batch=8 --micro-batches=4 "$@"; }
train --output=whole --checkpoint=whole.saved >stdout
"$checkpoint" show whole.saved >stdout
grep -q "step 60, " stdout || fail "show: $(cat stdout)"
# Killed after three rounds, then resumed by three stages in another order.
coproc { exec "$program" "${long[@]}" --batch=8 --micro-batches=4 --output=stopped \
  --checkpoint=stopped.saved 2>&1; }
pid=$COPROC_PID
exec {output}<&"${COPROC[0]}" # for bash closes its own when the program has ended
until [[ ${line:-} == "step 18/60: loss"* ]]; do read -r line <&"$output"; done
kill -KILL "$pid"
cat <&"$output" >/dev/null # until the workers have ended, too
wait "$pid" || true
# One worker: of several, another may say on a line of its own that worker 0 has gone.
expect_error 2 "--batch=8" "${long[@]}" --batch=16 --stages=1 --checkpoint=stopped.saved --resume
expect_error 2 "--resume" "${long[@]}" --batch=8 --stages=1 --checkpoint=stopped.saved
train --stages=3 --schedule=gpipe --output=stopped --checkpoint=stopped.saved --resume >stdout
grep -q "after 60 steps" stdout || fail "said: $(cat stdout)"
"$checkpoint" diff whole.saved stopped.saved || fail "the resumed run has learnt something else"
cmp <(losses whole) <(losses stopped) || fail "the table differs"
"$program" "${long[@]}" --batch=8 --micro-batches=2 --replicas=2 --output=stopped \
  --checkpoint=stopped.saved --resume >stdout
grep "after 60 steps" stdout

echo "== a stage's worker is killed in a step: the job ends with its name, and another one goes on"
coproc { exec "$program" "${long[@]}" --batch=8 --micro-batches=4 --stages=3 --output=lost \
  --checkpoint=lost.saved 2>&1; }
pid=$COPROC_PID
exec {output}<&"${COPROC[0]}" # for bash closes its own when the program has ended
until [[ ${line:-} == "step 6/60: loss"* ]]; do read -r line <&"$output" || fail "it ended"; done
workers=$(<"/proc/$pid/task/$pid/children")
for child in $workers; do
  if grep -qzx "RANK=1" "/proc/$child/environ"; then victim=$child; fi
done
until [[ $line == "step 24/60: loss"* ]]; do read -r line <&"$output" || fail "it ended"; done
# Who started them finds all of them ended at once, and yet says why.
kill -STOP "$pid"
kill -KILL "$victim"
ended() { [[ ! -e /proc/$1 ]] || grep -qs '^State:[[:space:]]*Z' "/proc/$1/status"; }
for child in $workers; do
  for ((i = 0; i < 600; ++i)); do
    if ended "$child"; then break; fi
    sleep 0.1
  done
done
kill -CONT "$pid"
said=$(cat <&"$output")
status=0; wait "$pid" || status=$?
((status == 137)) || fail "status $status: $said"
# Who leads says on which worker: the pipeline by the stage; or, where the worker was killed in the
# optimizer's step or while it saved a checkpoint, the call that it has not answered.
grep -Eq "(stage 1|call of '[^']*') on worker 'worker1'" <<<"$said" ||
  fail "the lost worker is not named: $said"
train --stages=3 --output=lost --checkpoint=lost.saved --resume >stdout
grep -q "after 60 steps" stdout || fail "said: $(cat stdout)"
"$checkpoint" diff whole.saved lost.saved || fail "the resumed run has learnt something else"
cmp <(losses whole) <(losses lost) || fail "the table differs"

echo "== Ctrl-C ends two replicas after the same step, and saves"
# Also where the one that saves does so after each step.
for every in 1000000 1; do
  rm -rf interrupted interrupted.saved
  coproc { exec "$program" --data=text.txt --steps=20000 --every=$every --batch=8 --width=16 \
    --context=16 --micro-batches=2 --replicas=2 --stages=1 --output=interrupted \
    --checkpoint=interrupted.saved 2>&1; }
  pid=$COPROC_PID
  exec {output}<&"${COPROC[0]}" # for bash closes its own when the program has ended
  until [[ $(wc -l 2>/dev/null <interrupted/training.csv) -gt 1 ]]; do kill -0 "$pid" || fail "it ended"; done
  kill -INT "$pid"
  rest=$(cat <&"$output")
  status=0; wait "$pid" || status=$?
  ((status == 130)) || fail "status $status: $rest"
  [[ $(grep "^transformer: " <<<"$rest") == "transformer: interrupted" ]] || fail "ended with: $rest"
  "$checkpoint" show interrupted.saved >stdout
  grep "^step " stdout || fail "saved $(ls -a interrupted.saved): $rest"
done
echo "all passed"
