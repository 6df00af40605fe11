// A target under libFuzzer, which has main().
//
//   frame_fuzzer CORPUS                   goes on from what is in that folder
//   frame_fuzzer --write-good-inputs=DIR  what to begin a corpus with
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "tests/fuzz/target.h"

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  for (int i = 1; i < *argc; ++i) {
    absl::string_view folder = (*argv)[i];
    if (!absl::ConsumePrefix(&folder, "--write-good-inputs=")) continue;
    int number = 0;
    for (const std::string& input : distgrad::GoodInputs()) {
      std::ofstream(absl::StrCat(folder, "/good", number++)) << input;
    }
    std::exit(0);
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  distgrad::ReadHostile(absl::string_view(reinterpret_cast<const char*>(data), size));
  return 0;
}
