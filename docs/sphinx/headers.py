"""Makes pages of the reference out of the public headers, for Sphinx' C and C++ domains.

The comments of the headers are written for readers of the headers: plain text, no markup. So each
declaration becomes a directive of Sphinx, which reads it as a compiler would, with its comment as
the text; a struct is shown as it stands, for its comments are beside its fields. One page for each
section of a header. What this cannot read is an error, and not left out.
"""
import os
import re

# What becomes a link in a comment: pages, and names. DG_VALUE_..., dg_T_destroy and DG_..._INIT stand
# for several names, and for none.
LINK = re.compile(r"\bdocs/([a-z_]+)\.md|\b(?!dg_T_)(?:dg|DG)_\w*[A-Za-z0-9]\b(?!_|\.\.\.)")

# A word, and what is said of it in a column of its own.
TERM = re.compile(r" {1,3}([A-Z]\w+) {2,}(\S.*)")


class Mistake(Exception):
    """A line of a header that this cannot read."""


def escape(text):
    return re.sub(r"([\\*`|_])", r"\\\1", text)


class Prose:
    """Comments as reStructuredText."""

    def __init__(self, c_names):
        self.c_names = c_names

    def words(self, text):
        """Text with names, pages and `code` in it."""
        result = []
        for i, part in enumerate(re.split(r"`([^`]+)`", text)):
            if i % 2:
                result.append("\\ ``%s``\\ " % part)
                continue
            begin = 0
            for found in LINK.finditer(part):
                result.append(escape(part[begin:found.start()]))
                begin = found.end()
                name = found.group()
                if found.group(1):
                    result.append(":doc:`/docs/%s`" % found.group(1))
                elif name in self.c_names:
                    result.append(":c:%s:`%s`\\ " % (self.c_names[name], name))
                else:
                    result.append("\\ ``%s``\\ " % name)
            result.append(escape(part[begin:]))
        return "".join(result)

    def paragraphs(self, lines, indent):
        """A comment's lines, without its marks, as lines of a page."""
        result, block = [], []
        for line in [*lines, ""]:
            if line.strip():
                block.append(line)
            elif block:
                result += ["", *self._paragraph(block)]
                block = []
        return [indent + line if line else "" for line in result]

    def _paragraph(self, block):
        text = " ".join(line.strip() for line in block)
        if TERM.match(block[0]):
            return self._list(block)
        if block[0].startswith("  "):
            return ["::", "", *("  " + line for line in block)]
        return [self.words(text)]

    def _list(self, block):
        """Words that stand before what is said of each."""
        said = []
        for line in block:
            item = TERM.match(line)
            if item:
                said.append((item.group(1), [item.group(2)]))
            else:
                said[-1][1].append(line.strip())
        return [line for term, text in said for line in ("", "**%s**" % term, "  " + self.words(" ".join(text)))]


def comment_lines(lines):
    """Of a C comment: its lines without the marks."""
    text = "\n".join(lines)
    text = re.sub(r"^\s*/\*", "", text)
    text = re.sub(r"\*/\s*$", "", text)
    return [re.sub(r"^\s*\* ?", "", line) if i else line.strip() for i, line in enumerate(text.split("\n"))]


def flat(text):
    return re.sub(r"\s+", " ", text).strip()


class Item:
    """Declarations that stand together below one comment."""

    def __init__(self, comment):
        self.comment = comment
        self.declarations = []  # (directive, declaration, text beside it)
        self.code = []  # shown as it stands
        self.members = []  # of a class


def read_c(path):
    """Returns the lines at the top, and the sections: a title with items each."""
    with open(path, encoding="utf-8") as file:
        lines = file.read().split("\n")
    end = next(i for i, line in enumerate(lines) if line.strip() == "*/")
    # Before it stands a word to the formatter.
    first = next(i for i, line in enumerate(lines) if "*/" not in line)
    top = comment_lines(lines[first:end + 1])
    begin = next(i for i, line in enumerate(lines) if re.match(r"/\* -{10,} ", line))
    sections, comment, item, i = [], [], None, begin

    def add(directive, declaration, beside="", code=()):
        nonlocal comment, item
        own = directive == "function" and re.search(r"_destroy\(", declaration) and not comment
        if item is None or comment or code or own:
            item = Item(comment)
            sections[-1][1].append(item)
            comment = []
        item.declarations.append((directive, declaration, beside))
        item.code += code

    def until(pattern):
        """The lines from i to the first that matches; i is then behind it."""
        nonlocal i
        first = i
        while not re.search(pattern, lines[i]):
            i += 1
            if i == len(lines):
                raise Mistake("%s:%d: this never ends" % (path, first + 1))
        i += 1
        return lines[first:i]

    while i < len(lines):
        line = lines[i]
        title = re.match(r"/\* -{10,} (.*) \*/$", line)
        if title:
            sections.append((title.group(1), []))
            item, comment = None, []
            i += 1
        elif line.startswith("/*"):
            if comment:  # the one before stands for itself
                sections[-1][1].append(Item(comment))
            item, comment = None, comment_lines(until(r"\*/"))
        elif not line.strip():
            if comment:
                sections[-1][1].append(Item(comment))
            item, comment = None, []
            i += 1
        elif line == "#ifdef __cplusplus":  # as C has it
            until(r"^#(else|endif)")
        elif re.match(r"#(else|endif)", line):
            i += 1
        elif line.startswith("#define"):
            text = "\n".join(until(r"[^\\]$"))
            name, beside = re.match(r"#define (\w+(?:\(\w+\))?)", text).group(1), re.search(r"/\*(.*)\*/", text)
            add("macro", name, beside.group(1).strip() if beside else "")
        elif re.match(r"typedef struct \w+ \w+;", line):
            add("type", re.match(r"typedef struct (\w+)", line).group(1))
            i += 1
        elif line.startswith("typedef struct"):
            name = line.split()[2]
            add("struct", name, code=until(r"^}"))
        elif line.startswith("typedef"):
            declaration = flat(" ".join(until(r";$")))[len("typedef "):-1]
            add("type", declaration)
        elif line.startswith("struct "):
            i += 1  # of another library
        elif line.startswith("enum"):
            for directive in enumerators("\n".join(until(r"};$"))):
                add(*directive)
            item = None
        elif line.startswith("static inline"):
            add("function", flat(re.match(r"static inline (.*) \{", "\n".join(until(r"^}"))).group(1)))
        elif line.startswith("DG_API"):
            declaration = flat(" ".join(until(r";$")))
            add("function", re.sub(r"\b(DG_API|DG_MUST_USE|DG_NOEXCEPT)\b ?", "", declaration).rstrip("; "))
        elif line in ("}", "} // extern \"C\"") or line.startswith(("extern", "}")):
            i += 1
        else:
            raise Mistake("%s:%d: what is this: %s" % (path, i + 1, line))
    return top, sections


def enumerators(text):
    """What `add` is to be called with, for each constant of an enum."""
    body = text[text.index("{") + 1:text.rindex("}")]
    before = ""
    for part in re.finditer(r"/\*.*?\*/|(\w+) = ([^,/]+?)(,|\s*(?=/\*)|\s*$)[ \t]*(/\*.*?\*/)?", body, re.DOTALL):
        if part.group(1) is None:
            before = flat(" ".join(comment_lines(part.group().split("\n"))))
            continue
        beside = flat(" ".join(comment_lines(part.group(4).split("\n")))) if part.group(4) else ""
        yield "enumerator", "%s = %s" % (part.group(1), flat(part.group(2))), beside or before
        before = ""


def names_of_c(sections):
    """The role that links to each name."""
    roles = {"function": "func", "macro": "macro", "type": "type", "struct": "struct", "enumerator": "enumerator"}
    names = {}
    for _, items in sections:
        for item in items:
            for directive, declaration, _ in item.declarations:
                found = re.search(r"\(\*(\w+)\)\(", declaration) if directive == "type" else None
                name = found or re.search(r"\b((?:dg|DG)_\w+)(?=\(| =|$)", declaration)
                names[name.group(1)] = roles[directive]
    return names


def belongs(declaration, comment):
    """Whether a comment is also about a declaration that stands below the first one."""
    text = " ".join(comment)
    return re.match(r"(Return|Store|Call|Set|Like) ", text) or name_of(declaration) in text


def name_of(declaration):
    found = re.search(r"\(\*(\w+)\)\(|([\w:~]+|operator[^(]*)\(|(\w+)$", declaration)
    return next((name for name in found.groups() if name), declaration) if found else declaration


def groups_of(item, together):
    """Declarations of one kind, and the text that they have together."""
    groups = []
    for directive, declaration, beside in item.declarations:
        text = item.comment if not groups else []
        if beside:
            groups.append(([(directive, declaration)], text + ["", beside]))
        elif groups and groups[-1][0][0][0] == directive and not (groups[-1][1] and not together(declaration, item, groups)):
            groups[-1][0].append((directive, declaration))
        else:
            groups.append(([(directive, declaration)], text))
    return groups


def directive_lines(domain, declarations, indent):
    head = "%s.. %s:%s:: " % (indent, domain, declarations[0][0])
    return [(head if i == 0 else " " * len(head)) + declaration for i, (_, declaration) in enumerate(declarations)]


def page_of_items(title, items, prose):
    lines = [title, "=" * len(title), "", ".. highlight:: c", ""]
    for item in items:
        if not item.declarations:
            lines += prose.paragraphs(item.comment, "") + [""]
            continue
        for declarations, text in groups_of(item, lambda declaration, item, _: belongs(declaration, item.comment)):
            lines += directive_lines("c", declarations, "")
            lines += prose.paragraphs(text, "   ") + [""]
            if declarations[0][0] == "struct":
                lines += ["   .. code-block:: c", ""] + ["      " + line for line in item.code] + [""]
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------ C++


def end_of_declaration(text, begin):
    """Returns where the declaration ends and where what belongs to it does: its body, or a semicolon."""
    depth, i, cut = 0, begin, None
    while i < len(text):
        c = text[i]
        if text.startswith("//", i):
            i = text.index("\n", i)
            continue
        if c in "\"'":
            i += 1
            while text[i] != c:
                i += 2 if text[i] == "\\" else 1
        elif c in "([":
            depth += 1
        elif c in ")]":
            depth -= 1
        elif depth == 0 and c == ":" and text[i - 1] != ":" and text[i + 1] != ":" and cut is None and ")" in text[begin:i]:
            cut = i  # what a constructor begins with
        elif depth == 0 and c == ";":
            return (cut if cut is not None else i), i + 1
        elif c == "{" and depth == 0:
            # `x_{y}` of a constructor's list is no body.
            if cut is not None and re.match(r"\w", text[i - 1]):
                i = matching(text, i)
            elif "=" in text[begin:i].rsplit("\n", 1)[-1] and ")" not in text[begin:i]:
                i = matching(text, i)  # the value of a field
            else:
                end = matching(text, i) + 1
                if text.startswith(";", end):
                    end += 1
                return (cut if cut is not None else i), end
        i += 1
    raise Mistake("this never ends: " + text[begin:begin + 200])


def matching(text, i):
    """The place of the bracket that closes the one at i."""
    depth = 0
    while True:
        c = text[i]
        if text.startswith("//", i):
            i = text.index("\n", i)
        elif c == "\"" or c == "'" and not text[i - 1].isalnum():
            i += 1
            while text[i] != c:
                i += 2 if text[i] == "\\" else 1
        elif c == "{":
            depth += 1
        elif c == "}":
            depth -= 1
            if depth == 0:
                return i
        i += 1


def scope_items(text, name=None):
    """Items of a class or of the namespace; a class among them has those of its own."""
    items, comment, item, i = [], [], None, 0
    public = True
    while i < len(text):
        newline = text.index("\n", i) if "\n" in text[i:] else len(text)
        line = text[i:newline].strip()
        title = re.match(r"// -{10,} (.*)$", line)
        if not line or title or line.startswith("//"):
            if title:
                items.append(title.group(1))
            if line.startswith("//") and not title:
                if item:
                    item, comment = None, []
                comment.append(line[2:][1:] if line.startswith("// ") else line[2:])
            else:
                if comment and name is None and not title:
                    items.append(Item(comment))
                item, comment = None, []
            i = newline + 1
            continue
        if re.match(r"(public|private|protected):$", line):
            public = line == "public:"
            item, comment, i = None, [], newline + 1
            continue
        if line.startswith("namespace internal"):
            i = matching(text, text.index("{", i)) + 1
            i = text.index("\n", i) + 1
            item, comment = None, []
            continue
        if line.startswith("}"):
            i = newline + 1
            continue
        begin = i + len(text[i:newline]) - len(text[i:newline].lstrip())
        cut, end = end_of_declaration(text, begin)
        declaration = flat(re.sub(r"//[^\n]*", "", text[begin:cut]))
        rest = text[end:text.index("\n", end)].strip() if "\n" in text[end:] else ""
        body = text[text.index("{", cut) + 1:end] if text[cut:cut + 1] == "{" else ""
        i = text.index("\n", end) + 1 if "\n" in text[end:] else len(text)
        beside = rest[2:].strip() if rest.startswith("//") else ""
        forward = re.match(r"(class|struct) \w+$", declaration) and not body
        kept = public and not forward and kind_of(declaration, name)
        if not kept:
            comment = []
            continue
        directive, shown = kept
        if item is None or comment or directive == "class" or item.declarations[-1][0] == "class":
            item = Item(comment)
            items.append(item)
            comment = []
        item.declarations.append((directive, shown, beside))
        if directive == "class":
            own = re.search(r"(?:class|struct) (\w+)", declaration).group(1)
            start = "" if " struct " in " " + declaration else "private:\n"
            item.members = scope_items(start + body[:body.rindex("}")], own)
            item, comment = None, []
    return items


def without_templates(text):
    """Without what stands between < and >, of which there may be more within."""
    while True:
        shorter = re.sub(r"<[^<>]*>", "", text)
        if shorter == text:
            return text
        text = shorter


def kind_of(declaration, name):
    """The directive and what it shows of a declaration; None for what is not for users."""
    text = re.sub(r"^(inline|static constexpr|constexpr) ", "", declaration)
    text = re.sub(r"^(template <.*?>) (inline|constexpr) ", r"\1 ", text)
    if re.search(r"= delete$|operator=|^template <>|^friend |^enum class", text):
        return None
    if re.match(r"(template <.*> )?(class|struct) \w+$", text) and name is None and text.startswith(("class", "struct")):
        return ("class", re.sub(r"^(class|struct) ", "", text))
    found = re.match(r"(template <.*> )?(?:class|struct) (\w+.*)", text)
    if found:
        return "class", (found.group(1) or "") + found.group(2)
    if name is None and re.search(r"\b\w+::\w+\(", text.split("(")[0] + "("):
        return None  # a member's body, declared above
    if text.startswith("using "):
        return "type", text[len("using "):]
    text = re.sub(r" = default$", "", text)
    if name and re.match(r"(explicit )?%s\((const )?%s&&?( other| \w+)?\)|~%s" % (name, name, name), text):
        return None
    if "(" in without_templates(text).split(" = ")[0] or "operator" in text:
        # Whom an overload is for is no part of what Sphinx reads, nor of what a caller writes.
        return "function", re.sub(r", typename = std::enable_if_t<.*>(?=> \w+\()", "", text)
    return "member", text


def read_cpp(path):
    with open(path, encoding="utf-8") as file:
        text = file.read()
    top = [line[2:][1:] for line in text[:text.index("#ifndef")].strip().split("\n")]
    begin = text.index("namespace dg {") + len("namespace dg {\n")
    items = scope_items(text[begin:text.rindex("}  // namespace dg")])
    sections = []
    for item in items:
        if isinstance(item, str):
            sections.append((item, []))
        elif item.declarations or item.comment:
            sections[-1][1].append(item)
    return top, sections


def cpp_lines(items, prose, indent):
    def overload(declaration, _, groups):
        return name_of(declaration) == name_of(groups[-1][0][0][1])

    lines = []
    for item in items:
        if not item.declarations:
            lines += prose.paragraphs(item.comment, indent) + [""]
        for declarations, text in groups_of(item, overload):
            lines += directive_lines("cpp", declarations, indent)
            lines += prose.paragraphs(text, indent + "   ") + [""]
        lines += cpp_lines(item.members, prose, indent + "   ")
    return lines


# ---------------------------------------------------------------------------------------- Pages


def file_name(title):
    return re.sub(r"\W+", "_", title.lower()).strip("_")


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def index(title, top, sections, prose):
    lines = [title, "=" * len(title), ""] + prose.paragraphs(top, "")
    lines += ["", ".. toctree::", ""] + ["   " + file_name(name) for name, items in sections if items]
    return "\n".join(lines) + "\n"


def make(include, folder):
    """Writes the pages of distgrad.h to folder/c, and of distgrad.hpp to folder/cpp."""
    top, sections = read_c(os.path.join(include, "distgrad.h"))
    prose = Prose(names_of_c(sections))
    write(os.path.join(folder, "c", "index.rst"), index("C: distgrad.h", top, sections, prose))
    for title, items in sections:
        write(os.path.join(folder, "c", file_name(title) + ".rst"), page_of_items(title, items, prose))
    top, sections = read_cpp(os.path.join(include, "distgrad.hpp"))
    write(os.path.join(folder, "cpp", "index.rst"), index("C++: distgrad.hpp", top, sections, prose))
    for title, items in sections:
        if items:
            lines = ["%s" % title, "=" * len(title), "", ".. cpp:namespace:: dg", ""]
            write(os.path.join(folder, "cpp", file_name(title) + ".rst"), "\n".join(lines + cpp_lines(items, prose, "")) + "\n")
