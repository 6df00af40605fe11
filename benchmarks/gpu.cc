// Times what distgrad does on one GPU, each beside what torch has for it, and prints each as soon
// as it has it, as JSON on a line of its own, so that what is ended in the middle leaves the rest;
// tools/gpu_check runs it. It ends with 2 where there is no GPU.
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/base/check.h"
#include "core/membership/store/in_process_store.h"
#include "core/parallel/bucket.h"
#include "core/parallel/data_parallel.h"
#include "core/parallel/process_group/process_group.h"
#include "core/tensor/message_codec.h"
#include "core/worker/worker.h"
#include "nccl.h"
#include "tests/testing/cluster.h"

namespace distgrad {
namespace {

using at::Tensor;

const c10::Device kGpu(c10::kCUDA, 0);

// The median time of a call, in seconds, with all of what it launched.
double Seconds(const std::function<void()>& call, int calls = 20) {
  for (int i = 0; i < 3; ++i) call();
  std::vector<double> times;
  for (int i = 0; i < calls; ++i) {
    c10::cuda::device_synchronize();
    const absl::Time begin = absl::Now();
    call();
    c10::cuda::device_synchronize();
    times.push_back(absl::ToDoubleSeconds(absl::Now() - begin));
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// Two times of the same thing.
struct Row {
  std::string name;
  double bytes = 0;  // 0 where nothing is carried
  double ours = 0;
  double torch = 0;
};

void Print(const Row& row) {
  const std::string line = absl::StrFormat(
      "{\"name\": \"%s\", \"bytes\": %.0f, \"seconds\": %.9f, \"torch_seconds\": %.9f}\n", row.name,
      row.bytes, row.ours, row.torch);
  std::fputs(line.c_str(), stdout);
  std::fflush(stdout);
}

void TimeCopies() {
  const std::vector<std::pair<int, int64_t>> cases = {{1000, 1 << 8}, {200, 1 << 16}, {4, 1 << 24}};
  for (const auto& [count, elements] : cases) {
    std::vector<Tensor> from, to;
    for (int i = 0; i < count; ++i) {
      from.push_back(at::rand({elements}, kGpu));
      to.push_back(at::empty_like(from.back()));
    }
    Row row;
    row.name = absl::StrCat("copy ", count, " tensors of ", elements * 4, " bytes");
    row.bytes = static_cast<double>(count) * static_cast<double>(elements) * 4;
    row.ours = Seconds([&] { CopyMany(to, from); });
    row.torch = Seconds([&] { at::_foreach_copy_(to, from); });
    Print(row);
  }
}

struct LayersImpl : torch::nn::Cloneable<LayersImpl> {
  LayersImpl() { reset(); }
  void reset() override {
    layers.clear();
    for (int i = 0; i < 8; ++i) {
      layers.push_back(register_module(absl::StrCat("layer", i), torch::nn::Linear(1024, 1024)));
    }
  }
  Tensor forward(Tensor x) {
    for (torch::nn::Linear& layer : layers) x = layer(x).relu();
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Layers);

void TimeSteps() {
  Layers net;
  net->to(kGpu);
  DataParallel<LayersImpl> parallel(net, {.devices = {kGpu, kGpu}});
  const Tensor batch = at::rand({1024, 1024}, kGpu);
  Row row;
  row.name = "forward and backward of two replicas on one GPU; torch: of the plain module";
  row.ours = Seconds([&] { parallel.Forward(batch).sum().backward(); });
  row.torch = Seconds([&] { net->forward(batch).sum().backward(); });
  Print(row);
}

// With the channel for GPUs, or without it, by way of the host, up to 128 MiB.
void TimeCalls(bool channel) {
  Cluster cluster({.workers = 2,
                   .transport = "socket",
                   .device_maps = {{"worker1", {{kGpu, kGpu}}}},
                   .gpu_channel = channel});
  const absl::Status registered = cluster[1].Register(
      "take", [](Request& /*request*/) -> absl::StatusOr<Message> { return Message(); });
  DG_CHECK(registered.ok()) << registered;
  const int64_t most = int64_t{1} << (channel ? 30 : 27);
  for (int64_t bytes = 4096; bytes <= most; bytes *= 8) {
    const Tensor tensor = at::rand({bytes / 4}, kGpu);
    Row row;
    const bool by_channel = channel && static_cast<size_t>(bytes) > kGpuByHostBytes;
    row.name = absl::StrCat("call with a tensor of ", bytes, " bytes from GPU to GPU, ",
                            by_channel ? "by the channel for GPUs" : "by way of the host",
                            "; torch: to the host and back");
    row.bytes = static_cast<double>(bytes);
    const int calls = bytes > (int64_t{64} << 20) ? 5 : 20;
    row.ours = Seconds(
        [&] {
          const auto reply = cluster[0].Call("worker1", "take", {"", {tensor}});
          DG_CHECK(reply.ok()) << reply.status();
        },
        calls);
    row.torch = Seconds([&] { tensor.cpu().to(kGpu); }, calls);
    Print(row);
  }
}

void CheckNccl(ncclResult_t result) {
  DG_CHECK(result == ncclSuccess) << ncclGetErrorString(result);
}

// The times of a rank that has the GPU of its number: of all-reduces, each waited for on the host.
// Rank 0 prints them.
void TimeCollectivesOfRank(const std::shared_ptr<Store>& store, const ncclUniqueId& id, int rank,
                           int ranks) {
  const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(rank));
  const c10::DeviceGuard guard(device);
  const std::string what = "adding";
  const auto group = ProcessGroup::Create(
      {.name = "benchmark", .store = store, .rank = rank, .size = ranks, .backend = "nccl"});
  DG_CHECK(group.ok()) << group.status();
  ncclComm_t alone = nullptr;
  CheckNccl(ncclCommInitRank(&alone, ranks, id, rank));
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  for (int64_t bytes = 4096; bytes <= int64_t{256} << 20; bytes *= 16) {
    const Tensor tensor = at::zeros({bytes / 4}, device);
    Row row;
    row.name = absl::StrCat("all-reduce of ", bytes, " bytes by ", ranks,
                            ranks == 1 ? " rank" : " ranks", "; torch: ncclAllReduce() alone");
    row.bytes = static_cast<double>(bytes);
    row.ours = Seconds([&] {
      const auto running = (*group)->BeginSum(tensor, what);
      DG_CHECK(running.ok()) << running.status();
      const absl::Status status = (*group)->Wait(**running);
      DG_CHECK(status.ok()) << status;
    });
    row.torch = Seconds([&] {
      CheckNccl(ncclAllReduce(tensor.const_data_ptr(), tensor.mutable_data_ptr(), tensor.numel(),
                              ncclFloat, ncclSum, alone, stream.stream()));
    });
    if (rank == 0) Print(row);
  }
  CheckNccl(ncclCommDestroy(alone));
}

// Over two GPUs if there are as many, and else by one rank alone: then nothing is carried, and the
// rest is what a collective costs besides. Beside NCCL's own call with a communicator that blocks,
// for c10d's header of NCCL needs those of libraries that the build does not have.
void TimeCollectives() {
  const int ranks = std::min(2, static_cast<int>(c10::cuda::device_count()));
  const auto store = NewInProcessStore();
  ncclUniqueId id;
  CheckNccl(ncclGetUniqueId(&id));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] { TimeCollectivesOfRank(store, id, rank, ranks); });
  }
  for (std::thread& thread : threads) thread.join();
}

int Main(int argc, char** argv) {
  if (argc != 2 || std::string(argv[1]) != "--json") {
    std::fputs("usage: gpu --json: times of one GPU, in seconds, with torch's beside them\n",
               stdout);
    return argc == 2 && std::string(argv[1]) == "--help" ? 0 : 1;
  }
  if (c10::cuda::device_count() == 0) {
    std::fputs("gpu: CUDA finds no GPU on this machine\n", stderr);
    return 2;
  }
  TimeCopies();
  TimeSteps();
  TimeCalls(/*channel=*/true);
  TimeCalls(/*channel=*/false);
  TimeCollectives();
  return 0;
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) { return distgrad::Main(argc, argv); }
