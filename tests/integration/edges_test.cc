// What flows through the edges of a context is what flows in one process: each program here runs
// once over two workers and once in one process, and leaves, hooks and functions must not be able
// to tell the difference.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <map>
#include <string>
#include <utility>

#include "tests/integration/team.h"

namespace distgrad {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// How often each hook and function ran; the passes here run one node at a time.
using Log = std::map<std::string, int>;

// Its backward, when it runs, has zeros for an output that got no gradient.
struct Materialize : torch::autograd::Function<Materialize> {
  static Variable forward(AutogradContext* context, const Variable& x, Log* log,
                          const std::string& name) {
    context->saved_data["log"] = reinterpret_cast<int64_t>(log);
    context->saved_data["name"] = name;
    return x * 1;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    Log& log = *reinterpret_cast<Log*>(context->saved_data["log"].toInt());
    ++log[context->saved_data["name"].toStringRef()];
    return {gradients[0] * 1, Variable(), Variable()};
  }
};

// Its backward gives no gradient.
struct Discard : torch::autograd::Function<Discard> {
  static Variable forward(AutogradContext*, const Variable& x) { return x.sum(); }
  static variable_list backward(AutogradContext*, variable_list) { return {Variable()}; }
};

// Fails on a gradient that is not there, like most hooks.
void Triple(const at::Tensor& tensor, Log* log, const std::string& name) {
  tensor.register_hook([log, name](const at::Tensor& gradient) {
    ++(*log)[name];
    return gradient * 3;
  });
}

struct ScaleBefore : torch::autograd::FunctionPreHook {
  ScaleBefore(double factor, Log* log, std::string name)
      : factor(factor), log(log), name(std::move(name)) {}
  variable_list operator()(const variable_list& gradients) override {
    ++(*log)[name];
    variable_list scaled;
    for (const Variable& gradient : gradients) scaled.push_back(gradient * factor);
    return scaled;
  }
  const double factor;
  Log* const log;
  const std::string name;
};

struct ScaleAfter : torch::autograd::FunctionPostHook {
  ScaleAfter(double factor, Log* log, std::string name)
      : factor(factor), log(log), name(std::move(name)) {}
  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    ++(*log)[name + " with " + std::to_string(inputs.size())];
    variable_list scaled;
    for (const Variable& gradient : outputs) {
      scaled.push_back(gradient.defined() ? gradient * factor : gradient);
    }
    return scaled;
  }
  const double factor;
  Log* const log;
  const std::string name;
};

void HookNode(const at::Tensor& tensor, double factor, Log* log, const std::string& name) {
  tensor.grad_fn()->add_pre_hook(std::make_unique<ScaleBefore>(factor, log, name + " before"));
  tensor.grad_fn()->add_post_hook(std::make_unique<ScaleAfter>(factor, log, name + " after"));
}

class EdgesTest : public ::testing::TestWithParam<std::string> {
 protected:
  using Handler = std::function<Tensors(Tensors)>;
  using Call = std::function<Tensors(Handler, Tensors)>;
  // Returns the root. `leaves` belong to no worker: the caller and what it calls use them all.
  using Program = std::function<at::Tensor(const Call& call, const Tensors& leaves, Log* log)>;

  EdgesTest() : team_(2, {.transport = GetParam()}) {}

  static Tensors Leaves() {
    Tensors leaves;
    // Small integers, whose sums are exact in whatever order they are added up.
    for (int seed = 1; seed <= 4; ++seed) {
      leaves.push_back((Leaf({2, 3}, seed) * 3).round().detach().set_requires_grad(true));
    }
    return leaves;
  }

  void Compare(const Program& program) {
    const Tensors want = Leaves(), got = Leaves();
    Log want_log, got_log;
    program([](const Handler& handler, Tensors in) { return handler(std::move(in)); }, want,
            &want_log)
        .backward();
    Context context = team_[0].NewContext();
    const at::Tensor root = program(
        [&](Handler handler, Tensors in) {
          return team_.Run(
              0, 1, context,
              [handler = std::move(handler)](Tensors in, Request&) {
                return handler(std::move(in));
              },
              std::move(in));
        },
        got, &got_log);
    const absl::Status done = context.Backward({root});
    ASSERT_TRUE(done.ok()) << done;
    EXPECT_EQ(got_log, want_log);
    for (size_t i = 0; i < got.size(); ++i) {
      SCOPED_TRACE("leaf " + std::to_string(i));
      EXPECT_FALSE(got[i].grad().defined());
      // Each is used on one worker alone.
      at::Tensor gradient = GradientOf(context, got[i]);
      if (!gradient.defined()) gradient = team_.Gradient(1, context, got[i]);
      ExpectSame(gradient, want[i].grad());
      ExpectSame(got[i].detach(), want[i].detach());
    }
  }

  Team team_;
};

// ---- what is reached ----

TEST_P(EdgesTest, AnUnusedResultBesideAUsedOne) {
  Compare([](const Call& call, const Tensors& leaves, Log* log) {
    const Tensors results = call(
        [leaves, log](const Tensors& in) {
          const at::Tensor unused = Materialize::apply(in[0] * leaves[2], log, "function");
          Triple(unused, log, "hook of the sender");
          return Tensors{in[0] * leaves[1], unused};
        },
        {leaves[0]});
    Triple(results[0], log, "hook");
    Triple(results[1], log, "hook of the unused");
    return results[0].sum();
  });
}

TEST_P(EdgesTest, AnUnusedArgumentBesideAUsedOne) {
  Compare([](const Call& call, const Tensors& leaves, Log* log) {
    const at::Tensor unused = Materialize::apply(leaves[1], log, "function");
    Triple(unused, log, "hook of the sender");
    return call(
               [log](const Tensors& in) {
                 Triple(in[0], log, "hook");
                 Triple(in[1], log, "hook of the unused");
                 return Tensors{in[0] * 2};
               },
               {leaves[0] * 3, unused})[0]
        .sum();
  });
}

TEST_P(EdgesTest, ManyTensorsOfWhichSomeAreUsed) {
  // More than one byte's worth of them.
  Compare([](const Call& call, const Tensors& leaves, Log* log) {
    const Tensors results = call(
        [leaves, log](const Tensors& in) {
          Tensors out;
          for (int i = 0; i < 20; ++i) {
            const std::string name = "function " + std::to_string(i);
            out.push_back(Materialize::apply(in[i] * leaves[i % 3 + 1], log, name));
          }
          return out;
        },
        Tensors(20, leaves[0] * 2));
    at::Tensor sum = results[19].sum();
    for (int i = 1; i < 19; i += 3) sum = sum + results[i].sum() * i;
    return sum;
  });
}

TEST_P(EdgesTest, ReachedWithoutAGradientIsReached) {
  Compare([](const Call& call, const Tensors& leaves, Log* log) {
    const Tensors results = call(
        [leaves, log](const Tensors& in) {
          return Tensors{Materialize::apply(in[0] * leaves[1], log, "function"), in[0] * 2,
                         Materialize::apply(in[0] * leaves[2], log, "unused")};
        },
        {Materialize::apply(leaves[0], log, "function of the caller")});
    return Discard::apply(results[0]) + results[1].sum();
  });
}

TEST_P(EdgesTest, NothingButUndefinedGradients) {
  Compare([](const Call& call, const Tensors& leaves, Log* log) {
    const Tensors results = call(
        [leaves, log](const Tensors& in) {
          return Tensors{Materialize::apply(in[0] * leaves[1], log, "function"),
                         Materialize::apply(in[0] * leaves[2], log, "unused")};
        },
        {Materialize::apply(leaves[0], log, "function of the caller")});
    return Discard::apply(results[0]);
  });
}

TEST_P(EdgesTest, OneFunctionBehindTwoResults) {
  // What no gradient reaches through one result is reached through the other.
  Compare([](const Call& call, const Tensors& leaves, Log* log) {
    const Tensors results = call(
        [leaves, log](const Tensors& in) {
          const at::Tensor both = Materialize::apply(in[0] * leaves[1], log, "function");
          return Tensors{both * 2, both * 3, both};
        },
        {leaves[0]});
    return (results[1] * results[1]).sum();
  });
}

TEST_P(EdgesTest, ViewsAndInPlaceBesideAnUnusedResult) {
  Compare([](const Call& call, const Tensors& leaves, Log* log) {
    const Tensors results = call(
        [leaves, log](const Tensors& in) {
          in[0].narrow(0, 0, 1).mul_(leaves[1].narrow(0, 0, 1));
          Triple(in[0], log, "hook after in-place");
          return Tensors{in[0].narrow(1, 0, 2), Materialize::apply(in[1], log, "unused"),
                         in[0] * 2};
        },
        {leaves[0] * 2, Materialize::apply(leaves[2], log, "unused argument")});
    at::Tensor used = results[2];
    Triple(used, log, "hook before in-place");
    used.narrow(0, 1, 1).mul_(5);
    used.retain_grad();
    return used.sum() + results[0].sum();
  });
}

TEST_P(EdgesTest, OneTensorTwiceInAMessage) {
  Compare([](const Call& call, const Tensors& leaves, Log* log) {
    const at::Tensor twice = Materialize::apply(leaves[0], log, "function");
    const Tensors results = call(
        [log](const Tensors& in) {
          Triple(in[0], log, "hook of the first");
          const at::Tensor result = in[0] * 2;
          return Tensors{result, result};
        },
        {twice, twice});
    return results[1].sum();
  });
}

// ---- hooks on nodes ----

TEST_P(EdgesTest, HooksOnTheNodeOfAReceivedTensor) {
  Compare([](const Call& call, const Tensors& leaves, Log* log) {
    const Tensors results = call(
        [log](const Tensors& in) {
          HookNode(in[0], 7, log, "argument");
          HookNode(in[1], 11, log, "second argument");
          HookNode(in[2], 13, log, "unused argument");
          Triple(in[0], log, "hook of a tensor");
          return Tensors{in[0].mul(5), in[1].mul(5), in[2].mul(5)};
        },
        {leaves[0].mul(2), leaves[1].mul(2), leaves[2].mul(2)});
    HookNode(results[0], 17, log, "result");
    HookNode(results[1], 19, log, "second result");
    HookNode(results[2], 23, log, "unused result");
    return (results[0] + results[1] * 2).sum();
  });
}

// ---- post-accumulate hooks ----

void OnAccumulated(const at::Tensor& leaf, std::function<void()> body) {
  struct Hook : torch::autograd::PostAccumulateGradHook {
    explicit Hook(std::function<void()> body) : body(std::move(body)) {}
    void operator()(const Variable&) override { body(); }
    const std::function<void()> body;
  };
  torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::make_unique<Hook>(std::move(body)));
}

// A tensor that a hook of its own knows from the start, and does not keep alive.
class Known {
 public:
  explicit Known(const at::Tensor& tensor) : tensor_(tensor.getIntrusivePtr()) {}
  at::Tensor operator*() const { return at::Tensor(tensor_.lock()); }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor_;
};

// What an optimizer of one parameter does.
struct Descent {
  Known parameter;
  void Step() {
    const at::Tensor leaf = *parameter;
    if (!leaf.grad().defined()) return;
    const at::NoGradGuard no_grad;
    leaf.sub_(leaf.grad() * 0.5);
  }
  void ZeroGrad() { (*parameter).mutable_grad().reset(); }
};

TEST_P(EdgesTest, APostAccumulateHookThatStepsAndDropsTheGradient) {
  Compare([](const Call& call, const Tensors& leaves, Log* log) {
    for (int i = 0; i < 3; ++i) {
      OnAccumulated(leaves[i], [optimizer = Descent{Known(leaves[i])}, log, i]() mutable {
        ++(*log)["hook " + std::to_string(i)];
        optimizer.Step();
        optimizer.ZeroGrad();
      });
    }
    return call([leaves](const Tensors& in) { return Tensors{in[0] * leaves[1] + leaves[2]}; },
                {leaves[0] * leaves[3]})[0]
        .sum();
  });
}

TEST_P(EdgesTest, APostAccumulateHookSeesWhatHasAccumulated) {
  const at::Tensor x = Leaves()[0], got = Leaves()[1], want = Leaves()[1];
  const auto scale = [](at::Tensor leaf) {
    OnAccumulated(leaf, [known = Known(leaf)] {
      const at::Tensor leaf = *known;
      leaf.mutable_grad() = leaf.grad() * 2 + 1;
    });
  };
  scale(got);
  scale(want);
  Context context = team_[0].NewContext();
  const at::Tensor root =
      team_.Run(0, 1, context, [&](Tensors in, Request&) { return Tensors{in[0] * got}; }, {x})[0]
          .sum();
  const at::Tensor reference = (x * want).sum();
  for (int pass = 0; pass < 3; ++pass) {
    ASSERT_TRUE(context.Backward({root}, {.retain_graph = true}).ok());
    reference.backward({}, /*retain_graph=*/true);
    ExpectSame(team_.Gradient(1, context, got), want.grad());
  }
}

// ---- a backward within the backward ----

// Computes again in backward, with a parameter that is not among its inputs.
struct Captures : torch::autograd::Function<Captures> {
  static Variable forward(AutogradContext* context, const Variable& x, const at::Tensor* captured) {
    context->save_for_backward({x});
    context->saved_data["captured"] = reinterpret_cast<int64_t>(captured);
    return x * *captured;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const at::AutoGradMode on(true);
    const auto* captured =
        reinterpret_cast<const at::Tensor*>(context->saved_data["captured"].toInt());
    const Variable x = context->get_saved_variables()[0].detach().requires_grad_();
    (x * *captured).backward(gradients[0]);
    return {x.grad(), Variable()};
  }
};

TEST_P(EdgesTest, AParameterThatACheckpointCapturesIsAnError) {
  const Tensors leaves = Leaves();
  Context context = team_[0].NewContext();
  const at::Tensor result =
      team_.Run(0, 1, context,
                [&](Tensors in, Request&) { return Tensors{Captures::apply(in[0], &leaves[1])}; },
                {leaves[0]})[0];
  const absl::Status status = context.Backward({result.sum()});
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  for (const char* part : {"worker1", "Captures", "[2, 3]", "torch::autograd::grad"}) {
    EXPECT_NE(status.message().find(part), std::string::npos) << part << " in " << status;
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, EdgesTest, ::testing::Values("inproc", "socket"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace distgrad
