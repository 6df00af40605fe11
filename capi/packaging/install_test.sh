#!/usr/bin/env bash
# Installs into a folder of the test's own, moves it, and builds and runs programs against it as
# somebody would who has never heard of Bazel: with pkg-config, with the samples' Makefile, in C++,
# and with CMake.
set -euo pipefail
capi=$TEST_SRCDIR/distgrad/capi samples=$TEST_SRCDIR/distgrad/bindings/c
source "$capi/testing/skip.sh"
skip_if_sanitized "$capi/libdistgrad.so.1"
cd "$TEST_TMPDIR"
RUNFILES_DIR=$TEST_SRCDIR "$capi/install" "$PWD/first place" --link-libtorch
mkdir -p moved
mv "first place" moved/prefix
prefix=$PWD/moved/prefix
export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
grep -q "Apache License" "$prefix/share/doc/distgrad/LICENSE" || { echo "FAILED: no licence of distgrad" >&2; exit 1; }
for license in abseil/LICENSE nlohmann-json/copyright tensorpipe/copyright libnop/copyright; do
  [[ -s $prefix/share/doc/distgrad/$license ]] || { echo "FAILED: no $license" >&2; exit 1; }
done
compgen -G "$prefix/share/doc/distgrad/*.dist-info" >/dev/null || { echo "FAILED: no licence of libtorch" >&2; exit 1; }
run_path=$(readelf -dW "$prefix/lib/libdistgrad.so.1" | sed -nE 's/.*\((RPATH|RUNPATH)\).*\[(.*)\]$/\2/p')
[[ $run_path == '$ORIGIN/distgrad' ]] || { echo "FAILED: the library's run path is $run_path" >&2; exit 1; }
libtorch=$prefix/lib/distgrad/libtorch
for needed in include/ATen/ATen.h include/torch/csrc/api/include/torch/torch.h lib/libtorch.so lib/libc10.so; do
  [[ -f $libtorch/$needed ]] || { echo "FAILED: no $needed for programs that use libtorch too" >&2; exit 1; }
done
grep -qxE '[0-9]+\.[0-9]+\.[0-9]+.*' "$libtorch/build-version"
cp -L "$samples"/{*.c,*.h,Makefile} . && chmod u+w ./*
mkdir cpp && cp -L "$samples"/../cpp/{*.cc,*.h,Makefile} cpp && chmod u+w cpp/*

if command -v pkg-config >/dev/null; then
  [[ $(pkg-config --modversion distgrad) == 1.* ]]
  # shellcheck disable=SC2046
  cc -std=c99 hello.c $(pkg-config --cflags --libs distgrad) -o app
  ./app | grep "^Hello process one"
  make --no-print-directory custom_handler data_parallel PKG_CONFIG_PATH="$PKG_CONFIG_PATH"
  ./custom_handler
  ./data_parallel
  make --no-print-directory -C cpp PKG_CONFIG_PATH="$PKG_CONFIG_PATH"
  cpp/hello | grep "^Hello worker 0"
  cpp/split
  cpp/replicas
else
  left_out pkg-config "no pkg-config on this machine"
  cc -std=c99 hello.c -I"$prefix/include" -L"$prefix/lib" -Wl,-rpath,"$prefix/lib" -ldistgrad -o app
  ./app | grep "^Hello process one"
fi

cat >app.cc <<'END'
#include <distgrad/distgrad.hpp>
int main() {
  const dg::Tensor x = dg::Tensor::From<float>({1, 2, 3}, {3});
  return dg::Op("aten::sum", {x}).data<float>()[0] == 6 ? 0 : 1;
}
END
g++ -std=c++17 app.cc -I"$prefix/include" -L"$prefix/lib" -Wl,-rpath,"$prefix/lib" -ldistgrad -o app_cc
./app_cc

if command -v cmake >/dev/null; then
  cat >CMakeLists.txt <<'END'
cmake_minimum_required(VERSION 3.13)
project(app C)
find_package(distgrad 1.0 REQUIRED)
add_executable(hello hello.c)
target_link_libraries(hello PRIVATE distgrad::distgrad)
END
  cmake -S . -B build -DCMAKE_PREFIX_PATH="$prefix" >/dev/null
  cmake --build build >/dev/null
  build/hello
else
  left_out cmake "no cmake on this machine"
fi
# Without --link-libtorch, as the README has it, libtorch is copied: nothing leads out of the folder.
# Over another installation, whose libraries a program may have loaded: it keeps what it has.
RUNFILES_DIR=$TEST_SRCDIR "$capi/install" "$PWD/copied" --link-libtorch
mkdir in_use
for library in libdistgrad.so.1 distgrad/libc10.so; do
  rm "copied/lib/$library"
  echo "of before" >"copied/lib/$library"
  ln "copied/lib/$library" in_use/
done
RUNFILES_DIR=$TEST_SRCDIR "$capi/install" "$PWD/copied"
for library in in_use/*; do
  [[ $(head -c 9 "$library") == "of before" ]] || { echo "FAILED: $library was written into" >&2; exit 1; }
done
links=$(find copied -type l -lname '/*')
[[ -z $links ]] || { echo "FAILED: these lead out of the folder: $links" >&2; exit 1; }
for needed in libc10.so libtorch_cpu.so libtorch/include/ATen/ATen.h; do
  [[ -s copied/lib/distgrad/$needed ]] || { echo "FAILED: no copy of $needed" >&2; exit 1; }
done
cc -std=c99 hello.c -Icopied/include -Lcopied/lib -Wl,-rpath,"$PWD/copied/lib" -ldistgrad -o app_copied
./app_copied | grep "^Hello process one"
loaded=$(ldd app_copied | sed -nE 's/^\s*libtorch_cpu\.so => (.*) \(.*/\1/p')
[[ $(realpath "$loaded") == "$(realpath copied/lib/distgrad/libtorch_cpu.so)" ]] ||
  { echo "FAILED: the program loads $loaded" >&2; exit 1; }
rm -r copied
echo "all of it runs"
