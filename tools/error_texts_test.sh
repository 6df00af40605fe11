#!/usr/bin/env bash
# What tools/error_texts.py finds of a page in two sources.
set -euo pipefail
tool=$TEST_SRCDIR/$TEST_WORKSPACE/tools/error_texts.py
cd "$(mktemp -d "$TEST_TMPDIR/error_texts.XXXXXX")"
cat >one.cc <<'END'
return absl::NotFoundError(absl::StrCat("there is no worker '", name,
                                        "' in "
                                        "this job"));
END
echo 'Fail("it is \"full\": ", what);' >two.cc

failed=0
# check WHAT EXPECTED: of standard input as page.md.
check() {
  local status=0 said
  cat >page.md
  said=$(python3 "$tool" page.md one.cc two.cc) || status=$?
  if [[ $said != "$2" || $status != $([[ -z $2 ]] && echo 0 || echo 1) ]]; then
    echo "FAILED: $1: status $status; it said '$said', not '$2'" >&2
    failed=1
  fi
}
check "texts that are there" "" <<'END'
# Errors
### `there is no worker '…' in this job`
### `it is "full": …`
END
check "a text that has changed" "page.md:2: no file has all of [\"there is no worker '\", \"' in that job\"]" <<'END'
### `it is "full": …`
### `there is no worker '…' in that job`
END
check "pieces of two files" "page.md:1: no file has all of ['it is \"full\":', \"' in this job\"]" <<'END'
### `it is "full": …' in this job`
END
check "no text" "page.md:1: this heading has no text of an error between backticks" <<'END'
### Something else
END
check "nothing at all" "page.md has no texts of errors" <<'END'
## Errors
END
exit $failed
