#!/usr/bin/env python3
"""Shows that the simulation finds defects: plants each that tests/simulation/planted.patch has.

  tools/planted.py [--seeds N] [--table] [--tree DIR] [NAME...]

Runs the simulation with one defect after the other (those named, or all) on the seeds from 0, until one
fails, and prints which; and where tests/simulation/cases has a program of its name, how many of 20 seeds
of that fail. Ends with 1 if one is not found within N seeds (default 5000), or by its case, or if the
patch and the table of docs/testing.md do not have the same defects. One of which the table says that none
finds it is run only if it is named. The seeds change with the code, so that those of the table are of a
day; --table writes them anew.

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
PAGE = "docs/testing.md"
TABLE = re.compile(r"(?<=\| planted \| defect \| first seed \|\n\| --- \| --- \| --- \|\n)(?:\|.*\n)+")


def read_table():
  """The page, and the rows of its table: name, defect, and first seed or why there is none."""
  with open(PAGE, encoding="utf-8") as page:
    text = page.read()
  return text, re.findall(r"^\| `(\w+)` \| (.*) \| (\d+|none of .*) \|$", TABLE.search(text)[0], re.M)


def write_seeds(found):
  """Writes the seeds into the page as it is now: it may have been edited while they were looked for."""
  text, table = read_table()
  rows = [(name, what, str(found.get(name, seed))) for name, what, seed in table]
  with_seed = sorted((row for row in rows if row[2].isdigit()), key=lambda row: (int(row[2]), row[0]))
  without = [row for row in rows if not row[2].isdigit()]
  lines = "".join(f"| `{name}` | {what} | {seed} |\n" for name, what, seed in with_seed + without)
  with open(PAGE, "w", encoding="utf-8") as page:
    page.write(TABLE.sub(lambda _: lines, text))


def failures(tree, name, *options):
  """The seeds that fail with a defect, each with its reason; the earliest first."""
  program = os.path.join(tree, "bazel-bin/tests/simulation/simulation")
  ran = subprocess.run([program, "--whole", *options],
                       env={**os.environ, "DISTGRAD_PLANTED": name}, stdin=subprocess.DEVNULL,
                       capture_output=True, text=True, check=False)
  found = re.findall(r"^seed (\d+): (.*)", ran.stdout, re.M)
  if not found and ran.returncode != 0:
    raise SystemExit(f"{name}: the simulation could not run:\n{ran.stdout}{ran.stderr}")
  return sorted((int(seed), why) for seed, why in found)


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
  parser.add_argument("names", nargs="*", metavar="NAME")
  parser.add_argument("--seeds", type=int, default=5000)
  parser.add_argument("--table", action="store_true", help=f"write the seeds into {PAGE}")
  parser.add_argument("--tree", default=tree_of("planted"))
  options = parser.parse_args()
  with open(PATCH, encoding="utf-8") as patch:
    planted = set(re.findall(r'Planted\("(\w+)"\)', patch.read()))
  _, table = read_table()
  listed = {name for name, _, _ in table}
  rare = {name for name, _, seed in table if not seed.isdigit()}
  for name in sorted(planted ^ listed):
    print(f"{name}: not in {PAGE if name in planted else PATCH}", file=sys.stderr)
  unknown = sorted(set(options.names) - planted)
  if planted != listed or unknown:
    raise SystemExit(f"{PATCH} has no {', '.join(unknown)}" if unknown else 1)

  tree = os.path.abspath(options.tree)
  prepare(tree)
  git("apply", os.path.abspath(PATCH), cwd=tree)
  built = bazel(tree, "build", "//tests/simulation")
  if built.returncode != 0:
    raise SystemExit(built.stdout + built.stderr)
  found = {}
  names = options.names or sorted(planted - rare)
  for name in names:
    said = []
    failed = failures(tree, name, "--first", "--seeds", str(options.seeds))
    said.append(f"seed {failed[0][0]}" if failed else f"NOT FOUND by {options.seeds} seeds")
    case = os.path.abspath(os.path.join(CASES, name + ".txt"))
    in_case = failures(tree, name, "--case", case, "--seeds", "20") if os.path.exists(case) else None
    if in_case is not None:
      said.append(f"{len(in_case)} of 20 seeds of its case" if in_case else "NOT FOUND by its case")
    print(f"{name}: {', '.join(said)}" + (f": {failed[0][1]}" if failed else ""), flush=True)
    if failed and in_case != []:
      found[name] = failed[0][0]
  missed = len(names) - len(found)
  print(f"{len(found)} of {len(names)} planted defects are found")
  if options.table and not missed and not options.names:
    write_seeds(found)
  return 1 if missed else 0


if __name__ == "__main__":
  os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
  sys.exit(main())
