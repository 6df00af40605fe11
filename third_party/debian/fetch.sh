#!/usr/bin/env bash
# fetch.sh binary|source PACKAGE VERSION SHA256
#
# Prints the path of one Debian package (.deb) or of a source package's upstream tarball,
# out of a store that all clones share; asks apt only for what is not there yet.
# Nothing is installed, and the machine's own apt lists are neither needed nor touched.
set -euo pipefail
kind=$1 package=$2 version=$3 sha256=$4

die() { echo "Debian $kind package $package $version: $*" >&2; exit 1; }
is_wanted() { [[ $(sha256sum "$1" | cut -d' ' -f1) == "$sha256" ]]; }

cache=${DISTGRAD_CACHE:-${HOME:-/root}/.cache/distgrad}
mkdir -p "$cache/debian" "$cache/apt/lists/partial" "$cache/apt/sources" ||
  die "cannot write to $cache (set DISTGRAD_CACHE to another folder)"
store=$cache/debian/$sha256
state=$cache/apt

stored() {
  local file
  for file in "$store"/*; do
    if [[ -f $file ]] && is_wanted "$file"; then echo "$file"; return 0; fi
  done
  return 1
}
stored && exit

command -v apt-get >/dev/null || die "needs apt-get, which this machine lacks"

# One at a time: apt's lists are shared, and whoever waited may find its file in the store.
exec 9>"$state/lock"
flock 9
stored && exit
rm -rf "$cache"/debian/tmp.* # of a fetch that was killed

apt() {
  apt-get -q -o Acquire::Retries=3 -o Acquire::GzipIndexes=true -o APT::Sandbox::User=root \
    -o Dir::Cache="$state" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= \
    -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$state/sources" \
    -o Dir::State::lists="$state/lists" "$@" </dev/null >&2
}

# The machine's own sources, asked for source packages too.
rm -f "$state/sources"/*
for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
  if [[ -f $file ]]; then
    sed -n 's/^[[:space:]]*deb[[:space:]].*/&/p; s/^[[:space:]]*deb\([[:space:]].*\)/deb-src\1/p' "$file" \
      >"$state/sources/$(basename "$file" .list).list"
  fi
done
for file in /etc/apt/sources.list.d/*.sources; do
  if [[ -f $file ]]; then
    sed 's/^Types:.*/Types: deb deb-src/' "$file" >"$state/sources/$(basename "$file")"
  fi
done

download=$(mktemp -d "$cache/debian/tmp.XXXXXX")
log=$download.log
trap 'rm -rf "$download" "$log"' EXIT
get() {
  cd "$download"
  if [[ $kind == source ]]; then
    # No version: Debian's own revisions come and go, the upstream tarball below them stays.
    apt source --download-only --tar-only "$package"
  else
    apt download "$package=$version"
  fi
}

# Lists of an earlier call do; new ones are fetched only when those do not lead to the file.
if ! (get) 2>"$log"; then
  apt update 2>"$log" || true
  (get) 2>>"$log" || die "not to be had with this machine's apt sources (no network, or not Debian 12?):" \
    "$(grep '^[EW]:' "$log" | sort -u | head -n 2 | tr '\n' ' ')"
fi
files=("$download"/*)
is_wanted "${files[0]}" || die "$(basename "${files[0]}") has checksum $(sha256sum "${files[0]}" | cut -d' ' -f1), not $sha256"
mkdir -p "$store"
mv "${files[0]}" "$store/"
stored
