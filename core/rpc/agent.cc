// Begins and ends an agent, and answers what it can be asked.
#include "core/rpc/agent.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/status.h"

namespace distgrad {
namespace {

// Made before main(), for later there may be no memory for it.
const absl::Status* const kShuttingDown =
    new absl::Status(absl::CancelledError("this worker is shutting down"));

}  // namespace

Agent::Agent(Clock* clock, Transport* transport, AgentService* service, const AgentOptions& options)
    : clock_(clock),
      service_(service),
      directory_(options.directory),
      limits_(options.limits),
      trace_(options.trace != nullptr ? options.trace : std::make_shared<TraceRecorder>()),
      peers_(std::make_shared<Peers>(options.max_workers)),
      calls_(std::make_shared<CallTable>(clock, options.limits, trace_, peers_)),
      links_(std::make_shared<LinkTable>(clock, transport, options.directory,
                                         options.heartbeat_limit, options.limits, peers_, calls_)),
      watch_interval_(links_->heartbeat_interval()),
      watch_(peers_, options.heartbeat_limit - watch_interval_) {}

absl::Status Agent::Start(const WorkerInfo& self, std::vector<WorkerInfo> workers) {
  DG_RETURN_IF_ERROR(peers_->Start(self, std::move(workers)));
  links_->Start();
  return absl::OkStatus();
}

void Agent::Close() {
  StopWatching();
  calls_->Close(*kShuttingDown);
  links_->Close(*kShuttingDown);
}

absl::StatusOr<WorkerRank> Agent::FindWorker(int rank) const {
  const auto worker = static_cast<WorkerRank>(rank);
  if (rank != worker || (directory_ == nullptr && !peers_->Find(worker)))
    return Peers::NoWorker(rank);
  return worker;
}

absl::StatusOr<WorkerInfo> Agent::Info(WorkerRank worker) const {
  const std::optional<WorkerInfo> known = peers_->Find(worker);
  if (!known) return Peers::NoWorker(worker);
  return *known;
}

void Agent::OnPeerLost(WorkerRank peer, uint64_t begun, const absl::Status& why) {
  service_->OnPeerLost(peer, begun, why);
}

void Agent::OnRevived(WorkerRank peer, Incarnation incarnation, uint64_t loss) {
  service_->OnRevived(peer, incarnation, loss);
}

void Agent::OnMemberEvents() { service_->OnMemberEvents(); }

}  // namespace distgrad
