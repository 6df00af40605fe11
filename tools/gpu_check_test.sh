#!/usr/bin/env bash
# What tools/gpu_check says of machines and programs that are made here: drivers that count no GPU, one
# or two, and programs that pass, fail, skip and do not start. It has the form in which an archive
# unpacks.
set -euo pipefail
cd "$TEST_SRCDIR/$TEST_WORKSPACE"
scratch=$(mktemp -d "$TEST_TMPDIR/gpu_check.XXXXXX")
mkdir -p "$scratch/unpacked/programs" "$scratch/site/torch/lib"
cp tools/gpu_check tools/skipped.py "$scratch/unpacked"
echo '{}' >"$scratch/unpacked/about.json"
touch "$scratch/site/torch/lib/libtorch_cuda.so"

# driver NAME VERSION GPUS [CAPABILITY]: a libcuda.so.1 that has these; the last is C for the value of
# an attribute.
driver() {
  mkdir -p "$scratch/$1"
  cc -shared -fPIC -o "$scratch/$1/libcuda.so.1" -x c - <<C
#include <string.h>
int cuInit(unsigned flags) { return $3 == 0 ? 100 : 0; }
int cuDriverGetVersion(int* version) { *version = $2; return 0; }
int cuDeviceGetCount(int* count) { *count = $3; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char* name, int length, int device) { strcpy(name, "a GPU"); return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) { *value = ${4:-attribute}; return 0; }
C
}
driver none 13000 0
driver old 12040 1
driver one 13000 1
driver two 13010 2
driver volta 13000 2 'attribute == 75 ? 7 : device == 0 ? 5 : 0'

# program STATUS REASON [FROM]: one with two cases, the second of which is skipped if there is a reason,
# and is not there from that repeat on.
program() {
  rm -f "$scratch/repeats"
  local skip=""
  if [[ -n $2 ]]; then skip="<skipped message=\"a.cc:7&#x0A;$2\"/>"; fi
  cat >"$scratch/unpacked/programs/core.a_test" <<SH
#!/bin/sh
for argument; do
  case \$argument in
    --gtest_list_tests) exit 0 ;;
    --gtest_output=xml:*) xml=\${argument#--gtest_output=xml:} ;;
  esac
done
echo >>"$scratch/repeats"
two='<testcase classname="A" name="Two" status="run">$skip</testcase>'
if [ "\$(wc -l <"$scratch/repeats")" -ge "${3:-1000}" ]; then two=; fi
cat >"\$xml" <<XML
<testsuites><testsuite><testcase classname="A" name="One" status="run"><properties><property name="GB_s" value="900"/></properties></testcase>\$two</testsuite></testsuites>
XML
exit $1
SH
  chmod +x "$scratch/unpacked/programs/core.a_test"
}

export FIGURES='{"rows": [{"name": "a copy", "seconds": 0.25}]}'
failed=0
# check WHAT DRIVER STATUS TEXT [OPTION...]
check() {
  local status=0
  LD_LIBRARY_PATH=$scratch/$2 python3 "$scratch/unpacked/gpu_check" --site "$scratch/site" "${@:5}" \
    --json "$scratch/report.json" >"$scratch/said" 2>&1 || status=$?
  if [[ $status != "$3" ]] || ! grep -qF -- "$4" "$scratch/said"; then
    echo "FAILED: $1: status $status, not $3, or it does not say '$4':" >&2
    cat "$scratch/said" >&2
    failed=1
  fi
}

program 0 ""
check "without a driver" nothing 2 "no libcuda.so.1"
check "without a GPU" none 2 "cuInit() is error 100"
check "an old driver" old 2 "CUDA 12.4, and libtorch 2.11 needs 13: install a driver from 580 on"
check "an old GPU" volta 2 "cuda:1 (a GPU) has compute capability 7.0, and CUDA 13 needs 7.5"
check "all pass" one 0 "1 programs passed, 0 failed, 0 skips without need"
grep -q '"compute_capability": "75.76"' "$scratch/report.json"
grep -q '"ok": true' "$scratch/report.json"
grep -q '"GB_s": "900"' "$scratch/report.json"
program 0 "this machine has a GPU"
check "a test for machines without one" one 0 "0 skips without need"
program 0 "this machine has no GPU"
check "a GPU that is not seen" one 1 "does not justify that core.a_test A.Two is skipped: this machine has no GPU"
grep -q '"ok": false' "$scratch/report.json"
program 0 "it needs two GPUs"
check "one GPU where two are needed" one 0 "skipped: core.a_test A.Two: it needs two GPUs"
check "two GPUs of which one is not seen" two 1 "does not justify"
program 0 "it needs two GPUs"
check "repeats" one 0 "core.a_test: passed, 3 times 1 cases and 1 skipped" --repeat 3
program 0 "" 2
check "a repeat that runs less" one 1 "core.a_test: failed: repeat 2 ran 1 cases, and another one 2" --repeat 3
program 3 ""
check "a program that fails" two 1 "FAILED: core.a_test"
program 0 ""
benchmark=$scratch/unpacked/programs/benchmarks.gpu
printf '#!/bin/sh\n[ "$1" = --help ] || echo "$FIGURES"\n' >"$benchmark"
chmod +x "$benchmark"
check "with the benchmark" one 0 "2 of 2 programs start"
grep -q '"name": "a copy"' "$scratch/report.json"
FIGURES=nothing check "the benchmark fails" one 1 "FAILED: the benchmark"
grep -q '"outcome": "passed"' "$scratch/report.json"
rm "$benchmark"
printf '#!/bin/sh\nexit 127\n' >"$scratch/unpacked/programs/core.a_test"
check "a program that does not start" nothing 1 "core.a_test does not start"
check "a program that does not start, on a GPU" one 1 "core.a_test does not start"

status=0
python=$(python3 -c 'import sys; print(sys.executable)')
PATH=$scratch LD_LIBRARY_PATH=$scratch/one "$python" \
  "$scratch/unpacked/gpu_check" --site "$scratch/site" --sanitizer memcheck >"$scratch/said" 2>&1 ||
  status=$?
if [[ $status != 1 ]] || ! grep -q "there is no compute-sanitizer" "$scratch/said"; then
  echo "FAILED: without compute-sanitizer: status $status" >&2
  cat "$scratch/said" >&2
  failed=1
fi

# With Bazel, of which there is a stub here: it knows the targets $LABELS, of which one runs, once for
# each of $COUNTS, with so many cases, which say $REASON; and a benchmark, which says $FIGURES. Its test
# command ends with $ENDS.
mkdir -p "$scratch/tree/tools"
cp tools/gpu_check tools/skipped.py "$scratch/tree/tools"
cat >"$scratch/tree/tools/bazel" <<'SH'
#!/bin/sh
command=$1
echo "$@" >>"$ARGUMENTS"
for argument; do
  case $argument in --build_event_json_file=*) events=${argument#*=} ;; esac
done
case $command in
  query) printf '%s\n' ${LABELS:-//core:a_test} ;;
  run) echo "$FIGURES" ;;
  test)
    case="<testcase classname=\"A\" name=\"One\">$REASON</testcase>"
    if [ "$REASON" = none ]; then case=; fi
    echo '{"id":{"targetConfigured":{"label":"//core:a_test"}},"configured":{"targetKind":"cc_test rule"}}' >"$events"
    run=0
    for count in ${COUNTS:-1}; do
      run=$((run + 1))
      cases=
      while [ "$count" -gt 0 ]; do
        cases=$cases$case
        count=$((count - 1))
      done
      echo "<testsuites><testsuite>$cases</testsuite></testsuites>" >"$events.$run.xml"
      cat >>"$events" <<JSON
{"id":{"testResult":{"label":"//core:a_test","run":$run}},"testResult":{"testAttemptDurationMillis":"1500","testActionOutput":[{"name":"test.xml","uri":"file://$events.$run.xml"}]}}
JSON
    done
    echo "{\"id\":{\"testSummary\":{\"label\":\"//core:a_test\"}},\"testSummary\":{\"overallStatus\":\"$OUTCOME\"}}" >>"$events"
    exit "${ENDS:-0}"
    ;;
esac
SH
chmod +x "$scratch/tree/tools/bazel"
# check_bazel WHAT STATUS OUTCOME REASON [OPTION...]
check_bazel() {
  local status=0
  local reason=${4:+"<skipped message='a.cc:7&#x0A;$4'/>"}
  if [[ $4 == none ]]; then reason=none; fi
  OUTCOME=$3 REASON=$reason LD_LIBRARY_PATH=$scratch/one ARGUMENTS=$scratch/arguments \
    python3 "$scratch/tree/tools/gpu_check" "${@:5}" --json "$scratch/report.json" >"$scratch/said" 2>&1 || status=$?
  if [[ $status != "$2" ]]; then
    echo "FAILED: $1: status $status, not $2:" >&2
    cat "$scratch/said" >&2
    failed=1
  fi
}
check_bazel "all pass" 0 PASSED ""
grep -q '"seconds": 1.5' "$scratch/report.json"
grep -q '"name": "a copy"' "$scratch/report.json"
FIGURES=nothing check_bazel "the benchmark fails" 1 PASSED ""
check_bazel "a test fails" 1 FAILED ""
check_bazel "a test does not see the GPU" 1 PASSED "this machine has no GPU"
check_bazel "a test is for two GPUs" 0 PASSED "this machine has fewer than 2 GPUs"
ENDS=3 check_bazel "a test fails, as Bazel says" 1 FAILED ""
ENDS=1 check_bazel "Bazel fails" 1 PASSED ""
check_bazel "a test that has run nothing" 1 PASSED none
COUNTS="2 2 2" check_bazel "repeats" 0 PASSED "" --repeat 3
grep -qF "//core:a_test: passed, 3 times 2 cases and 0 skipped, 4.5 s" "$scratch/said"
COUNTS="2 1 2" check_bazel "a repeat that runs less" 1 PASSED "" --repeat 3
grep -qF "FAILED: //core:a_test: failed: repeat 2 ran 1 cases, and another one 2" "$scratch/said"
COUNTS="2 2" check_bazel "a repeat that is not there" 1 PASSED "" --repeat 3
LABELS="//core:a_test //core:b_test" check_bazel "a target that Bazel leaves out" 1 PASSED ""
if ! grep -q "FAILED: //core:b_test" "$scratch/said"; then
  echo "FAILED: a target that Bazel leaves out is not named" >&2
  failed=1
fi
rm "$scratch/arguments"
NCCL_DEBUG=INFO CUDA_VISIBLE_DEVICES=1 check_bazel "with variables" 0 PASSED ""
for variable in NCCL_DEBUG CUDA_VISIBLE_DEVICES LD_LIBRARY_PATH; do
  if ! grep '^test ' "$scratch/arguments" | grep -q -- "--test_env=$variable "; then
    echo "FAILED: $variable does not get to tests" >&2
    failed=1
  fi
done

# What the linker wrote of this machine is gone, and the program still runs.
echo 'int main() { return 7; }' | cc -o "$scratch/linked" -Wl,-rpath,/a/place/of/here -x c -
python3 - "$scratch/linked" <<'PY'
import importlib.machinery
import importlib.util
import os
import sys
loader = importlib.machinery.SourceFileLoader("gpu_check", "tools/gpu_check")
module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_check", loader))
loader.exec_module(module)
needs = module.versions_needed([sys.argv[1]])
if list(needs) != ["GLIBC"] or not needs["GLIBC"].startswith("2."):
    sys.exit("FAILED: a program in C needs " + str(needs))
with open(sys.argv[1], "rb") as file:
    data = module.without_rpath(file.read())
with open(sys.argv[1] + ".without", "wb") as file:
    file.write(data)
os.chmod(sys.argv[1] + ".without", 0o755)
PY
readelf -d "$scratch/linked" | grep -q '/a/place/of/here'
if readelf -d "$scratch/linked.without" | grep -qE 'R(UN)?PATH'; then
  echo "FAILED: the place that the linker wrote is still there" >&2
  failed=1
fi
status=0
"$scratch/linked.without" || status=$?
[[ $status == 7 ]] || failed=1
exit "$failed"
