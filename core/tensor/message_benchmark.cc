// Measures what it costs to encode and decode a message of one tensor, by size, next to making such
// a tensor at all; inline and as a segment. Prints a table. Run with -c opt, on a quiet machine:
//
//   tools/bazel run //core/tensor:message_benchmark
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "core/tensor/find_operator.h"
#include "core/tensor/message_codec.h"
#include "core/tensor/number_check.h"
#include "core/tensor/operator.h"
#include "core/tensor/operator_policy.h"
#include "core/tensor/piece_count.h"

namespace distgrad {
namespace {

// Nanoseconds of one call: the best of several rounds.
template <typename F>
double Cost(F f) {
  using Clock = std::chrono::steady_clock;
  double best = 1e12;
  for (int round = 0; round < 20; ++round) {
    constexpr int kCalls = 2000;
    const Clock::time_point start = Clock::now();
    for (int i = 0; i < kCalls; ++i) f();
    const std::chrono::duration<double, std::nano> time = Clock::now() - start;
    best = std::min(best, time.count() / kCalls);
  }
  return best;
}

void Check(const absl::Status& status) {
  if (!status.ok()) std::printf("%s\n", status.ToString().c_str());
}

void Run() {
  std::printf("%10s %12s %12s %12s %12s\n", "bytes", "at::empty", "encode", "decode", "copy seg.");
  for (int64_t bytes : {4, 256, 1024, 2048, 4096, 4100, 8192, 16384, 65536}) {
    const Message message{"", {at::ones({bytes / 4})}};
    Packet packet;
    Check(AppendMessage(message, &packet));
    const double empty = Cost([&] { at::empty({bytes / 4}, at::kFloat); });
    const double encode = Cost([&] {
      Packet fresh;
      Check(AppendMessage(message, &fresh));
    });
    const double decode = Cost([&] {
      WireReader reader(packet.bytes);
      std::vector<Segment> copies = packet.segments;
      SegmentReader segments(absl::MakeSpan(copies));
      Check(ReadMessage(reader, segments, {}).status());
    });
    // What an inproc or socket transport adds for a segment, less its system calls.
    const double segment = packet.segments.empty() ? 0 : Cost([&] { CopyPacket(packet); });
    std::printf("%10lld %9.0f ns %9.0f ns %9.0f ns %9.0f ns\n", static_cast<long long>(bytes),
                empty, encode, decode, segment);
  }
  const at::Tensor one = at::ones({1});
  const std::vector<c10::IValue> args = {one, one};
  std::printf("EncodeValues %.0f ns\n", Cost([&] { Check(EncodeValues(args).status()); }));
  const Message encoded = *EncodeValues(args);
  std::printf("DecodeValues %.0f ns\n",
              Cost([&] { Check(DecodeValues(encoded, UINT64_MAX).status()); }));
  std::printf("CallOperator(aten::add.Tensor) %.0f ns, called directly %.0f ns\n",
              Cost([&] { Check(CallOperator("aten::add.Tensor", args).status()); }),
              Cost([&] { one.add(one); }));
  const c10::OperatorHandle op = FindOperator("aten::add.Tensor").value();
  std::printf(
      "FindOperator %.0f ns, CheckServed %.0f ns, what a worker checks of arguments %.0f ns\n",
      Cost([&] { Check(FindOperator("aten::add.Tensor").status()); }),
      Cost([&] { Check(CheckServed(op)); }), Cost([&] {
        const ShownTensors shown = CountShown(args);
        if (CountPieces(op, args) + CountListBytes(op, args) > 0) std::abort();
        Check(CheckAttention(op, args));
        Check(CheckViews(op, args, shown));
        Check(CheckListLengths(op, args));
        Check(CheckNumbers(op, args));
      }));
}

}  // namespace
}  // namespace distgrad

int main() { distgrad::Run(); }
