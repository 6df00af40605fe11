"""clang_tidy_test: what clang-tidy says of each C++ file below some targets.

Each file is an action of its own, so what has not changed is not looked at again. What it found is
the action's output, and the test fails on any that is not empty: so all is said at once, and the
build does not stop at the first.
"""

_ClangTidyInfo = provider(fields = ["findings"])

# Of clang's alone; -Wall and -Wextra are those of .bazelrc.
_FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Wthread-safety"]

# clang says nothing of the headers of others.
def _if_others(folder):
    return folder if "/external/" in "/" + folder else None

def _if_ours(folder):
    return None if _if_others(folder) else folder

def _findings(ctx, file, context, program):
    findings = ctx.actions.declare_file(file.basename + ".clang_tidy")
    flags = ctx.actions.args()
    flags.add_all(_FLAGS)
    flags.add_all(depset(transitive = [context.defines, context.local_defines]), before_each = "-D")
    flags.add_all(context.quote_includes, before_each = "-iquote", map_each = _if_ours)
    flags.add_all(context.quote_includes, before_each = "-isystem", map_each = _if_others)
    for folders in [context.system_includes, context.includes]:
        flags.add_all(folders, before_each = "-I", map_each = _if_ours)
        flags.add_all(folders, before_each = "-isystem", map_each = _if_others)
    ctx.actions.run_shell(
        inputs = depset([file, ctx.file._config], transitive = [context.headers]),
        outputs = [findings],
        tools = [program],
        # What it says besides, of how many warnings were in others' headers, is of no use.
        command = """
program=$1 config=$2 file=$3 findings=$4; shift 4
"$program" --quiet --config-file="$config" "$file" -- "$@" >"$findings" 2>"$findings.log"
status=$?
if [[ $status != 0 && ! -s $findings ]]; then cat "$findings.log" >&2; exit $status; fi
""",
        arguments = [program.path, ctx.file._config.path, file.path, findings.path, flags],
        mnemonic = "ClangTidy",
        progress_message = "clang-tidy %s" % file.short_path,
        # libtorch's 6,000 headers in a sandbox cost more than clang does (.bazelrc).
        execution_requirements = {"no-sandbox": "1"},
    )
    return findings

def _aspect_impl(target, ctx):
    deps = getattr(ctx.rule.attr, "deps", [])
    if ctx.rule.kind == "link_only":  # what is for GPUs (third_party/cuda/cuda.bzl)
        deps = [ctx.rule.attr.dep]
    below = [dep[_ClangTidyInfo].findings for dep in deps if _ClangTidyInfo in dep]
    own = []
    if CcInfo in target and target.label.workspace_name == "":
        context = target[CcInfo].compilation_context
        for source in getattr(ctx.rule.attr, "srcs", []):
            for file in source.files.to_list():
                if file.extension == "cc" and file.is_source:
                    own.append(_findings(ctx, file, context, ctx.file._program))
    return [_ClangTidyInfo(findings = depset(own, transitive = below))]

_clang_tidy = aspect(
    implementation = _aspect_impl,
    attr_aspects = ["deps", "dep"],
    attrs = {
        "_program": attr.label(default = "@clang_tidy", allow_single_file = True),
        "_config": attr.label(default = "//:.clang-tidy", allow_single_file = True),
    },
)

def _test_impl(ctx):
    findings = depset(transitive = [dep[_ClangTidyInfo].findings for dep in ctx.attr.deps])
    test = ctx.actions.declare_file(ctx.label.name)
    ctx.actions.write(
        test,
        # A header's finding is the same for each file that includes it.
        "#!/usr/bin/env bash\nset -euo pipefail\n" +
        "files=(" + " ".join(["'%s'" % file.short_path for file in findings.to_list()]) + ")\n" +
        """
echo "${#files[@]} files"
((${#files[@]} > 0))
if grep -q . "${files[@]}"; then
  grep -hE '(warning|error):' "${files[@]}" | sort -u
  exit 1
fi
""",
        is_executable = True,
    )
    return [DefaultInfo(executable = test, runfiles = ctx.runfiles(findings.to_list()))]

clang_tidy_test = rule(
    implementation = _test_impl,
    test = True,
    attrs = {"deps": attr.label_list(
        aspects = [_clang_tidy],
        doc = "cc_library targets: their files, and those of all that they depend on here.",
    )},
)
