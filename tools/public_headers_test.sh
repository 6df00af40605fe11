#!/usr/bin/env bash
# What tools/public_headers.py counts in headers that are written here.
set -euo pipefail
program=$TEST_SRCDIR/$TEST_WORKSPACE/tools/public_headers.py
cd "$(mktemp -d "$TEST_TMPDIR/public_headers.XXXXXX")"
mkdir a
include() {  # FILE INCLUDED...
  printf '#include "%s"\n' "${@:2}" >"$1"
}
include a/top.h a/left.h a/right.h elsewhere.h
include a/left.h a/low.h
include a/right.h a/low.h a/left.h
printf '#include <a/top.h>\n// #include "a/other.h"\n' >a/low.h
touch a/other.h
python3 "$program" a/top.h=3 a/low.h=0 a/left.h=1 >said
[[ ! -s said ]]
status=0
python3 "$program" a/top.h=2 a/low.h=0 a/left.h=0 >said || status=$?
cat >wanted <<END
a/top.h brings 3 headers, more than 2: a/left.h, a/low.h, a/right.h
a/left.h brings 1 headers, more than 0: a/low.h
END
diff wanted said
[[ $status == 1 ]]
