"""cargo_docs: what `cargo doc` makes of a crate, as a tar; nothing where Rust is missing."""

load("@crates//:defs.bzl", "RUST")
load(":crates/cargo.bzl", "CrateInfo")

def _impl(ctx):
    crate = ctx.attr.crate[CrateInfo]
    if not crate.dependencies:
        return [DefaultInfo()]
    tar = ctx.actions.declare_file(ctx.label.name + ".tar")
    ctx.actions.run(
        executable = "/usr/bin/python3",
        arguments = [ctx.file._docs.path, RUST.sysroot, RUST.store, ctx.file.manifest.path] +
                    [crate.features, crate.dependencies.path, tar.path],
        inputs = [ctx.file._stamp, ctx.file._docs, ctx.file._cargo, ctx.file.manifest, ctx.file.lock] +
                 [crate.dependencies] + ctx.files.srcs,
        outputs = [tar],
        mnemonic = "CargoDocs",
        progress_message = "Documenting the crate %s" % ctx.label,
        use_default_shell_env = True,
    )
    return [DefaultInfo(files = depset([tar]), runfiles = ctx.runfiles([tar]))]

cargo_docs = rule(
    implementation = _impl,
    attrs = {
        "crate": attr.label(providers = [CrateInfo], mandatory = True, doc = "For what it depends on, and its features."),
        "manifest": attr.label(allow_single_file = ["Cargo.toml"], mandatory = True),
        "lock": attr.label(allow_single_file = ["Cargo.lock"], mandatory = True),
        "srcs": attr.label_list(allow_files = True),
        "_stamp": attr.label(default = "@crates//:stamp.txt", allow_single_file = True),
        "_cargo": attr.label(default = "//third_party:crates/cargo.py", allow_single_file = True),
        "_docs": attr.label(default = "//third_party:crates/docs.py", allow_single_file = True),
    },
)
