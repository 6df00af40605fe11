#!/usr/bin/env bash
# Runs the example as its users do.
set -euo pipefail
source capi/testing/skip.sh
program=$PWD/examples/fashion_mnist check=$PWD/tests/testing/trace_check
checkpoint=$PWD/tools/checkpoint
cd "$TEST_TMPDIR"

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
expect_error 2 "--wrokers" --wrokers=2
expect_error 2 "--workers" --workers=99
expect_error 2 "--micro-batches" --micro-batches=0
expect_error 1 "nowhere/train-images-idx3-ubyte.gz" --single --data=/nowhere
expect_error 2 "--device" --device=gpu
expect_error 1 "built without CUDA; build it with --config=cuda" --device=cuda
touch in_the_way
expect_error 1 "in_the_way" --single --output=in_the_way
RANK=0 expect_error 1 "WORLD_SIZE" --epochs=1

echo "== --help"
"$program" --help | grep -q -- "--transport NAME"

# A data set of 100 black images, all of class 0.
mkdir data
for part in train t10k; do
  { printf '\x00\x00\x08\x03\x00\x00\x00\x64\x00\x00\x00\x1c\x00\x00\x00\x1c'
    head -c $((100 * 28 * 28)) /dev/zero; } | gzip >data/$part-images-idx3-ubyte.gz
  { printf '\x00\x00\x08\x01\x00\x00\x00\x64'
    head -c 100 /dev/zero; } | gzip >data/$part-labels-idx1-ubyte.gz
done

echo "== without gnuplot"
PATH=/nowhere "$program" --single --data=data --epochs=2 --output=small >stdout
grep "picture: left out, gnuplot is not installed" stdout
[[ $(wc -l <small/training.csv) == 5 ]] || fail "the table: $(cat small/training.csv)"

echo "== traces of two workers"
expect_error 2 "--trace" --single --trace=trace.json
"$program" --workers=2 --data=data --epochs=1 --batch=25 --micro-batches=5 --output=traced \
  --trace=trace.json
"$check" trace.0.json trace.1.json | tee stdout
# Four steps, and a pass over the test images: worker 0 sends learning rates to itself and worker 1,
# and each has all micro-batches and steps.
for line in "worker0 client learning rate 8" \
  "worker1 server learning rate 4" "worker1 pipeline step 4" "worker0 pipeline forward 0 5" \
  "worker1 pipeline send gradients 4 4"; do
  grep -qx "$line" stdout || fail "the traces lack: $line"
done
if grep "did not fit" stdout; then fail "the trace is not whole"; fi
expect_error 1 "/nowhere/trace.0.json" --workers=1 --trace=/nowhere/trace.json

echo "== checkpoints"
expect_error 2 "--checkpoint" --resume
expect_error 2 "--checkpoint" --single --checkpoint=saved
# A data set of 90 images of noise, of three classes.
mkdir noise
for part in train t10k; do
  { printf '\x00\x00\x08\x03\x00\x00\x00\x5a\x00\x00\x00\x1c\x00\x00\x00\x1c'
    for ((i = 0; i < 90 * 28; ++i)); do printf '%28s' "$i $part"; done; } | gzip >noise/$part-images-idx3-ubyte.gz
  { printf '\x00\x00\x08\x01\x00\x00\x00\x5a'
    for ((i = 0; i < 30; ++i)); do printf '\x00\x01\x05'; done; } | gzip >noise/$part-labels-idx1-ubyte.gz
done
run=(--data=noise --lr=0.05 --epochs=12 --batch=10 --every=20)
train() { "$program" "${run[@]}" "$@"; }
train --workers=2 --output=whole --checkpoint=whole.saved --resume >stdout
grep -q "^there is no checkpoint in .*/whole.saved: beginning with step 1$" stdout ||
  fail "said: $(cat stdout)"
"$checkpoint" show whole.saved | tee stdout
grep -q "step 108, " stdout && grep -q "all checksums are right" stdout || fail "show"
[[ $(ls whole.saved) == $(printf 'step-000%s\n' 080 100 108) ]] || fail "kept $(ls whole.saved)"
# Killed after three epochs, then resumed by three workers; then one finds that it is over.
coproc { exec "$program" "${run[@]}" --workers=2 --output=stopped --checkpoint=stopped.saved 2>&1; }
pid=$COPROC_PID
exec {output}<&"${COPROC[0]}" # for bash closes its own when the program has ended
until [[ $line == "epoch 3/12: loss"* ]]; do read -r line <&"$output"; done
kill -KILL "$pid"
cat <&"$output" >/dev/null # until the workers have ended, too
wait "$pid" || true
ls -d stopped.saved/step-*
expect_error 2 "--batch=10" --workers=1 --data=noise --batch=20 --checkpoint=stopped.saved --resume
expect_error 2 "--micro-batches=4" "${run[@]}" --workers=1 --micro-batches=2 \
  --checkpoint=stopped.saved --resume
# Who forgets --resume neither loses the checkpoints nor the table.
before=$(cat stopped/training.csv)
expect_error 2 "--resume" "${run[@]}" --workers=1 --output=stopped --checkpoint=stopped.saved
[[ $(cat stopped/training.csv) == "$before" ]] || fail "the table is gone"
expect_error 2 "stopped.saved, and that step" "${run[@]}" --workers=1 --resume \
  --checkpoint="$(ls -d stopped.saved/step-* | tail -n 1)"
train --workers=3 --output=stopped --checkpoint=stopped.saved --resume >stdout
grep -q "test accuracy" stdout
grep -q "^going on after step [1-9]" stdout || fail "said: $(cat stdout)"
"$checkpoint" diff whole.saved stopped.saved || fail "the resumed run has learnt something else"
[[ $(wc -l <stopped/training.csv) == $(wc -l <whole/training.csv) ]] || fail "the table lacks rows"
train --workers=1 --output=stopped --checkpoint=stopped.saved --resume | grep "test accuracy"
"$checkpoint" merge whole.saved merged.safetensors
"$checkpoint" split merged.safetensors 3 pieces
"$checkpoint" show pieces/model-00003-of-00003.safetensors
"$checkpoint" diff whole.saved merged.safetensors || fail "merge"
status=0; "$checkpoint" diff merged.safetensors whole.saved/step-000080 >stdout || status=$?
((status == 1)) && grep -q "layer4.weight.*differs in" stdout || fail "diff: $(cat stdout)"

echo "== Ctrl-C saves"
coproc { exec "$program" --data=data --epochs=10000 --workers=2 --output=interrupted \
  --checkpoint=interrupted.saved --every=1000000 2>&1; }
pid=$COPROC_PID
exec {output}<&"${COPROC[0]}" # for bash closes its own when the program has ended
read -r line <&"$output" # the end of an epoch
kill -INT "$pid"
rest=$(cat <&"$output")
status=0; wait "$pid" || status=$?
((status == 130)) || fail "status $status: $rest"
# Not always the last line: a worker that has seen worker 0 end may warn of it.
grep -qx "fashion_mnist: interrupted" <<<"$rest" || fail "ended with: $rest"
"$checkpoint" show interrupted.saved | grep "^step " || fail "saved $(ls -a interrupted.saved): $rest"

echo "== the same seed gives the same run"
# All columns but the times.
run() { "$program" --single --data=data --epochs=2 --output="$1" --seed="$2" && cut -d, -f1,2,5- "$1/training.csv" >"$1.losses"; }
run a 7; run b 7; run c 8
cmp a.losses b.losses
! cmp -s a.losses c.losses || fail "the seed changes nothing"

echo "== a learning rate that is too high"
expect_error 1 "--lr" --single --lr=1e30 --data=data --batch=10

for signal in INT TERM; do
  echo "== SIG$signal"
  coproc { exec "$program" --single --data=data --epochs=10000 --output=interrupted 2>&1; }
  pid=$COPROC_PID
  exec {output}<&"${COPROC[0]}" # for bash closes its own when the program has ended
  read -r line <&"$output" # the end of an epoch
  kill -"$signal" "$pid"
  rest=$(cat <&"$output")
  status=0; wait "$pid" || status=$?
  ((status == 128 + $(kill -l "$signal"))) || fail "status $status"
  [[ $(tail -n 1 <<<"$rest") == "fashion_mnist: interrupted" ]] || fail "ended with: $rest"
done

echo "== one epoch of the real thing"
"$program" --single --epochs=1 --output=real | tee stdout
accuracy=$(sed -n 's/^test accuracy \([0-9]*\).*/\1/p' stdout)
((accuracy >= 85)) || fail "accuracy $accuracy"
if [[ ! -s real/training.svg ]]; then
  grep "gnuplot is not installed" stdout
  left_out picture "no gnuplot on this machine"
fi
echo "all passed"
