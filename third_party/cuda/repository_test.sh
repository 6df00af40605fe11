#!/usr/bin/env bash
# Runs repository_test.py with the machine's Python.
set -euo pipefail
exec python3 "$TEST_SRCDIR/$TEST_WORKSPACE/third_party/cuda/repository_test.py"
