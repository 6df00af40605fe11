"""Checks that pages have texts of errors that the sources still have.

error_texts.py docs/errors.md [PAGE...] -- FILE...

Each heading of the third level of the first page is the text of an error, between backticks; … stands
for what differs each time. What stands between two of these has to be in the string literals of one
and the same FILE, where neighbouring literals count as one.

In every page such texts are in tables whose first column is headed "you see", too, where a cell begins
with one. There an error of several layers is one text: what stands before a ": " is in one FILE, and what
stands behind it may be in another one. A cell may also begin with a code, such as `ABORTED`.

Prints what is in none as PAGE:LINE:, and ends with 1; it also ends with 1 if the first page has no
heading with a text, or all pages no table.
"""
import re
import sys

# `"one " "two"`, on one line or two, is one text.
JOINT = re.compile(r'"\s*"')
CODE = re.compile(r"[A-Z]+(_[A-Z]+)*$")


def literals(path):
    """The string literals of a file, with the marks of C++ taken out."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    # An empty literal in between, as in StrCat("", x), would join what does not belong together.
    return JOINT.sub("", text).replace('\\"', '"')


def pieces(text):
    return [piece.strip() for piece in text.split("…") if len(piece.strip()) > 2]


def is_in_one(wanted, sources):
    return any(all(piece in source for piece in wanted) for source in sources)


def check_heading(line, sources):
    found = re.fullmatch(r"### `([^`]+)`\n?", line)
    wanted = pieces(found.group(1)) if found else []
    if not wanted:
        return "this heading has no text of an error between backticks"
    return None if is_in_one(wanted, sources) else "no file has all of %s" % wanted


def check_cell(text, sources):
    """Of a table: what is wrong with the text at the beginning of a cell."""
    if CODE.match(text):
        return None if is_in_one(["DG_%s " % text], sources) else "there is no code %s" % text
    layers = [layer for layer in map(pieces, text.split(": ")) if layer]
    if not layers:
        return "this has no text of an error"
    missing = [layer for layer in layers if not is_in_one(layer, sources)]
    return "no file has all of %s" % " or ".join(map(str, missing)) if missing else None


def texts(page, has_headings):
    """Yields number, check and text of each line that has one."""
    in_table = False
    with open(page, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if has_headings and line.startswith("### "):
                yield number, check_heading, line
            in_table = re.match(r"\| *you see *\|", line) is not None or (in_table and line.startswith("|"))
            found = re.match(r"\| *`([^`]+)`", line) if in_table else None
            if found:
                yield number, check_cell, found.group(1)


def main(arguments):
    split = arguments.index("--")
    pages, files = arguments[:split], arguments[split + 1:]
    sources = [literals(path) for path in files]
    failed, seen = False, set()
    for place, page in enumerate(pages):
        for number, check, text in texts(page, has_headings=place == 0):
            seen.add(check)
            wrong = check(text, sources)
            if wrong:
                print("%s:%d: %s" % (page, number, wrong))
                failed = True
    if check_heading not in seen:
        print("%s has no texts of errors" % pages[0])
    elif len(pages) > 1 and check_cell not in seen:
        print("no page has a table of errors")
    else:
        return 1 if failed else 0
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
