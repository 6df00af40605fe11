#!/usr/bin/env bash
# Runs the example of replicas as its users do, and compares it with one process.
set -euo pipefail
program=$PWD/examples/replicas
cd "$TEST_TMPDIR"

fail() { echo "FAILED: $*" >&2; exit 1; }

# A data set of 90 images of noise, of three classes.
mkdir data
for part in train t10k; do
  { printf '\x00\x00\x08\x03\x00\x00\x00\x5a\x00\x00\x00\x1c\x00\x00\x00\x1c'
    for ((i = 0; i < 90 * 28; ++i)); do printf '%28s' "$i $part"; done; } | gzip >data/$part-images-idx3-ubyte.gz
  { printf '\x00\x00\x08\x01\x00\x00\x00\x5a'
    for ((i = 0; i < 30; ++i)); do printf '\x00\x01\x05'; done; } | gzip >data/$part-labels-idx1-ubyte.gz
done

echo "== errors: one line each"
status=0; "$program" --replicas=0 2>stderr || status=$?
((status == 2)) && [[ $(wc -l <stderr) == 1 && $(cat stderr) == replicas:*--replicas* ]] ||
  fail "status $status: $(cat stderr)"
status=0; "$program" --transport=tcp 2>stderr || status=$?
((status == 2)) || fail "--transport: status $status: $(cat stderr)"
"$program" --help >help
grep -q -- "--replicas N" help || fail "--help: $(cat help)"

# The last batch has 2 images, fewer than there are replicas. The losses are those of one process but
# for the order of sums; a gradient that were not averaged, or not with its weight, differs by much more.
run() { "$program" "$1" --data=data --epochs=3 --batch=22 --lr=0.05 --output="$2" >stdout 2>stderr ||
  fail "$1: $(cat stderr)"; }
echo "== one process"
run --single single
grep -q "test accuracy" stdout || fail "said $(cat stdout)"
for replicas in 1 2 3; do
  echo "== $replicas replicas"
  run --replicas=$replicas r$replicas
  [[ $(wc -l <r$replicas/training.csv) == $(wc -l <single/training.csv) ]] || fail "rows are missing"
  paste -d, single/training.csv r$replicas/training.csv | awk -F, -v n=$replicas '
    NR == 1 { columns = NF / 2; next }
    { for (i = 5; i <= columns; ++i) {
        difference = $i - $(i + columns); if (difference < 0) difference = -difference
        if (difference > 1e-4) { print "row " NR ", column " i ": " $i " and " $(i + columns); bad = 1 } } }
    END { exit bad }' || fail "$replicas replicas learn something else than one process"
done
echo "all passed"
