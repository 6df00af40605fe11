// Shows which numbers are live handles, and when.
#include "capi/handles.h"

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "gtest/gtest.h"

struct dg_number;

namespace distgrad {
namespace {

struct NumberObject : HandleObject {
  using Handle = dg_number;
  static constexpr HandleKind kKind = HandleKind::kError;
  static constexpr char kName[] = "dg_number";

  NumberObject() = default;
  explicit NumberObject(int number) : number(number) {}
  ~NumberObject() override {
    if (ended != nullptr) ++*ended;
  }
  int number = 0;
  int* ended = nullptr;
};

bool IsLive(const dg_number* handle) { return Pin<NumberObject>(handle, "number").ok(); }

// Returns what the next handle will be, for slots are reused last in, first out.
dg_number* NextHandle() {
  uintptr_t made[2];
  for (uintptr_t& each : made) {
    dg_number* const handle = NewHandle<NumberObject>();
    each = reinterpret_cast<uintptr_t>(handle);
    EXPECT_TRUE(DestroyHandle<NumberObject>(handle));
  }
  return reinterpret_cast<dg_number*>(made[1] + (made[1] - made[0]));
}

TEST(Handles, OneMadeAheadIsAliveOnlyOnceReleased) {
  dg_number* const guess = NextHandle();
  HandleAhead<NumberObject> made;
  EXPECT_FALSE(IsLive(guess));
  EXPECT_FALSE(DestroyHandle<NumberObject>(guess));
  EXPECT_FALSE(TakeHandle<NumberObject>(guess, "number").ok());
  made->number = 7;
  dg_number* const handle = made.Release();
  ASSERT_EQ(handle, guess);
  {
    const absl::StatusOr<Pinned<NumberObject>> pinned = Pin<NumberObject>(handle, "number");
    ASSERT_TRUE(pinned.ok());
    EXPECT_EQ((*pinned)->number, 7);
  }
  EXPECT_TRUE(DestroyHandle<NumberObject>(handle));
  EXPECT_FALSE(IsLive(handle));
}

TEST(Handles, OneMadeAheadAndNotReleasedEndsItsObjectAndGivesItsSlotBack) {
  dg_number* const guess = NextHandle();
  int ended = 0;
  {
    HandleAhead<NumberObject> made;
    made->ended = &ended;
  }
  EXPECT_EQ(ended, 1);
  EXPECT_FALSE(IsLive(guess));
  dg_number* const next = NewHandle<NumberObject>(1);
  EXPECT_EQ(next, guess);
  EXPECT_TRUE(DestroyHandle<NumberObject>(next));
}

TEST(Handles, TheLastUserOfADestroyedOneEndsItsObject) {
  int ended = 0;
  auto object = std::make_unique<NumberObject>(3);
  object->ended = &ended;
  dg_number* const handle = AdoptHandle(std::move(object));
  {
    absl::StatusOr<Pinned<NumberObject>> pinned = Pin<NumberObject>(handle, "number");
    ASSERT_TRUE(pinned.ok());
    EXPECT_TRUE(DestroyHandle<NumberObject>(handle));
    EXPECT_FALSE(DestroyHandle<NumberObject>(handle));
    EXPECT_FALSE(IsLive(handle));
    EXPECT_EQ(ended, 0);
    EXPECT_EQ((*pinned)->number, 3);
  }
  EXPECT_EQ(ended, 1);
}

}  // namespace
}  // namespace distgrad
