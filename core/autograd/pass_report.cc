// Describes a pass: its state for Engine::State(), and past its deadline a report for the
// initiator.
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/autograd/pass_run.h"
#include "core/base/origin.h"

namespace distgrad {
namespace {

// For how long the initiator, past its deadline, waits for what the others say they waited for.
constexpr absl::Duration kReportPatience = absl::Seconds(2);
// How many of them its error quotes.
constexpr size_t kMaxReports = 16;

}  // namespace

PassState PassRun::State() {
  Promise<PassState> promise;
  const Future<PassState> state = promise.future();
  Post(
      [this, promise = std::move(promise)]() mutable {
        PassState s;
        s.id = id_;
        s.retain_graph = retain_graph_;
        s.awaited = pass_.Awaited();
        const auto& unacknowledged = pass_.Unacknowledged();
        s.unacknowledged.insert(unacknowledged.begin(), unacknowledged.end());
        s.busy = outstanding_;
        promise.Set(std::move(s));
      },
      RunHere::kNo, &services_->pool);
  return *state.Wait();
}

void PassRun::OnDeadlineOnStrand() {
  if (over_.has_value()) return;
  Reports& reports = reports_.emplace();
  reports.parts.push_back(DescribeAwaitedOnStrand());
  reports.missing = pass_.peers();
  timer_ = services_->clock.At(services_->clock.Now() + kReportPatience, [weak = weak_from_this()] {
    auto self = weak.lock();
    if (self) self->Post([run = self.get()] { run->EndReportsOnStrand(); }, RunHere::kNo);
  });
  // Everyone drops the pass now, and says in answer what it was waiting for.
  pass_.Fail(LocalError(absl::DeadlineExceededError("the deadline has passed")));
}

void PassRun::SendReportOnStrand() {
  if (MakerOf(id_) == services_->self || std::exchange(reported_, true)) return;
  Notice report{.kind = Notice::Kind::kReport};
  if (pass_.running()) {
    report.awaited = DescribeAwaitedOnStrand();
    report.peers.assign(pass_.peers().begin(), pass_.peers().end());
  }
  Deliver(MakerOf(id_), std::move(report));
}

void PassRun::TakeReportOnStrand(WorkerRank from, const Notice& report) {
  // It may come before that of the worker by whom we learn that this one takes part.
  if (!reports_.has_value() || !reports_->heard.insert(from).second) return;
  reports_->missing.erase(from);
  for (const WorkerRank peer : report.peers) {
    if (peer != services_->self && reports_->heard.count(peer) == 0) reports_->missing.insert(peer);
  }
  if (!report.awaited.empty() && reports_->parts.size() < kMaxReports)
    reports_->parts.push_back(report.awaited);
}

void PassRun::EndReportsOnStrand() {
  if (!reports_.has_value()) return;
  std::vector<std::string> parts = std::move(reports_->parts);
  for (const WorkerRank silent : reports_->missing) {
    if (parts.size() == 2 * kMaxReports) break;
    parts.push_back(
        absl::StrCat("worker ", services_->network.Describe(silent), " does not say what"));
  }
  reports_.reset();
  over_ = WithOrigin(absl::DeadlineExceededError(
                         absl::StrCat(over_->message(), "; awaited: ", absl::StrJoin(parts, "; "))),
                     {services_->self, ErrorOrigin::By::kDistgrad});
}

std::string PassRun::DescribeAwaitedOnStrand() {
  // Of the edges only so many are named.
  constexpr size_t kNamed = 8;
  std::vector<std::string> parts;
  std::map<WorkerRank, std::vector<std::string>> by_peer;
  for (const EdgeEnd& end : pass_.Awaited()) by_peer[end.peer].push_back(absl::StrCat(end.edge));
  for (auto& [peer, edges] : by_peer) {
    const size_t count = edges.size();
    if (count > kNamed) edges.resize(kNamed);
    parts.push_back(absl::StrCat("the gradients of ", count, " edge(s) to worker ",
                                 services_->network.Describe(peer), " (",
                                 absl::StrJoin(edges, ", "), count > kNamed ? ", ...)" : ")"));
  }
  for (const auto& [peer, count] : pass_.Unacknowledged()) {
    parts.push_back(
        absl::StrCat("the end of worker ", services_->network.Describe(peer), "'s part"));
  }
  if (outstanding_ > 0) parts.push_back("nodes that run there");
  return absl::StrCat("by worker ", services_->network.Describe(services_->self), ": ",
                      parts.empty() ? "nothing" : absl::StrJoin(parts, ", "));
}

}  // namespace distgrad
