"""cuda_repository and nccl_repository: the CUDA toolkit's compiler and NCCL, the machine's own or out of pinned wheels.

CUDA_HOME names an installed toolkit 13, NCCL_HOME a folder with NCCL's include and lib (CUDA_HOME
is looked into as well). Without them, or for what they lack, wheels are fetched as for @torch.
Both are given with --repo_env=CUDA_HOME=... or in the environment.
"""

load("//third_party:wheels/wheels.bzl", "WHEEL_ATTRS", "WHEEL_ENVIRON", "fetch_wheels")

# libtorch_cuda is built for this major version, and so is the cudart that all of a process shares.
_CUDA = "13"

# NCCL's least version: libtorch_cuda was built with it, and calls what older ones lack.
_NCCL = 22809

def _nccl_version(ctx, header):
    """NCCL_VERSION_CODE of an nccl.h, as 22809 is 2.28.9; 0 if it has none."""
    for line in ctx.read(header).splitlines():
        words = line.split()
        if len(words) == 3 and words[:2] == ["#define", "NCCL_VERSION_CODE"] and words[2].isdigit():
            return int(words[2])
    return 0

def _cuda_impl(ctx):
    home = ctx.os.environ.get("CUDA_HOME")
    if home:
        nvcc = home + "/bin/nvcc"
        if not ctx.path(nvcc).exists:
            fail("@%s: CUDA_HOME=%s has no bin/nvcc; unset it to use the pinned wheels" % (ctx.name, home))
        version = ctx.execute([nvcc, "--version"])
        if version.return_code != 0 or "release %s." % _CUDA not in version.stdout:
            fail("@%s: CUDA_HOME=%s is not a toolkit of version %s: %s" %
                 (ctx.name, home, _CUDA, (version.stdout + version.stderr).strip()))
        for folder in ["bin", "include", "nvvm"]:
            ctx.symlink("%s/%s" % (home, folder), "toolkit/" + folder)
        # Where it lies in wheels and in Conda's packages; an installed toolkit has it below nvvm.
        if ctx.path(home + "/lib/libnvvm.so.4").exists:
            ctx.symlink(home + "/lib/libnvvm.so.4", "toolkit/lib/libnvvm.so.4")
    else:
        ctx.symlink(fetch_wheels(ctx) + "/nvidia/cu13", "toolkit")
    ctx.symlink(ctx.attr.build_file, "BUILD.bazel")

def _nccl_impl(ctx):
    named = ctx.os.environ.get("NCCL_HOME")
    home = named or ctx.os.environ.get("CUDA_HOME")
    found = None
    for lib in ["lib", "lib64", "lib/x86_64-linux-gnu"]:
        folder = "%s/%s" % (home, lib)
        if (home and not found and ctx.path(folder + "/libnccl.so.2").exists and
            ctx.path(home + "/include/nccl.h").exists):
            found = (home + "/include", folder)
    if named and not found:
        fail("@%s: NCCL_HOME=%s has no include/nccl.h, or no lib/libnccl.so.2" % (ctx.name, named))
    if found:
        version = _nccl_version(ctx, found[0] + "/nccl.h")
        if version < _NCCL:
            fail("@%s: %s/nccl.h is of NCCL %d, and libtorch needs %d (2.28.9) or later; without NCCL_HOME and CUDA_HOME the pinned wheel is used" %
                 (ctx.name, found[0], version, _NCCL))
    else:
        store = fetch_wheels(ctx) + "/nvidia/nccl"
        found = (store + "/include", store + "/lib")
    ctx.symlink(found[0] + "/nccl.h", "include/nccl.h")
    ctx.symlink(found[1] + "/libnccl.so.2", "lib/libnccl.so.2")
    ctx.template("BUILD.bazel", ctx.attr.build_file, {"{lib}": found[1]})

cuda_repository = repository_rule(
    implementation = _cuda_impl,
    attrs = WHEEL_ATTRS,
    environ = WHEEL_ENVIRON + ["CUDA_HOME"],
)

nccl_repository = repository_rule(
    implementation = _nccl_impl,
    attrs = WHEEL_ATTRS,
    environ = WHEEL_ENVIRON + ["CUDA_HOME", "NCCL_HOME"],
)
