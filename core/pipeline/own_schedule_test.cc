// Random schedules of a user's own: what Check() accepts comes to its end, with the gradients of
// one process.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tanh.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "core/optim/local_optimizer.h"
#include "core/pipeline/pipeline.h"
#include "core/pipeline/schedule.h"
#include "core/pipeline/stages.h"
#include "core/pipeline/test_layers.h"
#include "tests/testing/cluster.h"

namespace distgrad {
namespace {

using Kind = Action::Kind;

struct Plan {
  Schedule schedule;
  std::vector<std::string> workers;  // by rank
  int worker_count = 1;
  bool steps = false;
  std::set<int> tied;  // stages
  std::set<int> frozen, recompute;
  std::map<int, std::vector<int>> skips;
  bool share = false;  // one tensor per worker
  int in_flight = 1;
  int rows = 0;
};

Plan Random(std::mt19937& random) {
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  Plan plan;
  const int stages = 1 + below(5);
  const int ranks = 1 + below(stages);
  const int m_count = 1 + below(4);
  Schedule& s = plan.schedule;
  s.micro_batches = m_count;
  for (int i = 0; i < stages; ++i) s.rank_of_stage.push_back(i < ranks ? i : below(ranks));
  std::shuffle(s.rank_of_stage.begin(), s.rank_of_stage.end(), random);
  s.lists.resize(ranks);
  plan.worker_count = 1 + below(ranks);
  for (int r = 0; r < ranks; ++r) {
    plan.workers.push_back(WorkerName(r < plan.worker_count ? r : below(plan.worker_count)));
  }
  plan.steps = below(2) == 0;
  plan.in_flight = 1 + below(3);
  plan.rows = m_count + below(6);
  if (below(2) == 0) {
    for (int i = 0; i < stages; ++i) {
      if (below(2) == 0) plan.tied.insert(i);
    }
    plan.share = below(2) == 0;
  }
  for (int i = 0; i < stages; ++i) {
    if (below(4) == 0) plan.frozen.insert(i);
    if (below(4) == 0) plan.recompute.insert(i);
    for (int to = i + 2; to < stages; ++to) {
      for (int k = below(6) - 3; k > 0; --k) plan.skips[i].push_back(to);
    }
    std::shuffle(plan.skips[i].begin(), plan.skips[i].end(), random);
  }
  // Nodes.
  struct Node {
    Action action;
    std::vector<size_t> needs;
  };
  std::vector<Node> nodes;
  std::map<std::tuple<int, int, int>, size_t> at;
  const auto add = [&](Kind kind, int stage, int m) {
    at[{static_cast<int>(kind), stage, m}] = nodes.size();
    nodes.push_back({{kind, stage, m}, {}});
  };
  const auto crosses = [&](int stage) {
    return stage > 0 && stage < stages && s.rank_of_stage[stage] != s.rank_of_stage[stage - 1];
  };
  const bool halves = below(2) == 0;
  for (int i = 0; i < stages; ++i) {
    for (int m = 0; m < m_count; ++m) {
      add(Kind::kForward, i, m);
      if (halves && below(2) == 0) {
        add(Kind::kBackwardInput, i, m);
        add(Kind::kBackwardWeight, i, m);
      } else {
        add(Kind::kBackward, i, m);
      }
      if (crosses(i + 1)) {
        add(Kind::kSendActivation, i, m);
        add(Kind::kReceiveGradient, i, m);
      }
      if (crosses(i)) {
        add(Kind::kReceiveActivation, i, m);
        add(Kind::kSendGradient, i, m);
      }
    }
    if (plan.steps) add(Kind::kStep, i, 0);
  }
  const auto find = [&](Kind kind, int stage, int m) -> size_t {
    const auto found = at.find({static_cast<int>(kind), stage, m});
    return found == at.end() ? nodes.size() : found->second;
  };
  const auto back = [&](int stage, int m) {
    const size_t whole = find(Kind::kBackward, stage, m);
    return whole < nodes.size() ? whole : find(Kind::kBackwardInput, stage, m);
  };
  const auto back_end = [&](int stage, int m) {
    const size_t whole = find(Kind::kBackward, stage, m);
    return whole < nodes.size() ? whole : find(Kind::kBackwardWeight, stage, m);
  };
  for (Node& node : nodes) {
    const int i = node.action.stage, m = node.action.micro_batch;
    switch (node.action.kind) {
      case Kind::kForward:
        if (i > 0) {
          node.needs.push_back(crosses(i) ? find(Kind::kReceiveActivation, i, m)
                                          : find(Kind::kForward, i - 1, m));
        }
        break;
      case Kind::kBackward:
      case Kind::kBackwardInput:
        node.needs.push_back(find(Kind::kForward, i, m));
        if (i + 1 < stages) {
          node.needs.push_back(crosses(i + 1) ? find(Kind::kReceiveGradient, i, m)
                                              : back(i + 1, m));
        }
        break;
      case Kind::kBackwardWeight:
        node.needs.push_back(find(Kind::kBackwardInput, i, m));
        break;
      case Kind::kSendActivation:
        node.needs.push_back(find(Kind::kForward, i, m));
        break;
      case Kind::kReceiveActivation:
        node.needs.push_back(find(Kind::kSendActivation, i - 1, m));
        break;
      case Kind::kSendGradient:
        node.needs.push_back(back(i, m));
        break;
      case Kind::kReceiveGradient:
        node.needs.push_back(find(Kind::kSendGradient, i + 1, m));
        break;
      case Kind::kStep:
        for (int k = 0; k < m_count; ++k) node.needs.push_back(back_end(i, k));
        if (!plan.tied.empty()) {
          for (size_t n = 0; n < nodes.size(); ++n) {
            if (nodes[n].action.kind != Kind::kStep &&
                s.rank_of_stage[nodes[n].action.stage] == s.rank_of_stage[i]) {
              node.needs.push_back(n);
            }
          }
        }
        break;
    }
  }
  // A random order that keeps all needs.
  std::vector<bool> done(nodes.size());
  for (size_t count = 0; count < nodes.size(); ++count) {
    std::vector<size_t> ready;
    for (size_t n = 0; n < nodes.size(); ++n) {
      if (done[n]) continue;
      if (std::all_of(nodes[n].needs.begin(), nodes[n].needs.end(),
                      [&](size_t need) { return done[need]; })) {
        ready.push_back(n);
      }
    }
    const size_t next = ready[random() % ready.size()];
    done[next] = true;
    s.lists[s.rank_of_stage[nodes[next].action.stage]].push_back(nodes[next].action);
  }
  return plan;
}

std::string Describe(const Plan& plan) {
  std::string text = absl::StrCat("M ", plan.schedule.micro_batches, " rows ", plan.rows,
                                  plan.steps ? " steps" : "", " in flight ", plan.in_flight,
                                  plan.share ? " share" : "", "\n");
  for (int i = 0; i < plan.schedule.stages(); ++i) {
    absl::StrAppend(&text, "stage ", i, " rank ", plan.schedule.rank_of_stage[i], " worker ",
                    plan.workers[plan.schedule.rank_of_stage[i]], plan.tied.count(i) ? " tied" : "",
                    plan.frozen.count(i) ? " frozen" : "",
                    plan.recompute.count(i) ? " recompute" : "", " skips");
    if (plan.skips.count(i)) {
      for (int to : plan.skips.at(i)) absl::StrAppend(&text, " ", to);
    }
    absl::StrAppend(&text, "\n");
  }
  for (const auto& list : plan.schedule.lists) {
    for (const Action& action : list) absl::StrAppend(&text, ToString(action), "; ");
    absl::StrAppend(&text, "\n");
  }
  return text;
}

constexpr int kWidth = 6;

struct Model {
  std::vector<at::Tensor> weights, tied;  // by stage; tied copies by stage

  static Model Make(const Plan& plan) {
    Model model;
    const auto options = at::TensorOptions().dtype(at::kDouble);
    const at::Tensor shared = at::randn({kWidth, kWidth}, options);
    for (int i = 0; i < plan.schedule.stages(); ++i) {
      model.weights.push_back(
          (at::randn({kWidth, kWidth}, options) * 0.6).requires_grad_(plan.frozen.count(i) == 0));
      model.tied.push_back(plan.tied.count(i) ? shared.clone().requires_grad_() : at::Tensor());
    }
    return model;
  }
  Model Copy() const {
    Model copy;
    for (const at::Tensor& t : weights) {
      copy.weights.push_back(t.detach().clone().requires_grad_(t.requires_grad()));
    }
    at::Tensor one;
    for (const at::Tensor& t : tied) {
      if (!t.defined()) {
        copy.tied.emplace_back();
        continue;
      }
      if (!one.defined()) one = t.detach().clone().requires_grad_();
      copy.tied.push_back(one);  // one process has one
    }
    return copy;
  }
  // Inputs: what the stage before gives and what skips here.
  Tensors Forward(const Plan& plan, int stage, const Tensors& in) const {
    at::Tensor x = in[0];
    for (size_t i = 1; i < in.size(); ++i) x = x + in[i] * (0.3 * i);
    x = at::tanh(at::linear(x, weights[stage]));
    if (tied[stage].defined()) x = at::tanh(x.mm(tied[stage]));
    Tensors out{x};
    const auto skips = plan.skips.find(stage);
    if (skips == plan.skips.end()) return out;
    for (size_t i = 0; i < skips->second.size(); ++i) {
      // Some give the very same tensor.
      out.push_back(i % 3 == 2 ? x : at::sin(x * (1.0 + i)));
    }
    return out;
  }
  at::Tensor Whole(const Plan& plan, const at::Tensor& x) const {
    std::map<int, Tensors> skipped;
    at::Tensor at = x;
    for (int i = 0; i < plan.schedule.stages(); ++i) {
      Tensors in{at};
      for (const at::Tensor& t : skipped[i]) in.push_back(t);
      Tensors out = Forward(plan, i, in);
      at = out[0];
      const auto skips = plan.skips.find(i);
      if (skips == plan.skips.end()) continue;
      for (size_t k = 0; k < skips->second.size(); ++k)
        skipped[skips->second[k]].push_back(out[1 + k]);
    }
    return at;
  }
};

TEST(OwnScheduleTest, WhatCheckAcceptsHasTheGradientsOfOneProcess) {
  for (int seed = 1; seed <= 60; ++seed) {
    std::mt19937 random(seed);
    at::manual_seed(seed);
    Plan plan = Random(random);
    Model model = Model::Make(plan);
    const int stages = plan.schedule.stages();
    bool trains = false;
    for (int i = 0; i < stages; ++i) trains = trains || !plan.frozen.count(i) || plan.tied.count(i);
    if (!trains) continue;
    // Of ranks that share a tensor steps may not be in flight.
    if (plan.share) {
      std::map<std::string, at::Tensor> of_worker;
      for (int i = 0; i < stages; ++i) {
        if (!model.tied[i].defined()) continue;
        at::Tensor& one = of_worker[plan.workers[plan.schedule.rank_of_stage[i]]];
        if (!one.defined()) one = model.tied[i];
        model.tied[i] = one;
      }
      if (plan.steps) plan.in_flight = 1;
    }
    SCOPED_TRACE(absl::StrCat("seed ", seed, "\n", Describe(plan)));
    const absl::Status checked = Check(plan.schedule);
    ASSERT_EQ(checked, absl::OkStatus());
    const Model alone = model.Copy();
    const std::string transport = seed % 3 == 0 ? "socket" : "inproc";
    Cluster cluster({.workers = plan.worker_count,
                     .transport = transport,
                     .thread_count = 1,
                     .timeout = absl::Seconds(30)});
    std::vector<std::map<int, PipelineStage>> own(plan.worker_count);
    std::deque<LocalOptimizer> optimizers;
    std::set<c10::TensorImpl*> seen;
    for (int i = 0; i < stages; ++i) {
      Tensors parameters;
      if (model.weights[i].requires_grad()) parameters.push_back(model.weights[i]);
      if (model.tied[i].defined() && seen.insert(model.tied[i].unsafeGetTensorImpl()).second) {
        parameters.push_back(model.tied[i]);
      }
      LocalOptimizer* optimizer = nullptr;
      if (!parameters.empty()) {
        optimizers.emplace_back(
            std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.1)));
        optimizer = &optimizers.back();
      }
      PipelineStage stage{.forward = [&, i](Tensors in) { return model.Forward(plan, i, in); },
                          .loss = Loss,
                          .inputs = std::nullopt,
                          .skips = plan.skips[i],
                          .recompute = plan.recompute.count(i) > 0,
                          .step =
                              [optimizer](const Context& c) {
                                return optimizer == nullptr ? absl::OkStatus()
                                                            : optimizer->Step(*c.record());
                              }};
      if (model.tied[i].defined()) stage.tied = {{"tied", model.tied[i]}};
      const std::string& worker = plan.workers[plan.schedule.rank_of_stage[i]];
      for (int w = 0; w < plan.worker_count; ++w) {
        if (WorkerName(w) == worker) own[w][i] = stage;
      }
    }
    const auto made = CreateStages(cluster, std::move(own));
    const auto pipeline = Pipeline::Create(
        &cluster[0], {.name = "model", .workers = plan.workers, .schedule = plan.schedule});
    ASSERT_TRUE(pipeline.ok()) << pipeline.status();
    Tensors all;
    std::set<c10::TensorImpl*> alone_seen;
    for (const auto* list : {&alone.weights, &alone.tied}) {
      for (const at::Tensor& t : *list) {
        if (t.defined() && t.requires_grad() && alone_seen.insert(t.unsafeGetTensorImpl()).second) {
          all.push_back(t);
        }
      }
    }
    torch::optim::SGD optimizer_alone(all, torch::optim::SGDOptions(0.1));
    struct Started {
      std::unique_ptr<Context> context;
      PipelineStep step;
      Tensors losses;
    };
    std::deque<Started> in_flight;
    const auto options = at::TensorOptions().dtype(at::kDouble);
    const auto finish = [&]() {
      const absl::StatusOr<PipelineResult> result = in_flight.front().step.Wait();
      ASSERT_TRUE(result.ok()) << result.status();
      ASSERT_EQ(result->losses.size(), in_flight.front().losses.size());
      for (size_t m = 0; m < result->losses.size(); ++m) {
        ASSERT_TRUE(result->losses[m].allclose(in_flight.front().losses[m], 1e-8, 1e-10))
            << result->losses[m].item<double>() << " "
            << in_flight.front().losses[m].item<double>();
      }
      in_flight.pop_front();
    };
    for (int step = 0; step < 4; ++step) {
      const at::Tensor x = at::randn({plan.rows, kWidth}, options),
                       y = at::randn({plan.rows, kWidth}, options);
      Started next{std::make_unique<Context>(cluster[0].NewContext()), {}, {}};
      absl::StatusOr<PipelineStep> started = (*pipeline)->Start(*next.context, {x}, {y});
      ASSERT_TRUE(started.ok()) << started.status();
      next.step = *std::move(started);
      const int count_m = plan.schedule.micro_batches;
      const Tensors xs = x.tensor_split(count_m), ys = y.tensor_split(count_m);
      optimizer_alone.zero_grad();
      for (int m = 0; m < count_m; ++m) {
        const at::Tensor loss = Loss({alone.Whole(plan, xs[m])}, {ys[m]});
        loss.backward(at::full_like(loss, static_cast<double>(xs[m].size(0)) / plan.rows));
        next.losses.push_back(loss.detach());
      }
      in_flight.push_back(std::move(next));
      if (plan.steps) {
        optimizer_alone.step();
      } else if (plan.in_flight == 1) {
        // Compare all gradients of worker 0.
        const absl::StatusOr<PipelineResult> result = in_flight.back().step.Wait();
        ASSERT_TRUE(result.ok()) << result.status();
        for (int i = 0; i < stages; ++i) {
          if (plan.workers[plan.schedule.rank_of_stage[i]] != WorkerName(0)) continue;
          for (const auto& [mine, other] :
               {std::pair(model.weights[i], alone.weights[i]), {model.tied[i], alone.tied[i]}}) {
            if (!mine.defined() || !mine.requires_grad()) continue;
            const auto gradient = in_flight.back().context->Gradient(mine);
            ASSERT_TRUE(gradient.ok()) << gradient.status() << " stage " << i;
            ASSERT_TRUE(gradient->allclose(other.grad(), 1e-8, 1e-10)) << "stage " << i;
          }
        }
        in_flight.pop_back();
        continue;
      }
      if (static_cast<int>(in_flight.size()) == plan.in_flight) {
        finish();
        if (HasFatalFailure()) return;
      }
    }
    while (!in_flight.empty()) {
      finish();
      if (HasFatalFailure()) return;
    }
    if (plan.steps) {
      for (int i = 0; i < stages; ++i) {
        ASSERT_TRUE(model.weights[i].allclose(alone.weights[i], 1e-8, 1e-10)) << "stage " << i;
        if (model.tied[i].defined()) {
          ASSERT_TRUE(model.tied[i].allclose(alone.tied[i], 1e-8, 1e-10)) << "tied of stage " << i;
        }
      }
    }
    // An evaluation with the same stages.
    const at::Tensor x = at::randn({plan.rows, kWidth}, options);
    const auto evaluated = (*pipeline)->Evaluate({x});
    ASSERT_TRUE(evaluated.ok()) << evaluated.status();
    Tensors outputs;
    for (const Tensors& of : evaluated->outputs) outputs.push_back(of[0]);
    ASSERT_TRUE(at::cat(outputs).allclose(alone.Whole(plan, x), 1e-8, 1e-10));
  }
}

}  // namespace
}  // namespace distgrad
