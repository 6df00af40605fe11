#!/usr/bin/env bash
# tools/bazel run //docs:site [-- --output FOLDER]
#
# Builds the documentation site into FOLDER (default: site, below the folder where it is called):
# files to be opened by a browser, or put on any server. Needs a python3 that is 3.11 or later, as
# Debian 12 has it; Sphinx and what it needs comes with @sphinx.
set -euo pipefail

output=site
while (($#)); do
  case $1 in
    --output=*) output=${1#*=} ;;
    --output) output=${2:?--output needs a folder}; shift ;;
    *) echo "usage: site [--output FOLDER]" >&2; exit 2 ;;
  esac
  shift
done
[[ $output == /* ]] || output=${BUILD_WORKING_DIRECTORY:-$PWD}/$output

here=${RUNFILES_DIR:-$0.runfiles}
tree=${BUILD_WORKSPACE_DIRECTORY:-}
[[ -d $here/distgrad && -n $tree ]] || {
  echo "site: run it with tools/bazel run //docs:site" >&2
  exit 1
}
# The list of the store's files stands for the store.
packages=$(dirname "$(readlink -f "$here/sphinx/site/sums.json")")
rustdoc=$here/distgrad/bindings/rust/rustdoc.tar arguments=()
if [[ -e $rustdoc ]]; then
  arguments=(--rustdoc "$rustdoc")
else
  echo "site: without the crate's documentation, for this machine has no Rust that could make it" >&2
fi
exec python3 "$tree/docs/sphinx/build.py" --packages "$packages" --tree "$tree" --output "$output" "${arguments[@]}"
