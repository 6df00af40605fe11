// Destroying a worker while its handlers, functions and threads are still busy.
#include "capi/worker_object.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "capi/include/distgrad/distgrad.h"

namespace distgrad {
namespace {

dg_code CodeOf(dg_error* error) {
  const dg_code code = dg_error_code(error);
  dg_error_destroy(error);
  return code;
}

// A worker that is alone, and what tests want to know of its end. It outlives the worker.
struct Scene {
  Scene() {
    rendezvous = absl::StrCat("file://", ::testing::TempDir(), "/worker_object.", getpid());
    dg_worker_options options = DG_WORKER_OPTIONS_INIT;
    options.name = DG_STR("alone");
    options.world_size = 1;
    options.rendezvous = ToStr(rendezvous);
    EXPECT_EQ(CodeOf(dg_worker_create(&options, &worker)), DG_OK);
    const auto handler = [](void* user_data, const dg_request*, dg_message**) -> dg_error* {
      static_cast<Scene*>(user_data)->Hold();
      return nullptr;
    };
    const auto end = [](void* user_data) { static_cast<Scene*>(user_data)->ended.Notify(); };
    EXPECT_EQ(CodeOf(dg_worker_register(worker, DG_STR("hold"), handler, this, end)), DG_OK);
    const auto take = [](void* user_data, uint32_t severity, dg_str text) {
      EXPECT_EQ(severity, uint32_t{DG_LOG_ERROR});
      static_cast<Scene*>(user_data)->lines.emplace_back(text.data, text.size);
    };
    EXPECT_EQ(CodeOf(dg_log_set_sink(take, this, nullptr)), DG_OK);
  }
  ~Scene() {
    EXPECT_EQ(CodeOf(dg_log_set_sink(nullptr, nullptr, nullptr)), DG_OK);
    unlink(rendezvous.c_str() + sizeof("file://") - 1);
  }

  void Hold() {
    held.Notify();
    go.WaitForNotification();
  }

  // Waits until the worker's handle is dead: the last thing that its end does.
  void AwaitEnd() {
    ended.WaitForNotification();
    while (CodeOf(dg_worker_close(worker, DG_FOREVER)) == DG_OK) std::this_thread::yield();
    EXPECT_EQ(CodeOf(dg_worker_close(worker, 0)), DG_INVALID_ARGUMENT);
  }

  std::string rendezvous;
  dg_worker* worker = nullptr;
  absl::Notification held, go, ended;
  std::vector<std::string> lines;  // of the log; written where a test's own thread destroys
};

// While a handler runs for longer than the bound.
TEST(DestroyWorkerTest, AHandlerOutlastsTheBound) {
  Scene scene;
  dg_message* empty = nullptr;
  dg_future* future = nullptr;
  ASSERT_EQ(CodeOf(dg_message_create(nullptr, 0, nullptr, 0, &empty)), DG_OK);
  ASSERT_EQ(CodeOf(dg_worker_call_async(scene.worker, DG_STR("alone"), DG_STR("hold"), empty,
                                        nullptr, &future)),
            DG_OK);
  dg_message_destroy(empty);
  scene.held.WaitForNotification();
  DestroyWorker(scene.worker, absl::Milliseconds(1));
  ASSERT_EQ(scene.lines.size(), 1u);
  EXPECT_TRUE(absl::StrContains(scene.lines[0], "worker 'alone' is closed, and "))
      << scene.lines[0];
  EXPECT_TRUE(absl::StrContains(scene.lines[0], "dg_worker_destroy waits no longer"));
  // The call has failed, the handler has its user data, and the worker takes nothing new.
  bool done = false;
  dg_message* reply = nullptr;
  EXPECT_EQ(CodeOf(dg_future_wait(future, DG_FOREVER, &done)), DG_OK);
  EXPECT_EQ(CodeOf(dg_future_result(future, &reply)), DG_CANCELLED);
  dg_future_destroy(future);
  EXPECT_FALSE(scene.ended.HasBeenNotified());
  dg_context* context = nullptr;
  EXPECT_EQ(CodeOf(dg_context_create(scene.worker, &context)), DG_FAILED_PRECONDITION);
  EXPECT_EQ(CodeOf(dg_worker_close(scene.worker, 0)), DG_DEADLINE_EXCEEDED);
  // Once is enough.
  DestroyWorker(scene.worker, absl::InfiniteDuration());
  EXPECT_EQ(scene.lines.size(), 1u);
  scene.go.Notify();
  scene.AwaitEnd();
}

// While a thread is in a function of the worker for longer than the bound.
TEST(DestroyWorkerTest, AFunctionOutlastsTheBound) {
  Scene scene;
  // As such a function has it.
  auto use = std::make_unique<absl::StatusOr<SharedWorker::Use>>(UseWorker(scene.worker));
  ASSERT_TRUE(use->ok());
  DestroyWorker(scene.worker, absl::Milliseconds(1));
  ASSERT_EQ(scene.lines.size(), 1u);
  EXPECT_TRUE(absl::StrContains(scene.lines[0], "1 threads are still in a function that uses it"))
      << scene.lines[0];
  EXPECT_FALSE(scene.ended.HasBeenNotified());
  use.reset();
  scene.AwaitEnd();
}

// What ends within the bound is waited for, and woken, not looked for now and then.
TEST(DestroyWorkerTest, WaitsForAThreadThatUsesTheWorker) {
  Scene scene;
  std::optional<absl::StatusOr<SharedWorker::Use>> use;
  use.emplace(UseWorker(scene.worker));
  ASSERT_TRUE((*use).ok());
  std::thread destroyer([&] { DestroyWorker(scene.worker, absl::Hours(1)); });
  // It has begun, and waits for the user's thread.
  dg_context* context = nullptr;
  while (CodeOf(dg_context_create(scene.worker, &context)) == DG_OK) {
    dg_context_destroy(context);
    std::this_thread::yield();
  }
  EXPECT_FALSE(scene.ended.HasBeenNotified());
  use.reset();
  destroyer.join();
  EXPECT_TRUE(scene.ended.HasBeenNotified());
  EXPECT_EQ(CodeOf(dg_worker_close(scene.worker, 0)), DG_INVALID_ARGUMENT);
  EXPECT_TRUE(scene.lines.empty());
}

}  // namespace
}  // namespace distgrad
