#!/usr/bin/env bash
# What tools/mutate.py would change in a file that is written here.
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
