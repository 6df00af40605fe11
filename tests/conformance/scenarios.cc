// Writes down each scenario, and says what came of it in a line.
#include "tests/conformance/scenarios.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <stdexcept>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/autograd/state.h"
#include "tests/conformance/scenario_nodes.h"

namespace distgrad {
namespace {

at::Tensor Leaf(int seed, at::ScalarType type = at::kDouble) {
  return at::randn({3, 3}, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kDouble))
      .to(type)
      .set_requires_grad(true);
}
at::Tensor X() { return Leaf(1); }
at::Tensor Path(std::vector<int64_t> workers) { return at::tensor(workers, at::kLong); }
at::Tensor LocalRelay(at::Tensor x, int workers) {
  for (int i = 0; i < workers; ++i) x = x.sin();
  for (int i = 0; i < workers; ++i) x = x.tanh();
  return x;
}

// Whether the leaves' gradients are those of `root` in one process.
std::string Compare(StepContext& step, const Tensors& leaves, const at::Tensor& root,
                    double times = 1) {
  const Tensors want = torch::autograd::grad({root}, leaves, {}, /*retain_graph=*/true,
                                             /*create_graph=*/false, /*allow_unused=*/true);
  for (size_t i = 0; i < leaves.size(); ++i) {
    const at::Tensor got = step.Gradient(leaves[i]);
    if (!want[i].defined() && !got.defined()) continue;
    if (!got.defined()) return absl::StrCat("leaf ", i, " lacks its gradient");
    if (!want[i].defined()) {
      return at::any(got.ne(0)).item<bool>() ? absl::StrCat("leaf ", i, " has a gradient")
                                             : "zeros where there is no gradient";
    }
    if (got.layout() != want[i].layout() || got.scalar_type() != want[i].scalar_type() ||
        !at::allclose(got.to_dense(), want[i].to_dense() * times, 1e-3)) {
      return absl::StrCat("leaf ", i, " has a wrong gradient");
    }
  }
  return kSame;
}

std::string TextOf(const std::exception& e) {
  const auto* const of_torch = dynamic_cast<const c10::Error*>(&e);
  return of_torch != nullptr ? of_torch->what_without_backtrace() : e.what();
}

// What became of something that should fail.
std::string ErrorOf(const std::function<void()>& fails, const std::string& has_to_name = "") {
  try {
    fails();
  } catch (const std::exception& e) {
    const std::string text = TextOf(e);
    if (has_to_name.empty() || absl::StrContains(text, has_to_name)) {
      return absl::StrCat("an error", has_to_name.empty() ? "" : " that names ", has_to_name, ": ",
                          text);
    }
    return absl::StrCat("an error that does not name ", has_to_name, ": ", text);
  }
  return "no error";
}

// Polls for a while, for what nothing announces.
bool Becomes(const std::function<bool()>& condition) {
  const absl::Time end = absl::Now() + absl::Seconds(5);
  while (!condition()) {
    if (absl::Now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

int64_t Count(Side& side, int worker, int which) {
  if (worker == 0) return which == 0 ? side.Contexts() : side.Passes();
  return side.Outside()->Call(worker, "counts", {})[0][which].item<int64_t>();
}

// ------------------------------------------------------------------------------ Graph shapes

// y = function(x) on a worker; the gradients of y.sum().
std::string OneCall(Side& side, int to, const std::string& function, const Tensors& in,
                    const at::Tensor& local) {
  const auto step = side.NewStep();
  step->Backward({step->Call(to, function, in)[0].sum()});
  Tensors leaves;
  for (const at::Tensor& one : in) {
    if (one.requires_grad()) leaves.push_back(one);
  }
  return Compare(*step, leaves, local.sum());
}
std::string Relay(Side& side, std::vector<int64_t> path) {
  const int first = static_cast<int>(path[0]), workers = static_cast<int>(path.size());
  path.erase(path.begin());
  const at::Tensor x = X();
  return OneCall(side, first, "relay", {x, Path(path)}, LocalRelay(x, workers));
}
std::string RoundTrips(Side& side) {
  const auto step = side.NewStep();
  const at::Tensor x = X();
  at::Tensor y = x, want = x;
  for (int i = 0; i < 5; ++i) {
    y = step->Call(1 + i % 2, "sine", {y})[0] * 2;
    want = want.sin() * 2;
  }
  step->Backward({y.sum()});
  return Compare(*step, {x}, want.sum());
}
std::string Diamond(Side& side) {
  const auto step = side.NewStep();
  const at::Tensor x = X();
  const at::Tensor a = step->Call(1, "relay", {x, Path({2})})[0];
  const at::Tensor b = step->Call(2, "relay", {x, Path({1})})[0];
  step->Backward({(a * b).sum()});
  return Compare(*step, {x}, LocalRelay(x, 2).square().sum());
}
std::string SeveralRoots(Side& side) {
  const auto step = side.NewStep();
  const at::Tensor x = X(), z = Leaf(2);
  const at::Tensor a = step->Call(1, "product", {x, z})[0], b = step->Call(2, "sine", {x})[0];
  step->Backward({a.sum(), b.sum(), z.exp().sum()});
  return Compare(*step, {x, z}, ((x * z).sum() + x.sin().sum() + z.exp().sum()));
}
std::string CalleesParameter(Side& side) {
  const auto step = side.NewStep();
  const at::Tensor c = X().detach();
  step->Backward({step->Call(1, "parameter", {c})[0].sum()});
  const Tensors got = step->Call(1, "parameter_gradient", {});
  return got.size() == 1 && got[0].allclose(c) ? kSame : "wrong";
}
std::string MixedResults(Side& side) {
  const auto step = side.NewStep();
  const at::Tensor x = X(), n = at::tensor({1, 2});
  const Tensors y = step->Call(1, "mixed", {x, n});
  if (y[1].requires_grad() || !y[1].equal(n + 1)) return "wrong";
  step->Backward({y[0].sum()});
  return Compare(*step, {x}, (x * 2).sum());
}
std::string Types(Side& side) {
  for (const at::ScalarType type : {at::kHalf, at::kBFloat16, at::kFloat, at::kComplexDouble}) {
    const auto step = side.NewStep();
    const at::Tensor x = Leaf(1, type), z = Leaf(2, type);
    const auto loss = [](const at::Tensor& y) { return at::real(y * y.conj()).sum(); };
    step->Backward({loss(step->Call(1, "product", {x, z})[0])});
    const std::string got = Compare(*step, {x, z}, loss(x * z));
    if (got != kSame) return absl::StrCat(c10::toString(type), ": ", got);
  }
  return kSame;
}
std::string Sparse(Side& side) {
  const at::Tensor table = X(), rows = at::tensor({2, 0, 0});
  return OneCall(side, 1, "look_up", {table, rows}, at::embedding(table, rows, -1, false, true));
}
std::string Retained(Side& side) {
  const auto step = side.NewStep();
  const at::Tensor x = X();
  const at::Tensor loss = step->Call(1, "relay", {x, Path({2})})[0].sum();
  for (int i = 0; i < 3; ++i) step->Backward({loss}, /*retain_graph=*/true);
  return Compare(*step, {x}, LocalRelay(x, 2).sum(), 3);
}

// ----------------------------------------------------------------------------- Unused results

// What is called besides, and its result ignored.
std::string Unused(Side& side, bool other_is_remote,
                   const std::function<void(StepContext&, const at::Tensor&)>& ignored) {
  const auto step = side.NewStep();
  const at::Tensor x = X(), z = Leaf(2);
  ignored(*step, z);
  const at::Tensor y = other_is_remote ? step->Call(1, "sine", {x})[0] : x.sin();
  step->Backward({y.sum()});
  return Compare(*step, {x, z}, x.sin().sum());
}
std::string OneOfTwoUnused(Side& side) {
  const auto step = side.NewStep();
  const at::Tensor x = X(), z = Leaf(2);
  step->Backward({step->Call(1, "two", {x, z})[0].sum()});
  return Compare(*step, {x, z}, x.sin().sum());
}
std::string AfterATimeout(Side& side) {
  const auto step = side.NewStep();
  const at::Tensor x = X();
  const auto late = step->CallAsync(1, "gated", {Leaf(2)}, absl::Milliseconds(200));
  const std::string failed = ErrorOf([&] { late(); });
  if (failed == "no error") return failed;
  step->Backward({step->Call(1, "sine", {x})[0].sum()});
  return Compare(*step, {x}, x.sin().sum());
}

// --------------------------------------------------------------------------- While a pass runs

std::string WhileAPassRuns(Side& side, const std::function<void(StepContext&)>& meanwhile) {
  const auto step = side.NewStep();
  const at::Tensor x = X();
  const at::Tensor y = step->Call(1, "sine", {x})[0];
  bool first = true;
  y.register_hook([&](const at::Tensor&) {
    const at::AutoGradMode on(true);
    if (std::exchange(first, false)) meanwhile(*step);
  });
  step->Backward({y.sum()}, /*retain_graph=*/true);
  return Compare(*step, {x}, x.sin().sum());
}
std::string TwoPassesAtOnce(Side& side) {
  const auto step = side.NewStep();
  const at::Tensor x = X();
  const at::Tensor y = step->Call(1, "waits", {x})[0];
  const at::Tensor one = y.sum(), two = (y * 2).sum();
  std::string failed;
  const auto pass = [&](const at::Tensor& loss) {
    try {
      step->Backward({loss}, /*retain_graph=*/true);
    } catch (const std::exception& e) {
      failed = absl::StrCat("an error: ", TextOf(e));
    }
  };
  std::thread first([&] { pass(one); });
  side.Outside()->Call(1, "await_reached", {});
  std::thread second([&] { pass(two); });
  // It cannot be over without the gate; so it runs, or has failed.
  Becomes([&] { return Count(side, 0, 1) >= 2; });
  side.Outside()->Call(1, "open", {});
  first.join();
  second.join();
  return failed.empty() ? Compare(*step, {x}, (x * 3).sum()) : failed;
}
std::string Released(Side& side) {
  const auto step = side.NewStep();
  at::Tensor y = X();
  for (int i = 0; i < 4; ++i) y = step->Call(1 + i % 2, "sine", {y})[0];
  y.register_hook([&](const at::Tensor&) { step->Release(); });
  const at::Tensor loss = y.sum();
  return ErrorOf([&] { step->Backward({loss}); }, "released");
}

// ---------------------------------------------------------------------------------------- Modes

std::string ModeReaches(Side& side, int flag, int64_t want) {
  const auto step = side.NewStep();
  const Tensors flags = step->Call(1, "flags", {X()});
  return flags[0][flag].item<int64_t>() == want ? "reaches the handler" : "does not reach it";
}

// ---------------------------------------------------------------------------------------- Errors

std::string DiamondError(Side& side) {
  {
    const auto step = side.NewStep();
    const at::Tensor x = X();
    const at::Tensor a = step->Call(1, "throws_further", {x})[0];
    const at::Tensor b = step->Call(1, "sine_further", {x})[0] + step->Call(2, "sine", {x})[0];
    const std::string failed = ErrorOf([&] { step->Backward({(a * b).sum()}); });
    if (failed == "no error") return failed;
    for (int worker = 0; worker < kScenarioWorkers; ++worker) {
      if (!Becomes([&] { return Count(side, worker, 1) == 0; }))
        return absl::StrCat("worker ", worker, " still runs a pass after 5 seconds");
    }
  }
  return "nothing is left running";
}
std::string OriginDies(Side& side) {
  const int64_t before = Count(side, 1, 0);
  side.Outside()->Call(2, "make_contexts", {X()});
  if (Count(side, 1, 0) <= before) return "no context was made";
  ErrorOf([&] { side.Outside()->CallAsync(2, "die", {}, absl::Seconds(1))(); });
  return Becomes([&] { return Count(side, 1, 0) <= before; })
             ? "its contexts go"
             : "its contexts are still there after 5 seconds";
}

}  // namespace

const std::vector<Scenario>& Scenarios() {
  static const std::vector<Scenario> scenarios = {
      {"backward_simple", "a call, and its backward",
       [](Side& s) {
         const at::Tensor x = X(), z = Leaf(2);
         return OneCall(s, 1, "product", {x, z}, x * z);
       },
       kSame, kSame},
      {"backward_simple_self", "a call of the worker itself",
       [](Side& s) {
         const at::Tensor x = X();
         return OneCall(s, 0, "sine", {x}, x.sin());
       },
       kSame, kSame},
      {"same_tensor_twice", "the same tensor passed twice",
       [](Side& s) {
         const at::Tensor x = X();
         return OneCall(s, 1, "product", {x, x}, x * x);
       },
       kSame, kSame},
      {"backward_nested", "nested calls",
       [](Side& s) {
         return Relay(s, {1, 2});
       },
       kSame, kSame},
      {"backward_ring", "a ring, back through the caller",
       [](Side& s) {
         return Relay(s, {1, 2, 0, 1});
       },
       kSame, kSame},
      {"backward_multiple_round_trips", "round trips", RoundTrips, kSame, kSame},
      {"diamond", "a diamond", Diamond, kSame, kSame},
      {"backward_multiple_roots", "several roots", SeveralRoots, kSame, kSame},
      {"grad_only_on_return_value", "a parameter of the callee alone", CalleesParameter, kSame,
       kSame},
      {"mixed_requires_grad", "results that need no gradient", MixedResults, kSame, kSame},
      {"types", "half, bfloat16, complex", Types, kSame, kSame},
      {"sparse", "a sparse gradient over the wire", Sparse, kSame, kSame},
      {"backward_accumulate_grads", "several passes with `retain_graph`", Retained, kSame, kSame},
      {"backward_in_a_handler", "a handler calls backward",
       [](Side& s) {
         const auto step = s.NewStep();
         const at::Tensor x = X();
         step->Call(1, "backward", {x});
         return Compare(*step, {x}, x.square().sum());
       },
       kSame, kSame},
      {"hooks", "a hook on a received tensor",
       [](Side& s) {
         const at::Tensor x = X();
         return OneCall(s, 1, "hooked", {x}, x.sin() * 3);
       },
       kSame, kSame},
      {"in_place", "in-place on a tensor that a node saved",
       [](Side& s) {
         const auto step = s.NewStep();
         const at::Tensor y = step->Call(1, "in_place", {X() * 1})[0];
         return ErrorOf([&] { step->Backward({y.sum()}); }, "modified by an inplace operation");
       },
       "an error that names", "an error that names"},

      {"unused_alone", "no remote result is used",
       [](Side& s) {
         return Unused(s, false,
                       [](StepContext& c, const at::Tensor& z) { c.Call(1, "sine", {z}); });
       },
       kSame, kHangs, true},
      {"backward_unused_send_function", "a remote result is unused, another used",
       [](Side& s) {
         return Unused(s, true,
                       [](StepContext& c, const at::Tensor& z) { c.Call(1, "sine", {z}); });
       },
       kSame, kHangs, true},
      {"unused_nested", "an unused result, nested three deep",
       [](Side& s) {
         return Unused(s, true, [](StepContext& c, const at::Tensor& z) {
           c.Call(1, "relay", {z, Path({2, 1})});
         });
       },
       kSame, kHangs, true},
      {"unused_of_two", "one of two results is unused", OneOfTwoUnused, kSame,
       "zeros where there is no gradient"},
      {"after_a_failed_call", "backward after a call that failed",
       [](Side& s) {
         return Unused(s, true, [](StepContext& c, const at::Tensor& z) {
           ErrorOf([&] { c.Call(1, "fails", {z}); });
         });
       },
       kSame, kHangs, true},
      {"after_a_timeout", "backward after a call that timed out", AfterATimeout, kSame, kHangs,
       true},

      {"call_during_a_pass", "a call that is made while a pass runs",
       [](Side& s) {
         return WhileAPassRuns(s, [](StepContext& c) { c.Call(1, "sine", {Leaf(3)}); });
       },
       kSame, kHangs, true},
      {"reply_during_a_pass", "a reply that arrives while a pass runs",
       [](Side& s) {
         StepContext::Later late;
         return WhileAPassRuns(s, [&](StepContext& c) {
           late = c.CallAsync(2, "gated", {Leaf(3)});
           s.Outside()->Call(2, "open", {});
           late();
         });
       },
       kSame, kSame, true},
      {"passes_at_once", "two threads run backward on one context, with `retain_graph`",
       TwoPassesAtOnce, kSame, "an error", true},
      {"second_pass", "a second pass without `retain_graph`",
       [](Side& s) {
         const auto step = s.NewStep();
         const at::Tensor loss = step->Call(1, "sine", {X()})[0].sum();
         step->Backward({loss});
         return ErrorOf([&] { step->Backward({loss}); });
       },
       "an error", "an error"},
      {"nested_context", "a second context in the same thread",
       [](Side& s) {
         const auto outer = s.NewStep();
         std::unique_ptr<StepContext> inner;
         const std::string failed = ErrorOf([&] { inner = s.NewStep(); });
         return failed == "no error" ? "works" : failed;
       },
       "works", "an error"},
      {"clean_context_during_backward", "release while a pass runs", Released,
       "an error that names released", "an error", true},

      {"no_grad", "the caller's `no_grad`",
       [](Side& s) {
         const at::NoGradGuard guard;
         return ModeReaches(s, 0, 0);
       },
       "reaches", "does not reach"},
      {"inference_mode", "the caller's inference mode",
       [](Side& s) {
         const c10::InferenceMode guard;
         return ModeReaches(s, 1, 1);
       },
       "reaches", "does not reach"},
      {"autocast", "the caller's autocast",
       [](Side& s) {
         at::autocast::set_autocast_enabled(at::kCPU, true);
         const std::string got = ModeReaches(s, 2, 1);
         at::autocast::set_autocast_enabled(at::kCPU, false);
         return got;
       },
       "reaches", "does not reach"},

      {"several_results", "a remote operator with several results",
       [](Side& s) {
         const auto step = s.NewStep();
         const at::Tensor x = X();
         const at::Tensor y = step->CallOp(1, "aten::max", "dim", {x, 0, false})[0];
         step->Backward({y.sum()});
         return Compare(*step, {x}, std::get<0>(x.max(0)).sum());
       },
       kSame, "an error"},
      {"error_in_forward", "an operator's error in forward",
       [](Side& s) {
         const auto step = s.NewStep();
         return ErrorOf(
             [&] {
               step->CallOp(1, "aten::mul", "Tensor", {X(), at::ones({7})});
             },
             "worker1");
       },
       "an error that names worker1", "an error that does not name worker1"},
      {"non_scalar_root", "a root that is not a scalar, with no gradient given for it",
       [](Side& s) {
         const auto step = s.NewStep();
         const at::Tensor y = step->Call(1, "sine", {X()})[0];
         return ErrorOf([&] { step->Backward({y}); });
       },
       "an error", "an error"},
      {"checkpoint", "reentrant checkpointing on a worker that is called",
       [](Side& s) {
         const at::Tensor x = X();
         return OneCall(s, 1, "checkpoint", {x}, x.sin().sin());
       },
       kSame, kSame},
      {"checkpoint_here", "reentrant checkpointing on the worker that calls backward",
       [](Side& s) {
         const auto step = s.NewStep();
         const at::Tensor x = X();
         const at::Tensor y = step->Call(1, "sine", {Checkpoint::apply(x)})[0];
         step->Backward({Checkpoint::apply(y).sum()});
         return Compare(*step, {x}, x.sin().sin().sin().sin().sin().sum());
       },
       kSame, kSame, true},
      {"backward_autograd_engine_error", "an error in a node of another worker",
       [](Side& s) {
         const auto step = s.NewStep();
         const at::Tensor y = step->Call(1, "throws", {X()})[0];
         return ErrorOf([&] { step->Backward({y.sum()}); }, "worker1");
       },
       "an error that names worker1", "an error"},
      // PyTorch's workers race: now and then the one that goes on has ended before it is asked.
      {"error_in_a_diamond", "an error in one corner of a diamond", DiamondError,
       "nothing is left running", "worker|nothing is left running", true},
      {"killed_during_a_pass", "a worker is killed during a pass",
       [](Side& s) {
         const auto step = s.NewStep();
         const at::Tensor y = step->Call(1, "dies", {X()})[0];
         return ErrorOf([&] { step->Backward({y.sum()}); }, "worker1");
       },
       "an error that names worker1", "an error", true},
      {"origin_dies", "the origin of contexts is killed", OriginDies, "its contexts go",
       "its contexts are still there", true},
  };
  return scenarios;
}

bool IsExpected(absl::string_view outcome, absl::string_view expected) {
  const std::vector<absl::string_view> ways = absl::StrSplit(expected, '|');
  return std::any_of(ways.begin(), ways.end(),
                     [outcome](absl::string_view way) { return absl::StartsWith(outcome, way); });
}

}  // namespace distgrad
