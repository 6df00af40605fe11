// A callback for members hears of each event, also where no memory could be had to say that there
// is one.
#include "core/worker/member_callback.h"

#include <gtest/gtest.h>

#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/base/fake_clock.h"
#include "core/base/thread_pool.h"
#include "core/membership/member_event.h"
#include "core/membership/worker_info.h"
#include "core/rpc/agent.h"
#include "core/transport/inproc/inproc_transport.h"
#include "tests/testing/fail_allocation.h"

namespace distgrad {
namespace {

class NoService : public AgentService {
 public:
  void OnCall(IncomingCall) override {}
  absl::Status OnNotice(WorkerRank, Body, absl::FunctionRef<bool()>) override {
    return absl::OkStatus();
  }
  void OnLateReply(WorkerRank, Body) override {}
  void OnPeerLost(WorkerRank, uint64_t, const absl::Status&) override {}
};

// Thread-safe.
class Heard {
 public:
  void Add() {
    absl::MutexLock lock(&mu_);
    ++count_;
  }
  bool Await(int count) {
    absl::MutexLock lock(&mu_);
    const auto is_there = [&] {
      mu_.AssertReaderHeld();
      return count_ >= count;
    };
    return mu_.AwaitWithTimeout(absl::Condition(&is_there), absl::Seconds(20));
  }

 private:
  absl::Mutex mu_;
  int count_ ABSL_GUARDED_BY(mu_) = 0;
};

// The next one may never come.
TEST(MemberCallbackTest, AnEventForWhichThereWasNoMemoryDoesNotWaitForTheNext) {
  FakeClock clock;
  const std::unique_ptr<Transport> transport =
      NewInprocTransport(std::make_shared<InprocNetwork>());
  NoService service;
  const auto agent = std::make_shared<Agent>(&clock, transport.get(), &service);
  WorkerInfo self{.rank = 0, .name = "self", .incarnation = 1};
  self.address = agent->Listen().value();
  const WorkerInfo peer{.rank = 1, .name = "peer", .address = self.address, .incarnation = 1};
  ASSERT_EQ(agent->Start(self, {self, peer}), absl::OkStatus());
  Heard heard;
  ThreadPool pool("test", 1);
  ASSERT_EQ(pool.Start(), absl::OkStatus());
  MemberCallback callback(&pool, agent.get());
  callback.Set([&](const MemberEvent&) { heard.Add(); });
  // So many that the pool needs memory for some.
  for (int i = 1; i <= 40; ++i) {
    if (i % 2 == 1) {
      agent->SetLost(1, peer.incarnation, "it was silent");
    } else {
      agent->SetAlive(1, peer.incarnation);
    }
    FailAllocation(0);
    callback.OnEvents();
    FailAllocation(-1);
    ASSERT_TRUE(heard.Await(i)) << i;
  }
  callback.Set(nullptr);
  pool.Join();
  agent->Close();
}

}  // namespace
}  // namespace distgrad
