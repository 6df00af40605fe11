"""Checks what Markdown files say against the tree: links, and code that is said to be a file's.

documents.py [--root FOLDER] FILE...

- A relative link leads to a file or folder that git has, or that is there; its #anchor is a heading
  of it.
- The file of a `{literalinclude}` is there, and has the text at which the part begins or ends. In the
  pages of the site (below docs/) all code in C, C++ and Rust comes by it.
- Elsewhere a block of such code stands below a line that has a sentence "From [name](path)", or ", from
  [name](path)" in one, and in that file, line by line.
- Either way the file is one that the nearest BUILD file names: that of a test or a sample.

Prints what is wrong as FILE:LINE: and ends with 1.
"""
import os
import re
import sys

LINK = re.compile(r"(?<!!)\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^()\s]+(?:\([^()\s]*\))?)\)")
SOURCE = re.compile(r"(?:^|[,.:] )[Ff]rom \[[^\]]+\]\(([^)\s]+)\)")
CODE = {"c", "cpp", "rust"}
# Those with other names for these languages.
SPELLED = {"c++": "cpp", "cc": "cpp", "cxx": "cpp", "hpp": "cpp", "h": "c", "rs": "rust"}
PART = re.compile(r":(start-after|start-at|end-before|end-at): +\"?(.*?)\"?$")
SITE = re.compile(r"docs/.*$")
# ``` or more, ~~~ or :::, then a language, or a directive of MyST with its argument.
FENCE = re.compile(r"\s*(`{3,}|~{3,}|:{3,})\s*(?:\{([\w-]+)\}\s*(\S*)|([\w+-]*)).*$")
# Directives whose content is Markdown.
CONTAINERS = {"tab-set", "tab-item", "note", "tip", "warning", "important", "caution", "admonition", "dropdown", "grid",
              "grid-item", "grid-item-card", "card", "seealso", "hint"}
UNTESTED = "%s is of no test: the BUILD file above it does not name it"


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


def is_tested(source, root):
    """Whether the nearest BUILD file above a source names it, as sources of tests are.

    Of a module in Rust: whether it names one of those that have the module.
    """
    folder, name = os.path.split(source)
    if name == "mod.rs":
        module, parent = "mod %s;" % os.path.basename(folder), os.path.dirname(folder)
        users = [os.path.join(parent, each) for each in os.listdir(os.path.join(root, parent)) if each.endswith(".rs")]
        return any(module in read(os.path.join(root, user)) and is_tested(user, root) for user in users)
    while folder and not os.path.exists(os.path.join(root, folder, "BUILD.bazel")):
        folder = os.path.dirname(folder)
    build = os.path.join(root, folder, "BUILD.bazel")
    if not os.path.exists(build):
        return False
    text = "\n".join(read(build))
    return any('"%s"' % each in text for each in (name, os.path.splitext(name)[0], os.path.relpath(source, folder)))


def check_include(target, options, path, root):
    """Of a part of a file; yields what is wrong."""
    file = os.path.join(root, os.path.dirname(path), target)
    if not os.path.exists(file):
        yield "%s is not there" % target
        return
    source = os.path.normpath(os.path.join(os.path.dirname(path), target))
    if SITE.match(path) and not is_tested(source, root):
        yield UNTESTED % target
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


def check_block(path, language, source, block, root):
    """What is wrong with code that stands in a page itself, or None."""
    if language not in CODE:
        return None
    if SITE.match(path):
        return "code of a page of the site has to be a {literalinclude} of a file that is tested"
    if not source:
        return "code has to be of a file that is tested: say above it from which, as From [name](path)"
    file = os.path.join(root, os.path.dirname(path), source)
    if not os.path.exists(file):
        return "the code is said to be from %s, which is not there" % source
    if not contains(read(file), block):
        return "the code is not what %s has" % source
    if not is_tested(os.path.normpath(os.path.join(os.path.dirname(path), source)), root):
        return UNTESTED % source
    return None


def check(path, root):
    fences = []  # those that are open: marker, and whether Markdown is inside
    language, block, begin, source, included = None, [], 0, None, None
    for number, line in enumerate(read(os.path.join(root, path)), 1):
        fence = FENCE.match(line)
        if fences and re.match(r"\s*%s+\s*$" % re.escape(fences[-1][0]), line):
            if not fences.pop()[1]:
                found = [check_block(path, language, source, block, root)]
                if included:
                    found = check_include(included, block, path, root)
                for wrong in filter(None, found):
                    yield begin, wrong
                language, source, included = None, None, None
        elif fences and not fences[-1][1]:
            block.append(line.rstrip())
        elif fence:
            marker, directive, argument, language = fence.groups()
            fences.append((marker, directive in CONTAINERS))
            block, begin = [], number
            included = argument if directive == "literalinclude" else None
            if directive in ("code-block", "code", "sourcecode"):
                language = argument
            language = SPELLED.get(language, language)
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
