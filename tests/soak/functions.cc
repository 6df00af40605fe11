// The functions; and the numbers that all processes compute alike.
#include "tests/soak/functions.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tanh.h>
#include <torch/optim/sgd.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "core/base/status.h"

namespace distgrad {
namespace {

constexpr int64_t kWidth = 16;

absl::StatusOr<Message> Relay(Worker* worker, Request& request) {
  std::vector<std::string> words = absl::StrSplit(request.message.payload, ' ');
  if (words.size() < 2) return absl::InvalidArgumentError("a relay needs a function and a worker");
  const std::string next = words[1];
  words.erase(words.begin() + 1);
  const std::string function = words.size() == 1 ? words[0] : "relay";
  request.message.payload = absl::StrJoin(words, " ");
  return worker->Call(next, function, std::move(request.message), request.Nested());
}

Future<Message> Wait(Request& request) {
  auto promise = std::make_shared<Promise<Message>>();
  Future<Message> never = promise->future();
  Cancellation* const cancellation = request.cancellation.get();
  cancellation->OnCancel([promise, cancellation] { promise->Set(cancellation->why()); });
  return never;
}

}  // namespace

bool IsTransient(absl::string_view worker) { return worker == kVictim || worker == kGuest; }

double FactorOf(absl::string_view worker) {
  if (worker == kFront) return 2;
  if (worker == kMiddle) return 0.5;
  return worker == kVictim ? 4 : 0.25;
}

at::Tensor InitialWeight(absl::string_view worker, absl::string_view leader) {
  const double frequency = FactorOf(worker) + 0.1 * FactorOf(leader);
  return at::sin(at::arange(kWidth * kWidth, at::kFloat).mul_(frequency))
      .mul_(0.5)
      .view({kWidth, kWidth})
      .requires_grad_();
}

at::Tensor Layer(const at::Tensor& weight, const at::Tensor& x) {
  return at::tanh(at::mm(x, weight));
}

absl::StatusOr<Optimizers> ServeFunctions(Worker* worker) {
  DG_RETURN_IF_ERROR(worker->Register("echo", [](Request& request) -> absl::StatusOr<Message> {
    return std::move(request.message);
  }));
  DG_RETURN_IF_ERROR(worker->RegisterAsync("wait", Wait));
  DG_RETURN_IF_ERROR(worker->Register("block", [](Request& request) -> absl::StatusOr<Message> {
    Layer(at::full({kWidth, kWidth}, 1), at::full({kWidth, kWidth}, 1));
    return Wait(request).Wait().status();
  }));
  DG_RETURN_IF_ERROR(worker->Register("fail", [](Request& request) -> absl::StatusOr<Message> {
    if (request.message.payload == "throw") throw std::runtime_error("as it was asked to");
    return absl::OutOfRangeError("as it was asked to");
  }));
  DG_RETURN_IF_ERROR(
      worker->Register("relay", [worker](Request& request) { return Relay(worker, request); }));
  const at::Tensor factor = at::full({}, FactorOf(worker->name())).requires_grad_();
  DG_RETURN_IF_ERROR(
      worker->Register("scale", [factor](Request& request) -> absl::StatusOr<Message> {
        return Message{"", {at::mul(request.message.tensors.at(0), factor)}};
      }));

  std::map<std::string, at::Tensor> weights;
  for (const std::string leader : kLeaders) {
    weights[leader] = InitialWeight(worker->name(), leader);
  }
  DG_RETURN_IF_ERROR(
      worker->Register("forward", [weights](Request& request) -> absl::StatusOr<Message> {
        const at::Tensor& weight = weights.at(request.message.payload);
        return Message{"", {Layer(weight, request.message.tensors.at(0))}};
      }));
  DG_RETURN_IF_ERROR(
      worker->Register("weight", [weights](Request& request) -> absl::StatusOr<Message> {
        return Message{"", {weights.at(request.message.payload).detach().clone()}};
      }));
  Optimizers optimizers;
  for (const auto& [leader, weight] : weights) {
    DG_ASSIGN_OR_RETURN(optimizers[leader],
                        Optimizer::Create(worker,
                                          std::make_unique<torch::optim::SGD>(
                                              std::vector<at::Tensor>{weight}, kLearningRate),
                                          absl::StrCat("of ", leader)));
  }
  return optimizers;
}

}  // namespace distgrad
