// Saves in the background where memory lacks.
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>

#include <cerrno>
#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/synchronization/notification.h"
#include "core/checkpoint/durable_file.h"
#include "core/checkpoint/job/checkpoint_folder.h"
#include "core/checkpoint/job/checkpoint_manager.h"
#include "gtest/gtest.h"
#include "tests/testing/cluster.h"
#include "tests/testing/fail_allocation.h"

namespace distgrad {
namespace {

// A disk that is full.
class FullDisk final : public FileCalls {
 public:
  ssize_t Write(int, const void*, size_t) override {
    on_write();
    errno = ENOSPC;
    return -1;
  }
  std::function<void()> on_write;
};

using CheckpointNoMemoryTest = CheckpointFolderTest;

// The thread that writes says what has failed, and nothing that it throws may leave it.
TEST_F(CheckpointNoMemoryTest, ASaveThatFailsInTheBackgroundSaysSo) {
  Cluster cluster({.workers = 1});
  absl::StatusOr<std::unique_ptr<CheckpointPart>> part =
      CheckpointPart::Create(&cluster[0], {.tensors = {{"weight", at::ones({3})}}});
  ASSERT_TRUE(part.ok()) << part.status();
  FullDisk disk;
  absl::StatusOr<std::unique_ptr<CheckpointManager>> manager =
      CheckpointManager::Create(&cluster[0], folder_, {.file_calls = &disk});
  ASSERT_TRUE(manager.ok()) << manager.status();
  int64_t step = 0;
  FailEachAllocation([&](absl::FunctionRef<void()> lack) {
    absl::Notification is_watched, is_over;
    disk.on_write = [&] {
      is_watched.WaitForNotification();
      lack();
    };
    bool failed = false;
    const absl::StatusOr<Future<Unit>> saved = (*manager)->SaveAsync(++step);
    EXPECT_TRUE(saved.ok()) << saved.status();
    if (saved.ok()) {
      saved->Then([&](const absl::StatusOr<Unit>&) {
        failed = FailAllocation(-1);
        is_over.Notify();
      });
      is_watched.Notify();
      is_over.WaitForNotification();
      const absl::Status status = saved->Wait().status();
      EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    }
    return !failed;
  });
}

}  // namespace
}  // namespace distgrad
