// Writes ranks of two bytes each, and reads them.
#include "core/worker/context_peers.h"

#include "core/base/wire.h"

namespace distgrad {

std::string NamePeers(absl::Span<ContextRecord* const> contexts) {
  std::set<WorkerRank> peers;
  for (const ContextRecord* const context : contexts) {
    for (const WorkerRank peer : context->Peers()) peers.insert(peer);
  }
  std::string payload;
  WireWriter writer(&payload);
  for (const WorkerRank peer : peers) writer.U16(peer);
  return payload;
}

absl::Status ReadPeers(absl::string_view payload, std::set<WorkerRank>* peers) {
  WireReader reader(payload);
  while (reader.ok() && reader.remaining() > 0) peers->insert(reader.U16());
  return reader.status("the peers of a context");
}

}  // namespace distgrad
