#!/usr/bin/env python3
"""Finds statements that no test needs: changes one at a time, and runs the tests.

  tools/mutate.py [--seed S] [--count N] [--tree DIR] [--log FILE] FILE_OR_FOLDER...
  tools/mutate.py --list FILE_OR_FOLDER...

A mutant is a source file with one change: a statement is gone, two stand in the other order, a
condition is turned round, a comparison is off by one, a mutex is not locked. N of them (default 20),
each on lines of its own, are drawn by the seed from all that the files allow (*.cc, tests aside).

All are built at once, into one tree of programs (mutant schemata; R. Untch, 1993): each change stands
beside what it replaces, and a file says, when a program starts, which one counts. A change that does
not compile is no mutant, nor is one of a file that no program of TESTED has. The tests of TESTED run
once without any, which tells which of them get to which mutant, and how long they take; and then, for
each mutant, those that do, until one fails: the file's own test, those of its package, and the others,
quick ones first. A test that takes longer than --longest is left out; one that takes four times as long
as without, and --grace more, fails. A test that fails may be a flaky one: it runs once more without the
mutant, where it has to pass, and with it, where it has to fail again. Then the mutant is killed; what no
test kills survives, and wants a test or a reason. Where a mutex is not locked no test is run, but clang's
analysis by //tools:clang_tidy_test.

The tree (DIR, by default one of this clone in the project's cache) is a work tree of its own, and kept:
the next run builds on it. Each result is printed, and appended to FILE as a line of JSON; a run with the
same seed, count and FILE goes on where the last one was stopped. Ends with 1 if fewer than nine in ten
are killed.
"""

import argparse
import glob
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys

NO_LOCK = "without the lock"
GONE = "without the statement"
SWAPPED = "two statements the other way round"
CACHE = os.environ.get("DISTGRAD_CACHE") or os.path.expanduser("~/.cache/distgrad")
OF_TESTS = r"(_(test|testing|benchmark|conformance|cases)|/random_program)\.cc$"
TESTED = ["//core/...", "//capi/...", "//tests/integration/..."]

# A statement on one line that is no declaration: what it does can be left out.
STATEMENT = re.compile(r"^\s+(?!return\b|using\b|static\b|constexpr\b|const\b|auto\b|delete\b|goto\b|"
                       r"break\b|continue\b|DG_ASSIGN_OR_RETURN|absl::MutexLock\b|case\b|typedef\b|"
                       r"public:|private:)"
                       r"(?:\+\+|--|\*)?[A-Za-z_][\w:.\->\[\]()]*\s*(?:\(|[-+*/|&^]?=[^=]|\+\+|--).*;"
                       r"(?:\s*//.*)?$")
LEAVES = re.compile(r"^\s+(?:break|continue|return);")
LOCK = re.compile(r"^\s+(?:const )?(?:absl::(?:Reader|Writer)?MutexLock|SteadyMutexLock) \w+\(.*\);")
# `Type name = value;` and `Type name(value);` are declarations that others need.
DECLARATION = re.compile(r"^\s+(?:[\w:]+(?:<.*>)?[&*]*\s+)+[&*]?\w+\s*(?:=|\(|\{|;)")
LEFT_ALONE = re.compile(r"^\s*(?://|#|\*|DG_LOG|DG_CHECK)")
CONDITION = re.compile(r"\b(if|while) \((.*)\)( \{| return| continue| break|$)")
FAILED = re.compile(r"^(//\S+)\s+(FAILED|TIMEOUT)", re.M)  # a line of Bazel's summary
COMPARISONS = [("==", "!="), ("!=", "=="), ("<=", "<"), (">=", ">"), ("<", "<="), (">", ">=")]


# In each file: whether a mutant counts. $DISTGRAD_MUTANTS/on has its number; where that is 0, each
# test says in $DISTGRAD_MUTANTS/seen which mutants it gets to. In one line, so that the others stay
# where they are.
SWITCH = re.sub(r"\n\s*", " ", """
namespace {
  [[maybe_unused]] bool Mutant(int number) {
    static const char* const folder = std::getenv("DISTGRAD_MUTANTS");
    static const int on = [] {
      int value = -1;
      char path[4096];
      std::snprintf(path, sizeof(path), "%s/on", folder != nullptr ? folder : "");
      if (FILE* file = fopen(path, "re")) {
        if (fscanf(file, "%d", &value) != 1) value = -1;
        fclose(file);
      }
      return value;
    }();
    static bool told[100000];
    if (on == 0 && !__atomic_exchange_n(&told[number], true, __ATOMIC_RELAXED)) {
      const char* test = std::getenv("TEST_TARGET");
      char path[4096];
      int end = std::snprintf(path, sizeof(path), "%s/seen/%d@", folder, number);
      for (; test != nullptr && *test != 0 && end < 4000; ++test) {
        path[end++] = *test == '/' ? '+' : *test;
      }
      path[end] = 0;
      if (FILE* file = fopen(path, "we")) fclose(file);
    }
    return number == on;
  }
}""").strip()


ADDED = 3  # lines: what it needs, and it
NONE = 0  # the number of no mutant


def is_statement(line):
  return STATEMENT.match(line) is not None and not DECLARATION.match(line)


def region(line):
  """Where in a line the one expression is that can be computed in two ways; None if nowhere."""
  for pattern, group in ((CONDITION, 2), (r"\bfor \([^;]*; ([^;]*);[^;]*\) ?\{?$", 1),
                         (r"^\s+return (.*);$", 1), (r"^\s+[\w ]*[\w.\->\[\]]+ = (.*);$", 1)):
    found = re.search(pattern, line)
    if found and found[group].count("(") == found[group].count(")"):
      return found.start(group), found.end(group)
  return None


def mutants_of(lines):
  """All (line number from 0, what is done, the lines in its place) of a file."""
  found = []
  for i, line in enumerate(lines):
    if LEFT_ALONE.match(line):
      continue
    statement = is_statement(line)
    balanced = line.count("(") == line.count(")") and line.count("{") == line.count("}")
    if (statement and balanced) or LEAVES.match(line):
      found.append((i, GONE, [re.sub(r"\S.*", ";", line)]))
      below = lines[i + 1] if i + 1 < len(lines) else ""
      indent = len(line) - len(line.lstrip())
      if (statement and is_statement(below) and not LEFT_ALONE.match(below) and
          below.count("(") == below.count(")") and indent == len(below) - len(below.lstrip())):
        found.append((i, SWAPPED, [below, line]))
    if LOCK.match(line):
      found.append((i, NO_LOCK, [re.sub(r"\S.*", ";", line)]))
    where = region(line)
    if where is None:
      continue
    before, expression, after = line[:where[0]], line[where[0]:where[1]], line[where[1]:]
    others = []
    if CONDITION.search(line) and " = " not in expression:
      others.append(("the other condition", f"!({expression})"))
      for operator, other in (("&&", "||"), ("||", "&&")):
        if f" {operator} " in expression:
          others.append((f"{other} for {operator}",
                         expression.replace(f" {operator} ", f" {other} ", 1)))
    for operator, other in COMPARISONS:
      if f" {operator} " in expression:
        others.append((f"{other} for {operator}",
                       expression.replace(f" {operator} ", f" {other} ", 1)))
        break
    found += [(i, what, [before + changed + after]) for what, changed in others]
  return found


def plant(lines, drawn):
  """The text of a file in which each of the mutants drawn, (number, line, what, new lines), stands
  beside what it replaces. It has ADDED lines more, before that of its namespace."""
  lines = list(lines)
  for number, i, what, new in drawn:
    bare = [re.sub(r"\s*//.*$", "", line).strip() for line in lines[i:i + len(new)]]
    if what == GONE:
      lines[i] = f"{{ if (!Mutant({number})) {bare[0]} }}"
    elif what == SWAPPED:
      lines[i] = (f"{{ if (!Mutant({number})) {{ {bare[0]} {bare[1]} }} "
                  f"else {{ {bare[1]} {bare[0]} }} }}")
      lines[i + 1] = ""
    else:
      begin, end = region(lines[i])
      tail = len(lines[i]) - end
      other = new[0][begin:len(new[0]) - tail]
      same = lines[i][begin:end]
      if CONDITION.search(lines[i]):
        same = f"static_cast<bool>({same})"
      lines[i] = f"{lines[i][:begin]}(Mutant({number}) ? ({other}) : ({same})){lines[i][end:]}"
  at = next(i for i, line in enumerate(lines) if line.startswith("namespace "))
  return "\n".join(lines[:at] + ["#include <cstdio>", "#include <cstdlib>", SWITCH] + lines[at:])


def files_of(names):
  files = []
  for name in names:
    inside = sorted(glob.glob(name + "/**/*.cc", recursive=True)) if os.path.isdir(name) else [name]
    files += [f for f in inside if not re.search(OF_TESTS, f)]
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


def tree_of(name):
  """Where in the cache a work tree of this clone is."""
  clone = hashlib.sha256(os.getcwd().encode()).hexdigest()[:8]
  return os.path.join(CACHE, f"{name}-{clone}")


def prepare(tree):
  """The work tree, as HEAD has it."""
  head = git("rev-parse", "HEAD")
  trees = git("worktree", "list", "--porcelain").split("\n")
  if os.path.exists(os.path.join(tree, ".git")) and "worktree " + os.path.realpath(tree) in trees:
    git("checkout", "-q", "--force", "--detach", head, cwd=tree)
  else:
    # Of a clone that was here before. What somebody has named is not ours to remove: git refuses it.
    if os.path.dirname(tree) == CACHE:
      shutil.rmtree(tree, ignore_errors=True)
    git("worktree", "add", "-q", "--force", "--detach", tree, head)  # also where it is gone
  if os.path.exists("user.bazelrc"):
    with open("user.bazelrc", encoding="utf-8") as ours, \
        open(os.path.join(tree, "user.bazelrc"), "w", encoding="utf-8") as theirs:
      theirs.write(ours.read())


def bazel(tree, *arguments):
  return subprocess.run(["tools/bazel", *arguments], cwd=tree, stdin=subprocess.DEVNULL,
                        capture_output=True, text=True, check=False)


class Schemata:
  """The tree with all mutants in it, of which one counts at a time, and the tests that reach each."""

  def __init__(self, tree, longest, grace):
    self.tree = tree
    self.longest = longest
    self.grace = grace
    self.folder = tree + ".on"
    self.reached = {}
    self.seconds = {}

  def test(self, targets, timeout, *arguments):
    return bazel(self.tree, "test", "--nocache_test_results", f"--test_timeout={timeout}",
                 f"--test_env=DISTGRAD_MUTANTS={self.folder}",
                 f"--sandbox_writable_path={self.folder}", "--test_output=summary",
                 "--test_summary=terse", *arguments, "--", *targets)

  def switch(self, number):
    with open(os.path.join(self.folder, "on"), "w", encoding="ascii") as file:
      file.write(str(number))

  def build(self, mutants):
    """Plants the mutants, by number, and returns the numbers of those that compile."""
    shutil.rmtree(self.folder, ignore_errors=True)
    os.makedirs(os.path.join(self.folder, "seen"), mode=0o777)
    os.chmod(os.path.join(self.folder, "seen"), 0o777)
    files = {file for file, _, _, _ in mutants.values()}
    sources = {}
    for file in files:
      with open(file, encoding="utf-8") as source:
        sources[file] = source.read().split("\n")
    left = {n: m for n, m in mutants.items() if m[2] != NO_LOCK}
    while True:
      for file in files:
        drawn = [(n, i, what, new) for n, (f, i, what, new) in left.items() if f == file]
        text = plant(sources[file], drawn) if drawn else "\n".join(sources[file])
        with open(os.path.join(self.tree, file), "w", encoding="utf-8") as out:
          out.write(text)
      built = bazel(self.tree, "build", "--keep_going", "--build_tests_only", *TESTED)
      if built.returncode == 0:
        return left
      wrong = {(file, int(line) - 1 - ADDED) for file, line in
               re.findall(r"^(\S+\.cc):(\d+):\d+: error:", built.stdout + built.stderr, re.M)}
      bad = [n for n, (file, i, _, _) in left.items() if (file, i) in wrong or (file, i + 1) in wrong]
      if not bad:
        raise SystemExit(built.stdout + built.stderr)
      print(f"{len(bad)} do not compile", flush=True)
      for n in bad:
        del left[n]

  def is_built(self, file):
    """Whether a program that is tested has the file: what is for GPUs alone is in none."""
    folder, unit = os.path.split(file.removesuffix(".cc"))
    return bool(glob.glob(os.path.join(self.tree, "bazel-bin", folder, "_objs", "*", unit + ".*o")))

  def learn(self):
    """Runs all tests without a mutant: which of them get to which mutant."""
    self.switch(NONE)
    ran = self.test(TESTED, 2 * self.longest, "--keep_going", "--test_summary=short",
                    "--flaky_test_attempts=2")
    said = ran.stdout + ran.stderr
    self.seconds = {test: float(seconds) for test, seconds in
                    re.findall(r"^(//\S+)\s+(?:PASSED|FLAKY.*) in ([\d.]+)s", said, re.M)}
    slow = set(re.findall(r"^(//\S+)\s+TIMEOUT", said, re.M))
    slow |= {test for test, seconds in self.seconds.items() if seconds > self.longest}
    failed = set(re.findall(r"^(//\S+)\s+FAILED", said, re.M))
    if failed or "PASSED" not in said:
      raise SystemExit(f"tests fail without a mutant: {', '.join(sorted(failed)) or said}")
    for test in sorted(slow):
      print(f"left out, for it takes long: {test}", flush=True)
    for name in os.listdir(os.path.join(self.folder, "seen")):
      number, test = name.split("@", 1)
      test = test.replace("+", "/")
      if test in self.seconds and test not in slow:
        self.reached.setdefault(int(number), set()).add(test)

  def timeout(self, tests):
    return int(4 * max(self.seconds[test] for test in tests) + self.grace)

  def passes(self, test, number):
    self.switch(number)
    ran = self.test([test], self.timeout([test]))
    if ran.returncode != 0 and not FAILED.search(ran.stdout + ran.stderr):
      raise SystemExit(ran.stdout + ran.stderr)
    return ran.returncode == 0

  def outcome(self, number, file):
    tests = self.reached.get(number, set())
    if not tests:
      return "SURVIVED: no test gets there"
    package, unit = os.path.dirname(file), os.path.basename(file).removesuffix(".cc")
    order = sorted(tests, key=lambda test: (test != f"//{package}:{unit}_test",
                                            not test.startswith(f"//{package}:"),
                                            self.seconds[test]))
    # Bazel does not stop at the first that fails: so ever more at a time.
    ran_already = 0
    flaky = []
    while ran_already < len(order):
      some = order[ran_already:2 * ran_already + 1]
      ran_already += len(some)
      self.switch(number)
      ran = self.test(some, self.timeout(some))
      if ran.returncode == 0:
        continue
      failed = dict.fromkeys(FAILED.findall(ran.stdout + ran.stderr))
      if not failed:
        raise SystemExit(ran.stdout + ran.stderr)
      for test, how in failed:
        if self.passes(test, NONE) and not self.passes(test, number):
          return f"killed by {test}" + (" (it hangs)" if how == "TIMEOUT" else "")
        flaky.append(test)
    return (f"SURVIVED: {len(tests) - len(flaky)} tests pass" +
            (f"; flaky: {', '.join(flaky)}" if flaky else ""))


def without_lock(tree, file, line, new):
  """What clang says of a file in which a mutex is not locked."""
  path = os.path.join(tree, file)
  with open(path, encoding="utf-8") as source:
    before = source.read()
  with open(file, encoding="utf-8") as source:
    lines = source.read().split("\n")
  lines[line:line + len(new)] = new
  try:
    with open(path, "w", encoding="utf-8") as source:
      source.write("\n".join(lines))
    ran = bazel(tree, "test", "--test_output=all", "//tools:clang_tidy_test")
    # Other mutants are in the tree, of which it finds other things.
    found = re.search(rf"\b{re.escape(file)}:\d+:\d+: .*\[clang-diagnostic-thread-safety",
                      ran.stdout + ran.stderr)
    return "killed by clang" if found else "SURVIVED: clang finds nothing"
  finally:
    with open(path, "w", encoding="utf-8") as source:
      source.write(before)


def draw(every, seed, count):
  """Some of the mutants, by number from 1, each on lines of its own."""
  random.Random(seed).shuffle(every)
  drawn, taken = {}, set()
  for file, i, what, new in every:
    lines = {(file, i + k) for k in range(len(new))}
    if len(drawn) == count:
      break
    if not lines & taken:
      taken |= lines
      drawn[len(drawn) + 1] = (file, i, what, new)
  return drawn


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
  parser.add_argument("names", nargs="+", metavar="FILE_OR_FOLDER")
  parser.add_argument("--seed", type=int, default=1)
  parser.add_argument("--count", type=int, default=20)
  parser.add_argument("--tree", default=tree_of("mutants"))
  parser.add_argument("--longest", type=int, default=30, help="seconds of a test that is run")
  parser.add_argument("--grace", type=int, default=15, help="seconds")
  parser.add_argument("--log")
  parser.add_argument("--list", action="store_true", help="print what could be drawn")
  parser.add_argument("--plant", action="store_true", help="print one file with all that fit in")
  options = parser.parse_args()
  every = all_mutants(options.names)
  if options.list:
    for file, i, what, new in every:
      print(f"{file}:{i + 1}: {what}: {' / '.join(line.strip() for line in new)}")
    return 0
  mutants = draw(every, options.seed, options.count)
  if options.plant:
    with open(options.names[0], encoding="utf-8") as source:
      print(plant(source.read().split("\n"),
                  [(n, i, what, new) for n, (_, i, what, new) in mutants.items()
                   if what != NO_LOCK]), end="")
    return 0
  commit = git("rev-parse", "--short", "HEAD")
  done = {}
  if options.log and os.path.exists(options.log):
    with open(options.log, encoding="utf-8") as log:
      done = {said["at"] + said["change"]: said["result"] for said in map(json.loads, log)
              if said["seed"] == options.seed and said["commit"] == commit}
  tree = os.path.abspath(options.tree)
  prepare(tree)
  schemata = Schemata(tree, options.longest, options.grace)
  compiled = schemata.build(mutants)
  schemata.learn()
  killed, survived = 0, 0
  for number, (file, i, what, new) in mutants.items():
    at = f"{file}:{i + 1}"
    if not schemata.is_built(file) or (what != NO_LOCK and number not in compiled):
      continue
    result = done.get(at + what)
    if result is None:
      result = (without_lock(tree, file, i, new) if what == NO_LOCK else
                schemata.outcome(number, file))
      if options.log:
        with open(options.log, "a", encoding="utf-8") as log:
          log.write(json.dumps({"at": at, "change": what, "lines": [line.strip() for line in new],
                                "result": result, "seed": options.seed, "commit": commit}) + "\n")
    killed += result.startswith("killed")
    survived += result.startswith("SURVIVED")
    print(f"{at}: {what}: {result}", flush=True)
  print(f"{killed} of {killed + survived} mutants were killed")
  if killed + survived == 0:
    raise SystemExit("there is nothing to change in what the tests run")
  return 0 if killed >= 0.9 * (killed + survived) else 1


if __name__ == "__main__":
  os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
  sys.exit(main())
