// Notices as bytes and back, and the errors for bytes that are cut short or out of range.
#include "core/autograd/notice.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/quantize_per_tensor.h>
#include <gtest/gtest.h>

#include <new>
#include <string>
#include <vector>

#include "tests/testing/fail_allocation.h"

namespace distgrad {
namespace {

Packet PacketOfEdge(std::vector<at::Tensor> gradients, absl::InlinedVector<bool, 8> reached) {
  Packet packet;
  const absl::Status status = AppendNotice({.kind = Notice::Kind::kEdge,
                                            .context = 1,
                                            .pass = 2,
                                            .edge = 3,
                                            .gradients = std::move(gradients),
                                            .reached = std::move(reached)},
                                           &packet);
  EXPECT_TRUE(status.ok()) << status;
  return packet;
}

// Others of the same packet are to be read all the same.
TEST(NoticeTest, OneForWhichThereIsNoMemoryLeavesThePacketAsItWas) {
  const Notice edge = {.kind = Notice::Kind::kEdge,
                       .context = 1,
                       .pass = 2,
                       .edge = 3,
                       .gradients = {at::ones({2, 3}), at::ones({100, 100}), at::ones({3, 2}).t()},
                       .reached = {true, true, true}};
  const Notice abort = {
      .kind = Notice::Kind::kAbort, .context = 1, .pass = 2, .status = absl::DataLossError("why")};
  const Notice report = {.kind = Notice::Kind::kReport,
                         .context = 1,
                         .pass = 2,
                         .awaited = std::string(100, 'x'),
                         .peers = {3, 4}};
  for (const Notice* const notice : {&edge, &abort, &report}) {
    bool failed = true;
    for (int nth = 0; failed; ++nth) {
      SCOPED_TRACE(nth);
      Packet packet = PacketOfEdge({at::ones({50, 50})}, {true});
      const std::string bytes = packet.bytes;
      const size_t segments = packet.segments.size();
      bool appended = false;
      FailAllocation(nth);
      try {
        appended = AppendNotice(*notice, &packet).ok();
      } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): it is not appended
      }
      failed = FailAllocation(-1);
      if (appended) continue;
      EXPECT_EQ(packet.bytes, bytes);
      EXPECT_EQ(packet.segments.size(), segments);
    }
  }
}

TEST(NoticeTest, EveryKindArrivesAsItWasSent) {
  const std::vector<Notice> sent = {
      {.kind = Notice::Kind::kEdge,
       .context = 1,
       .pass = 2,
       .settled = 1,
       .retain_graph = true,
       .edge = 3,
       .gradients = {at::ones({2, 3}), at::Tensor(), at::ones({100, 100}), at::Tensor()},
       .reached = {true, true, true, false}},
      {.kind = Notice::Kind::kEdge, .context = 1, .pass = 2, .edge = 4, .uncounted = true},
      {.kind = Notice::Kind::kEdge,
       .context = 1,
       .pass = 2,
       .edge = 5,
       .gradients = std::vector<at::Tensor>(19),
       .reached = {false, true, true, false, false, false, true, false, true, true, false, false,
                   false, false, false, false, false, true, true}},
      {.kind = Notice::Kind::kStart, .context = 1, .pass = 2},
      {.kind = Notice::Kind::kAck, .context = 1, .pass = 2, .count = 7},
      {.kind = Notice::Kind::kAbort,
       .context = 1,
       .pass = 2,
       .status = absl::CancelledError("because")},
      {.kind = Notice::Kind::kRelease, .context = 1},
      {.kind = Notice::Kind::kKnown, .context = 1},
      {.kind = Notice::Kind::kReport,
       .context = 1,
       .pass = 2,
       .awaited = "the gradients of an edge",
       .peers = {3, 65535}}};
  Packet packet;
  packet.bytes = "front";
  for (const Notice& notice : sent) ASSERT_TRUE(AppendNotice(notice, &packet).ok());
  Packet arrived = CopyPacket(packet);
  const absl::StatusOr<std::vector<Notice>> got = ReadNotices(arrived, 5, {});
  ASSERT_TRUE(got.ok()) << got.status();
  ASSERT_EQ(got->size(), sent.size());
  for (size_t i = 0; i < sent.size(); ++i) {
    SCOPED_TRACE(i);
    const Notice &a = (*got)[i], &b = sent[i];
    EXPECT_EQ(a.kind, b.kind);
    EXPECT_EQ(a.context, b.context);
    EXPECT_EQ(a.pass, b.pass);
    EXPECT_EQ(a.settled, b.settled);
    EXPECT_EQ(a.retain_graph, b.retain_graph);
    EXPECT_EQ(a.edge, b.edge);
    EXPECT_EQ(a.uncounted, b.uncounted);
    EXPECT_EQ(a.reached, b.reached);
    EXPECT_EQ(a.count, b.count);
    EXPECT_EQ(a.status, b.status);
    EXPECT_EQ(a.awaited, b.awaited);
    EXPECT_EQ(a.peers, b.peers);
    ASSERT_EQ(a.gradients.size(), b.gradients.size());
    for (size_t g = 0; g < a.gradients.size(); ++g) {
      ASSERT_EQ(a.gradients[g].defined(), b.gradients[g].defined());
      if (a.gradients[g].defined()) {
        EXPECT_TRUE(a.gradients[g].equal(b.gradients[g]));
      }
    }
  }
}

TEST(NoticeTest, OneThatCannotBeSentLeavesThePacketAsItWas) {
  Packet packet;
  ASSERT_TRUE(AppendNotice({.kind = Notice::Kind::kStart, .context = 1, .pass = 2}, &packet).ok());
  const std::string before = packet.bytes;
  const absl::Status status = AppendNotice(
      {.kind = Notice::Kind::kEdge,
       .context = 1,
       .pass = 2,
       .edge = 3,
       .gradients = {at::ones({4}), at::quantize_per_tensor(at::ones({4}), 0.5, 0, at::kQInt8)},
       .reached = {true, true}},
      &packet);
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(packet.bytes, before);
  EXPECT_TRUE(packet.segments.empty());
}

TEST(NoticeTest, AReportIsCut) {
  Packet packet;
  ASSERT_TRUE(
      AppendNotice({.kind = Notice::Kind::kReport, .awaited = std::string(100000, 'x')}, &packet)
          .ok());
  const absl::StatusOr<std::vector<Notice>> got = ReadNotices(packet, 0, {});
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->at(0).awaited, std::string(kMaxReport, 'x'));
}

TEST(NoticeTest, TheReadersLimitsAreKept) {
  Packet packet = PacketOfEdge({at::ones({1}), at::ones({1})}, {true, true});
  EXPECT_TRUE(ReadNotices(packet, 0, {.max_tensors = 2}).ok());
  EXPECT_EQ(ReadNotices(packet, 0, {.max_tensors = 1}).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(NoticeTest, AGradientThatIsThereIsReached) {
  Packet packet = PacketOfEdge({at::ones({1}), at::Tensor()}, {true, true});
  EXPECT_TRUE(ReadNotices(packet, 0, {}).ok());
  packet.bytes.back() = 2;  // the first is not
  EXPECT_EQ(ReadNotices(packet, 0, {}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(NoticeTest, CutShortItIsAnError) {
  Packet packet = PacketOfEdge({at::ones({1}), at::Tensor()}, {true, false});
  const size_t edge = packet.bytes.size();
  ASSERT_TRUE(AppendNotice({.kind = Notice::Kind::kAbort,
                            .context = 1,
                            .pass = 2,
                            .status = absl::CancelledError("because")},
                           &packet)
                  .ok());
  const size_t whole = packet.bytes.size();
  ASSERT_TRUE(
      AppendNotice({.kind = Notice::Kind::kReport, .awaited = "two", .peers = {1, 2}}, &packet)
          .ok());
  for (size_t size = 1; size < packet.bytes.size(); ++size) {
    if (size == edge || size == whole) continue;
    Packet cut;
    cut.bytes = packet.bytes.substr(0, size);
    EXPECT_FALSE(ReadNotices(cut, 0, {}).ok()) << size << " bytes";
  }
  Packet odd;
  odd.bytes = packet.bytes;
  odd.bytes[0] = 99;
  EXPECT_FALSE(ReadNotices(odd, 0, {}).ok());
}

}  // namespace
}  // namespace distgrad
