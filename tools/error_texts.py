"""Checks that docs/errors.md has texts of errors that the sources still have.

error_texts.py docs/errors.md FILE...

Each heading of the third level of the page is the text of an error, between backticks; … stands
for what differs each time. What stands between two of these has to be in the string literals of one
and the same FILE, where neighbouring literals count as one. Prints what is in none as FILE:LINE:, and
ends with 1; it also ends with 1 if the page has no such text.
"""
import re
import sys

# `"one " "two"`, on one line or two, is one text.
JOINT = re.compile(r'"\s*"')


def literals(path):
    """The string literals of a file, with the marks of C++ taken out."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    # An empty literal in between, as in StrCat("", x), would join what does not belong together.
    return JOINT.sub("", text).replace('\\"', '"')


def pieces(text):
    return [piece.strip() for piece in text.split("…") if len(piece.strip()) > 2]


def main(page, files):
    sources = [literals(path) for path in files]
    failed, count = False, 0
    with open(page, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.startswith("### "):
                continue
            found = re.fullmatch(r"### `([^`]+)`\n?", line)
            wanted = pieces(found.group(1)) if found else []
            count += 1
            if not wanted:
                print("%s:%d: this heading has no text of an error between backticks" % (page, number))
            elif not any(all(piece in source for piece in wanted) for source in sources):
                print("%s:%d: no file has all of %s" % (page, number, wanted))
            else:
                continue
            failed = True
    if count == 0:
        print("%s has no texts of errors" % page)
    return 1 if failed or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
