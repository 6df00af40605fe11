"""Says which tests of one `bazel test` were skipped and why, then counts its test targets.

skipped.py FILE [ALLOWED]: FILE was written by that call under --build_event_json_file. Where there
is a list of what may be skipped (.ci/skips says how it is written), anything else that was fails, and
what another machine would run is said once more.
"""
import fnmatch
import json
import sys
import urllib.parse
import xml.etree.ElementTree


def cases(path):
    """The (name, reason for being skipped or None) of each case in a test.xml."""
    for case in xml.etree.ElementTree.parse(path).iter("testcase"):
        name = "%s.%s" % (case.get("classname"), case.get("name"))
        skipped = case.find("skipped")
        if skipped is not None:
            text = skipped.get("message") or skipped.text or "no reason given"
            # GoogleTest puts "file:line" before the message.
            lines = [line.strip() for line in text.strip().splitlines()]
            yield name, " ".join(lines[1:] or lines)
        elif case.get("status") == "notrun":
            yield name, "it is disabled"
        else:
            yield name, None


def path_of(uri):
    """The file that an event names."""
    return urllib.parse.unquote(urllib.parse.urlparse(uri).path)


def patterns(path):
    """The lines of a list of what may be skipped, and of these those that begin with "? "."""
    with open(path, encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    lines = [line for line in lines if line and line[0] != "#"]
    # Of fnmatch's signs only * is one here.
    escaped = [line.removeprefix("? ").replace("[", "[[]").replace("?", "[?]") for line in lines]
    return escaped, [pattern for pattern, line in zip(escaped, lines) if line.startswith("? ")]


def matches(line, patterns):
    return any(fnmatch.fnmatchcase(line, pattern) for pattern in patterns)


def main(path, allowed=None):
    tests = {}  # label: "failed" until known otherwise
    skips = set()
    ran = set()  # labels with a case that was not skipped
    with open(path, encoding="utf-8") as file:
        for line in file:
            event = json.loads(line)
            kind, key = next(iter(event["id"].items()))
            label = key.get("label") if isinstance(key, dict) else None
            if kind == "targetConfigured":
                if event.get("configured", {}).get("targetKind", "").endswith("_test rule"):
                    tests.setdefault(label, "failed")
            elif kind == "targetCompleted" and label in tests:
                if event.get("aborted", {}).get("reason") == "SKIPPED":
                    tests[label] = "skipped"
                    skips.add((label, "", "not compatible with this platform"))
            elif kind == "testSummary":
                if event.get("testSummary", {}).get("overallStatus") in ("PASSED", "FLAKY"):
                    tests[label] = "passed"
            elif kind == "testResult":
                for output in event.get("testResult", {}).get("testActionOutput", []):
                    if output.get("name") != "test.xml":
                        continue
                    try:
                        found = list(cases(path_of(output["uri"])))
                    except (OSError, xml.etree.ElementTree.ParseError):
                        found = []  # the test died before it had written all of it
                    skips.update((label, name, reason) for name, reason in found if reason)
                    if not all(reason for _, reason in found):
                        ran.add(label)
    told = {label for label, _, _ in skips}
    for label in set(tests) - ran:
        if tests[label] == "passed":
            tests[label] = "skipped"
            if label not in told:
                skips.add((label, "", "it passed without a case that ran"))
    lines = [("%s %s: %s" if name else "%s%s: %s") % (label, name, reason) for label, name, reason in sorted(skips)]
    for line in lines:
        print("skipped: " + line)
    if tests:
        results = list(tests.values())
        print("%d passed, %d failed, %d skipped" % tuple(map(results.count, ("passed", "failed", "skipped"))))
    if allowed is None:
        return 0
    may, elsewhere = patterns(allowed)
    for line in lines:
        if matches(line, elsewhere):
            print("NOT RUN ON THIS MACHINE: " + line)
    others = [line for line in lines if not matches(line, may)]
    for line in others:
        print("FAILED: this is not to be skipped here, for %s does not have it: %s" % (allowed, line))
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
