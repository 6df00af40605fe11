#!/usr/bin/env bash
# Runs release_test.py with the Python that makes releases.
set -euo pipefail
cd "$TEST_SRCDIR/$TEST_WORKSPACE"
PYTHONPATH=$PWD/tools:$PWD/capi/packaging PYTHONDONTWRITEBYTECODE=1 exec /usr/bin/python3 tools/release_test.py
