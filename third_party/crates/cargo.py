"""Runs cargo for Bazel, offline but for `vendor`.

cargo.py vendor SYSROOT MANIFEST LOCK TORCH CACHE
                                       fills the store; prints its path
cargo.py dependencies SYSROOT STORE MANIFEST FEATURES SANITIZER TAR [TAR]
                                       builds what the crate depends on, from what is in the second
cargo.py build SYSROOT STORE MANIFEST FEATURES SANITIZER TAR HEADER LIBRARY NAME=FILE...
                                       builds its programs, runs its checks

SANITIZER is as rustc calls it, with the target ("address:x86_64-unknown-linux-gnu"), or empty.
"""
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile

# To be raised when vendor() changes what a store looks like.
LAYOUT = "1"

# With the crate's features. In this order: the last one does without the library, and so builds its
# own part again.
CHECKS = {
    "fmt": ["fmt", "--check"],
    "clippy": ["clippy", "--all-targets", "--", "-D", "warnings"],
    "doctest": ["test", "--doc"],
    "package": ["package", "--allow-dirty"],
    "doc": ["doc", "--no-deps"],
}


def stub(manifest, lock, folder):
    """The crate without its sources, and with a build script that does nothing."""
    os.makedirs(folder)
    shutil.copyfile(manifest, os.path.join(folder, "Cargo.toml"))
    shutil.copyfile(lock, os.path.join(folder, "Cargo.lock"))
    with open(manifest, encoding="utf-8") as file:
        targets = re.findall(r'\[\[(\w+)\]\]\nname = "(\w+)"', file.read())
    sources = ["README.md", "src/lib.rs", "build.rs"] + ["%ss/%s.rs" % target for target in targets]
    for path in (os.path.join(folder, source) for source in sources):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write("#![allow(dead_code)]\nfn main() {}\n" if path.endswith(".rs") else "")


def name_of(manifest):
    with open(manifest, encoding="utf-8") as file:
        return next(line.split('"')[1] for line in file if line.startswith("name = "))


def vendor(sysroot, manifest, lock, torch, cache):
    torch = os.path.join(os.path.dirname(os.path.realpath(os.path.join(torch, "lib", "libtorch_cpu.so"))), "..")
    torch = os.path.realpath(torch)
    with open(lock, encoding="utf-8") as file:
        key = "\0".join([LAYOUT, torch, file.read()])
    store = os.path.join(cache, "crates-" + hashlib.sha256(key.encode()).hexdigest()[:16])
    os.makedirs(cache, exist_ok=True)
    with open(os.path.join(cache, "crates.lock"), "w") as guard:
        # Whoever comes second waits, and then finds the store filled.
        fcntl.flock(guard, fcntl.LOCK_EX)
        for left in glob.glob(os.path.join(glob.escape(cache), "crates.tmp.*")):
            shutil.rmtree(left, ignore_errors=True)  # of a fetch that was killed
        if not os.path.isdir(store):
            with tempfile.TemporaryDirectory(prefix="crates.tmp.", dir=cache) as scratch:
                stub(manifest, lock, os.path.join(scratch, "stub"))
                site = os.path.join(scratch, "site")
                command = [os.path.join(sysroot, "bin", "cargo"), "vendor", "--quiet", "--locked", "--versioned-dirs",
                           "--manifest-path", os.path.join(scratch, "stub", "Cargo.toml"), os.path.join(site, "vendor")]
                result = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True)
                if result.returncode:
                    sys.exit("cargo vendor failed (no network, or no crate registry in reach?): " + result.stdout)
                link_libtorch(torch, os.path.join(site, "libtorch"))
                # All or nothing: a store that exists is complete.
                os.rename(site, store)
    print(store)


def link_libtorch(torch, folder):
    """What tch takes for a libtorch: the wheel's, with a name that it links and the wheel's CPU part lacks."""
    os.makedirs(os.path.join(folder, "lib"))
    os.symlink(os.path.join(torch, "include"), os.path.join(folder, "include"))
    for library in glob.glob(os.path.join(glob.escape(torch), "lib", "*.so*")):
        os.symlink(library, os.path.join(folder, "lib", os.path.basename(library)))
    os.symlink("libtorch_cpu.so", os.path.join(folder, "lib", "libtorch.so"))


class Cargo:
    """cargo in a home and with a target folder of this action's own."""

    def __init__(self, sysroot, store, folder, features, sanitizer="", tar=None):
        top = os.getcwd()
        self.home = os.path.join(top, "_cargo")
        self.target = os.path.join(self.home, "target")
        self.folder = folder
        self.features = features
        os.makedirs(self.target)
        if tar:
            with tarfile.open(tar) as archive:
                archive.extractall(self.target)
        with open(os.path.join(self.home, "config.toml"), "w") as file:
            file.write('[source.crates-io]\nreplace-with = "vendored"\n[source.vendored]\n'
                       'directory = "%s/vendor"\n[net]\noffline = true\n' % store)
        self.environment = {
            "PATH": sysroot + "/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": self.home,
            "CARGO_HOME": self.home,
            "CARGO_TARGET_DIR": self.target,
            "CARGO_INCREMENTAL": "0",
            "CARGO_TERM_COLOR": "never",
            "CARGO_PROFILE_DEV_DEBUG": "line-tables-only",
            "LIBTORCH": store + "/libtorch",
            "RUSTDOCFLAGS": "-D warnings",
            "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
        }
        if sanitizer:
            name, triple = sanitizer.split(":")
            # A stable rustc has the run-time, but not yet the option. With a target named, build
            # scripts and macros stay as they are.
            self.environment["RUSTC_BOOTSTRAP"] = "1"
            self.environment["RUSTFLAGS"] = "-Zsanitizer=" + name
            self.environment["CARGO_BUILD_TARGET"] = triple
            self.environment["CXXFLAGS_" + triple.replace("-", "_")] = "-fsanitize=" + name

    def __call__(self, command, **options):
        command, tail = (command[:command.index("--")], command[command.index("--"):]) if "--" in command else (command, [])
        common = [] if command[0] == "fmt" else ["--quiet", "--offline", "--frozen", "--features", self.features]
        line = ["cargo", *command, *common, "--manifest-path", os.path.join(self.folder, "Cargo.toml"), *tail]
        return subprocess.run(line, env=self.environment, stdin=subprocess.DEVNULL, text=True, **options)


def dependencies(sysroot, store, manifest, features, sanitizer, tar, base=None):
    folder = os.path.abspath("_stub")
    stub(manifest, os.path.join(os.path.dirname(manifest), "Cargo.lock"), folder)
    cargo = Cargo(sysroot, store, folder, features, sanitizer, base)
    for command in (["test", "--no-run"], ["clippy", "--all-targets"])[:1 if sanitizer else 2]:
        result = cargo(command)
        if result.returncode:
            sys.exit(result.returncode)
    # The stub must not pass for the crate: cargo goes by times, and the real sources may be older.
    name = name_of(manifest)
    # With a target named there is a folder more on the way.
    for path in (path for way in ("*/*/*", "*/*/*/*") for path in glob.glob(os.path.join(cargo.target, way))):
        if os.path.basename(path).startswith((name + "-", "lib%s-" % name, name + ".", "lib%s." % name)):
            shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
    with tarfile.open(tar, "w") as archive:
        archive.add(cargo.target, ".")


def install(header, library, prefix):
    """An installed tree, for build.rs."""
    os.makedirs(os.path.join(prefix, "lib"))
    os.symlink(os.path.dirname(os.path.dirname(os.path.abspath(header))), os.path.join(prefix, "include"))
    for name in ("libdistgrad.so", "libdistgrad.so.1"):
        os.symlink(os.path.realpath(library), os.path.join(prefix, "lib", name))


def programs(cargo):
    """Builds tests and examples; name to file."""
    found = {}
    # Not `test --examples`, which gives each example a main of the test harness.
    for command in (["test", "--no-run", "--tests"], ["build", "--examples"]):
        result = cargo(command + ["--message-format=json-render-diagnostics"], stdout=subprocess.PIPE)
        if result.returncode:
            sys.exit(result.returncode)
        for line in result.stdout.splitlines():
            message = json.loads(line) if line.startswith("{") else {}
            if message.get("executable"):
                found[message["target"]["name"]] = message["executable"]
    return found


def strict_rustdoc(sysroot, folder):
    """One that looks at the codes of `compile_fail,E0277` too, which a stable one passes over."""
    path = os.path.join(folder, "rustdoc")
    with open(path, "w") as file:
        file.write('#!/bin/sh\nRUSTC_BOOTSTRAP=1 exec "%s/bin/rustdoc" "$@"\n' % sysroot)
    os.chmod(path, 0o755)
    return path


def build(sysroot, store, manifest, features, sanitizer, tar, header, library, *outputs):
    cargo = Cargo(sysroot, store, os.path.dirname(os.path.abspath(manifest)), features, sanitizer, tar)
    prefix = os.path.join(cargo.home, "prefix")
    install(header, library, prefix)
    torch = os.path.dirname(os.path.realpath(os.path.join(store, "libtorch", "lib", "libtorch_cpu.so")))
    cargo.environment["DISTGRAD_DIR"] = prefix
    cargo.environment["LD_LIBRARY_PATH"] = "%s:%s" % (os.path.dirname(os.path.realpath(library)), torch)

    found = programs(cargo)
    files = dict(output.split("=", 1) for output in outputs)
    for name in sorted(set(files) - set(CHECKS)):
        if name not in found:
            sys.exit("cargo built no %r, only %s" % (name, sorted(found)))
        shutil.copy(found[name], files[name])
    # A check that fails is a test that fails, and not the end of the others.
    for name in (name for name in CHECKS if name in files):
        if name == "doc":
            del cargo.environment["DISTGRAD_DIR"]
        if name == "doctest":
            cargo.environment["RUSTDOC"] = strict_rustdoc(sysroot, cargo.home)
        with open(files[name], "w") as log:
            code = cargo(CHECKS[name], stdout=log, stderr=log).returncode
            log.write("\n%d\n" % abs(code))


if __name__ == "__main__":
    {"vendor": vendor, "dependencies": dependencies, "build": build}[sys.argv[1]](*sys.argv[2:])
