// Takes steps of training on several ranks, by GradientAverager or by PyTorch's Reducer.
#include "benchmarks/rank_side.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "benchmarks/parallel_step.h"
#include "core/base/status.h"
#include "core/parallel/process_group/c10d_store.h"
#include "core/parallel/process_group/gradient_averager.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

constexpr size_t kFirstBucket = size_t{1} << 20, kBucket = size_t{25} << 20;  // DDP's, and ours
constexpr int64_t kTextBytes = 64;

// A rank's work between two signals of rank 0.
using Step = std::function<absl::Status()>;

// Does what PyTorch's DistributedDataParallel does in C++, and around a forward.
class Rival {
 public:
  Rival(const std::vector<at::Tensor>& parameters, c10::intrusive_ptr<c10d::ProcessGroup> group,
        bool views)
      : reducer_(parameters, Buckets(parameters), std::move(group),
                 std::vector<bool>(parameters.size(), false), kBucket,
                 /*find_unused_parameters=*/false, /*gradient_as_bucket_view=*/views, {},
                 kFirstBucket, /*skip_all_reduce_unused_params=*/false,
                 /*use_python_reducer=*/false, {}) {}

  void BeforeForward() {
    reducer_.prepare_for_forward();
    reducer_.rebuild_buckets();
  }
  void AfterForward() { reducer_.prepare_for_backward({}); }

 private:
  static std::vector<std::vector<size_t>> Buckets(const std::vector<at::Tensor>& parameters) {
    auto buckets =
        std::get<0>(c10d::compute_bucket_assignment_by_size(parameters, {kFirstBucket, kBucket}));
    std::reverse(buckets.begin(), buckets.end());
    return buckets;
  }

  c10d::Reducer reducer_;
};

std::vector<at::Tensor> Gradients(torch::nn::Sequential net) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : net->parameters()) gradients.push_back(parameter.grad());
  return gradients;
}

class RankSide : public BenchmarkSide {
 public:
  RankSide(std::shared_ptr<ProcessGroup> group, c10::intrusive_ptr<c10d::ProcessGroup> c10d_group)
      : group_(std::move(group)), c10d_group_(std::move(c10d_group)) {
    if (group_->rank() > 0) follower_ = std::thread([this] { Follow(); });
  }
  ~RankSide() override {
    if (follower_.joinable()) follower_.join();  // when rank 0 is gone
  }

  absl::StatusOr<Sample> Run(const Work& work, absl::Duration budget) override {
    std::string text = ToText(work);
    DG_RETURN_IF_ERROR(Tell(&text));
    DG_ASSIGN_OR_RETURN(const Step step, StepOf(work));
    absl::StatusOr<Sample> sample = Repeat(budget, [&]() -> absl::StatusOr<double> {
      std::string again = "again";
      DG_RETURN_IF_ERROR(Tell(&again));
      const double start = MicrosNow();
      DG_RETURN_IF_ERROR(step());
      return MicrosNow() - start;
    });
    DG_RETURN_IF_ERROR(sample.status());
    std::string end = "end";
    DG_RETURN_IF_ERROR(Tell(&end));
    return sample;
  }

 private:
  // Returns the text that rank 0 wrote.
  absl::Status Tell(std::string* text) {
    const at::Tensor bytes = at::zeros({kTextBytes}, at::kByte);
    char* const data = reinterpret_cast<char*>(bytes.mutable_data_ptr<uint8_t>());
    if (group_->rank() == 0) std::copy(text->begin(), text->end(), data);
    DG_RETURN_IF_ERROR(group_->Broadcast({bytes}));
    *text = data;
    return absl::OkStatus();
  }

  void Follow() {
    absl::Status status;
    while (status.ok()) status = FollowOnce();
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
  }
  absl::Status FollowOnce() {
    std::string text;
    DG_RETURN_IF_ERROR(Tell(&text));
    DG_ASSIGN_OR_RETURN(const Work work, WorkFromText(text));
    DG_ASSIGN_OR_RETURN(const Step step, StepOf(work));
    while (true) {
      DG_RETURN_IF_ERROR(Tell(&text));
      if (text == "end") return absl::OkStatus();
      DG_RETURN_IF_ERROR(step());
    }
  }

  // Kept while the size is the same, on all ranks alike.
  absl::StatusOr<Step> StepOf(const Work& work) {
    const std::string size = work.kind.substr(work.kind.rfind('_'));
    if (size != size_) steps_.clear();
    size_ = size;
    if (steps_.count(work.kind) == 0) {
      DG_ASSIGN_OR_RETURN(steps_[work.kind], NewStep(work));
    }
    return steps_[work.kind];
  }

  absl::StatusOr<Step> NewStep(const Work& work) {
    try {
      torch::manual_seed(1);
      auto [net, input] = NewLayers(work.kind, group_->size());
      input.add_(group_->rank());
      if (absl::StartsWith(work.kind, "allreduce_")) return NewAllreduce(net);
      if (absl::StartsWith(work.kind, "alone_")) return NewAlone(net, input);
      DG_RETURN_IF_ERROR(Backward(net, input));
      const std::vector<at::Tensor> expected = Gradients(net);
      DG_RETURN_IF_ERROR(group_->Average(expected));
      DG_ASSIGN_OR_RETURN(Step step, absl::StartsWith(work.kind, "averaged_")
                                         ? NewAveraged(net, input)
                                         : NewRival(net, input, work.kind));
      // PyTorch's buckets get their final form after the first.
      for (int time = 0; time < 2; ++time) {
        DG_RETURN_IF_ERROR(step());
        const std::vector<at::Tensor> got = Gradients(net);
        for (size_t i = 0; i < got.size(); ++i) {
          if (at::allclose(got[i], expected[i], 1e-3, 1e-4)) continue;
          return absl::InternalError(absl::StrCat(work.kind, ": gradient ", i, " is wrong"));
        }
      }
      return step;
    } catch (...) {
      return StatusFromException(std::current_exception());
    }
  }

  static absl::Status Backward(torch::nn::Sequential net, const at::Tensor& input,
                               Rival* rival = nullptr) {
    try {
      net->zero_grad();
      if (rival != nullptr) rival->BeforeForward();
      const at::Tensor loss = net->forward(input).sum();
      if (rival != nullptr) rival->AfterForward();
      loss.backward();
      return absl::OkStatus();
    } catch (...) {
      return StatusFromException(std::current_exception());
    }
  }

  // Runs all ranks at once, each for itself, until the slowest is done.
  Step NewAlone(torch::nn::Sequential net, at::Tensor input) {
    return [this, net, input, one = at::zeros({1})]() -> absl::Status {
      DG_RETURN_IF_ERROR(Backward(net, input));
      return group_->Average({one});
    };
  }

  // Reduces all bytes of the gradients at once.
  Step NewAllreduce(torch::nn::Sequential net) {
    std::vector<at::Tensor> flat;
    for (const at::Tensor& parameter : net->parameters()) flat.push_back(parameter.flatten());
    const at::NoGradGuard no_grad;
    return [this, all = at::cat(flat)]() mutable -> absl::Status {
      std::vector<at::Tensor> tensors = {all};
      try {
        c10d_group_->allreduce(tensors)->wait();
        all.div_(group_->size());
        return absl::OkStatus();
      } catch (...) {
        return StatusFromException(std::current_exception());
      }
    };
  }

  absl::StatusOr<Step> NewAveraged(torch::nn::Sequential net, at::Tensor input) {
    DG_ASSIGN_OR_RETURN(std::shared_ptr<GradientAverager> averager,
                        GradientAverager::Create(group_, *net));
    return Step([net, input, averager] { return Backward(net, input); });
  }

  Step NewRival(torch::nn::Sequential net, at::Tensor input, const std::string& kind) {
    const auto rival =
        std::make_shared<Rival>(net->parameters(), c10d_group_, absl::StartsWith(kind, "views_"));
    return [net, input, rival] { return Backward(net, input, rival.get()); };
  }

  const std::shared_ptr<ProcessGroup> group_;
  const c10::intrusive_ptr<c10d::ProcessGroup> c10d_group_;
  std::string size_;
  std::map<std::string, Step> steps_;  // by kind of work
  std::thread follower_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<BenchmarkSide>> StartRank(const SideOptions& place) {
  at::set_num_threads(1);
  try {
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(place.port);
    options.isServer = place.rank == 0;
    const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    DG_ASSIGN_OR_RETURN(auto group, ProcessGroup::Create({.name = "benchmark",
                                                          .store = StoreOfC10d(store),
                                                          .rank = place.rank,
                                                          .size = place.world,
                                                          .timeout = absl::Hours(24)}));
    const auto of_c10d = c10::make_intrusive<c10d::PrefixStore>("c10d", store);
    auto gloo = c10d::ProcessGroupGloo::Options::create(std::chrono::hours(24));
    gloo->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
    const auto c10d_group =
        c10::make_intrusive<c10d::ProcessGroup>(of_c10d, place.rank, place.world);
    c10d_group->setBackend(
        at::kCPU, c10d::ProcessGroup::BackendType::GLOO,
        c10::intrusive_ptr<c10d::Backend>(
            c10::make_intrusive<c10d::ProcessGroupGloo>(of_c10d, place.rank, place.world, gloo)));
    return std::make_unique<RankSide>(std::move(group), c10d_group);
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
}

}  // namespace distgrad
