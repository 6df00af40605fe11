"""Finds public names of the crate that have no example in their documentation.

documented.py SRC

SRC is the crate's src/. Its lib.rs says by `pub use` what is public, and has free functions and macros of
its own; what is hidden from the documentation does not count. An example is a block of code that rustdoc
runs, or compiles (`no_run`); one that shall not compile, or is ignored, shows nobody what to write.

Prints what has none as FILE:LINE:, and ends with 1; it also ends with 1 for a `pub use` that it cannot
follow.
"""
import os
import re
import sys

USE = re.compile(r"((?:^#\[[^\n]*\]\n)*)^pub use (\w+)::([^;]+);", re.M)
ITEM = r"^(?:pub (?:async |const |unsafe )*(?:struct|enum|union|trait|type|fn|const|static) |macro_rules! )(%s)\b"
# Of a block of code that is an example.
TAGS = {"rust", "no_run", "should_panic", "edition2021", "edition2024"}


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def sources(folder):
    found = [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names if name.endswith(".rs")]
    return sorted(found)


def files_of(module, folder):
    """Where the items of a module of the crate are."""
    beside, below = os.path.join(folder, module + ".rs"), os.path.join(folder, module)
    return ([beside] if os.path.exists(beside) else []) + sources(below)


def has_example(above):
    """Whether the comment that ends above an item has one; `above` are the lines before the item."""
    comment = []
    for line in reversed(above):
        if line.startswith("///"):
            comment.append(line[3:].strip())
        elif not line.startswith("#["):
            break
    opened = False
    for line in reversed(comment):
        if line.startswith("```"):
            opened = not opened
            if opened and set(re.split(r"[,\s]+", line.strip("`").strip())) - {""} <= TAGS:
                return True
    return False


def is_hidden(attributes):
    return "doc(hidden)" in attributes


def attributes_above(lines, number):
    found = []
    while number > 0 and lines[number - 1].startswith(("#[", "///")):
        number -= 1
        found.append(lines[number])
    return "\n".join(line for line in found if line.startswith("#["))


def check(folder):
    """Yields what is wrong."""
    lib = os.path.join(folder, "lib.rs")
    text = read(lib)
    wanted = []  # name, and the files that may have it
    for attributes, module, names in USE.findall(text):
        if re.search(r"\bas\b|::|\*", names):
            yield "%s: `pub use %s::%s` is not followed: teach documented.py" % (lib, module, names)
        elif not is_hidden(attributes):
            wanted += [(name, files_of(module, folder)) for name in re.findall(r"\w+", names)]
    if len(USE.findall(text)) != len(re.findall(r"^pub use ", text, re.M)) or re.search(r"^pub (mod|extern) ", text, re.M):
        yield "%s: it makes something public in a way that is not followed: teach documented.py" % lib
    wanted += [(found.group(1), [lib]) for found in re.finditer(ITEM % r"\w+", text, re.M)
               if not found.group().startswith("macro")]
    for path in sources(folder):
        wanted += [(name, [path]) for name in re.findall(r"^#\[macro_export\]\nmacro_rules! (\w+)", read(path), re.M)]
    if not wanted:
        yield "%s makes nothing public" % lib
    for name, paths in wanted:
        places = []
        for path in paths:
            lines = read(path).splitlines()
            places += [(path, number, lines) for number, line in enumerate(lines) if re.match(ITEM % name, line)]
        if len(places) != 1:
            yield "%s: %s is defined in %d places of %s, not in one" % (lib, name, len(places), paths)
            continue
        path, number, lines = places[0]
        if not is_hidden(attributes_above(lines, number)) and not has_example(lines[:number]):
            yield "%s:%d: %s has no example" % (path, number + 1, name)


def main(folder):
    wrong = list(check(folder))
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
