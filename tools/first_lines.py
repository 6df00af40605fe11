#!/usr/bin/env python3
"""Finds sources in C, C++ and CUDA whose first line is no comment.

    tools/first_lines.py FILE...      # git ls-files -z '*.h' '*.cc' | xargs -0 tools/first_lines.py

A file says first what it is, so that a reader of a folder knows from the first lines which file to
read on. Whether the comment says that is for people to judge.

Prints the name of each such file on a line, and ends with 1 if there are any.
"""
import sys


def main(files):
    found = 0
    for file in files:
        with open(file, encoding="utf-8") as source:
            first = source.readline().rstrip("\n")
        # A comment without words says nothing.
        if not first.startswith(("// ", "/* ")):
            print(f"{file}: the first line does not say what the file is")
            found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
