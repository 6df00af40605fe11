// Entries without a signature, with another key's, and moved from one name to another.
#include "core/membership/store/signed_store.h"

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/membership/store/in_process_store.h"
#include "core/net/cluster_key.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

constexpr absl::Time kNow = absl::InfinitePast();

class SignedStoreTest : public testing::Test {
 protected:
  const std::shared_ptr<Store> plain_ = NewInProcessStore();
  const std::shared_ptr<Store> ours_ = NewSignedStore("a key of all workers", plain_);
  const std::shared_ptr<Store> theirs_ = NewSignedStore("another key", plain_);
};

TEST_F(SignedStoreTest, OursIsRead) {
  for (const std::string& value : {std::string(), std::string("x"), std::string(1000, '\0')}) {
    ASSERT_TRUE(ours_->Set("k", value, kNow).ok());
    EXPECT_EQ(ours_->Get("k", kNow).value(), value);
  }
  EXPECT_EQ(ours_->Add("n", 2, kNow).value(), 2);
  EXPECT_EQ(theirs_->Add("n", 1, kNow).value(), 3);
  EXPECT_TRUE(absl::IsNotFound(ours_->Get("none", kNow).status()));
}

TEST_F(SignedStoreTest, OthersAreNot) {
  ASSERT_TRUE(theirs_->Set("k", "value", kNow).ok());
  EXPECT_TRUE(absl::IsUnauthenticated(ours_->Get("k", kNow).status()));
  for (const std::string& value : {std::string(), std::string("x"), std::string(100, 'x')}) {
    ASSERT_TRUE(plain_->Set("k", value, kNow).ok());
    EXPECT_TRUE(absl::IsUnauthenticated(ours_->Get("k", kNow).status()));
  }
}

TEST_F(SignedStoreTest, ChangesAreSeen) {
  ASSERT_TRUE(ours_->Set("k", "value", kNow).ok());
  const std::string stored = plain_->Get("k", kNow).value();
  for (size_t i = 0; i < stored.size(); ++i) {
    std::string changed = stored;
    changed[i] ^= 1;
    ASSERT_TRUE(plain_->Set("k", changed, kNow).ok());
    EXPECT_TRUE(absl::IsUnauthenticated(ours_->Get("k", kNow).status())) << i;
  }
}

// Neither a true entry under another key, nor one whose border with the key is moved.
TEST_F(SignedStoreTest, EntriesCannotBeMoved) {
  ASSERT_TRUE(ours_->Set("worker/1", "1value", kNow).ok());
  const std::string stored = plain_->Get("worker/1", kNow).value();
  ASSERT_TRUE(plain_->Set("worker/2", stored, kNow).ok());
  ASSERT_TRUE(plain_->Set("worker/11", stored.substr(1), kNow).ok());
  EXPECT_TRUE(absl::IsUnauthenticated(ours_->Get("worker/2", kNow).status()));
  EXPECT_TRUE(absl::IsUnauthenticated(ours_->Get("worker/11", kNow).status()));
}

// While a key is exchanged for another, entries of both are read, and no change is seen where there
// is none.
TEST_F(SignedStoreTest, OfTwoKeysEitherIsRead) {
  const auto both = NewSignedStore(ClusterKey("a key of all workers", "another key"), plain_);
  ASSERT_TRUE(ours_->Set("old", "1", kNow).ok());
  ASSERT_TRUE(theirs_->Set("new", "2", kNow).ok());
  const std::vector<std::string> keys = {"old", "new", "none"};
  const std::vector<Store::Value> values = {"1", "2", std::nullopt};
  EXPECT_EQ(both->GetEach(keys, kNow).value(), values);
  EXPECT_EQ(both->AwaitChange(keys, values, absl::Now() + absl::Milliseconds(5)).value(), values);
  EXPECT_EQ(both->AwaitChange(keys, std::vector<Store::Value>(3), absl::InfiniteFuture()).value(),
            values);
  ASSERT_TRUE(both->Set("mine", "3", kNow).ok());
  EXPECT_EQ(ours_->Get("mine", kNow).value(), "3");
  EXPECT_TRUE(absl::IsUnauthenticated(theirs_->Get("mine", kNow).status()));
  ASSERT_TRUE(NewSignedStore("a third key", plain_)->Set("old", "4", kNow).ok());
  EXPECT_TRUE(absl::IsUnauthenticated(both->Get("old", kNow).status()));
}

}  // namespace
}  // namespace distgrad
