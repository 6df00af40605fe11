#!/usr/bin/env bash
# What tools/documents.py finds wrong, and what it lets pass.
set -euo pipefail
tool=$TEST_SRCDIR/$TEST_WORKSPACE/tools/documents.py
root=$(mktemp -d "$TEST_TMPDIR/documents.XXXXXX")
mkdir "$root/docs" "$root/notes"
printf 'int one() {\n  return 1;\n}\n\nint two() { return 2; }\n' >"$root/code.cc"
printf '# A heading\n\n## Its `code`, and [a link](x.md)\n\n## Twice\n\n## Twice\n\n```sh\n# no heading\n```\n' >"$root/docs/other.md"
cp "$root/docs/other.md" "$root/notes/"
cp "$root/code.cc" "$root/loose.cc"
echo 'cc_test(name = "code", srcs = ["code.cc"])' >"$root/BUILD.bazel"

failed=0
page=notes/page.md
# check WHAT EXPECTED: of standard input as $page.
check() {
  local status=0 said
  cat >"$root/$page"
  said=$(python3 "$tool" --root "$root" "$page") || status=$?
  if [[ $said != "$2" || $status != $([[ -z $2 ]] && echo 0 || echo 1) ]]; then
    echo "FAILED: $1: status $status; it said '$said', not '$2'" >&2
    failed=1
  fi
}

check "good links" "" <<'END'
[one](other.md), [two](../code.cc), [three](other.md#a-heading), [four](#here), [a folder](..),
[five](other.md#its-code-and-a-link) [six](other.md#twice-1) [away](https://nowhere.invalid/x)
`[no link](nowhere.md)`
## Here
END
check "dead links" "notes/page.md:2: nowhere.md is not there
notes/page.md:2: notes/other.md has no heading #no-heading
notes/page.md:3: notes/page.md has no heading #there
notes/page.md:3: ../../etc leads out of the tree
notes/page.md:3: /etc/passwd leads out of the tree" <<'END'

[one](nowhere.md) [two](other.md#no-heading)
[three](#there) [four](../../etc) [five](/etc/passwd)
END
check "code of a file" "" <<'END'
From [code.cc](../code.cc), which is a test:

```cpp
int one() {
  return 1;
}
```

Ours is this, from [code.cc](../code.cc):
```cpp
int two() { return 2; }
```
Yours is another. From [code.cc](../code.cc), the second one:
```c++
int two() { return 2; }
```
```python
anything(at, all)
```
END
check "code that is no file's" "notes/page.md:3: the code is not what ../code.cc has
notes/page.md:8: ../gone.cc is not there
notes/page.md:9: the code is said to be from ../gone.cc, which is not there" <<'END'
From [code.cc](../code.cc):

```cpp
int one() {
  return 2;
}
```
From [gone.cc](../gone.cc):
```c
x
```
END
check "parts of files in tabs" "" <<'END'
`````{tab-set}
````{tab-item} C++
```{literalinclude} ../code.cc
:language: cpp
:start-at: int one
:end-before: "int two"
```
````
`````
[a link](other.md)
```{literalinclude} ../code.cc
```
END
check "parts that are not there" "notes/page.md:1: ../gone.cc is not there
notes/page.md:3: ../code.cc has no \"int three\" after that
notes/page.md:7: ../code.cc has no \"int one\" after that
notes/page.md:11: gone.md is not there" <<'END'
```{literalinclude} ../gone.cc
```
```{literalinclude} ../code.cc
:start-after: int one
:end-before: int three
```
```{literalinclude} ../code.cc
:start-at: int two
:end-before: int one
```
[a dead link](gone.md)
END
check "half of a line, and code with a hole" "notes/page.md:2: the code is not what ../code.cc has
notes/page.md:7: the code is not what ../code.cc has" <<'END'
From [code.cc](../code.cc):
```cpp
int two()
```

From [code.cc](../code.cc):
```cpp
int one() {
}
```
END
check "code of a file that is no test's, and of none" "notes/page.md:2: ../loose.cc is of no test: the BUILD file above it does not name it
notes/page.md:6: code has to be of a file that is tested: say above it from which, as From [name](path)" <<'END'
From [loose.cc](../loose.cc):
```cpp
int two() { return 2; }
```
# Next
```rs
fn three();
```
END
check "the source of a section ends with it" "notes/page.md:3: code has to be of a file that is tested: say above it from which, as From [name](path)" <<'END'
From [code.cc](../code.cc), nothing.
# Next
```cpp
int three();
```
END

# Directives of MyST.
mkdir -p "$root/samples" "$root/docs/tutorial"
printf 'int main() {}\n' >"$root/samples/tested.cc"
printf 'int main() {}\n' >"$root/samples/loose.cc"
echo 'cc_test(name = "tested", srcs = ["tested.cc"])' >"$root/samples/BUILD.bazel"
check "links in tabs" "notes/page.md:4: nowhere.md is not there
notes/page.md:12: nowhere.md is not there" <<'END'
`````{tab-set}
````{tab-item} C++
:sync: cpp
[one](nowhere.md) [two](other.md)
```{literalinclude} ../samples/loose.cc
:language: cpp
```
```sh
[no link](nowhere.md)
```
````
[three](nowhere.md)
`````
END
page=docs/tutorial/page.md
check "code that is taught" "docs/tutorial/page.md:4: ../../samples/loose.cc is of no test: the BUILD file above it does not name it
docs/tutorial/page.md:6: ../../samples/gone.cc is not there
docs/tutorial/page.md:8: code of a page of the site has to be a {literalinclude} of a file that is tested
docs/tutorial/page.md:12: code of a page of the site has to be a {literalinclude} of a file that is tested" <<'END'
```{literalinclude} ../../samples/tested.cc
:language: cpp
```
```{literalinclude} ../../samples/loose.cc
```
```{literalinclude} ../../samples/gone.cc
```
```cpp
int main();
```
::::{tab-set}
```{code-block} c++
int main();
```
::::
```sh
make
```
END
page=docs/page.md
check "code of a page of the site" "docs/page.md:2: code of a page of the site has to be a {literalinclude} of a file that is tested" <<'END'
From [code.cc](../code.cc):
```cpp
int two() { return 2; }
```
```{literalinclude} ../code.cc
:start-at: int two
```
END
exit $failed
