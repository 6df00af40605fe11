#!/usr/bin/env bash
# What tools/machine.sh says of machines, and what it makes of a disk cache; and that tools/bazel
# passes the cache on to Bazel.
set -euo pipefail
tools=$TEST_SRCDIR/$TEST_WORKSPACE/tools
source "$tools/machine.sh"
source "$TEST_SRCDIR/$TEST_WORKSPACE/capi/testing/skip.sh"
cd "$(mktemp -d "$TEST_TMPDIR/bazel.XXXXXX")"

failed=0
same() { # WHAT EXPECTED GOT
  if [[ $2 != "$3" ]]; then
    echo "FAILED: $1: '$3', not '$2'" >&2
    failed=1
  fi
}
has() { # WHAT PART TEXT
  if [[ $3 != *"$2"* ]]; then
    echo "FAILED: $1: '$3' lacks '$2'" >&2
    failed=1
  fi
}
release() { printf '%s\n' "$@" >release; }

release 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"' 'VERSION_ID="12"' VERSION_CODENAME=bookworm ID=debian
same "Debian 12" "" "$(machine_problem release x86_64)"
same "its name" debian12 "$(system_name release)"
has "another processor" "is a aarch64, and libtorch" "$(machine_problem release aarch64)"
release 'PRETTY_NAME="LMDE 6 (faye)"' VERSION_CODENAME=faye DEBIAN_CODENAME=bookworm ID=linuxmint
same "what is made of Debian 12" "" "$(machine_problem release x86_64)"
release 'PRETTY_NAME="Debian GNU/Linux 13 (trixie)"' VERSION_ID=13 VERSION_CODENAME=trixie ID=debian
has "Debian 13" "this is Debian GNU/Linux 13 (trixie), and the packages are those of Debian 12" "$(machine_problem release x86_64)"
release 'PRETTY_NAME="Ubuntu 24.04.1 LTS"' 'VERSION_ID="24.04"' VERSION_CODENAME=noble ID=ubuntu
has Ubuntu "Ubuntu 24.04.1 LTS" "$(machine_problem release x86_64)"
has "the container" "docker run --platform linux/amd64 -it debian:12" "$(machine_problem release x86_64)"
same "Ubuntu's name" ubuntu24.04 "$(system_name release)"
has "no name" "a system without /etc/os-release" "$(machine_problem nowhere x86_64)"
same "the name of none" linux "$(system_name nowhere)"

unset http_proxy https_proxy ftp_proxy all_proxy no_proxy HTTP_PROXY HTTPS_PROXY FTP_PROXY ALL_PROXY NO_PROXY
same "no proxy" "" "$(proxy_variables)"
same proxies https_proxy,no_proxy,HTTP_PROXY \
  "$(https_proxy=http://user:secret@proxy no_proxy=localhost HTTP_PROXY=http://proxy proxy_variables)"

draws run //examples:fashion_mnist -- --workers 4 || same "an example draws" yes no
draws run -c dbg examples:transformer || same "an example draws" yes no
if draws run //capi:install -- //examples:replicas; then same "an installation draws" no yes; fi
if draws run //examples:launcher_test_worker; then same "a launcher draws" no yes; fi

# Compilers of two versions have two caches; one that is there without a name is gone on with.
compiler() { printf '#!/bin/sh\necho %s\n' "$1" >gcc && chmod +x gcc; }
release ID=debian VERSION_ID=12
compiler 12.2.0
same "a disk cache" "$PWD/cache/bazel-debian12-gcc12.2.0" "$(disk_cache "$PWD/cache" release "$PWD/gcc")"
compiler 13.1.0
same "that of another compiler" "$PWD/cache/bazel-debian12-gcc13.1.0" "$(disk_cache "$PWD/cache" release "$PWD/gcc")"
release ID=debian VERSION_ID=13
same "that of another system" "$PWD/cache/bazel-debian13-gcc13.1.0" "$(disk_cache "$PWD/cache" release "$PWD/gcc")"
mkdir -p old/bazel/cas
same "one of before" "$PWD/old/bazel-debian13-gcc13.1.0" "$(disk_cache "$PWD/old" release "$PWD/gcc")"
if [[ ! -d old/bazel-debian13-gcc13.1.0/cas ]]; then same "one of before" used "not used"; fi
compiler 12.2.0
if [[ -d $(disk_cache "$PWD/old" release "$PWD/gcc")/cas ]]; then same "that of another compiler beside it" "of its own" shared; fi

printf '#!/bin/sh\n[ "$1" = -dumpversion ] && echo %s\n' 14.0.6 >clang && chmod +x clang
same "clang's" "$PWD/cache/bazel-debian13-clang14.0.6" "$(disk_cache "$PWD/cache" release "$PWD/clang")"
unset CC
same "the compiler" gcc "$(compiler_of build -c opt //a)"
same "that of the environment" gcc-11 "$(CC=gcc-11 compiler_of build //a)"
same "that of an option" /usr/bin/gcc-13 "$(CC=gcc-11 compiler_of build --repo_env=CC=/usr/bin/gcc-13 //a)"
same "the fuzzers'" clang "$(compiler_of run --config=fuzz //tests/fuzz:frame_fuzzer)"
same "that of a program's argument" gcc "$(compiler_of run //a -- --config=fuzz)"

# Ten files of 1 MB, used one day after the other, in a cache for 5 MB: four are left.
mkdir -p disk/ac disk/cas
for day in 1 2 3 4 5 6 7 8 9; do
  head -c 1048576 /dev/zero >"disk/cas/file $day"
  touch -d "2020-01-0$day" "disk/cas/file $day"
done
head -c 1048576 /dev/zero >disk/ac/new
prune disk 100
same "all of it where there is room" 10 "$(find disk/ac disk/cas -type f | wc -l)"
prune disk 5
same "the same day" 10 "$(find disk/ac disk/cas -type f | wc -l)"
touch -d "2 days ago" disk/pruned
prune disk 5
same "what was used latest" "disk/ac/new disk/cas/file 7 disk/cas/file 8 disk/cas/file 9" \
  "$(find disk/ac disk/cas -type f | sort | paste -sd' ')"
ln -s disk link
touch -d "2 days ago" disk/pruned
prune link 2
same "behind a link" "disk/ac/new" "$(find disk/ac disk/cas -type f)"
# Names of far more than a pipe's 64 KiB, of which most stay.
mkdir many
name=$(printf '%0100d' 0)
for ((i = 0; i < 3000; ++i)); do echo "$i" >"many/$name$i"; done
kilobytes=$(find many -type f -printf '%k\n' | awk '{ sum += $1 } END { print sum }')
megabytes=$((kilobytes / 1024 * 9 / 10))
# As tools/bazel calls it, where what fails ends all: behind a || it would not.
bash -euo pipefail -c 'source "$1"; prune many "$2"' prune "$tools/machine.sh" $megabytes ||
  same "the status with many files" 0 $?
if [[ ! -e many/pruned ]]; then same "many files" pruned "not pruned"; fi
left=$(find many -type f -name '0*' -printf '%k\n' | awk '{ sum += $1 } END { print sum }')
if ((left > megabytes * 1024 * 4 / 5 || left < megabytes * 1024 * 3 / 4)); then
  same "what is left of many files" "four fifths of $megabytes MB" "$left KB"
fi

# The wrapper itself, with a program in Bazel's place.
printf '#!/bin/sh\nprintf "%%s\\n" "$@"\n' >real && chmod +x real
if [[ -d /usr/share/bazel/rules/java && -e /usr/include/openssl/hmac.h ]]; then
  mkdir -p cache/debian
  said=$(BAZEL_REAL=$PWD/real DISTGRAD_CACHE=$PWD/cache "$tools/bazel" --max_idle_secs 9 build -k //a 2>&1)
  same "the call" "--max_idle_secs 9 build --disk_cache=CACHE -k //a" \
    "$(sed -E "s|=$PWD/cache/bazel-[^ ]*|=CACHE|" <<<"$said" | paste -sd' ')"
  said=$(PATH=$PWD:$PATH BAZEL_REAL=$PWD/real DISTGRAD_CACHE=$PWD/cache "$tools/bazel" build --config=fuzz //a 2>&1)
  has "the fuzzers' cache" "-clang14.0.6" "$said"
  said=$(BAZEL_REAL=$PWD/real DISTGRAD_CACHE=$PWD/cache "$tools/bazel" build --disk_cache=mine //a 2>&1)
  same "a cache of one's own" "build --disk_cache=mine //a" "$(paste -sd' ' <<<"$said")"
  said=$(BAZEL_REAL=$PWD/real DISTGRAD_CACHE=$PWD/cache "$tools/bazel" query //a 2>&1)
  same "a query" "query //a" "$(paste -sd' ' <<<"$said")"
else
  left_out wrapper "Bazel's own files are not on this machine"
fi
exit $failed
