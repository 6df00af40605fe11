#!/usr/bin/env bash
# What tools/coverage.py says of a program that is compiled here as .bazelrc has it, with a script in
# Bazel's place.
set -euo pipefail
scratch=$(mktemp -d "$TEST_TMPDIR/coverage.XXXXXX")
mkdir -p "$scratch"/{tools,core/part,capi}
cp "$TEST_SRCDIR/$TEST_WORKSPACE/tools/coverage.py" "$scratch/tools"
cd "$scratch"
fail() { echo "FAILED: $*" >&2; exit 1; }

cat >core/part/half.h <<'END'
inline int Twice(int x) {
  return x + x;
}
END
cat >core/part/half.cc <<'END'
#include "core/part/half.h"
int Half(int x) {
  if (x > 1) {
    return Twice(x) / 4;
  }
  x += 1;
  return x;
}
END
cat >core/part/half_test.cc <<'END'
#include <cstdlib>
int Half(int x);
int main() {
  return Half(4) == 2 ? 0 : 1;
}
END
echo 'int Never() { return 7; }' >capi/never.cc
mkdir -p bazel-out/core/part bazel-out/capi
# Bazel's compilers are told that this is where they are.
for source in core/part/half.cc core/part/half_test.cc capi/never.cc; do
  PWD=/proc/self/cwd g++ -O0 -I. --coverage -c "$source" -o "bazel-out/${source%.cc}.pic.o"
done
g++ --coverage bazel-out/core/part/*.o -o program
cat >real <<'END'
#!/usr/bin/env bash
set -euo pipefail
echo "$*" >>calls
case $1 in
  info) echo "$PWD/bazel-out" ;;
  test)
    for argument; do
      if [[ $argument == --test_env=* ]]; then export "${argument#--test_env=}"; fi
    done
    ./program
    exit "${STATUS:-0}"
    ;;
esac
END
chmod +x real
export BAZEL=./real

python3 tools/coverage.py --missing --json counts.json //core/part:all >said || fail "status $?: $(cat said)"
grep -q -- "--config=coverage .*-- //core/part:all$" calls || fail "it called $(cat calls)"
diff - said <<'END' || fail "it says something else"
   0.0 %       0 of      1  capi
    capi/never.cc: 1
  71.4 %       5 of      7  core/part
    core/part/half.cc: 6-7
  62.5 %       5 of      8  all
END
grep -q '"core/part/half.h": {"1": 1, "2": 1' counts.json || fail "counts: $(cat counts.json)"

# Each call counts anew, and says that a test has failed.
status=0
STATUS=3 python3 tools/coverage.py --config asan --folder core/part --json counts.json >said || status=$?
((status == 3)) || fail "a test that fails gives status $status"
# The last one says which output folders are used, to build and to count.
(($(grep -c -- "^[a-z]* --config=asan --config=coverage" calls) == 2)) || fail "it called $(cat calls)"
diff - said <<'END' || fail "it says something else of a folder"
  71.4 %       5 of      7  core/part
  71.4 %       5 of      7  all
END
grep -q '"core/part/half.h": {"1": 1, "2": 1' counts.json || fail "counted twice: $(cat counts.json)"

# Where nothing is counted at all, that is an error and no table.
printf '#!/bin/sh\nexit 0\n' >program
if python3 tools/coverage.py >said 2>&1; then fail "no counts are taken for a result: $(cat said)"; fi
grep -q "no test has written counts" said || fail "it says $(cat said)"
