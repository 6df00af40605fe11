#!/usr/bin/env python3
"""Shows that the simulation finds defects: plants each that tests/simulation/planted.patch has.

  tools/planted.py [--check] [--seeds N] [--table] [--tree DIR] [NAME...]

Runs the simulation with one defect after the other (those named, or all) on the seeds from 0, until one
fails, and prints which. Where tests/simulation/cases has a program of a defect's name, 20 seeds of that run
in their place: seeds change with the code, and one that rests on a rare interleaving may be found by none
of them on a day. With --table, or for one that is named, both run. Ends with 1 if one is not found by its
case, or, where it has none, within N seeds (default 5000), or if the patch and the table of docs/testing.md
do not have the same defects. What finds a defect must pass without it: so all seeds up to the last one that
found something run without any, and so do the cases. The seeds of the table are of a day; --table writes
them anew.

--check only sees whether the patch applies, and has the same defects as the table.

The tree (DIR, by default one of this clone in the project's cache) is a work tree of HEAD, with the patch,
and kept: the next run builds on it.
"""

import argparse
import os
import re
import subprocess
import sys

from mutate import bazel, git, prepare, tree_of

PATCH = "tests/simulation/planted.patch"
CASES = "tests/simulation/cases"
CASE_SEEDS = "20"  # as simulation_test has
PAGE = "docs/testing.md"
TABLE = re.compile(r"(?<=\| planted \| defect \| first seed \|\n\| --- \| --- \| --- \|\n)(?:\|.*\n)+")


def read_table():
  """The page, and the rows of its table: name, defect, and first seed or why there is none."""
  with open(PAGE, encoding="utf-8") as page:
    text = page.read()
  return text, re.findall(r"^\| `(\w+)` \| (.*) \| (\d+|none of .*) \|$", TABLE.search(text)[0], re.M)


def write_seeds(found, most):
  """Writes the seeds into the page as it is now: it may have been edited while they were looked for."""
  text, table = read_table()
  none = f"none of {most:,}; its case"
  rows = [(name, what, str(found.get(name, none if seed.isdigit() else seed))) for name, what, seed in table]
  rows.sort(key=lambda row: (not row[2].isdigit(), int(row[2]) if row[2].isdigit() else 0, row[0]))
  lines = "".join(f"| `{name}` | {what} | {seed} |\n" for name, what, seed in rows)
  with open(PAGE, "w", encoding="utf-8") as page:
    page.write(TABLE.sub(lambda _: lines, text))


def failures(tree, name, *options):
  """The seeds that fail with a defect ("": without any), each with its reason; the earliest first."""
  program = os.path.join(tree, "bazel-bin/tests/simulation/simulation")
  ran = subprocess.run([program, "--whole", *options],
                       env={**os.environ, "DISTGRAD_PLANTED": name}, stdin=subprocess.DEVNULL,
                       capture_output=True, text=True, check=False)
  found = re.findall(r"^seed (\d+): (.*)", ran.stdout, re.M)
  if not found and ran.returncode != 0:
    raise SystemExit(f"{name}: the simulation could not run:\n{ran.stdout}{ran.stderr}")
  return sorted((int(seed), why) for seed, why in found)


class Unplanted:
  """Makes sure that seeds and cases pass without a defect, and ends the program where one fails."""

  def __init__(self, tree):
    self.tree = tree
    self.seeds = 0  # of those from 0, so many have passed

  def check(self, what, *options):
    for seed, why in failures(self.tree, "", *options):
      raise SystemExit(f"{what} fails without a planted defect, so it finds none: seed {seed}: {why}")

  def check_seeds(self, last):
    """Those from 0 to the last; each runs once."""
    if last >= self.seeds:
      self.check(f"one of the seeds {self.seeds} to {last}",
                 "--from", str(self.seeds), "--seeds", str(last + 1 - self.seeds))
      self.seeds = last + 1

  def check_case(self, path):
    self.check(os.path.basename(path), "--case", path, "--seeds", CASE_SEEDS)


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
  parser.add_argument("names", nargs="*", metavar="NAME")
  parser.add_argument("--seeds", type=int, default=5000)
  parser.add_argument("--check", action="store_true", help="only see whether the patch applies")
  parser.add_argument("--table", action="store_true", help=f"write the seeds into {PAGE}")
  parser.add_argument("--tree", default=tree_of("planted"))
  options = parser.parse_args()
  with open(PATCH, encoding="utf-8") as patch:
    planted = set(re.findall(r'Planted\("(\w+)"\)', patch.read()))
  _, table = read_table()
  listed = {name for name, _, _ in table}
  for name in sorted(planted ^ listed):
    print(f"{name}: not in {PAGE if name in planted else PATCH}", file=sys.stderr)
  unknown = sorted(set(options.names) - planted)
  if planted != listed or unknown:
    raise SystemExit(f"{PATCH} has no {', '.join(unknown)}" if unknown else 1)

  if options.check:
    try:
      git("apply", "--check", PATCH)
    except subprocess.CalledProcessError as error:
      raise SystemExit(f"{PATCH} does not apply to this tree:\n{error.stderr}") from error
    print(f"{PATCH} applies, and has the {len(planted)} defects of {PAGE}")
    return 0

  tree = os.path.abspath(options.tree)
  prepare(tree)
  git("apply", os.path.abspath(PATCH), cwd=tree)
  built = bazel(tree, "build", "//tests/simulation")
  if built.returncode != 0:
    raise SystemExit(built.stdout + built.stderr)
  unplanted = Unplanted(tree)
  unplanted.check_seeds(max((int(seed) for _, _, seed in table if seed.isdigit()), default=-1))
  found = 0
  first = {}  # the seeds
  names = options.names or sorted(planted)
  for name in names:
    case = os.path.abspath(os.path.join(CASES, name + ".txt"))
    has_case = os.path.exists(case)
    said, by_seed, in_case = [], [], []
    if not has_case or options.table or options.names:
      by_seed = failures(tree, name, "--first", "--seeds", str(options.seeds))
      said.append(f"seed {by_seed[0][0]}" if by_seed else f"NOT FOUND by {options.seeds} seeds")
      if by_seed:
        first[name] = by_seed[0][0]
        unplanted.check_seeds(first[name])
    if has_case:
      unplanted.check_case(case)
      in_case = failures(tree, name, "--case", case, "--seeds", CASE_SEEDS)
      said.append(f"{len(in_case)} of {CASE_SEEDS} seeds of its case" if in_case else "NOT FOUND by its case")
    reasons = by_seed + in_case
    print(f"{name}: {', '.join(said)}" + (f": {reasons[0][1]}" if reasons else ""), flush=True)
    found += bool(in_case if has_case else by_seed)
  print(f"{found} of {len(names)} planted defects are found")
  if options.table and found == len(names) and not options.names:
    write_seeds(first, options.seeds)
  return 1 if found < len(names) else 0


if __name__ == "__main__":
  os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
  sys.exit(main())
