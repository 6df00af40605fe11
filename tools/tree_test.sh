#!/usr/bin/env bash
# The pages of this tree: documents.py finds no dead link in them and no code that is no test's, and
# error_texts.py no text of an error that no source has. Which files there are, git says: links lead to
# any of them, so they are read where they are, and not from among this test's own.
set -euo pipefail
files=$TEST_SRCDIR/$TEST_WORKSPACE
source "$files/capi/testing/skip.sh"
cd "$(dirname "$(readlink -f "$files/CHANGELOG.md")")"
# The tree may be another user's.
listed() { git -c safe.directory='*' ls-files -z "$@"; }
type -P git >/dev/null || skip "no git on this machine"
[[ -e .git ]] || skip "this tree is none of git's"

mapfile -d '' pages < <(listed '*.md')
mapfile -d '' shown < <(listed 'docs/*.md' ':!docs/errors.md')
mapfile -d '' sources < <(listed 'core/*.h' 'core/*.cc' 'capi/*.h' 'capi/*.cc' 'bindings/rust/src/*.rs' ':!*_test.cc')
((${#pages[@]} && ${#shown[@]} && ${#sources[@]})) || { echo "FAILED: git lists no files" >&2; exit 1; }
echo "${#pages[@]} pages, ${#sources[@]} sources, in $PWD"
status=0
python3 tools/documents.py "${pages[@]}" || status=$?
python3 tools/error_texts.py docs/errors.md "${shown[@]}" -- "${sources[@]}" || status=$?
exit $status
