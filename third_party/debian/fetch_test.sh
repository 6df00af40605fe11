#!/usr/bin/env bash
# Where fetch.sh finds a pinned file: at its place in the machine's mirrors, without any list of
# packages; and, when the mirrors have dropped it or have another file there, in an archive that keeps
# it. All of them are folders of this test.
set -euo pipefail
fetch=$TEST_SRCDIR/$TEST_WORKSPACE/third_party/debian/fetch.sh
source "$TEST_SRCDIR/$TEST_WORKSPACE/capi/testing/skip.sh"
type -P apt-get >/dev/null || skip "no apt-get on this machine"
cd "$(mktemp -d "$TEST_TMPDIR/debian.XXXXXX")"
here=$PWD

# The characters that versions have.
place=pool/main/t/thing/thing_1.0~git+b1_all.deb
mkdir -p "mirror/$(dirname $place)" etc/sources.list.d
echo "the package" >"mirror/$place"
sum=$(sha256sum "mirror/$place" | cut -d' ' -f1)
fetched() { DISTGRAD_CACHE=$here/$1 bash "$fetch" "${kind:-binary}" thing 1.0~git+b1 "$sum" "$place" "$here/etc"; }
expect() { # WHAT CACHE
  local file
  file=$(fetched "$2" 2>said) || { echo "FAILED: $1: $(cat said)" >&2; exit 1; }
  [[ $file == "$here/$2/debian/$sum/thing_1.0~git+b1_all.deb" && -f $file && ! -L $file ]] ||
    { echo "FAILED: $1: it is $file" >&2; exit 1; }
  grep -qx "the package" "$file"
}
refused() { # WHAT CACHE TEXT...
  local text
  if fetched "$2" >/dev/null 2>said; then echo "FAILED: $1 was not refused" >&2; exit 1; fi
  for text in "${@:3}"; do
    grep -qF -- "$text" said || { echo "FAILED: $1: no '$text' in: $(cat said)" >&2; exit 1; }
  done
}

# Each form of apt's sources; a mirror that lacks the file comes first.
echo "deb [trusted=yes arch=amd64] file:$here/mirror/ bookworm main" >etc/sources.list
expect "a source in one line" one
kind=source expect "a source package" two
mv etc/sources.list etc/sources.list.d/debian.list
echo "deb-src file:$here/nothing bookworm main" >>etc/sources.list.d/debian.list
expect "a list of its own" three
rm etc/sources.list.d/debian.list
printf 'Types: deb\nURIs: file:%s/nothing file:%s/mirror\nSuites: bookworm\nComponents: main\n' "$here" "$here" \
  >etc/sources.list.d/debian.sources
expect "a source of several lines" four

# What is in the store needs no source, and what is damaged there is fetched again.
mv mirror elsewhere
expect "the store" one
echo damaged >"one/debian/$sum/thing_1.0~git+b1_all.deb"
refused "a damaged file of the store" one "not to be had from this machine's apt sources"
mv elsewhere mirror
expect "a damaged file of the store" one

# The mirrors have dropped it.
mv mirror elsewhere
refused "a package that mirrors have dropped" five "tried file:$here/nothing file:$here/mirror, and by apt" \
  "set DISTGRAD_DEBIAN_ARCHIVE to an archive that has $place"
DISTGRAD_DEBIAN_ARCHIVE="file:$here/nothing file:$here/elsewhere" expect "an archive that is named" five
sed -i "1i # file://$here/old/archive/debian/20250520T000000Z" etc/sources.list.d/debian.sources
refused "an archive that lacks it, too" six "file://$here/old/archive/debian/20240801T000000Z, and by apt"
mkdir -p old/archive/debian
mv elsewhere old/archive/debian/20240801T000000Z
expect "the snapshot that apt's sources name in a comment" six

# Another file in its place is not taken.
mkdir -p "mirror/$(dirname $place)"
echo "another" >"mirror/$place"
expect "a mirror with another file there" seven
rm -r old
refused "another file" eight "thing_1.0~git+b1_all.deb has checksum $(sha256sum <"mirror/$place" | cut -d' ' -f1), not $sum"
[[ -z $(ls eight/debian) ]] || { echo "FAILED: it left something: $(ls eight/debian)" >&2; exit 1; }
