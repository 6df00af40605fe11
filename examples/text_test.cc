// The alphabet, the parts for training and for tests, and pieces of both.
#include "examples/text.h"

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

using ::testing::HasSubstr;

// "0 1 2 3 ... 999 "
std::string Numbers() {
  std::string text;
  for (int i = 0; i < 1000; ++i) absl::StrAppend(&text, i, " ");
  return text;
}

TEST(TextTest, HasAnAlphabetAndTwoParts) {
  const std::string numbers = Numbers();
  const Text text = *Text::Of(numbers);
  EXPECT_EQ(text.alphabet(), " 0123456789");
  EXPECT_EQ(text.Encode('7'), 8);
  EXPECT_EQ(text.Encode('x'), 0);
  EXPECT_EQ(text.test().size(0), static_cast<int64_t>(numbers.size() / 20));
  EXPECT_EQ(text.Decode(text.train()) + text.Decode(text.test()), numbers);
}

TEST(TextTest, KnowsAllBytes) {
  std::string bytes;
  for (int i = 0; i < 1024; ++i) bytes += static_cast<char>(i % 256);
  const Text text = *Text::Of(bytes);
  EXPECT_EQ(text.alphabet().size(), 256U);
  EXPECT_EQ(text.Decode(text.train()), bytes.substr(0, text.train().size(0)));
}

TEST(TextTest, PiecesAreFollowedByTheirTargets) {
  const Text text = *Text::Of(Numbers());
  for (const TextBatch& batch : {RandomPieces(text.train(), 5, 12, /*seed=*/1, /*step=*/3),
                                 SpreadPieces(text.test(), 5, 12)}) {
    EXPECT_EQ(batch.inputs.sizes(), (std::vector<int64_t>{5, 12}));
    EXPECT_EQ(batch.size(), 60);
    EXPECT_TRUE(batch.inputs.slice(1, 1).equal(batch.targets.slice(1, 0, 11)));
  }
  const TextBatch spread = SpreadPieces(text.test(), 2, 12);
  EXPECT_TRUE(spread.inputs[0].equal(text.test().slice(0, 0, 12)));
  EXPECT_FALSE(spread.inputs[1].equal(spread.inputs[0]));
}

TEST(TextTest, PiecesAreThoseOfSeedAndStep) {
  const Text text = *Text::Of(Numbers());
  const at::Tensor first = RandomPieces(text.train(), 5, 12, 1, 3).inputs;
  EXPECT_TRUE(first.equal(RandomPieces(text.train(), 5, 12, 1, 3).inputs));
  EXPECT_FALSE(first.equal(RandomPieces(text.train(), 5, 12, 1, 4).inputs));
  EXPECT_FALSE(first.equal(RandomPieces(text.train(), 5, 12, 2, 3).inputs));
}

TEST(TextTest, TheBibleIsWhatTheProgramHas) {
  const Text text = *Text::Load();
  EXPECT_EQ(text.train().size(0) + text.test().size(0), 4'137'850);
  EXPECT_EQ(text.Decode(text.train().slice(0, 0, 55)),
            "In the beginning God created the heaven and the earth.\n");
  EXPECT_EQ(text.Decode(text.test().slice(0, text.test().size(0) - 6)), "Amen.\n");
}

TEST(TextTest, SaysWhatIsWrong) {
  const absl::Status missing = Text::Load("/nowhere/text").status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.message()), HasSubstr("/nowhere/text"));
  EXPECT_EQ(Text::Of("short").status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace distgrad
