#!/usr/bin/env python3
"""Finds rings of units: a header, with the source of its name, that includes itself by way of others.

    tools/include_rings.py FILE...        # git ls-files -z '*.h' '*.hpp' '*.cc' | xargs -0 tools/include_rings.py

A reader of one unit of a ring has to read all of them, and no compiler minds: a source may include
what includes its header. Tests, and what is there for tests alone, are left out. An include counts
that is written with quotation marks and names one of the files.

Prints each ring on a line, and ends with 1 if there are any.
"""
import os
import re
import sys

UNIT = re.compile(r"^(?P<unit>.*)\.(h|hpp|cc)$")
FOR_TESTS = re.compile(r"_(test|testing|benchmark|fuzz)$")
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def rings(includes):
    """The sets of units that reach each other, by Tarjan's algorithm; without the sets of one."""
    number, lowest, stack, found = {}, {}, [], []

    def visit(unit):
        number[unit] = lowest[unit] = len(number)
        stack.append(unit)
        for other in includes[unit]:
            if other not in number:
                visit(other)
                lowest[unit] = min(lowest[unit], lowest[other])
            elif other in stack:
                lowest[unit] = min(lowest[unit], number[other])
        if lowest[unit] == number[unit]:
            ring = stack[stack.index(unit):]
            del stack[stack.index(unit):]
            if len(ring) > 1:
                found.append(sorted(ring))

    for unit in sorted(includes):
        if unit not in number:
            visit(unit)
    return found


def main(files):
    sys.setrecursionlimit(10000)
    unit_of = {}
    for file in files:
        match = UNIT.match(os.path.normpath(file))
        if match and not FOR_TESTS.search(match["unit"]):
            unit_of[os.path.normpath(file)] = match["unit"]
    includes = {unit: set() for unit in unit_of.values()}
    for file, unit in unit_of.items():
        with open(file, encoding="utf-8") as source:
            included = [unit_of.get(name) for name in INCLUDE.findall(source.read())]
        includes[unit].update(other for other in included if other not in (None, unit))
    found = rings(includes)
    for ring in found:
        print("these include each other:", ", ".join(ring))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
