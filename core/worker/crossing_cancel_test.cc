// A cancel of a call to a newcomer that crosses the store's answer, who that is.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "core/membership/store/in_process_store.h"
#include "core/transport/inproc/inproc_transport.h"
#include "core/worker/worker.h"
#include "tests/testing/forwarding_store.h"

namespace distgrad {

// The linker's name of the function that the next one is called in place of.
absl::Status RealAnnotate(const absl::Status& status, absl::string_view what) __asm__(
    "__real__ZN8distgrad8AnnotateERKN4absl12lts_202206236StatusESt17basic_string_viewIcSt11char_"
    "traitsIcEE");

namespace {

// Is called once, before this thread's next error has its words: a call that is cancelled has not
// ended by then.
thread_local std::function<void()> meanwhile;

}  // namespace

absl::Status AnnotateLater(const absl::Status& status, absl::string_view what) __asm__(
    "__wrap__ZN8distgrad8AnnotateERKN4absl12lts_202206236StatusESt17basic_string_viewIcSt11char_"
    "traitsIcEE");
absl::Status AnnotateLater(const absl::Status& status, absl::string_view what) {
  if (const auto call = std::exchange(meanwhile, nullptr)) call();
  return RealAnnotate(status, what);
}

namespace {

// Answers nothing while its door is closed.
class SlowStore final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  void SetOpen(bool open) {
    absl::MutexLock lock(&mu_);
    open_ = open;
  }
  absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline deadline) override {
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(&open_));
    }
    return ForwardingStore::GetEach(keys, deadline);
  }

 private:
  absl::Mutex mu_;
  bool open_ ABSL_GUARDED_BY(mu_) = true;
};

std::unique_ptr<Worker> New(WorkerOptions options) {
  options.transport = "inproc";
  options.thread_count = 1;
  absl::StatusOr<std::unique_ptr<Worker>> worker = Worker::Create(std::move(options));
  EXPECT_TRUE(worker.ok()) << worker.status();
  return worker.ok() ? *std::move(worker) : nullptr;
}

TEST(CrossingCancelTest, ACancelThatCrossesTheStoresAnswerReachesTheHandler) {
  absl::Notification begun, cancelled;  // outlive the handler
  const std::shared_ptr<Store> store = NewInProcessStore();
  const auto slow = std::make_shared<SlowStore>(store);
  const auto network = std::make_shared<InprocNetwork>();
  const auto first = New({.store = slow, .rank = 0, .world_size = 1, .network = network});
  ASSERT_NE(first, nullptr);
  ASSERT_TRUE(
      first->Register("pass", [](Request&) -> absl::StatusOr<Message> { return Message{}; }).ok());
  // Before it joins, for it says hello at once, and who reads that asks the store who it is.
  slow->SetOpen(false);
  const auto late = New({.name = "late", .store = store, .join = true, .network = network});
  ASSERT_NE(late, nullptr);
  ASSERT_TRUE(late->Register("wait",
                             [&](Request& request) -> absl::StatusOr<Message> {
                               begun.Notify();
                               const uint64_t watch =
                                   request.cancellation->OnCancel([&] { cancelled.Notify(); });
                               cancelled.WaitForNotification();
                               request.cancellation->Forget(watch);
                               return Message{};
                             })
                  .ok());
  const Future<Message> call = first->CallAsync("late", "wait", {});
  bool crossed = false;
  meanwhile = [&] {
    slow->SetOpen(true);
    begun.WaitForNotification();
    // Runs behind what has made the call, on the one thread that the pool has.
    crossed = first->Call("worker0", "pass", {}).ok();
  };
  call.Cancel();
  EXPECT_TRUE(crossed);
  EXPECT_TRUE(cancelled.WaitForNotificationWithTimeout(absl::Seconds(30)));
  EXPECT_EQ(call.Wait().status().code(), absl::StatusCode::kCancelled) << call.Wait().status();
}

}  // namespace
}  // namespace distgrad
