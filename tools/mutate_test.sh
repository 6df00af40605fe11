#!/usr/bin/env bash
# What tools/mutate.py would change in a file that is written here, that each change counts when it is
# its turn, and that a flaky test kills none.
set -euo pipefail
cd "$TEST_SRCDIR/$TEST_WORKSPACE"
scratch=$(mktemp -d "$TEST_TMPDIR/mutate.XXXXXX")

cat >"$scratch/link.cc" <<'END'
// Comments(are) left alone;
#include "core/rpc/link.h"
void Link::Close(int size) {
  absl::MutexLock lock(&mu_);
  const int left = limit_ - size;
  closed_ = true;
  waiting_.clear();
  DG_LOG(INFO) << "closed";
  if (left > 0 && open_) {
    return;
  }
  owner_->OnClosed(
      left);
}
bool Link::Await() {
  const SteadyMutexLock lock(&waiters_);
}
END
expected="4: without the lock: ;
6: without the statement: ;
6: two statements the other way round: waiting_.clear(); / closed_ = true;
7: without the statement: ;
9: the other condition: if (!(left > 0 && open_)) {
9: || for &&: if (left > 0 || open_) {
9: >= for >: if (left >= 0 && open_) {
10: without the statement: ;
16: without the lock: ;"
touch "$scratch/link_test.cc"
diff <(sed "s|^|$scratch/link.cc:|" <<<"$expected") <(tools/mutate.py --list "$scratch")

cat >"$scratch/sums.cc" <<'END'
// Sums.
#include <iostream>
namespace sums {
int Sum(int n) {
  int sum = 0;
  for (int i = 0; i < n; ++i) {
    if (i == 3) {
      continue;
    }
    sum += i;
  }
  sum *= 2;
  sum += 1;  // odd
  return sum > 10 ? sum : -sum;
}
}  // namespace sums
int main() { std::cout << sums::Sum(4) << " " << sums::Sum(9); }
END
tools/mutate.py --plant --count 100 "$scratch/sums.cc" >"$scratch/planted.cc"
c++ -std=c++17 -o "$scratch/sums" "$scratch/planted.cc"
export DISTGRAD_MUTANTS=$scratch/on TEST_TARGET=//some:test
mkdir -p "$DISTGRAD_MUTANTS/seen"
prints() {
  echo "$1" >"$DISTGRAD_MUTANTS/on"
  timeout 10 "$scratch/sums"
}
count=$(grep -o 'Mutant([0-9]*) ?\|!Mutant([0-9]*))' "$scratch/planted.cc" | wc -l)
[[ $count -ge 6 ]]
plain=$(prints 0)
[[ $plain == "-7 67" ]]
# All of them are reached, and each changes what is printed, but for one: no sum is 10.
for ((n = 1; n <= count; ++n)); do
  [[ -e $DISTGRAD_MUTANTS/seen/$n@++some:test ]]
  printed=$(prints "$n")
  [[ $printed != "$plain" ]] || echo "$n"
done >"$scratch/same"
same=$(cat "$scratch/same")
grep -q "Mutant($same) ? (sum >= 10" "$scratch/planted.cc"

# A test kills a mutant if it fails with it, passes without, and fails with it again. In place of
# Bazel: what each run of a test says, in turn.
PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=tools python3 - "$scratch/tree" <<'END'
import collections
import os
import subprocess
import sys

import mutate

LATE, OWN = "//core/rpc:late_test", "//core/rpc:link_test"


class Scripted(mutate.Schemata):
  """The mutant 7 of core/rpc/link.cc, which both tests reach."""

  def __init__(self, says):
    super().__init__(sys.argv[1], longest=30, grace=15)
    os.makedirs(self.folder, exist_ok=True)
    self.reached = {7: {LATE, OWN}}
    self.seconds = {LATE: 1.0, OWN: 2.0}
    self.says = says
    self.runs = collections.Counter()

  def test(self, targets, timeout, *arguments):
    with open(os.path.join(self.folder, "on"), encoding="ascii") as file:
      on = int(file.read())
    said = []
    for test in targets:
      how = self.says.get((test, on), ["PASSED"])
      said.append((test, how[min(self.runs[test, on], len(how) - 1)]))
      self.runs[test, on] += 1
    return subprocess.CompletedProcess(
        [], 3 if any(how != "PASSED" for _, how in said) else 0,
        "".join(f"{test}   {how} in 1.0s\n" for test, how in said), "")


def expect(says, result):
  outcome = Scripted(says).outcome(7, "core/rpc/link.cc")
  assert outcome == result, f"{says}: {outcome}, not {result}"


expect({}, "SURVIVED: 2 tests pass")
expect({(OWN, 7): ["FAILED"]}, f"killed by {OWN}")
expect({(LATE, 7): ["TIMEOUT"]}, f"killed by {LATE} (it hangs)")
# Fails now and then, and also with the mutant off.
expect({(OWN, 7): ["FAILED", "PASSED"]}, f"SURVIVED: 1 tests pass; flaky: {OWN}")
expect({(OWN, 7): ["FAILED"], (OWN, 0): ["FAILED"]}, f"SURVIVED: 1 tests pass; flaky: {OWN}")
# Another one may kill it all the same.
expect({(OWN, 7): ["FAILED", "PASSED"], (LATE, 7): ["FAILED"]}, f"killed by {LATE}")
END
