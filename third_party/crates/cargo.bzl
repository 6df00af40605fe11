"""cargo_crate builds a crate with cargo in Bazel actions, cargo_test runs what came out.

Two actions: what the crate depends on, again only when Cargo.toml, Cargo.lock or the toolchain
change; and the crate on top of it: its tests and examples, and what cargo checks. Where Rust is
missing the tests say so and count as skipped.
"""

load("@crates//:defs.bzl", "RUST")

CrateInfo = provider(fields = {
    "dependencies": "what it depends on, built: a tar; None if there is nothing",
    "outputs": "name of a program or a check: its file",
    "libraries": "files that programs load",
    "features": "with which it was built",
    "skip": "why there is nothing, or \"\"",
})

# What cargo.py's `check` knows.
CHECKS = ["clippy", "doc", "doctest", "fmt", "package"]

def _run(ctx, command, inputs, outputs, arguments, message):
    args = ctx.actions.args()
    args.add(ctx.file._cargo)
    args.add(command)
    args.add(RUST.sysroot)
    args.add(RUST.store)
    args.add(ctx.file.manifest)
    args.add(",".join(ctx.attr.crate_features))
    args.add("%s:%s" % (ctx.attr.sanitizer, RUST.sanitizers) if ctx.attr.sanitizer else "")
    args.add_all(arguments)
    ctx.actions.run(
        executable = "/usr/bin/python3",
        arguments = [args],
        inputs = depset([ctx.file._stamp, ctx.file._cargo, ctx.file.manifest, ctx.file.lock] + inputs),
        outputs = outputs,
        mnemonic = "Cargo" + command.capitalize(),
        progress_message = message % ctx.label,
        use_default_shell_env = True,
    )

def _crate_impl(ctx):
    sanitized = [option for option in ctx.fragments.cpp.copts if option.startswith("-fsanitize")]
    skip = RUST.missing
    if sanitized:
        skip = "the library is built with a sanitizer, Rust programs are not"
    elif ctx.attr.sanitizer and not skip and not RUST.sanitizers:
        skip = "the Rust toolchain has no sanitizers"
    libraries = ctx.files.library
    if skip:
        return [CrateInfo(dependencies = None, outputs = {}, libraries = [], features = "", skip = skip)]

    dependencies = ctx.actions.declare_file(ctx.label.name + "_dependencies.tar")
    base = [ctx.attr.base[CrateInfo].dependencies] if ctx.attr.base else []
    _run(ctx, "dependencies", base, [dependencies], [dependencies] + base, "Building the crates below %s")

    names = ctx.attr.programs + ctx.attr.checks
    outputs = {name: ctx.actions.declare_file("%s_%s" % (ctx.label.name, name)) for name in names}
    headers = ctx.attr.header[CcInfo].compilation_context.headers.to_list()
    arguments = [dependencies, headers[0], ctx.file.library]
    arguments += ["%s=%s" % (name, file.path) for name, file in outputs.items()]
    _run(
        ctx,
        "build",
        [dependencies, ctx.file.library] + headers + ctx.files.srcs,
        outputs.values(),
        arguments,
        "Building and checking the crate %s",
    )
    return [
        DefaultInfo(files = depset(outputs.values()), runfiles = ctx.runfiles(files = outputs.values())),
        CrateInfo(
            dependencies = dependencies,
            outputs = outputs,
            libraries = libraries,
            features = ",".join(ctx.attr.crate_features),
            skip = "",
        ),
    ]

cargo_crate = rule(
    implementation = _crate_impl,
    attrs = {
        "manifest": attr.label(allow_single_file = ["Cargo.toml"], mandatory = True),
        "lock": attr.label(allow_single_file = ["Cargo.lock"], mandatory = True),
        "srcs": attr.label_list(allow_files = True),
        "header": attr.label(providers = [CcInfo], mandatory = True, doc = "The C interface."),
        "library": attr.label(allow_single_file = True, mandatory = True, doc = "libdistgrad.so.1."),
        "crate_features": attr.string_list(),
        "sanitizer": attr.string(doc = "For the crate and what it depends on, but not for the library: \"address\"."),
        "base": attr.label(providers = [CrateInfo], doc = "The same crate with fewer features: what that depends on is not built again."),
        "programs": attr.string_list(doc = "Names of tests and examples."),
        "checks": attr.string_list(doc = "Of CHECKS."),
        "_stamp": attr.label(default = "@crates//:stamp.txt", allow_single_file = True),
        "_cargo": attr.label(default = "//third_party:crates/cargo.py", allow_single_file = True),
    },
    fragments = ["cpp"],
)

_PROGRAM = """
torch=$(dirname "$(readlink -f "$TEST_SRCDIR/torch/lib/libtorch_cpu.so")")
export LD_LIBRARY_PATH=$(dirname "$(readlink -f "$TEST_SRCDIR/{library}")"):$torch
cd "$TEST_SRCDIR/$TEST_WORKSPACE"
export TMPDIR=$TEST_TMPDIR
exec "./{program}" "$@"
"""

# Of a check there is what it said, and in the last line its exit code.
_CHECK = """
cat "$TEST_SRCDIR/$TEST_WORKSPACE/{program}"
exit "$(tail -n 1 "$TEST_SRCDIR/$TEST_WORKSPACE/{program}")"
"""

# A test that runs `script`, or says why not.
def _test(ctx, script, runfiles):
    skip = ctx.attr.crate[CrateInfo].skip
    if skip:
        script = "source \"$TEST_SRCDIR/$TEST_WORKSPACE/%s\"\nskip '%s'\n" % (ctx.file._skip.short_path, skip.replace("'", ""))
        runfiles = ctx.runfiles(files = [ctx.file._skip])
    executable = ctx.actions.declare_file(ctx.label.name)
    ctx.actions.write(executable, "#!/usr/bin/env bash\nset -euo pipefail\n" + script, is_executable = True)
    return [DefaultInfo(executable = executable, runfiles = runfiles)]

def _test_impl(ctx):
    crate = ctx.attr.crate[CrateInfo]
    if crate.skip:
        return _test(ctx, "", None)
    program = crate.outputs[ctx.attr.program]
    script = _CHECK if ctx.attr.program in CHECKS else _PROGRAM
    script = script.replace("{program}", program.short_path).replace("{library}", "distgrad/" + crate.libraries[0].short_path)
    return _test(ctx, script, ctx.runfiles(files = [program] + crate.libraries + ctx.files._torch + ctx.files.data))

cargo_test = rule(
    implementation = _test_impl,
    test = True,
    attrs = {
        "crate": attr.label(providers = [CrateInfo], mandatory = True),
        "program": attr.string(mandatory = True, doc = "A program of the crate, or one of CHECKS."),
        "data": attr.label_list(allow_files = True),
        "_skip": attr.label(default = "//capi:testing/skip.sh", allow_single_file = True),
        "_torch": attr.label(default = "@torch//:shared_objects"),
    },
)

_OUTSIDE = """
cd "$TEST_TMPDIR"
files=$TEST_SRCDIR/$TEST_WORKSPACE
source "$files/{skip}"
command -v pkg-config >/dev/null || left_out pkg-config "no pkg-config on this machine"
RUNFILES_DIR=$TEST_SRCDIR "$files/{install}" "$PWD/prefix" --link-libtorch
exec python3 "$files/{outside}" '{sysroot}' '{store}' "$files/{manifest}" '{features}' "$files/{tar}" prefix
"""

def _outside_impl(ctx):
    crate = ctx.attr.crate[CrateInfo]
    if crate.skip:
        return _test(ctx, "", None)
    files = [ctx.file._cargo, ctx.file._outside, ctx.file._skip, ctx.file.manifest, crate.dependencies] + ctx.files.srcs
    script = _OUTSIDE.format(
        skip = ctx.file._skip.short_path,
        install = ctx.executable.install.short_path,
        outside = ctx.file._outside.short_path,
        sysroot = RUST.sysroot,
        store = RUST.store,
        manifest = ctx.file.manifest.short_path,
        features = crate.features,
        tar = crate.dependencies.short_path,
    )
    return _test(ctx, script, ctx.runfiles(files = files).merge(ctx.attr.install[DefaultInfo].default_runfiles))

# Builds the crate with an installed library and no help from Bazel.
cargo_outside_test = rule(
    implementation = _outside_impl,
    test = True,
    attrs = {
        "crate": attr.label(providers = [CrateInfo], mandatory = True, doc = "For what it depends on."),
        "manifest": attr.label(allow_single_file = ["Cargo.toml"], mandatory = True),
        "srcs": attr.label_list(allow_files = True),
        "install": attr.label(executable = True, cfg = "target", mandatory = True, doc = "Installs the library into its argument."),
        "_skip": attr.label(default = "//capi:testing/skip.sh", allow_single_file = True),
        "_cargo": attr.label(default = "//third_party:crates/cargo.py", allow_single_file = True),
        "_outside": attr.label(default = "//third_party:crates/outside.py", allow_single_file = True),
    },
)
