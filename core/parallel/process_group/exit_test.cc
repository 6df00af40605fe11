// Programs that exit right after they have begun a collective over NCCL, when timers still watch it
// and CUDA is being unloaded: each ends in time, and with its own status. It needs a GPU, and is
// skipped without; nccl_on_stand_ins_exit_test is the same on the stand-ins for CUDA and NCCL.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <c10/core/Device.h>
#include <c10/cuda/CUDAFunctions.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/time/time.h"
#include "core/base/check.h"
#include "core/membership/store/in_process_store.h"
#include "core/net/cluster_key.h"
#include "core/parallel/nccl/nccl_collectives.h"
#include "core/parallel/nccl/process_communicators.h"
#include "core/parallel/new_device_collectives.h"
#include "core/parallel/process_group/process_group.h"
#include "tests/testing/child_process.h"

namespace distgrad {
namespace {

constexpr int kOwnStatus = 17;
constexpr int kExits = 30;
// For one program, by a signal: one that hangs is not waited for until the whole test is ended.
constexpr unsigned kSeconds = 60;

c10::Device Gpu(int index) { return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

at::Tensor On(int index) { return at::full({1000}, 2.0f).to(Gpu(index)); }

// Of two devices of this program.
int ExitAfterABroadcast() {
  const auto collectives = NewDeviceCollectives({Gpu(0), Gpu(1)});
  DG_CHECK(collectives.ok()) << collectives.status();
  const auto copies = (*collectives)->Broadcast({On(0)});
  DG_CHECK(copies.ok()) << copies.status();
  std::exit(kOwnStatus);
}

// Of a list of one GPU: NCCL copies, for the sum is another tensor.
int ExitAfterACopy() {
  const auto communicators = ProcessCommunicators({Gpu(0)}, absl::Minutes(1));
  DG_CHECK(communicators.ok()) << communicators.status();
  const std::vector<TensorVector> lists = {{On(0)}};
  const auto sums = NcclCollectives(*communicators, {}).Reduce(lists, Gpu(0));
  DG_CHECK(sums.ok()) << sums.status();
  std::exit(kOwnStatus);
}

// Nothing has begun, but a thread of the list's may just be making the GPU its current one.
int ExitAfterMakingAList() {
  const auto communicators = ProcessCommunicators({Gpu(0)}, absl::Minutes(1));
  DG_CHECK(communicators.ok()) << communicators.status();
  std::exit(kOwnStatus);
}

// With a group that ends before it, or never.
int ExitAfterASum(const std::string& group_ends) {
  static const std::string what = "adding";
  const auto group = ProcessGroup::Create({.name = "alone",
                                           .store = NewInProcessStore(),
                                           .rank = 0,
                                           .size = 1,
                                           .backend = "nccl",
                                           .cluster_key = ClusterKey()});
  DG_CHECK(group.ok()) << group.status();
  const at::Tensor tensor = On(0);
  const auto running = (*group)->BeginSum(tensor, what);
  DG_CHECK(running.ok()) << running.status();
  if (group_ends == "before") return kOwnStatus;
  std::exit(kOwnStatus);
}

int RunChild(const std::string& way) {
  alarm(kSeconds);
  if (way == "broadcast") return ExitAfterABroadcast();
  if (way == "made") return ExitAfterMakingAList();
  return way == "copy" ? ExitAfterACopy() : ExitAfterASum(way);
}

// In turn by these ways, DISTGRAD_EXITS times in all.
void ExpectExits(const std::vector<std::string>& ways) {
  int exits = kExits;
  if (const char* const said = std::getenv("DISTGRAD_EXITS"); said != nullptr) {
    ASSERT_TRUE(absl::SimpleAtoi(said, &exits)) << said;
    ASSERT_GE(exits, static_cast<int>(ways.size())) << "not each way to exit would be tried";
  }
  for (int i = 0; i < exits; ++i) {
    const std::string& way = ways[i % ways.size()];
    ChildProcess child({"--child", way});
    ASSERT_EQ(child.Wait(), kOwnStatus) << way << ", exit " << i + 1 << " of " << exits;
  }
  testing::Test::RecordProperty("exits", exits);
}

// Fewer than one for each way would pass, and have shown nothing of the others.
TEST(ExitTest, TooFewExitsAreAnError) {
  const char* const said = std::getenv("DISTGRAD_EXITS");
  const std::optional<std::string> before =
      said == nullptr ? std::nullopt : std::optional<std::string>(said);
  for (const char* const exits : {"-1", "0", "1"}) {
    setenv("DISTGRAD_EXITS", exits, 1);
    EXPECT_FATAL_FAILURE(ExpectExits({"made", "copy"}), "not each way to exit would be tried");
  }
  if (before.has_value()) {
    setenv("DISTGRAD_EXITS", before->c_str(), 1);
  } else {
    unsetenv("DISTGRAD_EXITS");
  }
}

TEST(ExitTest, RightAfterASum) {
  if (c10::cuda::device_count() < 1) GTEST_SKIP() << "this machine has no GPU";
  ExpectExits({"before", "never"});
}

TEST(ExitTest, RightAfterACopyByAListOfOneGpu) {
  if (c10::cuda::device_count() < 1) GTEST_SKIP() << "this machine has no GPU";
  ExpectExits({"copy"});
}

TEST(ExitTest, RightAfterAListWasMade) {
  if (c10::cuda::device_count() < 1) GTEST_SKIP() << "this machine has no GPU";
  ExpectExits({"made"});
}

TEST(ExitTest, RightAfterABroadcastToTwoGpus) {
  if (c10::cuda::device_count() < 2) GTEST_SKIP() << "this machine has fewer than 2 GPUs";
  ExpectExits({"broadcast"});
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  if (argc > 2 && argv[1] == std::string("--child")) return distgrad::RunChild(argv[2]);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
