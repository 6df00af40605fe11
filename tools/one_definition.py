#!/usr/bin/env python3
"""Finds types that two files of one program define under one name.

    tools/one_definition.py FILE...        # git ls-files -z '*.h' '*.cc' | xargs -0 tools/one_definition.py

No compiler sees that: each file alone is right, and the linker takes whichever of the two
destructors, or instances of std::vector, comes first. It was found by reading, with a class of a test
beside a struct of core's. So a type at the scope of a named namespace has a name of its own in all of
the tree; those of anonymous namespaces, of other types and of functions are not looked at.

Prints each name with the places that define it, and ends with 1 if there are any.
"""
import collections
import re
import sys

DEFINITION = re.compile(
    r"(?:struct|class|union|enum(?:\s+class)?)\s+(?:(?:alignas\s*\([^)]*\)|[A-Z][A-Z_]+(?:\([^)]*\))?)\s+)*"
    r"(?P<name>[A-Za-z_]\w*)\s*(?:final\s*)?(?::[^:;{}()][^;{}]*)?$")
NAMESPACE = re.compile(r"(?:inline\s+)?namespace(?:\s+(?P<name>[\w:]+))?\s*$")
EXTERN = re.compile(r'extern\s*"C(?:\+\+)?"\s*$')
# What has no braces or names of its own: comments, raw strings, strings, characters and lines of
# the preprocessor.
BLANK = re.compile(r'//[^\n]*|/\*.*?\*/|R"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"'
                   r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'|^[ \t]*#(?:\\\n|[^\n])*", re.DOTALL | re.MULTILINE)


def definitions(text):
    """Yields (qualified name, line) for each type at the scope of a named namespace."""
    def blank(match):
        kept = '"C"' if match.group() == '"C"' else ""
        return kept + "\n" * match.group().count("\n")

    text = BLANK.sub(blank, text)
    scopes = []  # a namespace's name, or None for anything else
    begin, line = 0, 1
    for match in re.finditer(r"[{};\n]", text):
        if match.group() == "\n":
            line += 1
            continue
        head = text[begin:match.start()].strip()
        begin = match.end()
        if match.group() == "}":
            if scopes:
                scopes.pop()
        elif match.group() == "{":
            if namespace := NAMESPACE.search(head):
                scopes.append(namespace["name"])
                continue
            if EXTERN.search(head):
                scopes.append("")
                continue
            head = re.sub(r"^template\s*<.*?>\s*(?=struct|class|union)", "", head, flags=re.DOTALL)
            if None not in scopes and (found := DEFINITION.match(head)):
                yield "::".join(filter(None, scopes + [found["name"]])), line
            scopes.append(None)


def main(paths):
    places = collections.defaultdict(dict)
    for path in paths:
        with open(path, encoding="utf-8") as file:
            for name, line in definitions(file.read()):
                places[name].setdefault(path, line)
    twice = {name: found for name, found in sorted(places.items()) if len(found) > 1}
    for name, found in twice.items():
        print(f"{name} is defined in " + " and ".join(f"{p}:{line}" for p, line in found.items()))
    return 1 if twice else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
