// Defines the functions that workers serve in the scenarios, for both sides.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <signal.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <stdexcept>

#include "absl/synchronization/notification.h"
#include "core/autograd/state.h"
#include "tests/conformance/scenario_nodes.h"
#include "tests/conformance/scenarios.h"

namespace distgrad {
namespace {

// What a function waits for until another is called.
absl::Notification* gate = new absl::Notification;
absl::Notification* reached = new absl::Notification;
void Open() {
  if (!gate->HasBeenNotified()) gate->Notify();
}

// Throws in backward; ends its process; waits for the gate; runs a backward of its own.
struct Throws : SameForward<Throws> {
  static void Backward() { throw std::runtime_error("thrown on purpose"); }
};
struct Dies : SameForward<Dies> {
  static void Backward() { raise(SIGKILL); }
};
struct Waits : SameForward<Waits> {
  static void Backward() {
    if (!reached->HasBeenNotified()) reached->Notify();
    gate->WaitForNotification();
  }
};

Tensors Flags() {
  return {
      at::tensor({int64_t{at::GradMode::is_enabled()}, int64_t{c10::InferenceMode::is_enabled()},
                  int64_t{at::autocast::is_autocast_enabled(at::kCPU)}})};
}

}  // namespace

at::Tensor ParameterOf(int rank) {
  static const std::vector<at::Tensor> parameters = [] {
    std::vector<at::Tensor> made;
    for (int i = 0; i < kScenarioWorkers; ++i)
      made.push_back(at::full({3, 3}, 0.5 + i, at::kDouble).set_requires_grad(true));
    return made;
  }();
  return parameters[rank];
}

ServedFunctions FunctionsOf(int rank) {
  return {
      {"product", [](Side&, StepContext&, Tensors in) { return Tensors{in[0] * in[1]}; }},
      {"sine", [](Side&, StepContext&, Tensors in) { return Tensors{in[0].sin()}; }},
      {"two",
       [](Side&, StepContext&, Tensors in) {
         return Tensors{in[0].sin(), in[1].sin()};
       }},
      {"mixed",
       [](Side&, StepContext&, Tensors in) {
         return Tensors{in[0] * 2, in[1] + 1};
       }},
      {"parameter",
       [rank](Side&, StepContext&, Tensors in) { return Tensors{in[0] * ParameterOf(rank)}; }},
      {"parameter_gradient",
       [rank](Side&, StepContext& step, Tensors) {
         const at::Tensor gradient = step.Gradient(ParameterOf(rank));
         return gradient.defined() ? Tensors{gradient} : Tensors{};
       }},
      {"look_up",
       [](Side&, StepContext&, Tensors in) {
         return Tensors{at::embedding(in[0], in[1], -1, false, /*sparse=*/true)};
       }},
      // x on to the workers in `path`, a sine on the way there and a tanh on the way back.
      {"relay",
       [](Side&, StepContext& step, Tensors in) {
         at::Tensor x = in[0].sin();
         const at::Tensor path = in[1];
         if (path.numel() > 0) {
           x = step.Call(path[0].item<int>(), "relay", {x, path.slice(0, 1).clone()})[0];
         }
         return Tensors{x.tanh()};
       }},
      {"fails",
       [](Side&, StepContext&, Tensors) -> Tensors {
         throw std::runtime_error("failed on purpose");
       }},
      {"throws", [](Side&, StepContext&, Tensors in) { return Tensors{Throws::apply(in[0])}; }},
      {"throws_further",
       [](Side&, StepContext& step, Tensors in) { return step.Call(2, "throws", {in[0].sin()}); }},
      {"sine_further",
       [](Side&, StepContext& step, Tensors in) { return step.Call(2, "sine", {in[0].sin()}); }},
      {"dies", [](Side&, StepContext&, Tensors in) { return Tensors{Dies::apply(in[0])}; }},
      {"waits", [](Side&, StepContext&, Tensors in) { return Tensors{Waits::apply(in[0])}; }},
      {"await_reached",
       [](Side&, StepContext&, Tensors) {
         reached->WaitForNotification();
         return Tensors{};
       }},
      {"gated",
       [](Side&, StepContext&, Tensors in) {
         gate->WaitForNotification();
         return Tensors{in[0].sin()};
       }},
      {"open",
       [](Side&, StepContext&, Tensors) {
         Open();
         return Tensors{};
       }},
      {"checkpoint",
       [](Side&, StepContext&, Tensors in) { return Tensors{Checkpoint::apply(in[0])}; }},
      {"hooked",
       [](Side&, StepContext&, Tensors in) {
         in[0].register_hook([](const at::Tensor& g) { return g * 3; });
         return Tensors{in[0].sin()};
       }},
      {"in_place",
       [](Side&, StepContext&, Tensors in) {
         const at::Tensor y = in[0].sin();
         in[0].mul_(2);
         return Tensors{y};
       }},
      {"backward",
       [](Side&, StepContext& step, Tensors in) {
         step.Backward({in[0].square().sum()});
         return Tensors{};
       }},
      {"flags", [](Side&, StepContext&, Tensors) { return Flags(); }},
      {"counts",
       [](Side& side, StepContext&, Tensors) {
         return Tensors{at::tensor({side.Contexts(), side.Passes()})};
       }},
      // Makes contexts on worker 1, and keeps them.
      {"make_contexts",
       [](Side& side, StepContext&, Tensors in) {
         std::unique_ptr<StepContext> made = side.NewStep();
         made->Call(1, "sine", {in[0].detach().set_requires_grad(true)});
         (void)made.release();
         return Tensors{};
       }},
      {"die",
       [](Side&, StepContext&, Tensors) {
         raise(SIGKILL);
         return Tensors{};
       }},
  };
}

}  // namespace distgrad
