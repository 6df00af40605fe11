// What the engines of two workers tell each other.
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>

#include "core/autograd/notice.h"
#include "core/base/check.h"
#include "tests/fuzz/packet.h"
#include "tests/fuzz/target.h"

namespace distgrad {

// What was taken can be sent on, and arrives as the same.
bool ReadHostile(absl::string_view bytes) {
  Packet packet = PacketFromInput(bytes);
  const absl::StatusOr<std::vector<Notice>> notices = ReadNotices(packet, 0, {});
  if (!notices.ok() || notices->empty()) return false;
  Packet again;
  for (const Notice& notice : *notices) {
    const absl::Status appended = AppendNotice(notice, &again);
    DG_CHECK(appended.ok()) << appended;
  }
  const absl::StatusOr<std::vector<Notice>> same = ReadNotices(again, 0, {});
  DG_CHECK(same.ok()) << same.status();
  DG_CHECK(same->size() == notices->size());
  for (size_t i = 0; i < same->size(); ++i) {
    const Notice &a = (*same)[i], &b = (*notices)[i];
    DG_CHECK(a.kind == b.kind && a.context == b.context && a.pass == b.pass &&
             a.settled == b.settled && a.retain_graph == b.retain_graph &&
             a.uncounted == b.uncounted && a.edge == b.edge && a.count == b.count &&
             a.status == b.status && a.gradients.size() == b.gradients.size() &&
             a.reached == b.reached && a.awaited == b.awaited && a.peers == b.peers);
  }
  return true;
}

std::vector<std::string> GoodInputs() {
  using Kind = Notice::Kind;
  const std::vector<Notice> notices = {
      {.kind = Kind::kEdge,
       .context = 1,
       .pass = 2,
       .settled = 1,
       .retain_graph = true,
       .edge = 3,
       .gradients = {at::ones({2, 3}), at::Tensor(), at::ones({40, 40}), at::Tensor()},
       .reached = {true, true, true, false}},
      {.kind = Kind::kEdge, .context = 1, .pass = 2, .edge = 4, .uncounted = true},
      {.kind = Kind::kStart, .context = 1, .pass = 2},
      {.kind = Kind::kAck, .context = 1, .pass = 2, .count = 7},
      {.kind = Kind::kAbort, .context = 1, .pass = 2, .status = absl::CancelledError("because")},
      {.kind = Kind::kRelease, .context = 1},
      {.kind = Kind::kKnown, .context = 1},
      {.kind = Kind::kReport,
       .context = 1,
       .pass = 2,
       .awaited = "the gradients of edge 3",
       .peers = {1, 2}}};
  std::vector<std::string> inputs;
  for (const Notice& notice : notices) {
    Packet packet;
    DG_CHECK(AppendNotice(notice, &packet).ok());
    inputs.push_back(InputFromPacket(packet));
  }
  return inputs;
}

}  // namespace distgrad
