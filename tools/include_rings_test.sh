#!/usr/bin/env bash
# What tools/include_rings.py finds in files that are written here, and what it passes over.
set -euo pipefail
program=$TEST_SRCDIR/$TEST_WORKSPACE/tools/include_rings.py
cd "$(mktemp -d "$TEST_TMPDIR/include_rings.XXXXXX")"
mkdir a
include() {  # FILE INCLUDED...
  printf '#include "%s"\n' "${@:2}" >"$1"
}
# A source belongs to its header: a/low and a/mid are a ring by way of low.cc, and a/top is in none.
include a/low.h missing.h
include a/low.cc a/low.h a/mid.h
include a/mid.h a/low.h
include a/top.cc a/top.h a/mid.h
include a/top.h a/low.h
# Three of one ring; a test may include what it likes.
include a/x.h a/y.h
include a/y.hpp a/top.h
include a/y.h a/z.h
include a/z.cc a/x.h
include a/top_test.cc a/x.h
include a/top_testing.h a/top_test.cc
echo '// #include "a/x.h"' >>a/top.h
cat >wanted <<END
these include each other: a/low, a/mid
these include each other: a/x, a/y, a/z
END
# y reaches z by its header.
include a/z.h a/low.h
status=0
python3 "$program" a/*.h a/*.hpp a/*.cc >said || status=$?
diff wanted said
[[ $status == 1 ]]
python3 "$program" a/top.h a/top.cc a/mid.h a/low.h >said
[[ ! -s said ]]
