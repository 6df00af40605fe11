#!/usr/bin/env bash
# What tools/skipped.py says of events and results that are written here, and what it lets pass.
set -euo pipefail
cd "$TEST_SRCDIR/$TEST_WORKSPACE"
scratch=$(mktemp -d "$TEST_TMPDIR/skipped.XXXXXX")

failed=0
# check WHAT STATUS LINES [ALLOWED]: of $scratch/events.
check() {
  local status=0
  python3 tools/skipped.py "$scratch/events" ${4:+"$4"} >"$scratch/said" 2>&1 || status=$?
  if [[ $status != "$2" ]] || ! diff <(printf '%s' "${3:+$3$'\n'}") "$scratch/said"; then
    echo "FAILED: $1: status $status; '$3' (<) and what it said (>)" >&2
    failed=1
  fi
}
# event ID REST
event() { printf '{"id":{%s},%s}\n' "$1" "$2"; }
# target LABEL STATUS [CASES]: one that ran, with the cases of its test.xml.
target() {
  local xml=$scratch/${1//[^a-z]/_}.xml
  event "\"targetConfigured\":{\"label\":\"$1\"}" '"configured":{"targetKind":"cc_test rule"}'
  if [[ -n ${3:-} ]]; then
    printf '<testsuites><testsuite>%s</testsuite></testsuites>\n' "$3" >"$xml"
    event "\"testResult\":{\"label\":\"$1\"}" \
      "\"testResult\":{\"testActionOutput\":[{\"name\":\"test.xml\",\"uri\":\"file://$xml\"}]}"
  fi
  event "\"testSummary\":{\"label\":\"$1\"}" "\"testSummary\":{\"overallStatus\":\"$2\"}"
}
ran() { printf '<testcase classname="Suite" name="%s" status="run"/>' "$1"; }
skipped() {
  printf '<testcase classname="Suite" name="%s" status="run"><skipped message="a.cc:7&#x0A;%s"/></testcase>' "$1" "$2"
}

{
  target //a:all PASSED "$(ran One)$(ran Two)"
  target //a:part PASSED "$(ran One)$(skipped Two 'no GPU (at all?) [here]')"
  target //a:none PASSED "$(skipped One 'no tc')"
  target //a:off PASSED "$(ran One)<testcase classname=\"Suite\" name=\"DISABLED_Two\" status=\"notrun\"/>"
  target //a:empty PASSED " "
  target //a:bad FAILED "$(ran One)"
  target //a:died FAILED
  event '"targetConfigured":{"label":"//a:cuda"}' '"configured":{"targetKind":"cc_test rule"}'
  event '"targetCompleted":{"label":"//a:cuda"}' '"aborted":{"reason":"SKIPPED"}'
  event '"targetConfigured":{"label":"//a:library"}' '"configured":{"targetKind":"cc_library rule"}'
} >"$scratch/events"
said='skipped: //a:cuda: not compatible with this platform
skipped: //a:empty: it passed without a case that ran
skipped: //a:none Suite.One: no tc
skipped: //a:off Suite.DISABLED_Two: it is disabled
skipped: //a:part Suite.Two: no GPU (at all?) [here]
3 passed, 2 failed, 3 skipped'
check "without a list all may be skipped" 0 "$said"

cat >"$scratch/all" <<'END'
# Why.
//a:cuda: not compatible with this platform

//a:empty: it passed without a case that ran
//a:none *: no tc
//a:off Suite.DISABLED_Two: it is disabled
//a:part Suite.T*: no GPU (at all?) [here]
END
check "what is on the list" 0 "$said" "$scratch/all"

sed 's|^//a:none|? &|' "$scratch/all" >"$scratch/elsewhere"
check "what another machine would run" 0 "$said
NOT RUN ON THIS MACHINE: //a:none Suite.One: no tc" "$scratch/elsewhere"

grep -v 'a:none' "$scratch/all" >"$scratch/part"
check "what is not on the list" 1 "$said
FAILED: this is not to be skipped here, for $scratch/part does not have it: //a:none Suite.One: no tc" "$scratch/part"

# Signs of shells and of regular expressions mean themselves.
sed 's/no GPU.*/no GPU (at all.) [h]/' "$scratch/all" >"$scratch/signs"
check "only the star is a sign" 1 "$said
FAILED: this is not to be skipped here, for $scratch/signs does not have it: //a:part Suite.Two: no GPU (at all?) [here]" "$scratch/signs"

: >"$scratch/events"
check "a call that tested nothing" 0 "" .ci/skips
exit $failed
