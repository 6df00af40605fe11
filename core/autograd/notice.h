// Notices, the messages between the engines of two workers, and their layout in a packet. Several
// notices for one worker travel in one packet. docs/wire.md has the layout.
#ifndef DISTGRAD_CORE_AUTOGRAD_NOTICE_H_
#define DISTGRAD_CORE_AUTOGRAD_NOTICE_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/ids.h"
#include "core/tensor/device_map.h"
#include "core/tensor/message_codec.h"
#include "core/transport/packet.h"

namespace distgrad {

struct Notice {
  enum class Kind : uint8_t {
    kEdge = 1,     // the one message of an edge in a pass: its gradients, or that there are none
    kStart = 2,    // the pass has begun
    kAck = 3,      // `count` messages of the pass are done with
    kAbort = 4,    // the pass has failed with `status`
    kRelease = 5,  // the context is over
    kKnown = 6,    // to the origin: we know the context, and the worker that told us of it is lost
    kReport = 7,   // to the initiator, whose deadline has passed: what we waited for
  };

  Kind kind = Kind::kStart;
  ContextId context = 0;
  PassId pass = 0;  // none for kRelease and kKnown
  // The last pass up to which all of this initiator's on this context are over everywhere.
  PassId settled = 0;
  bool retain_graph = false;  // of the pass
  EdgeId edge = 0;            // kEdge
  bool uncounted = false;     // kEdge: see Pass::OnLateRecv
  // The gradients of a kEdge: one for each tensor of the edge, or none at all: no gradient will
  // come for any. A tensor that is not reached has no gradient, and nor may one that is.
  std::vector<at::Tensor> gradients = {};
  absl::InlinedVector<bool, 8> reached = {};
  uint32_t count = 0;                  // kAck
  absl::Status status = {};            // kAbort
  std::string awaited = {};            // kReport; cut to kMaxReport bytes
  std::vector<WorkerRank> peers = {};  // kReport: the others that were told of the abort
};

// The most bytes of a worker's report that go into an error.
inline constexpr size_t kMaxReport = 1000;

// Appends a notice. Its gradients go to the devices that `devices` gives for theirs.
absl::Status AppendNotice(const Notice& notice, Packet* packet,
                          const DeviceMap& devices = DeviceMap());

// Reads all notices of a packet whose body begins at `offset`, and moves the segments out. `limits`
// are for the gradients of one edge.
absl::StatusOr<std::vector<Notice>> ReadNotices(Packet& packet, size_t offset,
                                                const MessageLimits& limits);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_NOTICE_H_
