"""torchrun_repository: torch's Python out of the wheel that @torch_cuda unpacks, and torchrun, for tests.

Its Python imports all of torch, with libtorch_cuda.so and what that loads; so it uses the libraries
that are there for --config=cuda, where they lie.
"""

def _impl(ctx):
    torch, torch_cuda, nccl = [
        ctx.path(file).dirname
        for file in [ctx.attr.torch, ctx.attr.torch_cuda, ctx.attr.nccl]
    ]
    for name, arguments in {"python": "", "torchrun": "-m torch.distributed.run "}.items():
        ctx.file(name, """#!/bin/sh
# python3 has to be 3.11. It leaves what is shared by all clones as it is.
PYTHONPATH={torch_cuda}/site${{PYTHONPATH:+:$PYTHONPATH}} LD_LIBRARY_PATH={torch}/lib:{nccl}/lib \\
    PYTHONDONTWRITEBYTECODE=1 exec python3 {arguments}"$@"
""".format(torch = torch, torch_cuda = torch_cuda, nccl = nccl, arguments = arguments))
    ctx.file("BUILD.bazel", "exports_files([\"python\", \"torchrun\"])\n")

torchrun_repository = repository_rule(
    implementation = _impl,
    attrs = {
        name: attr.label(mandatory = True, allow_single_file = True, doc = "A file in the root of @%s." % name)
        for name in ["torch", "torch_cuda", "nccl"]
    },
)
