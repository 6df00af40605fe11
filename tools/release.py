#!/usr/bin/python3
"""Makes the files of a release (docs/releasing.md).

tools/bazel run //tools:release -- VERSION [--output DIR] [--maintainer 'NAME <ADDRESS>'] [--allow-dirty]

Into DIR (default: release-VERSION in the current folder): a tarball, a Debian package, the crate, a
software bill of materials, and SHA256SUMS. Of one commit, the bytes are the same each time: names are
sorted, times are the commit's, and owners are root.
"""
import argparse
import datetime
import glob
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib

import documents
import release_sbom
from release_sbom import read

PLATFORM = "linux-x86_64"
# What libraries may need of the machine; Debian's packages of them are found when the release is made.
SYSTEM = {
    "ld-linux-x86-64.so.2", "libc.so.6", "libcrypto.so.3", "libdl.so.2", "libgcc_s.so.1", "libm.so.6",
    "libpthread.so.0", "librt.so.1", "libssl.so.3", "libstdc++.so.6", "libutil.so.1",
}
# Tracked files that stand in share/doc/distgrad as they do in the tree, so that links among them lead
# somewhere. The crate is beside them, in bindings/rust, and the site, in html.
DOCUMENTS = ["README.md", "CHANGELOG.md", "capi/CHANGELOG.md", "docs", "bindings/README.md", "bindings/c",
             "bindings/cpp", "bindings/ctypes_test.py", "tests/pages"]
NO_DOCUMENTS = re.compile(r".*BUILD\.bazel")
# Who answers for the Debian package, where nobody is named: a name, and no address that would be made up.
NOBODY = "distgrad"
# The wheels of @sphinx whose styles and scripts are in the site.
IN_SITE = ["furo", "snowballstemmer", "sphinx", "sphinx_basic_ng", "sphinx_design"]


class Refusal(Exception):
    """Why there is no release, and what to do."""


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def run(*command, **options):
    """What a command says; it has to end with 0."""
    result = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, **options)
    if result.returncode:
        said = (result.stderr or result.stdout).strip()
        raise Refusal("%s ended with %d: %s" % (command[0], result.returncode, said))
    return result.stdout


# ------------------------------------------------------------------------------ What is refused


def tree_version(manifest, lock):
    """The version that the tree has, by the texts of the crate's Cargo.toml and Cargo.lock."""
    version = tomllib.loads(manifest)["package"]["version"]
    locked = [package["version"] for package in tomllib.loads(lock)["package"]
              if package["name"] == "distgrad" and "checksum" not in package]
    if locked != [version]:
        raise Refusal("bindings/rust/Cargo.toml has version %s, and Cargo.lock %s; run cargo update --workspace there, "
                      "and commit Cargo.lock" % (version, " and ".join(locked) or "none"))
    return version


def check_version(version, tree):
    """That the tree is of this version, or of the one that this is a pre-release of."""
    if not re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}(-[0-9A-Za-z]+(\.[0-9A-Za-z]+)*)?", version):
        raise Refusal("%s is no version such as 1.2.3, or 1.2.3-rc.1" % version)
    if version != tree and version.partition("-")[0] != tree:
        raise Refusal("the tree is of version %s, not %s; change it in bindings/rust/Cargo.toml, run "
                      "cargo update --workspace there, and commit both files" % (tree, version))


def check_changelog(version, text):
    """That CHANGELOG.md says what is in the release; of a pre-release, what is not released serves."""
    headings = re.findall(r"^## \[([^\]]+)\]", text, re.MULTILINE)
    if version not in headings and not ("-" in version and "Unreleased" in headings):
        raise Refusal("CHANGELOG.md has no '## [%s]'; name what is below [Unreleased] so, with the date, and commit"
                      % version)


def check_interface(version, root):
    """That the C interface of a release is frozen, so that every later library is compared with it."""
    if "-" in version:
        return
    header = read(os.path.join(root, "capi/include/distgrad/distgrad.h"))
    interface = ".".join(re.search(r"^#define DG_ABI_%s (\d+)$" % part, header, re.MULTILINE).group(1)
                         for part in ("MAJOR", "MINOR"))
    copy = "abi/%s/distgrad/distgrad.h" % interface
    build = read(os.path.join(root, "capi/BUILD.bazel"))
    missing = [what for what, is_there in (
        ("capi/%s, a copy of the header" % copy, os.path.isfile(os.path.join(root, "capi", copy))),
        ("that file in the arguments of abidiff_test", "$(location %s)" % copy in build),
        ("a test frozen_header_%s_*" % interface, "frozen_header_%s_" % interface in build)) if not is_there]
    if missing:
        raise Refusal("version %s of the C interface is not frozen, which a release that is no pre-release does: there "
                      "is not %s; docs/abi.md, \"At a release\", has the steps" % (interface, ", nor ".join(missing)))


def check_maintainer(maintainer):
    """That it is as Debian writes somebody who answers for a package."""
    if maintainer != NOBODY and not re.fullmatch(r"[^\s<>][^<>\n]* <[^\s<>@]+@[^\s<>@]+>", maintainer):
        raise Refusal("%r is no maintainer such as 'Ada Lovelace <ada@example.org>'" % maintainer)


def not_set_yet(maintainer, manifest):
    """What only who publishes the release knows, and has not said: a sentence for each."""
    said = []
    if maintainer == NOBODY:
        said.append("the Debian package's Maintainer has no address; say --maintainer 'NAME <ADDRESS>'")
    if "repository" not in tomllib.loads(manifest)["package"]:
        said.append('the crate names no repository; add repository = "ADDRESS" to [package] in bindings/rust/Cargo.toml')
    return said


def check_clean(root):
    """That what is built is what is committed."""
    changed = run("git", "-C", root, "status", "--porcelain", "--untracked-files=all").splitlines()
    if changed:
        raise Refusal("the tree has changes (%s%s); commit them, or say --allow-dirty to try something out"
                      % (changed[0].strip(), ", and %d more" % (len(changed) - 1) if len(changed) > 1 else ""))


# ------------------------------------------------------------------------------ Archives


def entries(folder):
    """All that is in a folder, as paths relative to it, sorted."""
    found = []
    for place, folders, files in os.walk(folder):
        found += [os.path.relpath(os.path.join(place, name), folder) for name in folders + files]
    return sorted(found)


def settle(folder, seconds):
    """Gives everything in a folder one time and plain permissions; none of it is a program."""
    os.chmod(folder, 0o755)
    for path in [os.path.join(folder, entry) for entry in entries(folder)]:
        if not os.path.islink(path):
            os.chmod(path, 0o755 if os.path.isdir(path) else 0o644)
        os.utime(path, (seconds, seconds), follow_symlinks=False)
    os.utime(folder, (seconds, seconds))


def write_tar(folder, name, path, seconds):
    """Packs a folder as `name`, so that the bytes depend on nothing but names and contents."""
    def plain(entry):
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mtime = seconds
        entry.mode = 0o777 if entry.issym() else 0o755 if entry.isdir() else 0o644
        return entry

    with open(path, "wb") as file, gzip.GzipFile("", "wb", 6, file, seconds) as packed, \
            tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT, bufsize=1 << 20) as archive:
        archive.add(folder, name, recursive=False, filter=plain)
        for entry in entries(folder):
            archive.add(os.path.join(folder, entry), os.path.join(name, entry), recursive=False, filter=plain)


def write_deb(folder, path, seconds, control, triggers):
    """Makes a Debian package of a folder, to which its DEBIAN is added."""
    size = sum(os.lstat(os.path.join(folder, entry)).st_size for entry in entries(folder)) >> 10
    write(os.path.join(folder, "DEBIAN/control"),
          "".join("%s: %s\n" % field for field in control[:-1] + [("Installed-Size", size)] + control[-1:]))
    write(os.path.join(folder, "DEBIAN/triggers"), triggers)
    settle(folder, seconds)
    # zstd, for xz takes minutes of what is mostly libtorch; on one thread, for bytes must not depend on
    # how many the machine has.
    run("dpkg-deb", "--root-owner-group", "-Zzstd", "-z12", "--threads-max=1", "--build", folder, path,
        env=dict(os.environ, SOURCE_DATE_EPOCH=str(seconds)))


# ------------------------------------------------------------------------------ The tree


def libraries(prefix):
    found = [os.path.join(prefix, entry) for entry in entries(prefix) if re.search(r"\.so(\.\d+)*$", entry)]
    return [path for path in found if not os.path.islink(path)]


def newest(versions):
    return max(versions, key=lambda version: [int(part) for part in version.split(".")])


def check_libraries(prefix):
    """That the libraries find each other wherever the tree is; returns what they need of a machine."""
    own = {os.path.basename(path) for path in libraries(prefix)}
    versions = {"GLIBC": set(), "GLIBCXX": set()}
    for path in libraries(prefix):
        name = os.path.basename(path)
        said = run("readelf", "-dVW", path)
        strange = set(re.findall(r"\(NEEDED\).*\[(.*)\]", said)) - own - SYSTEM
        if strange:
            raise Refusal("%s needs %s, which neither the release nor SYSTEM in tools/release.py has"
                          % (name, sorted(strange)))
        run_path = re.findall(r"\(R(?:UN)?PATH\).*\[(.*)\]", said)
        if name.startswith("libdistgrad") and run_path != ["$ORIGIN/distgrad"]:
            raise Refusal("the run path of %s is %s" % (name, run_path))
        if any(part.partition("/")[0] != "$ORIGIN" for part in ":".join(run_path).split(":") if part):
            raise Refusal("%s looks for libraries in %s" % (name, run_path))
        for kind in versions:
            versions[kind].update(re.findall(r"Name: %s_(\d[\d.]*) " % kind, said))
    return {"glibc": newest(versions["GLIBC"]), "libstdcxx": "GLIBCXX_" + newest(versions["GLIBCXX"])}


def check_paths(prefix, places):
    """That nothing of ours names the machine that it was made on, and that links stay inside."""
    for entry in entries(prefix):
        path = os.path.join(prefix, entry)
        if os.path.islink(path):
            target = os.path.normpath(os.path.join(os.path.dirname(entry), os.readlink(path)))
            if os.path.isabs(target) or target.startswith("..") or not os.path.exists(path):
                raise Refusal("%s leads to %s" % (entry, os.readlink(path)))
        elif os.path.isfile(path) and not entry.startswith("lib/distgrad/"):
            with open(path, "rb") as file:
                data = file.read()
            for place in places:
                if place.encode() in data:
                    raise Refusal("%s has the path %s of this machine" % (entry, place))


def drop_dead_links(doc):
    """Of links in packed pages to what is not packed, the words stay."""
    def of(path):
        def replacement(found):
            return found[0][1:found[0].rindex("](")] if documents.check_link(found[1], path, doc) else found[0]
        return replacement

    for path in entries(doc):
        if path.endswith(".md") and ".dist-info/" not in path:
            lines = read(os.path.join(doc, path)).splitlines()
            for number in {number for number, _ in documents.check(path, doc)}:
                lines[number - 1] = documents.LINK.sub(of(path), lines[number - 1])
            write(os.path.join(doc, path), "\n".join(lines) + "\n")


def add_licences(packages, name, doc):
    """Of a wheel, in a folder as those of libtorch's wheels have it."""
    pattern = os.path.join(glob.escape(packages), name + "-*.dist-info", "**", "*")
    texts = [path for path in glob.glob(pattern, recursive=True)
             if re.match(r"LICEN[CS]E|COPYING", os.path.basename(path)) and os.path.isfile(path)]
    if not texts:
        raise Refusal("the wheel of %s has no licence in its .dist-info" % name)
    for path in texts:
        place = os.path.join(doc, os.path.relpath(path, packages))
        os.makedirs(os.path.dirname(place), exist_ok=True)
        shutil.copyfile(path, place)


def add_documents(root, doc, crate, site, packages):
    """Documentation, the site, samples, the crate, and what the machine has of libgomp's licence, which the
    wheels lack."""
    for path in run("git", "-C", root, "ls-files", "-z", "--", *DOCUMENTS).split("\0"):
        if path and not NO_DOCUMENTS.fullmatch(path):
            os.makedirs(os.path.join(doc, os.path.dirname(path)), exist_ok=True)
            shutil.copyfile(os.path.join(root, path), os.path.join(doc, path))
    with tarfile.open(crate) as archive:
        archive.extractall(doc)
    os.rename(os.path.join(doc, os.path.basename(crate)[:-len(".crate")]), os.path.join(doc, "bindings/rust"))
    drop_dead_links(doc)
    os.rename(site, os.path.join(doc, "html"))
    for name in IN_SITE:
        add_licences(packages, name, doc)
    for source in ("/usr/share/doc/gcc-12-base/copyright", "/usr/share/common-licenses/GPL-3"):
        if not os.path.exists(source):
            raise Refusal("%s is not on this machine; it has the licence of libgomp (Debian 12: "
                          "apt-get install --reinstall gcc-12-base base-files)" % source)
        os.makedirs(os.path.join(doc, "libgomp"), exist_ok=True)
        shutil.copyfile(source, os.path.join(doc, "libgomp", os.path.basename(source)))


def copyright_of(bill):
    """Which licences hold for what, as Debian wants it told, and anybody else."""
    lines = ["distgrad: Apache-2.0; LICENSE has the text. What comes with it:", ""]
    for component in bill["components"]:
        note = [value["value"] for value in component.get("properties", [])]
        if component["scope"] == "required" and note:
            licence = component["licenses"][0]
            text = licence.get("expression") or licence["license"].get("id") or licence["license"]["name"]
            lines.append("%s %s: %s. %s" % (component["name"], component["version"], text, note[0]))
    for component in bill["components"]:
        if component["name"].replace("-", "_") in IN_SITE:
            lines.append("%s %s: %s. html: styles and scripts of the site"
                         % (component["name"], component["version"], component["licenses"][0]["license"]["id"]))
    lines.append("rustdoc: MIT OR Apache-2.0, its fonts OFL-1.1. html/rust/static.files, which has the texts")
    lines += ["", "Their texts stand in the folders beside this file; OpenSSL, and its licence, are the machine's own."]
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------ The crate


def make_crate(root, version, toolchain, scratch, output):
    """Packs the crate with this version, as `cargo publish` would; returns the path of the file in `output`."""
    crate = os.path.join(scratch, "crate")
    for path in run("git", "-C", root, "ls-files", "-z", "--", "bindings/rust").split("\0"):
        if path:
            place = os.path.join(crate, os.path.relpath(path, "bindings/rust"))
            os.makedirs(os.path.dirname(place), exist_ok=True)
            shutil.copyfile(os.path.join(root, path), place)
    for name in ("Cargo.toml", "Cargo.lock"):
        text, count = re.subn(r'(?m)^(name = "distgrad"\nversion = )".*"$', r'\1"%s"' % version,
                              read(os.path.join(crate, name)))
        if count != 1:
            raise Refusal("bindings/rust/%s has no place of the version that is known" % name)
        write(os.path.join(crate, name), text)
    sys.path.insert(0, os.path.join(root, "third_party/crates"))
    from cargo import Cargo
    sysroot, store = toolchain
    os.chdir(scratch)
    cargo = Cargo(sysroot, store, crate, "")
    result = cargo(["package", "--no-verify"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if result.returncode:
        raise Refusal("cargo package: " + result.stdout.strip())
    name = "distgrad-%s.crate" % version
    return shutil.copyfile(os.path.join(cargo.target, "package", name), os.path.join(output, name))


def toolchain_of(stamp):
    """Sysroot and store of @crates, by its stamp.txt."""
    lines = read(stamp).splitlines()
    if len(lines) < 3:
        raise Refusal("the crate cannot be packed: " + lines[0])
    return lines[-2], lines[-1]


# ------------------------------------------------------------------------------ All of it


def depends(prefix, scratch):
    """The Debian packages that the libraries need, with the versions that have their symbols."""
    write(os.path.join(scratch, "debian/control"), "Source: distgrad\n\nPackage: distgrad\nArchitecture: amd64\n")
    private = os.path.join(prefix, "lib/distgrad")
    # It finds the machine's libgomp first; the tree has the one that is used.
    said = run("dpkg-shlibdeps", "-O", "--ignore-missing-info", "-xlibgomp1", "-l" + private, *libraries(prefix),
               cwd=scratch, env=dict(os.environ, LC_ALL="C"))
    found = re.fullmatch(r"shlibs:Depends=(.*)\n", said)
    for package in ("libc6 (", "libssl3 (", "libstdc++6 ("):
        if not found or package not in found[1]:
            raise Refusal("dpkg-shlibdeps found no %s) for the Debian package, only %s" % (package, said.strip()))
    return found[1]


def control_of(version, maintainer, needed):
    """The fields of the Debian package."""
    return [
        ("Package", "distgrad"), ("Version", version.replace("-", "~", 1)), ("Architecture", "amd64"),
        ("Maintainer", maintainer), ("Section", "libdevel"), ("Priority", "optional"), ("Depends", needed),
        ("Suggests", "g++, pkg-config"),
        ("Description", "distributed autograd over RPC, for C, C++ and Rust\n"
         " Trains one model across threads, processes and machines. Library, headers and samples,\n"
         " and in /usr/lib/distgrad the libtorch that it was built with."),
    ]


def release(root, version, output, runfiles, maintainer, dirty):
    manifest, lock = (read(os.path.join(root, "bindings/rust", name)) for name in ("Cargo.toml", "Cargo.lock"))
    check_maintainer(maintainer)
    check_version(version, tree_version(manifest, lock))
    check_changelog(version, read(os.path.join(root, "CHANGELOG.md")))
    check_interface(version, root)
    if not dirty:
        check_clean(root)
    for tool, package in (("dpkg-deb", "dpkg"), ("dpkg-shlibdeps", "dpkg-dev"), ("readelf", "binutils")):
        if not shutil.which(tool):
            raise Refusal("no %s on this machine; Debian 12: apt-get install %s" % (tool, package))
    toolchain = toolchain_of(os.path.join(runfiles, "crates/stamp.txt"))
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH") or run("git", "-C", root, "log", "-1", "--format=%ct"))
    os.makedirs(output, exist_ok=True)
    if os.listdir(output):
        raise Refusal("%s is not empty; name another folder by --output" % output)

    with tempfile.TemporaryDirectory(prefix=".making-", dir=output) as scratch:
        # First, while there is nothing in the folder: it may be one of the tree, all of which becomes pages.
        site = os.path.join(scratch, "site")
        # The list of the store's files stands for the store.
        packages = os.path.dirname(os.path.realpath(os.path.join(runfiles, "sphinx/site/sums.json")))
        run(sys.executable, os.path.join(root, "docs/sphinx/build.py"), "--packages", packages, "--tree", root,
            "--rustdoc", os.path.join(runfiles, "distgrad/bindings/rust/rustdoc.tar"), "--output", site)
        prefix = os.path.join(scratch, "prefix")
        run(os.path.join(runfiles, "distgrad/capi/install"), prefix, env=dict(os.environ, RUNFILES_DIR=runfiles))
        needs = check_libraries(prefix)
        time = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
        bill = release_sbom.sbom(
            root, version, time.strftime("%Y-%m-%dT%H:%M:%SZ"),
            lambda name, number: release_sbom.licence_of_crate(os.path.join(toolchain[1], "vendor"), name, number),
            dict(needs, commit=run("git", "-C", root, "rev-parse", "HEAD").strip(), platform=PLATFORM))
        sheet = json.dumps(bill, indent=1, sort_keys=True) + "\n"
        doc = os.path.join(prefix, "share/doc/distgrad")
        crate = make_crate(root, version, toolchain, scratch, output)
        add_documents(root, doc, crate, site, packages)
        write(os.path.join(doc, "copyright"), copyright_of(bill))
        write(os.path.join(doc, "sbom.cdx.json"), sheet)
        write(os.path.join(doc, "REQUIREMENTS"),
              "distgrad %s runs on Linux on x86-64 with glibc %s or later, a libstdc++ that has %s,\n"
              "and OpenSSL 3 (libssl.so.3, libcrypto.so.3).\n" % (version, needs["glibc"], needs["libstdcxx"]))
        check_paths(prefix, [root, os.path.realpath(runfiles), scratch, os.path.expanduser("~/.cache")])
        settle(prefix, seconds)

        write(os.path.join(output, "distgrad-%s.cdx.json" % version), sheet)
        name = "distgrad-%s-%s" % (version, PLATFORM)
        write_tar(prefix, name, os.path.join(output, name + ".tar.gz"), seconds)

        needed = depends(prefix, scratch)
        folder = os.path.join(scratch, "deb")
        os.makedirs(folder)
        os.rename(prefix, os.path.join(folder, "usr"))
        pc = os.path.join(folder, "usr/lib/pkgconfig/distgrad.pc")
        # Where the system looks by itself there is no folder to name.
        text = read(pc).replace("prefix=${pcfiledir}/../..", "prefix=/usr").replace(" -Wl,-rpath,${libdir}", "")
        write(pc, "".join(line for line in text.splitlines(True) if not line.startswith("#")))
        fields = control_of(version, maintainer, needed)
        write_deb(folder, os.path.join(output, "distgrad_%s_amd64.deb" % dict(fields)["Version"]), seconds, fields,
                  "activate-noawait ldconfig\n")

    files = sorted(os.listdir(output))
    write(os.path.join(output, "SHA256SUMS"), run("sha256sum", *files, cwd=output))
    for file in files:
        print("%8.1f MB  %s" % (os.path.getsize(os.path.join(output, file)) / 1e6, file))
    print("needs glibc %s, %s; Debian: %s" % (needs["glibc"], needs["libstdcxx"], needed))
    for sentence in not_set_yet(maintainer, manifest):
        print("before it is published: " + sentence)
    print("made in %s; try it: tools/bazel run //tools:release_try -- %s" % (output, output))


def main():
    parser = argparse.ArgumentParser(prog="tools/bazel run //tools:release --")
    parser.add_argument("version", metavar="VERSION",
                        help="that of bindings/rust/Cargo.toml, or a pre-release of it such as 1.2.3-rc.1")
    parser.add_argument("--output", metavar="DIR", help="default: release-VERSION")
    parser.add_argument("--maintainer", metavar="'NAME <ADDRESS>'", default=NOBODY,
                        help="who answers for the Debian package; default: " + NOBODY + ", without an address")
    parser.add_argument("--allow-dirty", action="store_true",
                        help="to try something out: with changes that are not committed")
    arguments = parser.parse_args()
    root = os.environ.get("BUILD_WORKSPACE_DIRECTORY")
    if not root:
        raise Refusal("run it by tools/bazel run //tools:release -- VERSION")
    output = os.path.join(os.environ.get("BUILD_WORKING_DIRECTORY", root),
                          arguments.output or "release-" + arguments.version)
    release(root, arguments.version, output, os.path.abspath(sys.argv[0]) + ".runfiles", arguments.maintainer,
            arguments.allow_dirty)


if __name__ == "__main__":
    try:
        main()
    except (Refusal, OSError) as error:
        sys.exit("release: %s" % error)
