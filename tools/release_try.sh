#!/usr/bin/env bash
# tools/bazel run //tools:release_try -- DIR [--without-tch]
#
# Tries the files of a release, which //tools:release has put into DIR, where there is nothing but a
# bare Debian 12: in two roots made by debootstrap, one for the tarball and one for the Debian package,
# installs what each language needs and no more, and then builds and runs programs in C, C++ (by
# pkg-config and CMake) and Rust, without a network. Rust's toolchain and the crates are this machine's,
# for Debian 12 has an older one. Says for each step how long it took; ends with 1 if one failed.
#
# Needs root, debootstrap and iproute2, about 5 GB in DISTGRAD_TRY (default: /var/tmp) until it ends,
# and a mirror of Debian, the one of this machine's own /etc/apt.
set -euo pipefail

die() { echo "release_try: $*" >&2; exit 1; }
usage() { die "usage: tools/bazel run //tools:release_try -- DIR [--without-tch]"; }
release="" with_tch=1
for argument in "$@"; do
  case $argument in
    --without-tch) with_tch=0 ;;
    -*) usage ;;
    *) [[ -z $release ]] || usage; release=$argument ;;
  esac
done
[[ -n $release ]] || usage
release=$(cd "${BUILD_WORKING_DIRECTORY:-$PWD}" && realpath -e "$release") || die "that folder is not there"
[[ $EUID -eq 0 ]] || die "only root may make roots; run it by sudo, or in a container"
for tool in debootstrap ip unshare; do
  type -P "$tool" >/dev/null || die "no $tool on this machine; apt-get install debootstrap iproute2"
done
mapfile -t toolchain < <(tail -n 2 "$0.runfiles/crates/stamp.txt")
((${#toolchain[@]} == 2)) || die "no Rust: $(cat "$0.runfiles/crates/stamp.txt")"
(cd "$release" && sha256sum --check --quiet SHA256SUMS) || die "SHA256SUMS in $release is of other files"
tarball=$(cd "$release" && echo distgrad-*-linux-x86_64.tar.gz)
package=$(cd "$release" && echo distgrad_*_amd64.deb)
crate=$(cd "$release" && echo distgrad-*.crate)
mirror=$(find /etc/apt/sources.list /etc/apt/sources.list.d -type f -exec cat {} + 2>/dev/null |
  sed -nE 's/^URIs: *([^ ]+debian)\/?( .*)?$/\1/p; s/^deb (\[[^]]*\] )?([^ ]+debian)\/? bookworm .*/\2/p' | sed -n 1p) || true
[[ -n $mirror ]] || die "no mirror of Debian in /etc/apt"

work=$(mktemp -d "${DISTGRAD_TRY:-/var/tmp}/distgrad-try.XXXXXX")
# Mounts are in namespaces of their own, and gone with them; --one-file-system all the same.
trap 'rm -rf --one-file-system "$work"' EXIT
mkdir "$work/target"

# enter ROOT alone|online SCRIPT: runs it in the root, as somebody who has set nothing; with the
# machine's network, or with a loopback alone.
enter() {
  local net=() keep=() name
  if [[ $2 == alone ]]; then
    net=(--net)
  else
    for name in http_proxy https_proxy no_proxy; do [[ -z ${!name:-} ]] || keep+=("$name=${!name}"); done
  fi
  # shellcheck disable=SC2016
  unshare --mount --pid --fork --kill-child "${net[@]}" bash -euc '
    root=$1 script=$2 release=$3 target=$4 sysroot=$5 store=$6 network=$7
    shift 7
    [[ $network == online ]] || ip link set lo up
    mkdir -p "$root"/opt/{release,target,rust,crates}
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    mount -o ro,bind "$release" "$root/opt/release"
    mount --bind "$target" "$root/opt/target"
    mount -o ro,bind "$sysroot" "$root/opt/rust"
    mount -o ro,bind "$store/vendor" "$root/opt/crates"
    exec chroot "$root" /usr/bin/env -i "$@" PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 \
      DEBIAN_FRONTEND=noninteractive bash -euo pipefail -c "$script"
  ' enter "$1" "$3" "$release" "$work/target" "${toolchain[0]}" "${toolchain[1]}" "$2" "${keep[@]}" </dev/null
}

failed=0 report=""
# try WHAT ROOT alone|online SCRIPT
try() {
  local begin=$SECONDS status=0
  echo "== $1"
  enter "$2" "$3" "$4" >"$work/log" 2>&1 || status=$?
  if ((status)); then
    tail -n 40 "$work/log"
    echo "FAILED with $status: $1"
    failed=1
  else
    tail -n 2 "$work/log"
  fi
  report+=$(printf '%6d s  %s%s' $((SECONDS - begin)) "$1" "$(if ((status)); then echo ": FAILED"; fi)")$'\n'
}
installing() { echo "apt-get -q -y install --no-install-recommends $*"; }

begin=$SECONDS
debootstrap --variant=minbase bookworm "$work/base" "$mirror" >"$work/log" 2>&1 ||
  { tail -n 20 "$work/log"; die "debootstrap failed"; }
cp /etc/resolv.conf "$work/base/etc/"
mkdir -p "$work/base/root/.cargo"
printf '[source.crates-io]\nreplace-with = "here"\n[source.here]\ndirectory = "/opt/crates"\n' >"$work/base/root/.cargo/config.toml"
cp -a "$work/base" "$work/tarball"
mv "$work/base" "$work/deb"
report+=$(printf '%6d s  debootstrap' $((SECONDS - begin)))$'\n'

# What somebody writes who uses the crate, with the build script of its README.
rust_user='
mkdir -p /tmp/crate /tmp/user/src
tar -xzf /opt/release/'$crate' -C /tmp/crate --strip-components=1
cd /tmp/user
cat >Cargo.toml <<END
[package]
name = "user"
version = "0.1.0"
edition = "2021"
[dependencies]
distgrad = { path = "/tmp/crate" }
END
cat >build.rs <<END
fn main() {
    println!("cargo::rustc-link-arg=-Wl,-rpath,{}", std::env::var("DEP_DISTGRAD_LIB").unwrap());
}
END
cat >src/main.rs <<END
fn main() -> distgrad::Result<()> {
    let x = distgrad::Tensor::from_slice(&[1.0f32, 2.0, 3.0], &[3])?;
    println!("the sum is {}", x.sum()?.item::<f32>()?);
    Ok(())
}
END
cp /tmp/crate/Cargo.lock .
export PATH=/opt/rust/bin:$PATH CARGO_TARGET_DIR=/opt/target CARGO_INCREMENTAL=0
'
cmake_user='
mkdir -p /tmp/cmake && cd /tmp/cmake
cat >CMakeLists.txt <<END
cmake_minimum_required(VERSION 3.13)
project(app C CXX)
set(CMAKE_CXX_STANDARD 17)
find_package(distgrad 1.0 REQUIRED)
add_executable(hello_c /tmp/c/hello.c)
add_executable(hello_cpp /tmp/cpp/hello.cc)
target_link_libraries(hello_c PRIVATE distgrad::distgrad)
target_link_libraries(hello_cpp PRIVATE distgrad::distgrad)
END
'
built='cmake --build build; build/hello_c | grep "^Hello process one"; build/hello_cpp | grep "^Hello worker 0"'

# ----------------------------------------------------------------------------- The tarball
root=$work/tarball
try "tarball: apt-get install gcc, make, pkg-config, libssl3" "$root" online \
  "$(installing gcc libc6-dev make pkg-config libssl3)"
try "tarball: unpacked" "$root" alone "tar -xzf /opt/release/$tarball -C /opt
  mv /opt/${tarball%.tar.gz} /opt/distgrad; cd /opt/distgrad/share/doc/distgrad; du -sh /opt/distgrad html
  for file in docs/start.md html/docs/start.html html/rust/distgrad/index.html bindings/rust/Cargo.toml; do test -s \$file; done
  cat REQUIREMENTS"
samples='cp -r /opt/distgrad/share/doc/distgrad/bindings/{c,cpp} /tmp; export PKG_CONFIG_PATH=/opt/distgrad/lib/pkgconfig'
try "tarball: C by pkg-config: hello, split, custom_handler" "$root" alone "$samples
  cd /tmp/c; make hello split custom_handler; ./custom_handler; ./split; ./hello | grep '^Hello process one'"
try "tarball: apt-get install libuv1-dev" "$root" online "$(installing libuv1-dev)"
try "tarball: C by pkg-config: all samples, also that for libuv, and the loops of epoll and libuv" "$root" alone '
  export PKG_CONFIG_PATH=/opt/distgrad/lib/pkgconfig; cd /tmp/c; make; test -x libuv; ./epoll; ./libuv'
try "tarball: moved to another place" "$root" alone 'mv /opt/distgrad /srv/distgrad
  export PKG_CONFIG_PATH=/srv/distgrad/lib/pkgconfig; cd /tmp/c; make -B hello; ./hello | grep "^Hello process one"
  mv /srv/distgrad /opt/distgrad'
try "tarball: apt-get install g++" "$root" online "$(installing g++)"
try "tarball: C++ by pkg-config: hello, split" "$root" alone "$samples
  cd /tmp/cpp; make hello split; ./split; ./hello | grep '^Hello worker 0'"
try "tarball: C++ and C, two processes with a key, as a launcher starts them" "$root" alone '
  od -An -tx1 -N32 /dev/urandom | tr -d " \n" >/tmp/job.key; chmod 600 /tmp/job.key
  export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 DISTGRAD_KEY_FILE=/tmp/job.key
  for split in /tmp/cpp/split /tmp/c/split; do RANK=1 $split & RANK=0 $split; wait $!; done'
try "tarball: apt-get install cmake" "$root" online "$(installing cmake)"
try "tarball: C and C++ by CMake" "$root" alone "$cmake_user cmake -S . -B build -DCMAKE_PREFIX_PATH=/opt/distgrad; $built"
try "tarball: apt-get install python3" "$root" online "$(installing python3)"
try "tarball: asyncio awaits calls, by ctypes" "$root" alone \
  'python3 /opt/distgrad/share/doc/distgrad/bindings/ctypes_test.py /opt/distgrad/lib/libdistgrad.so.1'
try "tarball: Rust, hello of its own copy of the crate, by DISTGRAD_DIR" "$root" alone "$rust_user
  export DISTGRAD_DIR=/opt/distgrad; cp -r /opt/distgrad/share/doc/distgrad/bindings/rust /tmp/rust; cd /tmp/rust
  cargo run --example hello | grep '^Hello process one'"
try "tarball: Rust, a crate that depends on it, by pkg-config" "$root" alone "$rust_user
  export PKG_CONFIG_PATH=/opt/distgrad/lib/pkgconfig; cargo run | grep 'the sum is 6'"
try "crate: documentation as docs.rs makes it, without the library" "$root" alone "$rust_user
  cd /tmp/crate; cargo doc --no-deps --features ndarray"

# ----------------------------------------------------------------------------- The Debian package
root=$work/deb
try "deb: apt-get install it" "$root" online "$(installing "/opt/release/$package"); du -sh /usr/lib/distgrad"
try "deb: apt-get install g++, make, pkg-config, cmake" "$root" online "$(installing g++ make pkg-config cmake)"
try "deb: C and C++ by pkg-config" "$root" alone 'cp -r /usr/share/doc/distgrad/bindings/{c,cpp} /tmp
  pkg-config --cflags --libs distgrad
  cd /tmp/c; make hello; ./hello | grep "^Hello process one"; cd /tmp/cpp; make hello; ./hello | grep "^Hello worker 0"'
try "deb: C and C++ by CMake" "$root" alone "$cmake_user cmake -S . -B build; $built"
try "deb: Rust, a crate that depends on it, with nothing set" "$root" alone "$rust_user cargo run | grep 'the sum is 6'"
try "deb: removed, with all its files" "$root" alone 'rm -rf /tmp/*; dpkg --purge distgrad
  left=$(find /usr -name "*distgrad*"); if [[ -n $left ]]; then echo "left: $left"; exit 1; fi'

# Last, for tch's C++ takes most of the time.
if ((with_tch)); then
  try "tarball: Rust with --features tch, its tests" "$work/tarball" alone "$rust_user
    export DISTGRAD_DIR=/opt/distgrad LIBTORCH=/opt/distgrad/lib/distgrad/libtorch
    export LD_LIBRARY_PATH=\$LIBTORCH/lib; cd /tmp/crate; cargo test --features tch --test tch"
fi

echo "== what was tried, in $release"
printf '%s' "$report"
((!failed)) || die "not all of it works"
echo "all of it works"
