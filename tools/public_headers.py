#!/usr/bin/env python3
"""Counts the headers of this project that a public header brings with it, itself not counted.

    tools/public_headers.py HEADER=MOST...      # from the root of the project

Whoever includes a public header compiles all of these, and reads them to know what it needs. So each
has a bound, which a forgotten include would pass unseen. An include counts that is written with
quotation marks and names a file here.

Prints each header that brings more than MOST, with all that it brings, and ends with 1 if there are any.
"""
import os
import re
import sys

INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def brought(header, found):
    with open(header, encoding="utf-8") as source:
        for name in INCLUDE.findall(source.read()):
            if name not in found and os.path.exists(name):
                found.add(name)
                brought(name, found)
    return found


def main(bounds):
    too_many = 0
    for bound in bounds:
        header, most = bound.rsplit("=", 1)
        found = brought(header, set())
        if len(found) > int(most):
            print(f"{header} brings {len(found)} headers, more than {most}: {', '.join(sorted(found))}")
            too_many += 1
    return 1 if too_many else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
