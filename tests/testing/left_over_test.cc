// That what is held is named: else nothing would ever be left over.
#include "tests/testing/left_over.h"

#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "absl/synchronization/notification.h"
#include "core/base/thread.h"
#include "core/worker/metrics.h"
#include "tests/testing/cluster.h"

namespace distgrad {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class Holds final : public FaultInjector {
 public:
  Action OnSend(const std::string& /*from*/, const std::string& /*to*/,
                Packet& /*packet*/) override {
    return holds ? Action::kHold : Action::kDeliver;
  }
  std::atomic<bool> holds{false};
};

class LeftOverTest : public ::testing::Test {
 protected:
  LeftOverTest() {
    EXPECT_TRUE(cluster_[1]
                    .Register("wait",
                              [this](Request&) -> absl::StatusOr<Message> {
                                served_.Notify();
                                go_on_.WaitForNotification();
                                return Message{};
                              })
                    .ok());
  }
  // What a worker has in the end; what has come may be counted a moment longer.
  static void ExpectNothingLeft(const Worker& worker) {
    while (!LeftOfWorker(worker).empty()) std::this_thread::yield();
  }

  const std::shared_ptr<Holds> faults_ = std::make_shared<Holds>();
  Cluster cluster_{{.faults = faults_}};
  absl::Notification served_, go_on_;
};

TEST_F(LeftOverTest, CallsInFlightAndWhatWaitsToBeSent) {
  EXPECT_EQ(LeftOfWorker(cluster_[0]), "");
  auto served = cluster_[0].CallAsync(1, "wait", {});
  served_.WaitForNotification();
  faults_->holds = true;
  auto held = cluster_[0].CallAsync(1, "no such function", {std::string(5000, 'x'), {}});
  EXPECT_THAT(LeftOfWorker(cluster_[0]), AllOf(HasSubstr("1 made calls of 'wait' with 1 in flight"),
                                               HasSubstr("1 made calls of 'no such function'"),
                                               HasSubstr(" bytes wait to be sent to 1;")));
  EXPECT_GT(cluster_[0].Metrics().queued_bytes[1], 5000u);
  EXPECT_THAT(LeftOfWorker(cluster_[1]), HasSubstr("1 served calls of 'wait' with 0 in flight"));
  faults_->holds = false;
  cluster_.network().ReleaseHeld();
  go_on_.Notify();
  EXPECT_TRUE(served.Wait().ok());
  EXPECT_FALSE(held.Wait().ok());
  ExpectNothingLeft(cluster_[0]);
  ExpectNothingLeft(cluster_[1]);
}

TEST_F(LeftOverTest, PassesAndContexts) {
  for (const bool fails : {false, true}) {
    absl::Notification begun, go_on;
    {
      const Context context = cluster_[0].NewContext();
      const at::Tensor x = at::mul(at::ones({3}).requires_grad_(), 2);
      x.register_hook([&](const at::Tensor&) {
        begun.Notify();
        go_on.WaitForNotification();
        if (fails) throw std::runtime_error("a hook that fails");
      });
      const auto y = cluster_[0].CallOp(1, "aten::neg", {x}, {.context = &context});
      ASSERT_TRUE(y.ok()) << y.status();
      absl::Status passed;
      std::thread pass([&] { passed = context.Backward({(*y)[0].toTensor().sum()}); });
      begun.WaitForNotification();
      EXPECT_THAT(LeftOfWorker(cluster_[0]),
                  AllOf(HasSubstr(" 1 passes;"), HasSubstr(" with 1 sends and 1 recvs;")));
      EXPECT_EQ(cluster_[0].Metrics().passes_in_flight, 1u);
      EXPECT_THAT(LeftOfWorker(cluster_[1]), HasSubstr(" with 1 sends and 1 recvs;"));
      go_on.Notify();
      pass.join();
      EXPECT_EQ(passed.ok(), !fails) << passed;
      EXPECT_EQ(cluster_[0].Metrics().passes_failed, fails ? 1u : 0u);
    }
    ExpectNothingLeft(cluster_[0]);
    ExpectNothingLeft(cluster_[1]);
  }
}

TEST(LeftOfProcessTest, ThreadsAndDescriptors) {
  const size_t before = OpenDescriptors().size();
  EXPECT_EQ(LeftOfProcess(before), "");
  const int descriptor = open("/dev/null", O_RDONLY | O_CLOEXEC);
  EXPECT_THAT(LeftOfProcess(before), HasSubstr(" /dev/null"));
  close(descriptor);
  for (const char* const name : {"dg-left", "dg/left"}) {
    absl::Notification runs, go_on;
    absl::StatusOr<std::thread> thread = StartThread(name, [&] {
      runs.Notify();
      go_on.WaitForNotification();
    });
    ASSERT_TRUE(thread.ok()) << thread.status();
    runs.WaitForNotification();
    EXPECT_EQ(LeftOfProcess(before), std::string(" thread ") + name);
    go_on.Notify();
    thread->join();
  }
}

}  // namespace
}  // namespace distgrad
