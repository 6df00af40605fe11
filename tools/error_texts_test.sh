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
echo '  DG_ABORTED = 10,' >codes.h

failed=0
# check WHAT EXPECTED [PAGE]: of standard input as page.md, before another page.
check() {
  local status=0 said
  cat >page.md
  said=$(python3 "$tool" page.md "${@:3}" -- one.cc two.cc codes.h) || status=$?
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

cat >table.md <<'END'
| you see | because |
| --- | --- |
| `calling …: there is no worker '…' in this job` | one |
| `there is no worker '…' in this job: it is "full": …` | two |
| `ABORTED`, with a name | three |
| nothing: `no text of an error` | four |

| what | why |
| --- | --- |
| `no text of an error` | five |
END
sed -i 's/calling …/it is "full"/' table.md
check "tables" "" table.md <<'END'
### `it is "full": …`
END
sed 's/ABORTED/FAILED/; s/no worker/some worker/; s/is one/is another/' table.md >changed.md
check "texts of tables that have changed" "changed.md:3: no file has all of [\"there is some worker '\", \"' in this job\"]
changed.md:4: no file has all of [\"there is some worker '\", \"' in this job\"]
changed.md:5: there is no code FAILED" changed.md <<'END'
### `it is "full": …`
END
check "a table of the first page" "page.md:4: this has no text of an error" <<'END'
### `it is "full": …`
| you see | because |
| --- | --- |
| `…: …` | it is short |
END
echo "| you say | because |" >table.md
check "no table" "no page has a table of errors" table.md <<'END'
### `it is "full": …`
END
exit $failed
