"""Repositories made of pinned Debian packages, without installing them.

debian_package unpacks a binary package, debian_source the upstream tarball of a source
package. Both check the file's SHA-256, and take it from its place in the archive that the machine's
apt names, or from one that keeps old versions: fetch.sh says which. Downloads are kept in
$DISTGRAD_CACHE (default ~/.cache/distgrad) and shared by all clones.
"""

def _fetch(ctx, kind):
    result = ctx.execute(
        ["bash", ctx.path(ctx.attr._fetch), kind, ctx.attr.package, ctx.attr.version, ctx.attr.sha256, ctx.attr.path],
        timeout = 1800,
    )
    if result.return_code != 0:
        fail("@%s: %s" % (ctx.name, result.stderr.strip()))
    return result.stdout.strip()

def _build_file(ctx):
    if ctx.attr.build_file:
        ctx.delete("BUILD")
        ctx.delete("BUILD.bazel")
        ctx.symlink(ctx.attr.build_file, "BUILD.bazel")

def _package_impl(ctx):
    deb = _fetch(ctx, "binary")
    result = ctx.execute(["dpkg-deb", "-x", deb, "."])
    if result.return_code != 0:
        fail("@%s: dpkg-deb: %s" % (ctx.name, result.stderr.strip()))
    _build_file(ctx)

def _source_impl(ctx):
    ctx.extract(_fetch(ctx, "source"), stripPrefix = ctx.attr.strip_prefix)
    for patch in ctx.attr.patches:
        ctx.patch(patch, strip = 1)
    _build_file(ctx)

_ATTRS = {
    "package": attr.string(mandatory = True),
    "version": attr.string(mandatory = True, doc = "Debian's, with the revision."),
    "sha256": attr.string(mandatory = True),
    "path": attr.string(mandatory = True, doc = "The file's place in an archive of Debian."),
    "build_file": attr.label(allow_single_file = True, doc = "Default: the one that is inside."),
    "_fetch": attr.label(default = "//third_party:debian/fetch.sh", allow_single_file = True),
}

debian_package = repository_rule(
    implementation = _package_impl,
    attrs = _ATTRS,
    environ = ["DISTGRAD_CACHE"],
)

debian_source = repository_rule(
    implementation = _source_impl,
    attrs = dict(_ATTRS, strip_prefix = attr.string(), patches = attr.label_list(allow_files = True)),
    environ = ["DISTGRAD_CACHE"],
)
