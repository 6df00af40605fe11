#!/usr/bin/env python3
"""Shows that the simulation finds defects: plants each that tests/simulation/planted.patch has.

  tools/planted.py [--seeds N] [--table] [--tree DIR] [NAME...]

Runs the simulation with one defect after the other (those named, or all) on the seeds from 0, until one
fails, and prints which. Ends with 1 if one is not found within N seeds (default 3000), or if the patch
and the table of docs/testing.md do not have the same defects. The seeds change with the code, so that
those of the table are of a day; --table writes them anew.

The tree (DIR, default "planted" in the project's cache) is a work tree of HEAD, with the patch, and kept:
the next run builds on it.
"""

import argparse
import os
import re
import subprocess
import sys

from mutate import CACHE, bazel, git, prepare

PATCH = "tests/simulation/planted.patch"
PAGE = "docs/testing.md"
TABLE = re.compile(r"(?<=\| planted \| defect \| first seed \|\n\| --- \| --- \| --- \|\n)(?:\|.*\n)+")


def first_seed(tree, name, seeds):
  """The first seed that fails with a defect, and why; None if there is none."""
  ran = subprocess.run([os.path.join(tree, "bazel-bin/tests/simulation/simulation"), "--seeds",
                        str(seeds), "--first", "--whole"], env={**os.environ, "DISTGRAD_PLANTED": name},
                       stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
  found = re.findall(r"^seed (\d+): (.*)", ran.stdout, re.M)
  if not found and ran.returncode != 0:
    raise SystemExit(f"{name}: the simulation could not run:\n{ran.stdout}{ran.stderr}")
  return min(((int(seed), why) for seed, why in found), default=None)


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
  parser.add_argument("names", nargs="*", metavar="NAME")
  parser.add_argument("--seeds", type=int, default=3000)
  parser.add_argument("--table", action="store_true", help=f"write the seeds into {PAGE}")
  parser.add_argument("--tree", default=os.path.join(CACHE, "planted"))
  options = parser.parse_args()
  with open(PATCH, encoding="utf-8") as patch:
    planted = set(re.findall(r'Planted\("(\w+)"\)', patch.read()))
  with open(PAGE, encoding="utf-8") as page:
    text = page.read()
  rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \| \d+ \|$", TABLE.search(text)[0], re.M))
  for name in sorted(planted ^ set(rows)):
    print(f"{name}: not in {PAGE if name in planted else PATCH}", file=sys.stderr)
  unknown = sorted(set(options.names) - planted)
  if planted != set(rows) or unknown:
    raise SystemExit(f"{PATCH} has no {', '.join(unknown)}" if unknown else 1)

  tree = os.path.abspath(options.tree)
  prepare(tree)
  git("apply", os.path.abspath(PATCH), cwd=tree)
  built = bazel(tree, "build", "//tests/simulation")
  if built.returncode != 0:
    raise SystemExit(built.stdout + built.stderr)
  found = {}
  for name in options.names or sorted(planted):
    seed = first_seed(tree, name, options.seeds)
    print(f"{name}: " + (f"seed {seed[0]}: {seed[1]}" if seed else
                         f"NOT FOUND by {options.seeds} seeds"), flush=True)
    if seed:
      found[name] = seed[0]
  missed = len(options.names or planted) - len(found)
  print(f"{len(found)} of {len(found) + missed} planted defects are found")
  if options.table and not missed and not options.names:
    lines = "".join(f"| `{name}` | {rows[name]} | {seed} |\n"
                    for name, seed in sorted(found.items(), key=lambda pair: (pair[1], pair[0])))
    with open(PAGE, "w", encoding="utf-8") as page:
      page.write(TABLE.sub(lambda _: lines, text))
  return 1 if missed else 0


if __name__ == "__main__":
  os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
  sys.exit(main())
