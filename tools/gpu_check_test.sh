#!/usr/bin/env bash
# What tools/gpu_check says of machines and programs that are made here: drivers that count no GPU, one
# or two, and programs that pass, fail, skip and do not start. It has the form in which an archive
# unpacks.
set -euo pipefail
cd "$TEST_SRCDIR/$TEST_WORKSPACE"
scratch=$(mktemp -d "$TEST_TMPDIR/gpu_check.XXXXXX")
mkdir -p "$scratch/unpacked/programs" "$scratch/site/torch/lib" "$scratch/bin/core" "$scratch/bin/benchmarks"
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

# program STATUS REASON [FROM]: core.a_test, with two cases, the second of which is skipped if there is a
# reason, and is not there from that repeat on. The tree's build has the same.
program() {
  rm -f "$scratch/repeats"
  local skip=""
  if [[ -n $2 ]]; then skip="<skipped message=\"a.cc:7&#x0A;$2\"/>"; fi
  cat >"$scratch/bin/core/a_test" <<SH
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
  chmod +x "$scratch/bin/core/a_test"
  cp "$scratch/bin/core/a_test" "$scratch/unpacked/programs/core.a_test"
}

export FIGURES='{"name": "a copy", "seconds": 0.25}'
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
check "no repeat" one 1 "--repeat 0 would run nothing" --repeat 0
check "repeats" one 0 "core.a_test: passed, 3 times 1 cases and 1 skipped" --repeat 3
# Under compute-sanitizer, of which there is a stub here: torch's allocator cuts tensors out of one piece of
# memory, in which memcheck sees no tensor's end, unless it is told not to. It says $SUMMARY in the end.
mkdir "$scratch/sanitizer"
cat >"$scratch/sanitizer/compute-sanitizer" <<'SH'
#!/bin/sh
[ "$1 $3 $4" = "--tool --error-exitcode 99" ] || exit 2
shift 4
if [ "$PYTORCH_NO_CUDA_MEMORY_CACHING" != 1 ]; then
  echo "torch's allocator hides where tensors end"
  exit 99
fi
"$@" || exit
echo "========= $SUMMARY"
SH
chmod +x "$scratch/sanitizer/compute-sanitizer"
# check_sanitizer WHAT STATUS TEXT TOOL SUMMARY
check_sanitizer() {
  PATH=$scratch/sanitizer:$PATH SUMMARY=$5 check "$1" one "$2" "$3" --sanitizer "$4"
}
check_sanitizer "under memcheck" 0 "1 programs passed" memcheck "ERROR SUMMARY: 0 errors"
check_sanitizer "under racecheck" 0 "1 programs passed" racecheck \
  "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
nothing_found="compute-sanitizer has not said that it found nothing"
check_sanitizer "a sanitizer that has looked at nothing" 1 "$nothing_found" memcheck \
  "Error: Target application terminated before first instrumented API call"
check_sanitizer "errors, of which the status says nothing" 1 "$nothing_found" memcheck "ERROR SUMMARY: 10 errors"
check_sanitizer "races, of which the status says nothing" 1 "$nothing_found" racecheck \
  "RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)"
# Of how it was called, and with which variables, the report has all that changes what runs, and no key.
NCCL_DEBUG=INFO GTEST_FILTER='A.*' DISTGRAD_EXITS=5 DISTGRAD_KEY=secret \
  check_sanitizer "a filter" 0 "GTEST_FILTER is 'A.*'" memcheck "ERROR SUMMARY: 0 errors"
python3 - "$scratch/report.json" <<'PY' || failed=1
import json
import sys
with open(sys.argv[1], encoding="utf-8") as file:
    text = file.read()
report = json.loads(text)
at = report["arguments"].index("--sanitizer")
if report["arguments"][at:at + 2] != ["--sanitizer", "memcheck"]:
    sys.exit("FAILED: the report has other arguments: %s" % report["arguments"])
wanted = {"NCCL_DEBUG": "INFO", "GTEST_FILTER": "A.*", "DISTGRAD_EXITS": "5", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
          "OMP_NUM_THREADS": "1"}
if not wanted.items() <= report["variables"].items():
    sys.exit("FAILED: the report has other variables: %s" % report["variables"])
if "DISTGRAD_KEY" in text or "secret" in text:
    sys.exit("FAILED: the report has the key of a job")
PY
TESTBRIDGE_TEST_ONLY='A.*' check "Bazel's filter" one 0 "TESTBRIDGE_TEST_ONLY is 'A.*'"
if python3 "$scratch/unpacked/gpu_check" --site "$scratch/site" --json "$scratch/report.txt" >"$scratch/said" 2>&1 ||
  ! grep -qF "is where what programs print goes" "$scratch/said"; then
  echo "FAILED: the report and what programs print may be one file" >&2
  failed=1
fi
program 0 "" 2
check "a repeat that runs less" one 1 "core.a_test: failed: repeat 2 ran 1 cases, and another one 2" --repeat 3
program 3 ""
check "a program that fails" two 1 "FAILED: core.a_test"

# One that does not end, and whose children hold its output open, one of them in a session of its own: it
# is ended, once, and nobody waits for that child, which this test ends below.
hangs=$scratch/unpacked/programs/core.b_test
cat >"$hangs" <<'SH'
#!/bin/sh
[ "$1" = --gtest_list_tests ] && exit 0
echo >>"$HUNG"
printf "\377"
setsid sh -c 'while [ -e "$HUNG" ]; do sleep 0.1; done' &
sleep 1000000 &
wait
SH
chmod +x "$hangs"
program 0 ""
export HUNG=$scratch/hung
check "a program that does not end" one 1 "FAILED: core.b_test: failed: repeat 1: it did not end within 3 s" \
  --repeat 3 --timeout 3 --only b_test
if [[ -e $HUNG && $(wc -l <"$HUNG") -gt 1 ]]; then
  echo "FAILED: a program that has not ended was run again" >&2
  failed=1
fi
rm -f "$HUNG"
grep -qF "runs 1 of 1: core.b_test, 3 times, each within 3 s" "$scratch/said"

# Whoever ends gpu_check in the middle has what was found so far.
cat >"$hangs" <<SH
#!/bin/sh
[ "\$1" = --gtest_list_tests ] && exit 0
cp "$scratch/report.json" "$scratch/meanwhile.json"
echo '<testsuites><testsuite><testcase classname="B" name="One" status="run"/></testsuite></testsuites>' >"\${1#--gtest_output=xml:}"
SH
check "two programs" two 0 "2 programs passed, 0 failed" --repeat 2
python3 - "$scratch/meanwhile.json" "$scratch/report.json" <<'PY'
import json
import sys
meanwhile, end = (json.load(open(path)) for path in sys.argv[1:])
assert [(test["name"], test["outcome"], len(test["repeats"])) for test in meanwhile["tests"]] == [
    ("core.a_test", "passed", 2), ("core.b_test", "has not ended", 1)], meanwhile
assert meanwhile["running"] == "core.b_test" and not meanwhile["complete"] and not meanwhile["ok"], meanwhile
assert [test["outcome"] for test in end["tests"]] == ["passed", "passed"], end
assert "running" not in end and end["complete"] and end["ok"], end
PY
rm "$hangs"

# Whoever ends gpu_check itself, as a limit of time does, leaves no program on the GPU.
cat >"$hangs" <<'SH'
#!/bin/sh
[ "$1" = --gtest_list_tests ] && exit 0
echo $$ >"$HUNG"
exec sleep 1000000
SH
chmod +x "$hangs"
for signal in TERM KILL; do
  rm -f "$HUNG"
  LD_LIBRARY_PATH=$scratch/one python3 "$scratch/unpacked/gpu_check" --site "$scratch/site" --only b_test \
    --json "$scratch/report.json" >"$scratch/said" 2>&1 &
  checker=$!
  while [[ ! -s $HUNG ]] && kill -0 "$checker"; do sleep 0.1; done
  kill -s "$signal" "$checker"
  wait "$checker" || true
  orphan=$(cat "$HUNG")
  for _ in {1..100}; do
    readlink -q "/proc/$orphan/exe" >/dev/null || break # nor of one that is dead, and not waited for
    sleep 0.1
  done
  if readlink -q "/proc/$orphan/exe" >/dev/null; then
    echo "FAILED: a program goes on when SIG$signal has ended gpu_check" >&2
    kill -KILL "$orphan"
    failed=1
  fi
done
rm "$hangs"

# What a repeat has recorded is not lost with a later one that is ended.
cat >"$hangs" <<'SH'
#!/bin/sh
[ "$1" = --gtest_list_tests ] && exit 0
if [ -e "$HUNG" ]; then exec sleep 1000000; fi
touch "$HUNG"
echo '<testsuites><testsuite><testcase classname="B" name="One" status="run"><properties><property name="GB_s" value="800"/></properties></testcase></testsuite></testsuites>' >"${1#--gtest_output=xml:}"
SH
chmod +x "$hangs"
rm -f "$HUNG"
check "a second repeat that does not end" one 1 "failed: repeat 2: it did not end" --repeat 2 --timeout 3 --only b_test
grep -q '"GB_s": "800"' "$scratch/report.json" || { echo "FAILED: what repeat 1 has recorded is lost" >&2 && failed=1; }
rm "$hangs" "$HUNG"

# A case that fails is named in the report, with what it said.
cat >"$hangs" <<'SH'
#!/bin/sh
[ "$1" = --gtest_list_tests ] && exit 0
echo '<testsuites><testsuite><testcase classname="B" name="Bad" status="run"><failure message="b.cc:7&#x0A;two is not three"/></testcase></testsuite></testsuites>' >"${1#--gtest_output=xml:}"
echo "looked at two"
echo "saw three" >&2
exit 1
SH
chmod +x "$hangs"
check "a case that fails" one 1 "FAILED: core.b_test" --only b_test
grep -q "B.Bad" "$scratch/report.json" && grep -q "two is not three" "$scratch/report.json" ||
  { echo "FAILED: the report does not say which case failed, and why" >&2 && failed=1; }
# All that they have printed is in one file beside the report, and nothing of the call before.
check "two programs, one of which fails" one 1 "FAILED: core.b_test"
diff - "$scratch/report.txt" >&2 <<'TEXT' ||
gpu_check: core.a_test
gpu_check: repeat 1
gpu_check: core.b_test
gpu_check: repeat 1
looked at two
saw three
TEXT
  { echo "FAILED: what programs have printed is not kept as it should be" >&2 && failed=1; }
# A program that opens its standard error anew, as NCCL does where NCCL_DEBUG_FILE says so, empties that file.
cat >"$scratch/unpacked/programs/core.d_test" <<'SH'
#!/bin/sh
[ "$1" = --gtest_list_tests ] && exit 0
echo '<testsuites><testsuite><testcase classname="D" name="Good" status="run"/></testsuite></testsuites>' >"${1#--gtest_output=xml:}"
echo anew >/dev/stderr
SH
chmod +x "$scratch/unpacked/programs/core.d_test"
check "a program that empties the file of what is printed" one 0 "1 programs passed" --repeat 2 --only d_test
rm "$scratch/unpacked/programs/core.d_test"
# Each header begins a line, also behind a program that has not ended its last one.
sed -i 's/^echo "saw three" >&2$/printf "saw three"/; s/^exit 1$/exit 0/' "$hangs"
cp "$hangs" "$scratch/unpacked/programs/core.c_test"
check "programs that do not end their last lines" one 0 "2 programs passed" --repeat 2 --only "core.[bc]"
cat >"$scratch/lines" <<'TEXT'
gpu_check: core.b_test
gpu_check: repeat 1
looked at two
saw three
gpu_check: repeat 2
looked at two
saw three
gpu_check: core.c_test
gpu_check: repeat 1
looked at two
saw three
gpu_check: repeat 2
looked at two
TEXT
printf "saw three" >>"$scratch/lines"
diff "$scratch/lines" "$scratch/report.txt" >&2 ||
  { echo "FAILED: a header does not begin a line" >&2 && failed=1; }
rm "$scratch/unpacked/programs/core.c_test"
sed -i 's/^exit 0$/exit 1/' "$hangs"
# Of each repeat, also where one dies before it has written which case failed.
sed -i 's/^exit 1$/rm -f "${1#--gtest_output=xml:}" \&\& kill -SEGV $$/' "$hangs"
check "a program that dies each time" one 1 "FAILED: core.b_test" --only b_test --repeat 2
python3 - "$scratch/report.json" <<'PY' || failed=1
import json
import sys
repeats = json.load(open(sys.argv[1]))["tests"][0]["repeats"]
if [each.get("wrong") for each in repeats] != ["status -11"] * 2:
    sys.exit("FAILED: the report does not say of each repeat how it ended: %s" % repeats)
PY
rm "$hangs"

# What could take longer than what is left of --within is not begun. A part of it has gone by then.
check "no time for anything" one 1 "FAILED: core.a_test: not begun: of --within 13" --within 13 --timeout 3
grep -qF "0 of 1 programs start" "$scratch/said" || { echo "FAILED: it was loaded all the same" >&2 && failed=1; }
check "time for all" one 0 "1 programs passed" --within 1000000
check "less than one run may take" one 1 "--within 12 has no room for --timeout 3" --within 12 --timeout 3
python3 - "$scratch/report.json" <<'PY' || failed=1
import argparse
import importlib.machinery
import importlib.util
import sys
import types
loader = importlib.machinery.SourceFileLoader("gpu_check", "tools/gpu_check")
module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_check", loader))
loader.exec_module(module)
now = [0]
module.time = types.SimpleNamespace(monotonic=lambda: now[0])
begun = []


def run_limited(command, *_):
    begun.append(command[0])
    now[0] += 20
    return "", ""


module.run_limited = run_limited
report = {"tests": [], "skips": []}
module.run_all(report, [("a", "a"), ("b", "b"), ("c", "c")], "benchmark", [], {},
               argparse.Namespace(repeat=3, timeout=20, within=100, end=100, json=sys.argv[1]))
if begun != ["a", "a", "a", "b"]:
    sys.exit("FAILED: these were begun: %s" % begun)
said = [test["outcome"] for test in report["tests"]] + [report["benchmark_error"]]
for text, each in zip(["failed: 0 of 3 repeats", "failed: repeat 2: not begun", "not begun", "not begun"], said):
    if not each.startswith(text):
        sys.exit("FAILED: it says '%s', not '%s'" % (each, text))
PY

# To be loaded a program has no longer than to run.
cat >"$hangs" <<'SH'
#!/bin/sh
[ "$1" = --gtest_list_tests ] && exec sleep 1000000
exit 1
SH
chmod +x "$hangs"
check "a program that is not loaded in time" nothing 1 "core.b_test does not start: it did not end within 3 s" --timeout 3
rm "$hangs"

# The order is not the alphabet's, but that of docs/cuda.md.
first=$scratch/unpacked/programs/third_party.cuda_test
cp "$scratch/unpacked/programs/core.a_test" "$first"
check "what comes first" one 0 "runs 1 of 2: third_party.cuda_test"
rm "$first"
python3 - <<'PY' || failed=1
import importlib.machinery
import importlib.util
import re
import sys
loader = importlib.machinery.SourceFileLoader("gpu_check", "tools/gpu_check")
module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_check", loader))
loader.exec_module(module)
with open("docs/cuda.md", encoding="utf-8") as file:
    listed = re.findall(r"^[0-9]+\. `([a-z_.]+)`", file.read(), re.MULTILINE)
if listed != module.FIRST:
    sys.exit("FAILED: docs/cuda.md has %s, and gpu_check %s" % (listed, module.FIRST))
PY

benchmark=$scratch/unpacked/programs/benchmarks.gpu
printf '#!/bin/sh\n[ "$1" = --help ] || echo "$FIGURES"\n' >"$scratch/bin/benchmarks/gpu"
chmod +x "$scratch/bin/benchmarks/gpu"
cp "$scratch/bin/benchmarks/gpu" "$benchmark"
check "with the benchmark" one 0 "2 of 2 programs start"
grep -q '"name": "a copy"' "$scratch/report.json"
FIGURES=nothing check "the benchmark fails" one 1 "FAILED: the benchmark: it has printed no figures"
grep -q '"outcome": "passed"' "$scratch/report.json"
# Of one that is ended in the middle of its third line the first two are kept.
cat >"$benchmark" <<'SH'
#!/bin/sh
[ "$1" = --help ] && exit 0
printf '{"name": "first"}\n{"name": "second"}\n{"name": "thi'
sleep 1000000
SH
check "the benchmark is ended" one 1 "FAILED: the benchmark: it did not end within 3 s; it has printed 2 figures" \
  --timeout 3
grep -q '"name": "second"' "$scratch/report.json"
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

# With Bazel, of which there is a stub here: it knows the targets $LABELS, has built what is in bin, and its
# build command ends with $ENDS.
mkdir -p "$scratch/tree/tools"
cp tools/gpu_check tools/skipped.py "$scratch/tree/tools"
cat >"$scratch/tree/tools/bazel" <<'SH'
#!/bin/sh
echo "$@" >>"$ARGUMENTS"
case $1 in
  query) printf '%s\n' ${LABELS:-//core:a_test} ;;
  build) exit "${ENDS:-0}" ;;
  info) echo "$BIN" ;;
esac
SH
chmod +x "$scratch/tree/tools/bazel"
export ARGUMENTS=$scratch/arguments BIN=$scratch/bin
# check_bazel WHAT STATUS TEXT [OPTION...]
check_bazel() {
  local status=0
  LD_LIBRARY_PATH=$scratch/one python3 "$scratch/tree/tools/gpu_check" "${@:4}" \
    --json "$scratch/report.json" >"$scratch/said" 2>&1 || status=$?
  if [[ $status != "$2" ]] || ! grep -qF -- "$3" "$scratch/said"; then
    echo "FAILED: $1: status $status, not $2, or it does not say '$3':" >&2
    cat "$scratch/said" >&2
    failed=1
  fi
}
program 0 ""
check_bazel "all pass" 0 "//core:a_test: passed, 1 times 2 cases and 0 skipped"
grep -q '"name": "a copy"' "$scratch/report.json"
grep -qx "build --config=cuda //core:a_test //benchmarks:gpu" "$ARGUMENTS"
FIGURES=nothing check_bazel "the benchmark fails" 1 "FAILED: the benchmark"
FIGURES=nothing check_bazel "a target" 0 "1 programs passed" //core:a_test
grep -qx "query --noshow_progress tests(//core:a_test)" "$ARGUMENTS"
check_bazel "repeats" 0 "//core:a_test: passed, 3 times 2 cases and 0 skipped" --repeat 3
ENDS=1 check_bazel "a target that Bazel cannot build, or leaves out" 1 "Bazel's build ended with status 1"
program 3 ""
check_bazel "a test fails" 1 "FAILED: //core:a_test: failed"
program 0 "this machine has no GPU"
check_bazel "a test does not see the GPU" 1 "does not justify that //core:a_test A.Two is skipped"
printf '#!/bin/sh\n' >"$scratch/bin/core/a_test"
check_bazel "a test that has run nothing" 1 "0 of 1 repeats have written results"

# An archive, of programs in C.
echo 'int of_a_library(void) { return 0; }' |
  cc -shared -Wl,-soname,libof_this_tree.so -o "$scratch/bin/libof_this_tree.so" -x c -
echo 'int main() { return 0; }' >"$scratch/main.c"
compile() { cc -o "$scratch/bin/$1" -Wl,-rpath,/a/place/of/here "$scratch/main.c" "${@:2}"; }
compile core/a_test
compile core/b_test
compile benchmarks/gpu
export LABELS="//core:a_test //core:b_test"
pack() { check_bazel "$@" --pack "$scratch/archive.tar.xz"; }
pack "an archive" 0 "archive.tar.xz: 3 programs, 0.0 MB; they need GLIBC 2."
mkdir "$scratch/elsewhere"
python3 -m tarfile -e "$scratch/archive.tar.xz" "$scratch/elsewhere"
for name in gpu_check skipped.py about.json programs/core.a_test programs/core.b_test programs/benchmarks.gpu; do
  [[ -f $scratch/elsewhere/distgrad_gpu_check/$name ]] || { echo "FAILED: there is no $name" >&2 && failed=1; }
done
status=0
LD_LIBRARY_PATH=$scratch/none "$scratch/elsewhere/distgrad_gpu_check/gpu_check" --site "$scratch/site" \
  >"$scratch/said" 2>&1 || status=$?
if [[ $status != 2 ]] || ! grep -q "3 of 3 programs start" "$scratch/said"; then
  echo "FAILED: what was unpacked: status $status" >&2
  cat "$scratch/said" >&2
  failed=1
fi
compile core/b_test -Wl,--no-as-needed "$scratch/bin/libof_this_tree.so"
pack "a library that nobody has" 1 "core.b_test needs libof_this_tree.so, which neither a system nor torch has"
compile core/b_test
printf '#!/bin/sh\ncp "$3" "$2"\n' >"$scratch/elsewhere/strip"
chmod +x "$scratch/elsewhere/strip"
PATH=$scratch/elsewhere:$PATH pack "what is not stripped" 1 "FAILED: core.a_test is not stripped"
python3 - "$scratch/archive.tar.xz" "$scratch/tree/tools/gpu_check" <<'PY' || failed=1
import argparse
import importlib.machinery
import importlib.util
import sys
loader = importlib.machinery.SourceFileLoader("gpu_check", sys.argv[2])
module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_check", loader))
loader.exec_module(module)
found = module.faults_of(sys.argv[1], ["core.a_test", "core.b_test", "core.c_test"])
for text in ("the archive has no programs/core.c_test", "the archive has programs/benchmarks.gpu, which is no test"):
    if not any(fault.startswith(text) for fault in found):
        sys.exit("FAILED: %s is no fault among %s" % (text, found))
if module.MOST_BYTES > 60 << 20:
    sys.exit("FAILED: an archive may have %d bytes" % module.MOST_BYTES)
module.MOST_BYTES = 100
if module.pack(argparse.Namespace(targets=[], pack=sys.argv[1])) != 1:
    sys.exit("FAILED: an archive may be larger than it may be")
PY

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
