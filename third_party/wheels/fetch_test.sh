#!/usr/bin/env bash
# Runs fetch_test.py with the machine's Python, as the rule of wheels does with fetch.py.
set -euo pipefail
exec python3 "$TEST_SRCDIR/$TEST_WORKSPACE/third_party/wheels/fetch_test.py"
