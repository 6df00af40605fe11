"""Runs `cargo doc` for Bazel, as cargo.py runs the rest: the crate alone, without its library.

docs.py SYSROOT STORE MANIFEST FEATURES DEPENDENCIES TAR
"""
import os
import sys
import tarfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cargo  # noqa: E402


def anonymous(member):
    """The same bytes whoever packs it, and whenever."""
    member.mtime, member.uid, member.gid, member.uname, member.gname = 0, 0, 0, "", ""
    return member


def main(sysroot, store, manifest, features, dependencies, tar):
    run = cargo.Cargo(sysroot, store, os.path.dirname(os.path.abspath(manifest)), features, "", dependencies)
    status = run(["doc", "--no-deps", "--lib"]).returncode
    if status:
        sys.exit(status)
    folder = os.path.join(run.target, "doc")
    with tarfile.open(tar, "w", format=tarfile.PAX_FORMAT) as archive:
        for path, folders, files in os.walk(folder):
            folders.sort()
            for name in sorted(files):
                if name != ".lock":
                    full = os.path.join(path, name)
                    archive.add(full, os.path.relpath(full, folder), filter=anonymous)


if __name__ == "__main__":
    main(*sys.argv[1:])
