// A reader of bytes that may come from anybody, as fuzzers see it. Each *_fuzz.cc is one; it runs
// in two ways:
//
//   NAME_test    the good inputs, the corpus, and a fixed number of mutations of both: an ordinary
//                test, with any compiler
//   NAME_fuzzer  libFuzzer, for as long as one likes:
//                tools/bazel run --config=fuzz //tests/fuzz:frame_fuzzer -- -max_total_time=300
//
// What it finds goes into corpus/NAME. A file is named by the SHA-1 of its content, as libFuzzer
// writes it; whoever changes inputs in place for a new wire format renames them.
#ifndef DISTGRAD_TESTS_FUZZ_TARGET_H_
#define DISTGRAD_TESTS_FUZZ_TARGET_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace distgrad {

// Reads them, and returns whether they were taken. Dies if what must hold of them does not.
bool ReadHostile(absl::string_view bytes);

// Some that must be taken: what our own writers write, of every kind.
std::vector<std::string> GoodInputs();

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_FUZZ_TARGET_H_
