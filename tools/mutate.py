#!/usr/bin/env python3
"""Finds statements that no test needs: changes one at a time, and runs the tests.

  tools/mutate.py [--seed S] [--count N] [--tree DIR] [--log FILE] FILE_OR_FOLDER...
  tools/mutate.py --list FILE_OR_FOLDER...

A mutant is a source file with one change: a statement is gone, two stand in the other order, a
condition is turned round, a comparison is off by one, a mutex is not locked. N of them (default 20)
are drawn by the seed from all that the files allow (*.cc, tests aside). Each is built and tested in a
work tree of its own (DIR, default "mutants" in the project's cache; kept, for the next run builds on
it): the tests of its package first, and if they pass those of //core/worker, //capi and
//tests/integration; where a mutex is not locked, clang's analysis by //tools:clang_tidy_test. A change that does not compile is no mutant, and another is drawn for it. What
fails or hangs is killed; what passes survives, and wants a test or a reason.

Each result is printed, and appended to FILE as a line of JSON. Ends with 1 if fewer than nine in ten
are killed.
"""

import argparse
import glob
import json
import os
import random
import re
import subprocess
import sys

NO_LOCK = "without the lock"
CACHE = os.environ.get("DISTGRAD_CACHE") or os.path.expanduser("~/.cache/distgrad")
TESTED_NEXT = ["//core/worker/...", "//capi/...", "//tests/integration/..."]

# A statement on one line that is no declaration: what it does can be left out.
STATEMENT = re.compile(r"^\s+(?!return\b|using\b|static\b|constexpr\b|const\b|auto\b|delete\b|goto\b|"
                       r"break\b|continue\b|DG_ASSIGN_OR_RETURN|absl::MutexLock\b|case\b|typedef\b|"
                       r"public:|private:)"
                       r"(?:\+\+|--|\*)?[A-Za-z_][\w:.\->\[\]()]*\s*(?:\(|[-+|&^]?=[^=]|\+\+|--).*;"
                       r"(?:\s*//.*)?$")
LEAVES = re.compile(r"^\s+(?:break|continue|return);")
LOCK = re.compile(r"^\s+absl::(?:Reader|Writer)?MutexLock \w+\(.*\);")
# `Type name = value;` and `Type name(value);` are declarations that others need.
DECLARATION = re.compile(r"^\s+(?:[\w:]+(?:<.*>)?[&*]*\s+)+[&*]?\w+\s*(?:=|\(|\{|;)")
LEFT_ALONE = re.compile(r"^\s*(?://|#|\*|DG_LOG|DG_CHECK)")
CONDITION = re.compile(r"\b(if|while) \((.*)\)( \{| return| continue| break|$)")
COMPARISONS = [("==", "!="), ("!=", "=="), ("<=", "<"), (">=", ">"), ("<", "<="), (">", ">=")]


def is_statement(line):
  return STATEMENT.match(line) is not None and not DECLARATION.match(line)


def mutants_of(lines):
  """All (line number from 0, what is done, the lines in its place) of a file."""
  found = []
  for i, line in enumerate(lines):
    if LEFT_ALONE.match(line):
      continue
    statement = is_statement(line)
    balanced = line.count("(") == line.count(")") and line.count("{") == line.count("}")
    if (statement and balanced) or LEAVES.match(line):
      found.append((i, "without the statement", [re.sub(r"\S.*", ";", line)]))
      below = lines[i + 1] if i + 1 < len(lines) else ""
      indent = len(line) - len(line.lstrip())
      if (statement and is_statement(below) and not LEFT_ALONE.match(below) and
          below.count("(") == below.count(")") and indent == len(below) - len(below.lstrip())):
        found.append((i, "two statements the other way round", [below, line]))
    if LOCK.match(line):
      found.append((i, NO_LOCK, [re.sub(r"\S.*", ";", line)]))
    condition = CONDITION.search(line)
    if condition and condition[2].count("(") == condition[2].count(")") and " = " not in condition[2]:
      turned = f"{condition[1]} (!({condition[2]})){condition[3]}"
      found.append((i, "the other condition", [line[:condition.start()] + turned + line[condition.end():]]))
      for operator, other in (("&&", "||"), ("||", "&&")):
        if f" {operator} " in condition[2]:
          found.append((i, f"{other} for {operator}", [line.replace(f" {operator} ", f" {other} ", 1)]))
    for operator, other in COMPARISONS:
      at = line.find(f" {operator} ")
      if at >= 0 and "template" not in line:
        found.append((i, f"{other} for {operator}", [line.replace(f" {operator} ", f" {other} ", 1)]))
        break
  return found


def files_of(names):
  files = []
  for name in names:
    inside = sorted(glob.glob(name + "/**/*.cc", recursive=True)) if os.path.isdir(name) else [name]
    files += [f for f in inside if not re.search(r"_(test|testing|benchmark|conformance|cases)\.cc$", f)]
  return files


def all_mutants(names):
  every = []
  for file in files_of(names):
    with open(file, encoding="utf-8") as source:
      lines = source.read().split("\n")
    every += [(file, i, what, new) for i, what, new in mutants_of(lines)]
  return every


def git(*arguments, cwd=None):
  return subprocess.run(["git", *arguments], cwd=cwd, check=True, capture_output=True,
                        text=True).stdout.strip()


def prepare(tree):
  """The work tree, as HEAD has it."""
  head = git("rev-parse", "HEAD")
  if os.path.exists(os.path.join(tree, ".git")):
    git("checkout", "-q", "--force", "--detach", head, cwd=tree)
  else:
    git("worktree", "add", "-q", "--detach", tree, head)
  if os.path.exists("user.bazelrc"):
    with open("user.bazelrc", encoding="utf-8") as ours, \
        open(os.path.join(tree, "user.bazelrc"), "w", encoding="utf-8") as theirs:
      theirs.write(ours.read())


def bazel(tree, *arguments):
  return subprocess.run(["tools/bazel", *arguments], cwd=tree, stdin=subprocess.DEVNULL,
                        capture_output=True, text=True, check=False)


def failing(tree, targets):
  """The tests among `targets` that fail or hang; None if all pass."""
  ran = bazel(tree, "test", "--test_timeout=120,300,600,900", "--test_output=summary",
              "--notest_keep_going", *targets)
  if ran.returncode == 0 or ran.returncode == 4:  # 4: there are no tests
    return None
  failed = re.findall(r"^(//\S+)\s+(?:FAILED|TIMEOUT)", ran.stdout + ran.stderr, re.M)
  return ", ".join(dict.fromkeys(failed)) or f"Bazel ended with {ran.returncode}"


def outcome(tree, file, line, what, new):
  path = os.path.join(tree, file)
  with open(path, encoding="utf-8") as source:
    before = source.read()
  lines = before.split("\n")
  lines[line:line + len(new)] = new
  package = "//" + os.path.dirname(file)
  try:
    with open(path, "w", encoding="utf-8") as source:
      source.write("\n".join(lines))
    if bazel(tree, "build", f"{package}:all").returncode != 0:
      return None
    first = [f"{package}:all"] + (["//tools:clang_tidy_test"] if what == NO_LOCK else [])
    by = failing(tree, first) or failing(tree, TESTED_NEXT)
    return f"killed by {by}" if by else "SURVIVED"
  finally:
    with open(path, "w", encoding="utf-8") as source:
      source.write(before)


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("names", nargs="+", metavar="FILE_OR_FOLDER")
  parser.add_argument("--seed", type=int, default=1)
  parser.add_argument("--count", type=int, default=20)
  parser.add_argument("--tree", default=os.path.join(CACHE, "mutants"))
  parser.add_argument("--log")
  parser.add_argument("--list", action="store_true", help="print what could be drawn")
  options = parser.parse_args()
  every = all_mutants(options.names)
  if options.list:
    for file, i, what, new in every:
      print(f"{file}:{i + 1}: {what}: {' / '.join(line.strip() for line in new)}")
    return 0
  tree = os.path.abspath(options.tree)
  prepare(tree)
  random.Random(options.seed).shuffle(every)
  killed, survived = 0, 0
  for file, i, what, new in every:
    if killed + survived == options.count:
      break
    result = outcome(tree, file, i, what, new)
    if result is None:
      continue
    killed += result != "SURVIVED"
    survived += result == "SURVIVED"
    said = {"at": f"{file}:{i + 1}", "change": what, "lines": [line.strip() for line in new],
            "result": result, "seed": options.seed, "commit": git("rev-parse", "--short", "HEAD")}
    print(f"{said['at']}: {what}: {result}", flush=True)
    if options.log:
      with open(options.log, "a", encoding="utf-8") as log:
        log.write(json.dumps(said) + "\n")
  print(f"{killed} of {killed + survived} mutants were killed")
  return 0 if killed >= 0.9 * (killed + survived) else 1


if __name__ == "__main__":
  os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
  sys.exit(main())
