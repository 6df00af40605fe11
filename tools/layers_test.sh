#!/usr/bin/env bash
# What tools/layers.py finds in BUILD files that are written here, and what it passes over.
set -euo pipefail
layers=$TEST_SRCDIR/$TEST_WORKSPACE/tools/layers.py
failed=0
scratch=$(mktemp -d "$TEST_TMPDIR/layers.XXXXXX")
mkdir -p "$scratch"/{docs,core/{top,low/part,base},odd}
cat >"$scratch/docs/layers.md" <<'END'
## Layers

```
core/top   above
core/low   in the middle
core/base  below
```
END
# check WHAT LINES: of the BUILD files below $scratch.
check() {
  local said expected=0
  [[ -z $2 ]] || expected=1
  local status=0
  said=$(cd "$scratch" && python3 "$layers" docs/layers.md $(find core odd -name BUILD.bazel)) || status=$?
  if [[ $status != "$expected" ]] || ! diff <(echo "$2") <(echo "$said"); then
    echo "FAILED: $1: status $status; expected (<) and said (>)" >&2
    failed=1
  fi
}
# package FOLDER RULE VISIBILITY DEPENDENCY...
package() {
  {
    printf 'package(default_visibility = ["%s"])\n%s(name = "all", deps = [' "$3" "$2"
    printf '"%s", ' "${@:4}"
    echo '] + if_cuda([":x"]))'
  } >"$scratch/$1/BUILD.bazel"
}
good() {
  rm -f "$scratch/odd/BUILD.bazel"
  package core/top cc_library //visibility:private //core/low
  package core/low cc_library //core/top:__pkg__ //core/low/part:all //core/base:all
  package core/low/part cc_library //core/low:__pkg__ //core/base:all
  package core/base cc_library //core:__subpackages__ @absl//:status
}
good
check "dependencies that point down" ""
package core/low/part cc_library //core/low:__pkg__ //core/top
check "one that points up" \
  "//core/low/part:all depends on //core/top: core/low stands below core/top"
package core/low/part cc_test //core/low:__pkg__ //core/top
check "a test may point up" ""
good
package core/top cc_library //visibility:private //core/base:all
check "visibility that nobody uses" \
  "//core/low is open to //core/top:__pkg__, which does not use it"
good
package core/low cc_library //core:__subpackages__ //core/low/part:all //core/base:all
check "visibility for several layers" \
  "//core/low is open to //core:__subpackages__, which is several layers: name those that use it"
good
package odd cc_library //visibility:private //core/base:all
check "a folder without a layer" "odd/BUILD.bazel: its folder is in no layer of docs/layers.md"
good
package core/top cc_library //visibility:private //odd:all
check "a dependency without a layer" \
  "//core/low is open to //core/top:__pkg__, which does not use it
//core/top:all depends on //odd:all, which is in no layer of docs/layers.md"
exit $failed
