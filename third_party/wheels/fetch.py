"""Downloads pinned wheels and unpacks them into a store shared by all clones; prints its path.

fetch.py --check
fetch.py NAME REQUIREMENTS CACHE MEGABYTES PATTERN...

A store that is there is checked, file by file, against the list that was written when it was
unpacked; one that has changed is thrown away, and fetched again.

MEGABYTES is the disk space for the wheels and what is kept of them; with less free it stops.

Runs on any Python >= 3.8 with pip >= 21.1: which wheels are taken does not depend on it.
"""
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile

# The wheels are for this Python; only tests (of torchrun, of safetensors) use what depends on it.
TARGET = ["--implementation=cp", "--python-version=3.11", "--abi=cp311", "--abi=none"] + [
    "--platform=manylinux_2_%d_x86_64" % minor for minor in range(28, 11, -1)
] + ["--platform=manylinux2014_x86_64"]
# To be raised when unpack() changes what a store looks like.
LAYOUT = "1"
# In each store: the SHA-256 of each of its files, by path.
SUMS = "sums.json"


def check():
    if sys.version_info < (3, 8):
        sys.exit("is Python %d.%d" % sys.version_info[:2])
    try:
        import pip
    except ImportError:
        sys.exit("has no pip")
    if tuple(map(int, re.findall(r"\d+", pip.__version__)[:2])) < (21, 1):
        sys.exit("has pip %s" % pip.__version__)


def download(requirements, folder):
    command = [
        sys.executable, "-m", "pip", "download", "--progress-bar=off", "--no-cache-dir", "--no-input",
        "--disable-pip-version-check", "--retries=2", "--timeout=60", "--no-deps",
        "--only-binary=:all:", "--require-hashes", "--dest", folder, "--requirement", requirements,
    ] + TARGET
    # pip's own temporary copy belongs on the same disk, not on a small /tmp.
    os.makedirs(folder)
    environment = dict(os.environ, TMPDIR=folder)
    for attempt in range(3):
        if attempt:
            time.sleep(2)
        result = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode == 0:
            return
    # pip says "no such version" for everything; what really happened stands in an earlier line.
    causes = re.findall(r"^.*(?:NewConnectionError|ConnectTimeout|ProxyError|SSLError).*$|^ERROR.*$",
                        result.stdout, re.MULTILINE)
    sys.exit("pip download failed three times (no network, or no package index in reach?): %s" %
             (causes or result.stdout.strip().splitlines() or ["no message"])[0].strip())


def unpack(wheels, folder, patterns):
    keep = [re.compile(p) for p in patterns if not p.startswith("!")]
    leave = [re.compile(p[1:]) for p in patterns if p.startswith("!")]
    os.makedirs(folder)
    for name in sorted(os.listdir(wheels)):
        if not name.endswith(".whl"):
            continue
        with zipfile.ZipFile(os.path.join(wheels, name)) as wheel:
            for member in wheel.infolist():
                if (not any(p.fullmatch(member.filename) for p in keep)
                        or any(p.fullmatch(member.filename) for p in leave)):
                    continue
                path = wheel.extract(member, folder)
                # zipfile drops the mode; the compiler's wheels have programs.
                os.chmod(path, (member.external_attr >> 16) & 0o777 | 0o644)


def sum_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def write_sums(store):
    """Lists all files of the store, whole or not at all."""
    sums = {}
    for folder, _, files in os.walk(store):
        for file in files:
            path = os.path.join(folder, file)
            relative = os.path.relpath(path, store)
            # Python leaves its own beside the modules that it has run.
            if relative not in (SUMS, SUMS + ".tmp") and not relative.endswith(".pyc"):
                sums[relative] = sum_of(path)
    temporary = os.path.join(store, SUMS + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(sums, file, indent=0, sort_keys=True)
    os.rename(temporary, os.path.join(store, SUMS))


def damage(store):
    """Returns what is wrong with a store, or None."""
    try:
        with open(os.path.join(store, SUMS), encoding="utf-8") as file:
            sums = json.load(file)
        if not isinstance(sums, dict) or not sums:
            return "%s lists nothing" % SUMS
    except FileNotFoundError:
        # Unpacked before there was a list, by a version that left none. What is there now has been
        # built with, and is what later changes are seen against.
        write_sums(store)
        return None
    except ValueError:
        return "%s is not readable" % SUMS
    for relative, expected in sums.items():
        try:
            if sum_of(os.path.join(store, relative)) != expected:
                return "%s has changed" % relative
        except OSError as error:
            return "%s cannot be read: %s" % (relative, error.strerror)
    return None


def main(name, requirements, cache, megabytes, patterns):
    with open(requirements, encoding="utf-8") as pins:
        key = "\0".join([LAYOUT, pins.read(), *patterns])
    store = os.path.join(cache, "%s-%s" % (name, hashlib.sha256(key.encode()).hexdigest()[:16]))
    os.makedirs(cache, exist_ok=True)
    with open(os.path.join(cache, name + ".lock"), "w") as lock:
        # Whoever comes second waits, and then finds the store filled.
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in glob.glob(os.path.join(glob.escape(cache), name + ".tmp.*")):
            shutil.rmtree(left, ignore_errors=True)  # of a fetch that was killed
        wrong = damage(store) if os.path.isdir(store) else None
        if wrong:
            print("%s: %s; fetching it again" % (store, wrong), file=sys.stderr)
            # Taken out of the way at once, and removed with what is left of fetches that were killed.
            os.rename(store, os.path.join(cache, "%s.tmp.%d" % (name, os.getpid())))
        if not os.path.isdir(store):
            free = shutil.disk_usage(cache).free >> 20
            if free < megabytes:
                sys.exit("%s has %d MB free, needs %d" % (cache, free, megabytes))
            with tempfile.TemporaryDirectory(prefix=name + ".tmp.", dir=cache) as scratch:
                download(requirements, os.path.join(scratch, "wheels"))
                unpack(os.path.join(scratch, "wheels"), os.path.join(scratch, "site"), patterns)
                write_sums(os.path.join(scratch, "site"))
                # All or nothing: a store that exists is complete.
                os.rename(os.path.join(scratch, "site"), store)
    print(store)


if __name__ == "__main__":
    # Bazel's way to stop a fetch; as an exit it also ends pip and removes what is half done.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    check()
    if sys.argv[1:] != ["--check"]:
        try:
            main(*sys.argv[1:4], int(sys.argv[4]), sys.argv[5:])
        except OSError as error:
            sys.exit(str(error))
