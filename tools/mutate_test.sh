#!/usr/bin/env bash
# What tools/mutate.py would change in a file that is written here, and that each change counts when
# it is its turn.
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
END
expected="4: without the lock: ;
6: without the statement: ;
6: two statements the other way round: waiting_.clear(); / closed_ = true;
7: without the statement: ;
9: the other condition: if (!(left > 0 && open_)) {
9: || for &&: if (left > 0 || open_) {
9: >= for >: if (left >= 0 && open_) {
10: without the statement: ;"
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
