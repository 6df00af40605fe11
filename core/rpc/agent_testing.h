// The fixture that the tests of agents share: a worker that has nothing but an agent.
//
//   FakeClock clock;
//   auto network = std::make_shared<InprocNetwork>();
//   std::vector<std::unique_ptr<TestAgent>> agents;
//   for (WorkerRank rank : {0, 1}) {
//     agents.push_back(std::make_unique<TestAgent>(&clock, network, rank, /*incarnation=*/1));
//   }
//   StartAll(agents);
//   EXPECT_EQ(*agents[0]->Call(1, "echo", "x").Wait(), "x");
#ifndef DISTGRAD_CORE_RPC_AGENT_TESTING_H_
#define DISTGRAD_CORE_RPC_AGENT_TESTING_H_

#include <atomic>
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "core/base/clock.h"
#include "core/base/future.h"
#include "core/base/ids.h"
#include "core/membership/worker_info.h"
#include "core/rpc/agent.h"
#include "core/transport/inproc/inproc_transport.h"
#include "core/transport/transport.h"

namespace distgrad {

// Echoes what is sent to "echo", fails "fail", drops "drop", and keeps all other calls; remembers
// the rest. Thread-safe.
class TestService : public AgentService {
 public:
  void OnCall(IncomingCall call) override;
  absl::Status OnNotice(WorkerRank from, Body notice,
                        absl::FunctionRef<bool()> is_cut_off) override;
  void OnLateReply(WorkerRank from, Body reply) override;
  void OnPeerLost(WorkerRank peer, uint64_t begun, const absl::Status& why) override;
  void OnUnreachable(WorkerRank peer, Incarnation incarnation, const absl::Status& why) override;
  uint64_t BegunSoFar() override { return begun; }
  void OnUnwatched() override { ++unwatched_; }
  void OnRevived(WorkerRank peer, Incarnation incarnation, uint64_t loss) override;
  void OnMemberEvents() override;

  // What it says has begun so far, for the test to set; and had, as the last loss was told.
  std::atomic<uint64_t> begun{0}, begun_at_loss{0};

  // Waits for the next call that was kept, and takes it.
  IncomingCall AwaitKept();
  // Wait for at least `n`, each as "from:text".
  std::vector<std::string> AwaitNotices(size_t n);
  std::vector<std::string> AwaitLateReplies(size_t n);
  // Has the next loss of a worker run `then`, on the thread that tells of it.
  void OnNextLost(absl::AnyInvocable<void()> then);
  // Does the same for the next notice, before that counts as here; it is taken with that result.
  using NoticeHook = absl::AnyInvocable<absl::Status(absl::FunctionRef<bool()> is_cut_off)>;
  void OnNextNotice(NoticeHook then);
  // Does the same for the next word that members may have changed.
  void OnNextMemberEvents(absl::AnyInvocable<void()> then);
  // Waits until a worker is lost; returns why.
  absl::Status AwaitLost(WorkerRank peer);
  bool HasLost(WorkerRank peer) const;
  // Do the same for that incarnation of a worker that cannot be reached.
  absl::Status AwaitUnreachable(WorkerRank peer, Incarnation incarnation);
  bool HasUnreachable(WorkerRank peer) const;
  // Returns how often it was told that nobody watches its worker.
  int unwatched() const { return unwatched_; }
  // Returns the last loss that it was told is over; 0: none.
  uint64_t last_revived() const;

 private:
  std::atomic<int> unwatched_{0};
  mutable absl::Mutex mu_;
  // Guarded by mu_.
  std::deque<IncomingCall> kept_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> notices_ ABSL_GUARDED_BY(mu_), late_ ABSL_GUARDED_BY(mu_);
  std::map<WorkerRank, absl::Status> lost_ ABSL_GUARDED_BY(mu_);
  // The losses that are over; in what needs memory, as does what a worker keeps of them.
  std::vector<uint64_t> revived_ ABSL_GUARDED_BY(mu_);
  absl::AnyInvocable<void()> on_lost_ ABSL_GUARDED_BY(mu_), on_events_ ABSL_GUARDED_BY(mu_);
  NoticeHook on_notice_ ABSL_GUARDED_BY(mu_);
  std::map<WorkerRank, std::map<Incarnation, absl::Status>> unreachable_ ABSL_GUARDED_BY(mu_);
};

// One incarnation of a worker, which listens from the start. Worker 0 is "a", 1 is "b", and so on.
struct TestAgent {
  TestAgent(Clock* clock, std::shared_ptr<InprocNetwork> network, WorkerRank rank,
            uint64_t incarnation, const AgentOptions& options = {});
  // On another transport than that within the process.
  TestAgent(Clock* clock, std::unique_ptr<Transport> transport, WorkerRank rank,
            uint64_t incarnation, const AgentOptions& options = {});
  ~TestAgent();

  Future<std::string> Call(WorkerRank to, const std::string& function, const std::string& body = "",
                           const CallTerms& terms = {});
  void Notify(WorkerRank to, const std::string& body);

  TestService service;
  std::unique_ptr<Transport> transport;
  const std::shared_ptr<Agent> agent;
  WorkerInfo info;
};

// Has all know each other.
void StartAll(const std::vector<std::unique_ptr<TestAgent>>& agents);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_AGENT_TESTING_H_
