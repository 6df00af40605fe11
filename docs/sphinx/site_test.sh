#!/usr/bin/env bash
# Builds the site from its pages: no warning of Sphinx (a link that leads nowhere, a page in no table of
# contents, a marker that a sample lacks), and no name that the headers lack. What only the whole tree
# can tell is tools/documents.py's to say.
set -euo pipefail
root=$TEST_SRCDIR/$TEST_WORKSPACE
packages=$(dirname "$(readlink -f "$TEST_SRCDIR/sphinx/site/sums.json")")
build() { # FOLDER ARGUMENT...
  python3 "$root/docs/sphinx/build.py" --packages "$packages" --tree "$root" --output "$TEST_TMPDIR/$1" --partial "${@:2}"
}
# In the place of what cargo makes.
mkdir -p "$TEST_TMPDIR/crate/distgrad" "$TEST_TMPDIR/crate/src"
echo '<meta content="docs/trace.md"><p>docs/trace.md explains it, and <code>docs/errors.md</code>.</p>' \
  >"$TEST_TMPDIR/crate/distgrad/index.html"
cp "$TEST_TMPDIR/crate/distgrad/index.html" "$TEST_TMPDIR/crate/src/code.html"
tar -C "$TEST_TMPDIR/crate" -cf "$TEST_TMPDIR/crate.tar" distgrad src
build one --rustdoc "$TEST_TMPDIR/crate.tar"
cd "$TEST_TMPDIR/one"
for page in index docs/index docs/start docs/errors docs/reference/c/tensors docs/reference/cpp/workers CHANGELOG; do
  [[ -s $page.html ]] || { echo "FAILED: $page.html is not there" >&2; exit 1; }
done
# A name in a page is a link into the reference, where a function of C and a class of C++ stand.
grep -q 'href="reference/c/errors.html#c.dg_error_code"' docs/errors.html
grep -q 'id="c.dg_tensor_from_data"' docs/reference/c/tensors.html
grep -q 'id="_CPPv4N2dg6TensorE"' docs/reference/cpp/tensors.html
# A page that the crate's documentation names is a link there, and nothing else has changed.
[[ $(cat rust/distgrad/index.html) == '<meta content="docs/trace.md"><p><a href="../../docs/trace.html">docs/trace.md</a> explains it, and <code><a href="../../docs/errors.html">docs/errors.md</a></code>.</p>' ]]
cmp rust/src/code.html "$TEST_TMPDIR/crate/src/code.html"
echo '<p>docs/gone.md</p>' >"$TEST_TMPDIR/crate/distgrad/index.html"
if said=$(cd "$root/docs/sphinx" && PYTHONDONTWRITEBYTECODE=1 python3 -c 'import sys, build; build.link_pages(*sys.argv[1:])' \
  "$TEST_TMPDIR/crate" "$TEST_TMPDIR/one" 2>&1); then
  echo "FAILED: a page that is not there was no mistake" >&2
  exit 1
fi
grep -q "names pages that the site does not have: docs/gone.md" <<<"$said"

# It finds what it is there for, in a tree of three pages and the reference.
mkdir -p "$TEST_TMPDIR/tree/docs" "$TEST_TMPDIR/tree/capi"
cp -rL "$root/capi/include" "$TEST_TMPDIR/tree/capi/"
cp -rL "$root/docs/sphinx" "$TEST_TMPDIR/tree/docs/"
cd "$TEST_TMPDIR/tree"
printf '# Home\n\n```{toctree}\nreference/c/index\nreference/cpp/index\nerrors\n```\n' >docs/index.md
printf '# Errors\n\n[gone](gone.md), `dg_no_such_function`\n' >docs/errors.md
printf '# Alone\n' >docs/alone.md
if said=$(python3 docs/sphinx/build.py --packages "$packages" --tree . --output "$TEST_TMPDIR/two" --partial 2>&1); then
  echo "FAILED: it found nothing" >&2
  exit 1
fi
for expected in "gone.md" "the headers have no dg_no_such_function" "alone.md: .*toctree"; do
  grep -q "$expected" <<<"$said" || { echo "FAILED: nothing about $expected in: $said" >&2; exit 1; }
done
[[ ! -e $TEST_TMPDIR/two ]]
# A folder of somebody's is left alone.
mkdir "$TEST_TMPDIR/mine"
touch "$TEST_TMPDIR/mine/thesis"
if said=$(build mine 2>&1); then echo "FAILED: it replaced a folder that is none of its own" >&2; exit 1; fi
grep -q "is no site that was made here" <<<"$said"
[[ -e $TEST_TMPDIR/mine/thesis ]]
