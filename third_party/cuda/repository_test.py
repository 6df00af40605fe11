"""Which NCCL and which toolkit repository.bzl takes, of folders that are made here.

repository.bzl is run as Python, of which its language is a part, with stand-ins for what Bazel has.
"""
import os
import re
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
PINNED = "/the/pinned/wheel"


class Failed(Exception):
    pass


class Context:
    """A repository_ctx with these variables; notes where links lead."""

    class _Os:
        environ = {}

    class _Path:
        def __init__(self, path):
            self.exists = os.path.exists(path)

    class _Ran:
        return_code, stderr = 0, ""

        def __init__(self, stdout):
            self.stdout = stdout

    class attr:
        build_file = "//third_party:nccl/nccl.BUILD"

    def __init__(self, name, environ, nvcc=""):
        self.name, self.os, self.links, self.templates, self._nvcc = name, self._Os(), {}, {}, nvcc
        self.os.environ = environ

    def path(self, path):
        return self._Path(path)

    def read(self, path):
        with open(path, encoding="utf-8") as file:
            return file.read()

    def execute(self, command):
        return self._Ran(self._nvcc)

    def symlink(self, target, link):
        self.links[link] = target

    def template(self, name, source, substitutions):
        self.templates[name] = substitutions


def fail(text):
    raise Failed(text)


def rules():
    """The implementations of the rules in repository.bzl, and its constants."""
    scope = {
        "load": lambda *_: None,
        "fail": fail,
        "fetch_wheels": lambda ctx: PINNED,
        "repository_rule": lambda implementation, **_: implementation,
        "WHEEL_ATTRS": {},
        "WHEEL_ENVIRON": [],
    }
    with open(os.path.join(HERE, "repository.bzl"), encoding="utf-8") as file:
        exec(file.read(), scope)  # pylint: disable=exec-used
    return scope


def nccl_home(folder, header, lib="lib", library=True):
    """A folder as NCCL is installed into, with this text in its header; none if it is None."""
    os.makedirs(os.path.join(folder, "include"))
    os.makedirs(os.path.join(folder, lib))
    if header is not None:
        with open(os.path.join(folder, "include/nccl.h"), "w", encoding="utf-8") as file:
            file.write(header)
    if library:
        open(os.path.join(folder, lib, "libnccl.so.2"), "w", encoding="utf-8").close()
    return folder


def header_of(code):
    return "#define NCCL_MAJOR 2\n#define NCCL_VERSION_CODE %d\n#define NCCL_VERSION(X,Y,Z) 0\n" % code


def main():
    scope = rules()
    failures = []

    def check(what, rule, environ, wants, nvcc=""):
        """`wants`: the folder that NCCL's header or the toolkit is taken from, or a part of the error."""
        ctx = Context("nccl", environ, nvcc)
        try:
            scope[rule](ctx)
            got = ctx.links.get("include/nccl.h") or ctx.links.get("toolkit") or ctx.links.get("toolkit/bin")
        except Failed as error:
            got = str(error)
        if wants not in got:
            failures.append("%s: '%s', without '%s'" % (what, got, wants))
        return ctx

    with tempfile.TemporaryDirectory() as scratch:
        def home(name, *args, **kwargs):
            return nccl_home(os.path.join(scratch, name), *args, **kwargs)

        least = scope["_NCCL"]
        old, same = home("old", header_of(least - 1)), home("same", header_of(least))
        later = home("later", header_of(least + 200), lib="lib/x86_64-linux-gnu")
        check("nothing is named", "_nccl_impl", {}, PINNED)
        ctx = check("the least version", "_nccl_impl", {"NCCL_HOME": same}, same)
        if ctx.links["lib/libnccl.so.2"] != same + "/lib/libnccl.so.2":
            failures.append("the library of %s is %s" % (same, ctx.links))
        ctx = check("a later one, in Debian's folders", "_nccl_impl", {"NCCL_HOME": later}, later)
        if ctx.templates["BUILD.bazel"]["{lib}"] != later + "/lib/x86_64-linux-gnu":
            failures.append("programs would look for the library in %s" % ctx.templates)
        too_old = "%s/include/nccl.h is of NCCL %d, and libtorch needs %d (2.28.9) or later" % (old, least - 1, least)
        check("an older one", "_nccl_impl", {"NCCL_HOME": old}, too_old)
        check("an older one in CUDA_HOME", "_nccl_impl", {"CUDA_HOME": old}, too_old)
        check("a header that says nothing", "_nccl_impl", {"NCCL_HOME": home("mute", "int ncclSend();\n")}, "is of NCCL 0")
        check("no header", "_nccl_impl", {"NCCL_HOME": home("headless", None)}, "has no include/nccl.h, or no lib")
        check("no library", "_nccl_impl", {"NCCL_HOME": home("bare", header_of(least), library=False)}, "or no lib/libnccl.so.2")
        check("CUDA_HOME has one", "_nccl_impl", {"CUDA_HOME": same}, same)
        check("CUDA_HOME has none", "_nccl_impl", {"CUDA_HOME": home("toolkit", None)}, PINNED)
        # As /usr and /usr/local/cuda.
        inner = home("headless/cuda", header_of(least))
        check("NCCL_HOME has none, and CUDA_HOME below it has", "_nccl_impl",
              {"NCCL_HOME": os.path.dirname(inner), "CUDA_HOME": inner}, "has no include/nccl.h, or no lib")

        os.makedirs(os.path.join(scratch, "cuda/bin"))
        cuda = os.path.join(scratch, "cuda")
        check("no nvcc", "_cuda_impl", {"CUDA_HOME": cuda}, "has no bin/nvcc")
        open(os.path.join(cuda, "bin/nvcc"), "w", encoding="utf-8").close()
        check("an older toolkit", "_cuda_impl", {"CUDA_HOME": cuda}, "is not a toolkit of version 13",
              nvcc="Cuda compilation tools, release 12.8, V12.8.93")
        check("a toolkit 13", "_cuda_impl", {"CUDA_HOME": cuda}, cuda + "/bin",
              nvcc="Cuda compilation tools, release 13.0, V13.0.88")

    # The wheel is of the least version: libtorch was built with it.
    with open(os.path.join(HERE, "../nccl/requirements.txt"), encoding="utf-8") as file:
        version = [int(part) for part in re.search(r"==(\d+)\.(\d+)\.(\d+)", file.read()).groups()]
    if version[0] * 10000 + version[1] * 100 + version[2] != scope["_NCCL"]:
        failures.append("the pinned NCCL is %s, and the least version %d" % (version, scope["_NCCL"]))
    for failure in failures:
        print("FAILED: " + failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
