"""cuda_library: .cu files, compiled with nvcc for the GPUs named below. if_cuda: what --config=cuda adds.
link_only: that without its headers.

    cuda_library(
        name = "pack_kernel",
        srcs = ["pack_kernel.cu"],
        hdrs = ["pack_kernel.h"],
    )

Any cc_* target can depend on it. Without --config=cuda it is incompatible with every platform, so
that `bazel build //...` skips it and all that needs it, and says so; nothing is downloaded.

Keep libtorch's headers out of .cu files: with them one takes ten times as long to compile (docs/cuda.md). Take raw
pointers there, and tensors in a .cc beside it.
"""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")

# Machine code for Turing (the oldest that CUDA 13 has), Ampere, Hopper and Blackwell, and PTX of the
# last for what comes after.
_TARGETS = [
    "-gencode=arch=compute_75,code=sm_75",
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=sm_90",
    "-gencode=arch=compute_100,code=[sm_100,compute_100]",
]

def if_cuda(yes, no = []):
    """What to take with --config=cuda, and what without."""
    return select({
        "//third_party:with_cuda": yes,
        "//conditions:default": no,
    })

def _link_only_impl(ctx):
    return [CcInfo(linking_context = ctx.attr.dep[CcInfo].linking_context)]

# A library without its headers: what depends on it is compiled as it is without CUDA, and so is not
# compiled again for it.
link_only = rule(
    implementation = _link_only_impl,
    attrs = {"dep": attr.label(providers = [CcInfo])},
)

def _compile(ctx, toolchain, features, context, source):
    object = ctx.actions.declare_file("_objs/%s/%s.o" % (ctx.label.name, source.basename))
    args = ctx.actions.args()
    args.add("-ccbin", cc_common.get_tool_for_action(
        feature_configuration = features,
        action_name = "c++-compile",
    ))
    args.add_all(["-c", "-std=c++17", "-Xcompiler=-fPIC", "-Xcompiler=-Wall", "-Werror=all-warnings"])
    args.add_all(["-G", "-g"] if ctx.var["COMPILATION_MODE"] == "dbg" else ["-O3"])
    args.add_all(_TARGETS)
    args.add_all(context.defines, before_each = "-D")
    args.add_all(context.quote_includes, before_each = "-I")
    args.add_all(context.includes, before_each = "-I")
    args.add_all(context.system_includes, before_each = "-isystem")
    args.add("-o", object)
    args.add(source)
    ctx.actions.run(
        executable = ctx.executable.nvcc,
        arguments = [args],
        inputs = depset([source], transitive = [context.headers]),
        tools = depset(transitive = [toolchain.all_files, ctx.attr.compiler.files]),
        outputs = [object],
        mnemonic = "CudaCompile",
        progress_message = "Compiling %s with nvcc" % source.short_path,
        # nvcc runs the host's compiler, assembler and linker.
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin"},
    )
    return object

def _cuda_library_impl(ctx):
    toolchain = find_cpp_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    own = cc_common.create_compilation_context(
        headers = depset(ctx.files.hdrs),
        quote_includes = depset(["."]),
    )
    deps = [dep[CcInfo] for dep in ctx.attr.deps]
    context = cc_common.merge_cc_infos(
        cc_infos = [CcInfo(compilation_context = own)] + deps,
    ).compilation_context
    objects = depset([_compile(ctx, toolchain, features, context, source) for source in ctx.files.srcs])
    linking, linked = cc_common.create_linking_context_from_compilation_outputs(
        actions = ctx.actions,
        feature_configuration = features,
        cc_toolchain = toolchain,
        # One object serves both kinds of link.
        compilation_outputs = cc_common.create_compilation_outputs(objects = objects, pic_objects = objects),
        linking_contexts = [dep.linking_context for dep in deps],
        name = ctx.label.name,
        disallow_dynamic_library = True,
    )
    return [
        DefaultInfo(files = depset([linked.library_to_link.pic_static_library])),
        CcInfo(compilation_context = context, linking_context = linking),
    ]

_cuda_library = rule(
    implementation = _cuda_library_impl,
    attrs = {
        "srcs": attr.label_list(allow_files = [".cu"]),
        "hdrs": attr.label_list(allow_files = [".h"]),
        "deps": attr.label_list(providers = [CcInfo]),
        "nvcc": attr.label(executable = True, cfg = "host", allow_single_file = True),
        "compiler": attr.label(cfg = "host"),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)

def cuda_library(name, deps = [], **kwargs):
    _cuda_library(
        name = name,
        # Chosen by select, so that @cuda is not even looked at without --config=cuda.
        compiler = if_cuda("@cuda//:compiler", None),
        nvcc = if_cuda("@cuda//:nvcc", None),
        deps = deps + ["//third_party:cuda_headers"],
        **kwargs
    )
