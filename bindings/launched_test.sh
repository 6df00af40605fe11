#!/usr/bin/env bash
# launched_test PROGRAM FUNCTION
#
# A sample of two processes that a launcher starts, as on several machines, rather than the sample
# itself. The trace of each has the calls of FUNCTION.
set -euo pipefail
source "$TEST_SRCDIR/$TEST_WORKSPACE/capi/testing/skip.sh"
program=$PWD/$1 function=$2
[[ -e $program ]] || skip "the crate is not built here; its other tests say why"
find_libraries
# Not one that follows from the number of this process, which in a sandbox is that of other tests.
MASTER_PORT=$(/usr/bin/python3 -c '
import socket
with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    print(listener.getsockname()[1])')
export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT TRACE=$TEST_TMPDIR
RANK=1 "$program" &
other=$!
RANK=0 "$program"
wait "$other"
for rank in 0 1; do
  file=$TEST_TMPDIR/trace.$rank.json
  grep -q '"traceEvents"' "$file" && grep -q "\"$function\"" "$file" || {
    echo "FAILED: $file lacks $function: $(head -c 1000 "$file")" >&2
    exit 1
  }
done
