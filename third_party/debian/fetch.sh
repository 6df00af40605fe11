#!/usr/bin/env bash
# fetch.sh binary|source PACKAGE VERSION SHA256 PATH [APT]
#
# Prints the path of one Debian package (.deb) or of a source package's upstream tarball, out of a
# store that all clones share; asks a network only for what is not there yet. PATH is the file's place
# in an archive of Debian, "pool/main/...". It is asked for, in this order,
#
#   1. at that place of the mirrors that the machine's own apt names (APT, default /etc/apt);
#   2. by apt, with lists of our own, for sources that apt alone understands;
#   3. at that place of archives that keep what mirrors have dropped: DISTGRAD_DEBIAN_ARCHIVE, one or
#      more with blanks between; then the snapshot of Debian that APT itself names in a comment, as it
#      does in containers of Debian, at a day when all that is pinned was in Debian 12.
#
# The checksum alone says whether a file is the right one, so it does not matter who it is from.
# Nothing is installed, and the machine's own apt lists are neither needed nor touched.
set -euo pipefail
shopt -s nullglob
kind=$1 package=$2 version=$3 sha256=$4 path=$5 etc=${6:-/etc/apt}
# Some weeks after the point release 12.6, which has the newest of them.
day=20240801T000000Z

die() { echo "Debian $kind package $package $version: $*" >&2; exit 1; }
sum_of() { sha256sum "$1" | cut -d' ' -f1; }
is_wanted() { [[ $(sum_of "$1") == "$sha256" ]]; }

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
download=$(mktemp -d "$cache/debian/tmp.XXXXXX")
log=$download.log
trap 'rm -rf "$download" "$download".*' EXIT
wrong="" # what was found in the place of the file

# keep FILE: puts it into the store, if it is what is pinned; then this is done.
keep() {
  if ! is_wanted "$1"; then
    wrong="$(basename "$1") has checksum $(sum_of "$1"), not $sha256"
    return 1
  fi
  # Of a mirror on this machine apt leaves a link.
  { mkdir -p "$store" && cp -L "$1" "$download.whole" && mv "$download.whole" "$store/$(basename "$1")"; } ||
    die "cannot write to $store"
  stored
  exit
}

sources=("$etc/sources.list" "$etc"/sources.list.d/*.list "$etc"/sources.list.d/*.sources)
lines() { # SED: what it makes of the machine's sources
  local file
  for file in "${sources[@]}"; do
    if [[ -f $file ]]; then sed -nE "$1" "$file"; fi
  done
}
mirrors() {
  lines 's/^[[:space:]]*deb[[:space:]]+(\[[^]]*\][[:space:]]+)?([^[:space:]]+).*/\2/p
         s/^URIs:[[:space:]]*//p' | tr -s '[:blank:]' '\n'
}
archives() {
  tr -s '[:blank:]' '\n' <<<"${DISTGRAD_DEBIAN_ARCHIVE:-}"
  lines "s|^#[[:space:]]*([a-z]+://[^[:space:]]+/archive/debian)/[0-9]{8}T[0-9]{6}Z/*\$|\1/$day|p"
}

# at_places: reads addresses of archives, and asks each for the file at its place.
at_places() {
  local place file=$download/${path##*/}
  while read -r place; do
    if [[ $place =~ ^(https?|ftp|file|copy):/ ]]; then
      tried+=" ${place%/}"
      rm -f "$file"
      if /usr/lib/apt/apt-helper -q -o Acquire::Retries=3 -o APT::Sandbox::User=root \
        download-file "${place%/}/$path" "$file" </dev/null >>"$log" 2>&1; then
        keep "$file" || true
      fi
    fi
  done < <(awk 'NF && !seen[$0]++')
}
tried=""
at_places < <(mirrors)

apt() {
  apt-get -q -o Acquire::Retries=3 -o Acquire::GzipIndexes=true -o APT::Sandbox::User=root \
    -o Dir::Cache="$state" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= \
    -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$state/sources" \
    -o Dir::State::lists="$state/lists" "$@" </dev/null >&2
}

# The machine's own sources, asked for source packages too.
rm -f "$state/sources"/*
for file in "${sources[@]}"; do
  if [[ $file == *.sources ]]; then
    sed 's/^Types:.*/Types: deb deb-src/' "$file" >"$state/sources/$(basename "$file")"
  elif [[ -f $file ]]; then
    sed -n 's/^[[:space:]]*deb[[:space:]].*/&/p; s/^[[:space:]]*deb\([[:space:]].*\)/deb-src\1/p' "$file" \
      >"$state/sources/$(basename "$file" .list).list"
  fi
done

get() {
  rm -f "$download"/*
  cd "$download"
  if [[ $kind == source ]]; then
    # No version: Debian's own revisions come and go, the upstream tarball below them stays.
    apt source --download-only --tar-only "$package"
  else
    apt download "$package=$version"
  fi
}

# Lists of an earlier call do; new ones are fetched only when those do not lead to the file.
if ! (get) 2>>"$log"; then
  apt update 2>>"$log" || true
  (get) 2>>"$log" || true
fi
for file in "$download"/*; do keep "$file" || true; done

at_places < <(archives)

[[ -z $wrong ]] || die "$wrong; tried$tried, and by apt"
die "not to be had from this machine's apt sources (no network, or not Debian 12?): tried$tried, and by apt:" \
  "$(grep '^[EW]:' "$log" | sort -u | head -n 2 | tr '\n' ' ')" \
  "If mirrors have dropped it, set DISTGRAD_DEBIAN_ARCHIVE to an archive that has $path," \
  "as Debian's snapshots have (.../archive/debian/$day)"
