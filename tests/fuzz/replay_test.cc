// A target as an ordinary test. Arguments: the files of its corpus.
#include <cstdint>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fuzz/target.h"

namespace distgrad {
namespace {

std::vector<std::string>* corpus = nullptr;

TEST(FuzzTest, GoodInputsAreTaken) {
  for (const std::string& input : GoodInputs()) {
    EXPECT_TRUE(ReadHostile(input)) << testing::PrintToString(input);
  }
}

// A good input that ends early is none: no reader takes a part for the whole.
TEST(FuzzTest, PartsAreNotTaken) {
  for (const std::string& input : GoodInputs()) {
    for (size_t size = 0; size < input.size(); ++size) {
      EXPECT_FALSE(ReadHostile(absl::string_view(input).substr(0, size))) << size;
    }
  }
}

TEST(FuzzTest, CorpusIsSurvived) {
  ASSERT_FALSE(corpus->empty());
  int taken = 0;
  for (const std::string& input : *corpus) taken += ReadHostile(input);
  EXPECT_GT(taken, 0) << "the corpus is of an earlier format, and gets nowhere";
}

// A small libFuzzer without coverage: reaches less, but on every machine and always the same.
TEST(FuzzTest, MutationsAreSurvived) {
  std::vector<std::string> inputs = *corpus;
  for (std::string& input : GoodInputs()) inputs.push_back(std::move(input));
  uint64_t state = 0x9e3779b97f4a7c15;
  const auto random = [&state](uint64_t below) {  // xorshift
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<size_t>((state >> 11) % below);
  };
  const std::string numbers[] = {std::string(8, '\xff'), std::string(4, '\xff'),
                                 std::string(8, '\0'), std::string("\0\0\0\x80", 4),
                                 std::string("\xff\xff\xff\x7f", 4)};
  int taken = 0;
  for (int i = 0; i < 40000; ++i) {
    std::string input = inputs[random(inputs.size())];
    for (size_t changes = 1 + random(4); changes > 0; --changes) {
      const size_t at = random(input.size() + 1);
      switch (random(6)) {
        case 0:
          if (at < input.size()) input[at] = static_cast<char>(random(256));
          break;
        case 1:
          if (at < input.size()) input[at] = static_cast<char>(input[at] ^ 1 << random(8));
          break;
        case 2:
          input.resize(at);
          break;
        case 3:
          input.insert(at, 1 + random(8), static_cast<char>(random(256)));
          break;
        case 4: {
          const std::string& number = numbers[random(5)];
          if (at + number.size() <= input.size()) input.replace(at, number.size(), number);
          break;
        }
        case 5: {
          const std::string& other = inputs[random(inputs.size())];
          input = input.substr(0, at) + other.substr(random(other.size() + 1));
          break;
        }
      }
    }
    taken += ReadHostile(input);
  }
  RecordProperty("taken", taken);
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  distgrad::corpus = new std::vector<std::string>();
  for (int i = 1; i < argc; ++i) {
    std::ifstream file(argv[i], std::ios::binary);
    distgrad::corpus->emplace_back(std::istreambuf_iterator<char>(file),
                                   std::istreambuf_iterator<char>());
  }
  return RUN_ALL_TESTS();
}
