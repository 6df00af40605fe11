// Makes the layers that are trained, and takes steps with and without replicas.
#include "benchmarks/parallel_step.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/rand.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <cmath>
#include <optional>
#include <vector>

#include "absl/strings/match.h"
#include "core/base/status.h"
#include "core/parallel/data_parallel.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

struct Size {
  int layers;
  int64_t width;
  int64_t batch;
};
constexpr Size kSmall = {100, 32, 64};   // 200 parameters of 4 KiB and 128 bytes
constexpr Size kMany = {1500, 128, 64};  // 25 million, 3,000 of 64 KiB and 512 bytes
constexpr Size kLarge = {6, 2048, 512};  // 25 million, 6 of 16 MiB
constexpr Size kTall = {6, 2048, 2048};  // the same with more rows

at::Tensor Forward(torch::nn::Sequential& net, const at::Tensor& input) {
  return net->forward(input);
}

absl::Status Check(torch::nn::Sequential& net, const at::Tensor& input) {
  std::vector<at::Tensor> got;
  for (const at::Tensor& parameter : net->parameters()) got.push_back(parameter.grad().clone());
  net->zero_grad();
  Forward(net, input).sum().backward();
  const std::vector<at::Tensor> parameters = net->parameters();
  for (size_t i = 0; i < got.size(); ++i) {
    if (!at::allclose(got[i], parameters[i].grad(), 1e-3, 1e-4)) {
      return absl::InternalError("the gradients are not those of the module");
    }
  }
  return absl::OkStatus();
}

}  // namespace

Layers NewLayers(const std::string& kind, int parts) {
  const Size size = absl::EndsWith(kind, "_small")  ? kSmall
                    : absl::EndsWith(kind, "_many") ? kMany
                    : absl::EndsWith(kind, "_tall") ? kTall
                                                    : kLarge;
  const at::NoGradGuard no_grad;
  torch::nn::Sequential net;
  for (int i = 0; i < size.layers; ++i) {
    torch::nn::Linear layer(size.width, size.width);
    // Keeps the size of gradients from layer to layer: processors are slow with tiny numbers.
    layer->weight.mul_(std::sqrt(3.0));
    net->push_back(layer);
  }
  return {net, at::rand({size.batch / parts, size.width})};
}

absl::StatusOr<Sample> RunParallelStep(const Work& work, absl::Duration budget) {
  try {
    auto [net, input] = NewLayers(work.kind);
    std::optional<DataParallel<torch::nn::SequentialImpl>> parallel;
    if (absl::StartsWith(work.kind, "parallel")) {
      parallel.emplace(
          net, DataParallelOptions{.devices = std::vector<c10::Device>(work.count, c10::kCPU)});
    }
    const auto step = [&, &net = net, &input = input]() -> absl::StatusOr<double> {
      net->zero_grad();
      const double start = MicrosNow();
      (parallel.has_value() ? parallel->Forward(input) : Forward(net, input)).sum().backward();
      return MicrosNow() - start;
    };
    DG_RETURN_IF_ERROR(step().status());
    DG_RETURN_IF_ERROR(Check(net, input));
    return Repeat(budget, step);
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
}

}  // namespace distgrad
