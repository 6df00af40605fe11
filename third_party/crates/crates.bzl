"""crates_repository: the machine's Rust toolchain, and the crates of a committed Cargo.lock.

The crates are downloaded once by `cargo vendor`, into a store outside Bazel's output base
($DISTGRAD_CACHE, default ~/.cache/distgrad) that all clones share; cargo checks their hashes.
`defs.bzl` has RUST, whose `missing` says why there is no toolchain, or is "", and whose
`sanitizers` is the target for which the toolchain has their run-times, or "".
"""

# What the crate's Cargo.toml asks for.
_OLDEST = (1, 88)

def _toolchain(ctx):
    """(sysroot, version's text, "") or (None, "", what is missing)."""
    rustc = ctx.which("rustc")
    if not rustc or not ctx.which("cargo"):
        return None, "", "no cargo and rustc on PATH"
    sysroot = ctx.execute([rustc, "--print", "sysroot"])
    version = ctx.execute([rustc, "-vV"])
    if sysroot.return_code != 0 or version.return_code != 0:
        return None, "", "rustc does not run: " + (sysroot.stderr + version.stderr).strip().split("\n")[0]
    number = version.stdout.split(" ")[1]
    if tuple([int(part) for part in number.split(".")[:2]]) < _OLDEST:
        return None, "", "rustc is %s, and %d.%d is needed" % (number, _OLDEST[0], _OLDEST[1])
    root = sysroot.stdout.strip()
    for tool in ["cargo", "rustc", "cargo-clippy", "rustfmt", "rustdoc"]:
        if not ctx.path(root + "/bin/" + tool).exists:
            return None, "", "the Rust toolchain has no " + tool
    return root, version.stdout, ""

def _impl(ctx):
    sysroot, version, missing = _toolchain(ctx)
    store, sanitizers = "", ""
    if not missing:
        host = version.split("host: ")[1].split("\n")[0]
        libraries = ctx.path(sysroot + "/lib/rustlib/" + host + "/lib").readdir()
        if [file for file in libraries if file.basename.endswith("_rt.asan.a")]:
            sanitizers = host
        cache = ctx.os.environ.get("DISTGRAD_CACHE") or ctx.os.environ.get("HOME", "/root") + "/.cache/distgrad"
        python = ctx.which("python3")
        ctx.report_progress("crates with cargo, once for all clones")
        result = ctx.execute(
            [python, ctx.path(ctx.attr._cargo), "vendor", sysroot, ctx.path(ctx.attr.manifest)] +
            [ctx.path(ctx.attr.lock), ctx.path(ctx.attr.torch).dirname, cache],
            timeout = 1800,
        )
        if result.return_code != 0:
            fail("@%s: %s" % (ctx.name, result.stderr.strip()))
        store = result.stdout.strip()

    # The store has thousands of files; to actions this one stands for them and for the toolchain.
    ctx.file("stamp.txt", version + sysroot + "\n" + store + "\n" if not missing else missing + "\n")
    ctx.file("defs.bzl", "RUST = struct(missing = %r, sysroot = %r, store = %r, sanitizers = %r)\n" %
                         (missing, sysroot or "", store, sanitizers))
    ctx.file("BUILD.bazel", "exports_files([\"stamp.txt\"])\n")

crates_repository = repository_rule(
    implementation = _impl,
    attrs = {
        "manifest": attr.label(mandatory = True, allow_single_file = True),
        "lock": attr.label(mandatory = True, allow_single_file = True),
        "torch": attr.label(mandatory = True, allow_single_file = True, doc = "A file in the root of @torch."),
        "_cargo": attr.label(default = "//third_party:crates/cargo.py", allow_single_file = True),
    },
    environ = ["DISTGRAD_CACHE", "PATH", "RUSTUP_TOOLCHAIN"],
)
