# For shell tests, which source it: skip REASON ends the test, and lets the run say that it was skipped,
# and why.
skip() {
  echo "skipped: $1"
  if [[ -n ${XML_OUTPUT_FILE:-} ]]; then
    cat >"$XML_OUTPUT_FILE" <<END
<testsuites><testsuite name="shell"><testcase classname="shell" name="all"><skipped message="$1"/></testcase></testsuite></testsuites>
END
  fi
  exit 0
}

# left_out PART REASON: goes on without a part of the test, and lets the run say so as above: the part
# stands there as a test that was skipped.
left_out_parts=""
left_out() {
  echo "left out: $1: $2"
  left_out_parts+="<testcase classname=\"shell\" name=\"$1\" status=\"run\"><skipped message=\"$2\"/></testcase>"
  if [[ -n ${XML_OUTPUT_FILE:-} ]]; then
    cat >"$XML_OUTPUT_FILE" <<END
<testsuites><testsuite name="shell"><testcase classname="shell" name="all" status="run"/>$left_out_parts</testsuite></testsuites>
END
  fi
}

# A sanitizer's run-time has to come first in a program: one that was not built with it can't load
# the library.
skip_if_sanitized() { # LIBRARY
  # Not grep -q, which would stop nm in the middle, and with pipefail that counts.
  if nm -D --undefined-only "$1" | grep -E ' __(asan|tsan)_init' >/dev/null; then
    skip "the library is built with a sanitizer, the program that would load it is not"
  fi
}

# Lets a program of Rust's find its libraries, where they are among the test's files; those of C and
# C++ know where theirs are.
find_libraries() {
  local torch=$TEST_SRCDIR/torch/lib/libtorch_cpu.so
  local own=$TEST_SRCDIR/$TEST_WORKSPACE/capi/libdistgrad.so.1
  [[ -e $torch ]] || return 0
  LD_LIBRARY_PATH=$(dirname "$(readlink -f "$own")"):$(dirname "$(readlink -f "$torch")")
  export LD_LIBRARY_PATH
}
