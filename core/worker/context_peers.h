// The workers with which a worker shares contexts, as it names them in a reply.
#ifndef DISTGRAD_CORE_WORKER_CONTEXT_PEERS_H_
#define DISTGRAD_CORE_WORKER_CONTEXT_PEERS_H_

#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/autograd/context_record.h"
#include "core/base/ids.h"

namespace distgrad {

// Makes the payload of a reply: the workers with which this one shares any of the contexts.
std::string NamePeers(absl::Span<ContextRecord* const> contexts);

// Adds those that such a payload names. kInvalidArgument for what is none.
absl::Status ReadPeers(absl::string_view payload, std::set<WorkerRank>* peers);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_CONTEXT_PEERS_H_
