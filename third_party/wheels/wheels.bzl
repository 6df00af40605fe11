"""wheel_repository: native libraries out of pinned Python wheels; no Python is built with them.

The wheels named in a requirements file with hashes are downloaded with pip and unpacked, in their
own layout, into a store outside Bazel's output base ($DISTGRAD_CACHE, default ~/.cache/distgrad),
so that every clone links to one copy. The repository has the store as `site`, and what `links` names.
"""

def _python(ctx):
    """A Python 3.8 or later that has pip 21.1 or later; its version need not be the wheels'."""
    asked = ctx.os.environ.get("DISTGRAD_FETCH_PYTHON")
    tried = []
    for python in [asked] if asked else [ctx.which("python3"), "/usr/bin/python3"]:
        if python and ctx.path(python).exists:
            result = ctx.execute([python, ctx.path(ctx.attr._fetch), "--check"])
            if result.return_code == 0:
                return python
            tried.append("%s: %s" % (python, result.stderr.strip()))
    fail("@%s needs a python3 (>= 3.8) with pip (>= 21.1), as by `apt-get install python3-pip`; %s" %
         (ctx.name, "; ".join(tried) or "none found"))

def fetch_wheels(ctx):
    """For repository rules with the attributes below: what `keep` names, in a store; returns its path."""
    cache = ctx.os.environ.get("DISTGRAD_CACHE") or ctx.os.environ.get("HOME", "/root") + "/.cache/distgrad"
    ctx.report_progress("wheels with pip, once for all clones")
    result = ctx.execute(
        [_python(ctx), ctx.path(ctx.attr._fetch), ctx.name, ctx.path(ctx.attr.requirements), cache] +
        [str(ctx.attr.megabytes)] + ctx.attr.keep,
        timeout = 3600,
    )
    if result.return_code != 0:
        fail("@%s: %s" % (ctx.name, result.stderr.strip()))
    return result.stdout.strip()

def _impl(ctx):
    store = fetch_wheels(ctx)
    ctx.symlink(store, "site")
    for link, target in ctx.attr.links.items():
        ctx.symlink("%s/%s" % (store, target), link)
    ctx.template("BUILD.bazel", ctx.attr.build_file, {"{store}": store})

WHEEL_ATTRS = {
    "requirements": attr.label(mandatory = True, allow_single_file = True),
    "build_file": attr.label(
        mandatory = True,
        allow_single_file = True,
        doc = "{store} in it is replaced by the store's path.",
    ),
    "keep": attr.string_list(doc = "Regular expressions: members to unpack; one with a leading ! leaves out."),
    "megabytes": attr.int(default = 1500, doc = "Disk space for the wheels and what is kept of them."),
    "_fetch": attr.label(default = "//third_party:wheels/fetch.py", allow_single_file = True),
}

WHEEL_ENVIRON = ["DISTGRAD_CACHE", "DISTGRAD_FETCH_PYTHON"]

wheel_repository = repository_rule(
    implementation = _impl,
    attrs = dict(WHEEL_ATTRS, links = attr.string_dict(doc = "Path in the repository to path in the store.")),
    environ = WHEEL_ENVIRON,
)
