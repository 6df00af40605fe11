#!/usr/bin/env bash
# install PREFIX [--link-libtorch]
#
# Lays out distgrad for programs outside Bazel:
#
#   PREFIX/include/distgrad/          the headers
#   PREFIX/lib/libdistgrad.so.1       the library, which finds what it needs relative to itself
#   PREFIX/lib/distgrad/              the libtorch that it was built with
#   PREFIX/lib/distgrad/libtorch/     the same as tch and CMake expect a libtorch, with its headers:
#                                     LIBTORCH of programs that use its own interface too
#   PREFIX/lib/pkgconfig/distgrad.pc
#   PREFIX/lib/cmake/distgrad/        find_package(distgrad), target distgrad::distgrad
#   PREFIX/share/doc/distgrad/        distgrad's licence (LICENSE), those of libtorch and what comes
#                                     with it, and of what is compiled into the library
#
# All of it may be moved together. With --link-libtorch there are links to libtorch's libraries in
# place of copies (490 MB): quick, but only as long as the build's cache is there.
set -euo pipefail

usage() {
  echo "usage: install PREFIX [--link-libtorch]" >&2
  exit 2
}
# Never into a library that is there: a program may have it loaded.
prefix="" new_copy=(cp --remove-destination -L)
copy=("${new_copy[@]}")
for argument in "$@"; do
  case $argument in
    --link-libtorch) copy=(ln -sf) ;;
    -*) usage ;;
    *) [[ -z $prefix ]] || usage; prefix=$argument ;;
  esac
done
[[ -n $prefix ]] || usage
[[ $prefix == /* ]] || prefix=${BUILD_WORKING_DIRECTORY:-$PWD}/$prefix

# Where Bazel put what this program needs.
here=${RUNFILES_DIR:-$0.runfiles}
[[ -d $here/distgrad ]] || here=${TEST_SRCDIR:-}
capi=$here/distgrad/capi torch=$here/torch
[[ -f $capi/libdistgrad.so.1 && -d $torch/lib ]] || {
  echo "install: run it with tools/bazel run //capi:install -- PREFIX" >&2
  exit 1
}
header=$capi/include/distgrad/distgrad.h
number() { sed -nE "s/^#define $1 ([0-9]+)$/\1/p" "$header"; }
version=$(number DG_ABI_MAJOR).$(number DG_ABI_MINOR)

mkdir -p "$prefix"/include/distgrad "$prefix"/lib/{distgrad,pkgconfig,cmake/distgrad} "$prefix"/share/doc/distgrad
cp -fL "$capi"/include/distgrad/distgrad.{h,hpp} "$prefix/include/distgrad/"
"${new_copy[@]}" "$capi/libdistgrad.so.1" "$prefix/lib/"
chmod u+w "$prefix/lib/libdistgrad.so.1"
python3 "$capi/packaging/run_path.py" "$prefix/lib/libdistgrad.so.1"
ln -sf libdistgrad.so.1 "$prefix/lib/libdistgrad.so"
for library in "$torch"/lib/*; do
  "${copy[@]}" "$(readlink -f "$library")" "$prefix/lib/distgrad/$(basename "$library")"
done
# The headers lie beside the libraries, and are not named one by one: they are 6,000.
libtorch=$prefix/lib/distgrad/libtorch
headers=$(dirname "$(dirname "$(readlink -f "$torch/lib/libtorch_cpu.so")")")/include
mkdir -p "$libtorch"
rm -rf "$libtorch/include"
if [[ ${copy[0]} == ln ]]; then ln -s "$headers" "$libtorch/include"; else cp -RL "$headers" "$libtorch/include"; fi
ln -sfn .. "$libtorch/lib"
# The name that programs of libtorch link; the CPU's part is all of it here.
ln -sf libtorch_cpu.so "$prefix/lib/distgrad/libtorch.so"
sed -n 's/^Version: //p' "$torch"/site/torch-*.dist-info/METADATA >"$libtorch/build-version"
sed "s/@VERSION@/$version/" "$capi/packaging/distgrad.pc.in" >"$prefix/lib/pkgconfig/distgrad.pc"
cp -fL "$capi/packaging/distgrad-config.cmake" "$prefix/lib/cmake/distgrad/"
sed "s/@VERSION@/$version/" "$capi/packaging/distgrad-config-version.cmake.in" \
  >"$prefix/lib/cmake/distgrad/distgrad-config-version.cmake"
(cd "$torch/site" && find -L . -path './*.dist-info/*' -type f) | while read -r file; do
  mkdir -p "$prefix/share/doc/distgrad/$(dirname "$file")"
  cp -fL "$torch/site/$file" "$prefix/share/doc/distgrad/$file"
done
license() { # NAME FILE
  mkdir -p "$prefix/share/doc/distgrad/$1"
  cp -fL "$here/$2" "$prefix/share/doc/distgrad/$1/"
}
cp -fL "$here/distgrad/LICENSE" "$prefix/share/doc/distgrad/"
license abseil com_google_absl/LICENSE
license nlohmann-json json/usr/share/doc/nlohmann-json3-dev/copyright
license tensorpipe tensorpipe_interfaces/usr/share/doc/libtensorpipe-dev/copyright
license libnop libnop/usr/share/doc/libnop-dev/copyright
chmod -R u+w "$prefix/include/distgrad" "$prefix/share/doc/distgrad"
echo "installed distgrad $version in $prefix"
