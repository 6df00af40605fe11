"""Checks what Markdown files say against the tree: links, and code that is said to be a file's.

documents.py [--root FOLDER] FILE...

- A relative link leads to a file or folder that git has, or that is there; its #anchor is a heading
  of it.
- The file of a `{literalinclude}` is there, and has the text at which the part begins or ends.
- A block of code in C, C++ or Rust below a line that begins with "From [name](path)", or has ", from
  [name](path)" in it, stands in that file, line by line.

Prints what is wrong as FILE:LINE: and ends with 1.
"""
import os
import re
import sys

LINK = re.compile(r"(?<!!)\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^()\s]+(?:\([^()\s]*\))?)\)")
SOURCE = re.compile(r"(?:^|, )[Ff]rom \[[^\]]+\]\(([^)\s]+)\)")
CODE = {"c", "cpp", "rust"}
INCLUDE = re.compile(r"```\{literalinclude\} +(\S+)\s*$")
PART = re.compile(r":(start-after|start-at|end-before|end-at): +\"?(.*?)\"?$")


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read().splitlines()


def anchors(lines):
    """Of the headings, as GitHub makes them."""
    found, fenced = {}, False
    for line in lines:
        if line.startswith("```"):
            fenced = not fenced
        heading = None if fenced else re.match(r"#{1,6} +(.*?) *#*$", line)
        if heading:
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.group(1)).lower()
            anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
            count = found.get(anchor, 0)
            found[anchor] = count + 1
            if count:
                found["%s-%d" % (anchor, count)] = 1
    return set(found)


def check_link(target, path, root):
    if re.match(r"[a-z][a-z0-9+.-]*:", target):
        return None  # of another site: what is there today need not be tomorrow
    file, _, anchor = target.partition("#")
    place = os.path.normpath(os.path.join(os.path.dirname(path), file)) if file else path
    if file.startswith("/") or place.startswith(".."):
        return "%s leads out of the tree" % target
    full = os.path.join(root, place)
    if not os.path.exists(full):
        return "%s is not there" % target
    if anchor and place.endswith(".md") and anchor not in anchors(read(full)):
        return "%s has no heading #%s" % (place, anchor)
    return None


def contains(lines, block):
    stripped = [line.rstrip() for line in lines]
    size = len(block)
    return any(stripped[i:i + size] == block for i in range(len(stripped) - size + 1))


def check_include(target, options, path, root):
    """Of a part of a file; yields what is wrong."""
    file = os.path.join(root, os.path.dirname(path), target)
    if not os.path.exists(file):
        yield "%s is not there" % target
        return
    lines, begin = read(file), 0
    for option in options:
        part = PART.match(option)
        if not part:
            continue
        found = [i for i in range(begin, len(lines)) if part.group(2) in lines[i]]
        if not found:
            yield "%s has no \"%s\"%s" % (target, part.group(2), " after that" if begin else "")
            return
        begin = found[0] + 1


def check(path, root):
    lines = read(os.path.join(root, path))
    language, block, begin, source = None, [], 0, None
    for number, line in enumerate(lines, 1):
        fence = re.match(r"```(\w*|\{.*)\s*$", line)
        if fence and language is None:
            language, block, begin = fence.group(1) or "text", [], number
        elif fence:
            included = INCLUDE.match(lines[begin - 1])
            if included:
                for wrong in check_include(included.group(1), block, path, root):
                    yield begin, wrong
            elif language in CODE and source:
                file = os.path.join(root, os.path.dirname(path), source)
                if not os.path.exists(file):
                    yield begin, "the code is said to be from %s, which is not there" % source
                elif not contains(read(file), block):
                    yield begin, "the code is not what %s has" % source
            language, source = None, None
        elif language is not None:
            block.append(line.rstrip())
        else:
            said = SOURCE.search(line)
            if said:
                source = said.group(1)
            elif line.startswith("#"):
                source = None
            for target in LINK.findall(re.sub(r"`[^`]*`", "", line)):
                wrong = check_link(target, path, root)
                if wrong:
                    yield number, wrong


def main(arguments):
    root = "."
    if arguments[:1] == ["--root"]:
        root, arguments = arguments[1], arguments[2:]
    failed = False
    for path in arguments:
        for number, wrong in check(path, root):
            print("%s:%d: %s" % (path, number, wrong))
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
