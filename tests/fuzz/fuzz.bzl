"""fuzz_target: one reader of hostile bytes, as a test and under libFuzzer; see target.h."""

def fuzz_target(name, deps):
    """NAME_fuzz.cc gives NAME_test, with the corpus in corpus/NAME, and NAME_fuzzer (by hand)."""
    native.cc_library(
        name = name,
        testonly = True,
        srcs = [name + "_fuzz.cc"],
        deps = deps + [
            ":target",
            "//core/base:check",
            "@com_google_absl//absl/strings",
        ],
        alwayslink = True,
    )
    corpus = native.glob(["corpus/%s/*" % name])
    native.cc_test(
        name = name + "_test",
        size = "small",
        srcs = ["replay_test.cc"],
        args = ["$(location %s)" % file for file in corpus],
        data = corpus,
        deps = [
            ":" + name,
            ":target",
            "@googletest//:gtest",
        ],
    )
    native.cc_binary(
        name = name + "_fuzzer",
        testonly = True,
        srcs = ["libfuzzer.cc"],
        linkopts = ["-fsanitize=fuzzer"],
        # Needs clang: --config=fuzz.
        tags = ["manual"],
        deps = [
            ":" + name,
            ":target",
        ],
    )
