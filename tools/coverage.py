#!/usr/bin/env python3
"""Runs tests, and says which lines of core and capi they have run.

  tools/coverage.py [--missing] [--folder FOLDER] [--json FILE] [--config CONFIG] [TARGET...]

Builds TARGET... (default //core/... //capi/... //tests/integration/...) with --config=coverage, for which
g++ counts how often each line runs, runs the tests, and prints for each package of core and capi how many
of its lines have code, and how many of these ran. With --missing it also prints which did not, file by
file; --folder core/rpc prints that folder alone. Tests and what is only for them do not count.
--config asan builds and runs them under that sanitizer, too, so that one build serves both; what skips
there has no counts.

A process writes its counts when it ends by itself: what it did is missing if it was killed, or ended with
_exit. A source that was built, and that no test of this call reaches, counts with all of its lines: use
--folder where TARGET... is not everything. Counts of all tests are added up in bazel-coverage/ of the
working tree, which each call begins anew.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
TARGETS = ["//core/...", "//capi/...", "//tests/integration/..."]
# Of which sources lines count.
COUNTED = re.compile(r"^(?:core|capi)/.*\.(?:cc|h|hpp)$")
FOR_TESTS = re.compile(r"_(?:test|testing|benchmark|conformance|cases)\.(?:cc|h)$|/testing/")


def find(folder, ending):
  for at, _, names in os.walk(folder):
    for name in names:
      if name.endswith(ending):
        yield os.path.join(at, name)


def read(output):
  """What `gcov --json-format --stdout` has said of any number of files: {file: {line: count}}."""
  lines = collections.defaultdict(dict)
  for document in output.splitlines():
    for file in json.loads(document)["files"]:
      path = os.path.normpath(file["file"])
      # Of a source that is gone there may still be an object.
      if not COUNTED.match(path) or FOR_TESTS.search(path) or not os.path.exists(os.path.join(ROOT, path)):
        continue
      of_file = lines[path]
      for line in file["lines"]:
        number = line["line_number"]
        of_file[number] = of_file.get(number, 0) + line["count"]
  return lines


def of_object(path):
  """The same for an object's notes and its counts: its path in Bazel's output, without the ending."""
  return os.path.splitext(path[path.rindex("/bazel-out/"):])[0]


def gcov(notes, counts, scratch):
  """Runs gcov over one object's notes and its counts, which it wants side by side."""
  folder = os.path.join(scratch, os.path.dirname(of_object(notes)).lstrip("/"))
  os.makedirs(folder, exist_ok=True)
  # Without counts none of its lines have run.
  for path in [notes] + counts:
    os.symlink(path, os.path.join(folder, os.path.basename(path)))
  result = subprocess.run(["gcov", "--json-format", "--stdout", os.path.join(folder, os.path.basename(notes))],
                          cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  if result.returncode != 0:
    sys.exit("gcov fails on %s: %s" % (notes, result.stderr))
  return result.stdout


def gather(objects, written):
  """All counts of the objects of core and capi: {file: {line: count}}."""
  lines = collections.defaultdict(dict)
  notes = [path for part in ("core", "capi") for path in find(os.path.join(objects, part), ".gcno")]
  counts = {of_object(path): path for path in find(written, ".gcda")}
  with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    def run(path):
      of = counts.get(of_object(path))
      return gcov(path, [of] if of else [], scratch)
    for output in pool.map(run, notes):
      for path, of_file in read(output).items():
        for number, count in of_file.items():
          lines[path][number] = lines[path].get(number, 0) + count
  return lines


def ranges(numbers):
  """As in "3, 7-9"."""
  parts = []
  for number in sorted(numbers):
    if parts and parts[-1][1] == number - 1:
      parts[-1][1] = number
    else:
      parts.append([number, number])
  return ", ".join("%d" % a if a == b else "%d-%d" % (a, b) for a, b in parts)


def report(lines, folder, missing):
  """The lines to print of {file: {line: count}}."""
  packages = collections.defaultdict(list)
  for path in sorted(lines):
    if not folder or path == folder or path.startswith(folder + "/"):
      packages[os.path.dirname(path)].append(path)
  said, all_lines, all_run = [], 0, 0
  for package, paths in sorted(packages.items()):
    total = sum(len(lines[path]) for path in paths)
    run = sum(sum(count > 0 for count in lines[path].values()) for path in paths)
    all_lines, all_run = all_lines + total, all_run + run
    said.append("%6.1f %%  %6d of %6d  %s" % (100 * run / max(1, total), run, total, package))
    if missing:
      for path in paths:
        not_run = [number for number, count in lines[path].items() if count == 0]
        if not_run:
          said.append("    %s: %s" % (path, ranges(not_run)))
  said.append("%6.1f %%  %6d of %6d  all" % (100 * all_run / max(1, all_lines), all_run, all_lines))
  return said


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--missing", action="store_true")
  parser.add_argument("--folder", default="")
  parser.add_argument("--json")
  parser.add_argument("--config", action="append", default=[])
  parser.add_argument("targets", nargs="*", default=TARGETS)
  options = parser.parse_args()
  os.chdir(ROOT)
  counts = os.path.join(ROOT, "bazel-coverage")
  shutil.rmtree(counts, ignore_errors=True)
  os.makedirs(counts)
  bazel = os.environ.get("BAZEL", "tools/bazel")
  # That of the coverage comes last, for its output folders are its own.
  configs = ["--config=" + each for each in options.config + ["coverage"]]
  tests = subprocess.run([bazel, "test", *configs, "--nocache_test_results",
                          "--sandbox_writable_path=" + counts, "--test_env=GCOV_PREFIX=" + counts, "--",
                          *options.targets])
  info = subprocess.run([bazel, "info", *configs, "bazel-bin"], stdout=subprocess.PIPE, text=True,
                        check=True)
  lines = gather(info.stdout.strip(), counts)
  if not any(any(of_file.values()) for of_file in lines.values()):
    sys.exit("no test has written counts into %s" % counts)
  print("\n".join(report(lines, options.folder.rstrip("/"), options.missing)))
  if options.json:
    with open(options.json, "w") as file:
      json.dump(lines, file, sort_keys=True)
  # A test that fails may not have got to its end, so its lines are those until then.
  return tests.returncode


if __name__ == "__main__":
  sys.exit(main())
