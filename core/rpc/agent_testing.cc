// Starts agents on an in-process transport, and keeps what their services hear.
#include "core/rpc/agent_testing.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/check.h"

namespace distgrad {
namespace {

// Waits for `n` texts.
std::vector<std::string> Await(absl::Mutex& mu, const std::vector<std::string>& texts, size_t n) {
  absl::MutexLock lock(&mu);
  const auto there = [&] { return texts.size() >= n; };
  mu.Await(absl::Condition(&there));
  return texts;
}

}  // namespace

void TestService::OnCall(IncomingCall call) {
  if (!call.refusal().ok()) return call.Fail(call.refusal());
  if (call.function() == "echo") {
    Packet reply = call.NewReply();
    reply.bytes += std::string(call.body().bytes());
    reply.segments = std::move(call.body().packet.segments);
    call.Reply(std::move(reply));
    return;
  }
  if (call.function() == "fail") return call.Fail(absl::DataLossError("as was asked"));
  if (call.function() == "drop") return;
  absl::MutexLock lock(&mu_);
  kept_.push_back(std::move(call));
}

absl::Status TestService::OnNotice(WorkerRank from, Body notice,
                                   absl::FunctionRef<bool()> is_cut_off) {
  NoticeHook then;
  {
    absl::MutexLock lock(&mu_);
    then = std::exchange(on_notice_, nullptr);
  }
  const absl::Status taken = then != nullptr ? then(is_cut_off) : notice.packet.segments_status;
  absl::MutexLock lock(&mu_);
  notices_.push_back(absl::StrCat(from, ":", notice.bytes()));
  return taken;
}

void TestService::OnLateReply(WorkerRank, Body reply) {
  absl::MutexLock lock(&mu_);
  late_.push_back(std::string(reply.bytes()));
}

void TestService::OnPeerLost(WorkerRank peer, uint64_t begun, const absl::Status& why) {
  begun_at_loss = begun;
  absl::AnyInvocable<void()> then;
  {
    absl::MutexLock lock(&mu_);
    lost_[peer] = why;
    then = std::exchange(on_lost_, nullptr);
  }
  if (then != nullptr) then();
}

void TestService::OnNextNotice(NoticeHook then) {
  absl::MutexLock lock(&mu_);
  on_notice_ = std::move(then);
}

void TestService::OnNextLost(absl::AnyInvocable<void()> then) {
  absl::MutexLock lock(&mu_);
  on_lost_ = std::move(then);
}

void TestService::OnMemberEvents() {
  absl::AnyInvocable<void()> then;
  {
    absl::MutexLock lock(&mu_);
    then = std::exchange(on_events_, nullptr);
  }
  if (then != nullptr) then();
}

void TestService::OnNextMemberEvents(absl::AnyInvocable<void()> then) {
  absl::MutexLock lock(&mu_);
  on_events_ = std::move(then);
}

void TestService::OnUnreachable(WorkerRank peer, Incarnation incarnation, const absl::Status& why) {
  absl::MutexLock lock(&mu_);
  unreachable_[peer][incarnation] = why;
}

void TestService::OnRevived(WorkerRank, Incarnation, uint64_t loss) {
  absl::MutexLock lock(&mu_);
  revived_.push_back(loss);
}

uint64_t TestService::last_revived() const {
  absl::MutexLock lock(&mu_);
  return revived_.empty() ? 0 : revived_.back();
}

IncomingCall TestService::AwaitKept() {
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(
      +[](std::deque<IncomingCall>* kept) { return !kept->empty(); }, &kept_));
  IncomingCall call = std::move(kept_.front());
  kept_.pop_front();
  return call;
}

std::vector<std::string> TestService::AwaitNotices(size_t n) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  return Await(mu_, notices_, n);
}

std::vector<std::string> TestService::AwaitLateReplies(size_t n) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  return Await(mu_, late_, n);
}

absl::Status TestService::AwaitLost(WorkerRank peer) {
  absl::MutexLock lock(&mu_);
  const auto there = [&] {
    mu_.AssertReaderHeld();
    return lost_.count(peer) > 0;
  };
  mu_.Await(absl::Condition(&there));
  return lost_[peer];
}

absl::Status TestService::AwaitUnreachable(WorkerRank peer, Incarnation incarnation) {
  absl::MutexLock lock(&mu_);
  const auto there = [&] {
    mu_.AssertReaderHeld();
    return unreachable_[peer].count(incarnation) > 0;
  };
  mu_.Await(absl::Condition(&there));
  return unreachable_[peer][incarnation];
}

bool TestService::HasUnreachable(WorkerRank peer) const {
  absl::MutexLock lock(&mu_);
  const auto found = unreachable_.find(peer);
  return found != unreachable_.end() && !found->second.empty();
}

bool TestService::HasLost(WorkerRank peer) const {
  absl::MutexLock lock(&mu_);
  return lost_.count(peer) > 0;
}

TestAgent::TestAgent(Clock* clock, std::shared_ptr<InprocNetwork> network, WorkerRank rank,
                     uint64_t incarnation, const AgentOptions& options)
    : TestAgent(clock, NewInprocTransport(std::move(network)), rank, incarnation, options) {}

TestAgent::TestAgent(Clock* clock, std::unique_ptr<Transport> the_transport, WorkerRank rank,
                     uint64_t incarnation, const AgentOptions& options)
    : transport(std::move(the_transport)),
      agent(std::make_shared<Agent>(clock, transport.get(), &service, options)) {
  info.rank = rank;
  info.name = std::string(1, static_cast<char>('a' + rank));
  info.incarnation = incarnation << 32;
  absl::StatusOr<std::string> address = agent->Listen();
  DG_CHECK(address.ok()) << address.status();
  info.address = *std::move(address);
}

TestAgent::~TestAgent() {
  agent->Close();
  transport.reset();
}

Future<std::string> TestAgent::Call(WorkerRank to, const std::string& function,
                                    const std::string& body, const CallTerms& terms) {
  Promise<std::string> promise;
  Future<std::string> future = promise.future();
  Agent::Request request = Agent::NewRequest(function);
  request.packet.bytes += body;
  const uint64_t call =
      agent->Call(to, std::move(request), terms,
                  [promise = std::move(promise)](absl::StatusOr<Body> reply, bool) mutable {
                    if (reply.ok()) {
                      promise.Set(std::string(reply->bytes()));
                    } else {
                      promise.Set(reply.status());
                    }
                  });
  future.MadeBy(agent->canceller(), call, {});
  return future;
}

void TestAgent::Notify(WorkerRank to, const std::string& body) {
  Packet notice = Agent::NewNotice();
  notice.bytes += body;
  agent->Notify(to, std::move(notice));
}

void StartAll(const std::vector<std::unique_ptr<TestAgent>>& agents) {
  std::vector<WorkerInfo> infos;
  for (const auto& agent : agents) infos.push_back(agent->info);
  for (const auto& agent : agents) {
    const absl::Status started = agent->agent->Start(agent->info, infos);
    DG_CHECK(started.ok()) << started;
  }
}

}  // namespace distgrad
