#!/usr/bin/env bash
# What tools/first_lines.py finds in files that are written here, and what it passes over.
set -euo pipefail
program=$TEST_SRCDIR/$TEST_WORKSPACE/tools/first_lines.py
cd "$(mktemp -d "$TEST_TMPDIR/first_lines.XXXXXX")"
printf '// Adds numbers.\n#include "sum.h"\n' >sum.cc
printf '/* Adds numbers,\n * from plain C. */\n' >sum.c
printf '#include "sum.h"\n// Adds numbers.\n' >late.cc
printf '\n// Adds numbers.\n' >below.cc
printf '//\n// Adds numbers.\n' >bare.cc
: >empty.h
cat >wanted <<END
below.cc: the first line does not say what the file is
bare.cc: the first line does not say what the file is
empty.h: the first line does not say what the file is
late.cc: the first line does not say what the file is
END
status=0
python3 "$program" below.cc sum.cc bare.cc empty.h sum.c late.cc >said || status=$?
diff wanted said
[[ $status == 1 ]]
python3 "$program" sum.cc sum.c >said
[[ ! -s said ]]
