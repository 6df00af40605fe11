// The behaviours that PyTorch's own tests of DistributedDataParallel look for, by their names there
// (of distributed_test.py and test_c10d_common.py and test_c10d_gloo.py), each with what is
// expected here. Ranks are threads, with a process group of Gloo's each.
#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/nn.h>
#include <torch/optim.h>
#include <torch/serialize.h>

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/attributes.h"
#include "absl/strings/match.h"
#include "absl/synchronization/mutex.h"
#include "core/parallel/process_group/gradient_averager.h"
#include "tests/testing/ranks.h"

namespace distgrad {
namespace {

namespace nn = torch::nn;

using at::Tensor;
using Group = std::shared_ptr<ProcessGroup>;

constexpr GradientAveragerOptions kSmallBuckets = {.bucket_bytes = 256, .first_bucket_bytes = 64};

template <typename Holder>
std::unique_ptr<GradientAverager> Wrap(const Group& group, const Holder& module,
                                       GradientAveragerOptions options = kSmallBuckets) {
  auto averager = GradientAverager::Create(group, *module, options);
  EXPECT_TRUE(averager.ok()) << averager.status();
  return averager.ok() ? *std::move(averager) : nullptr;
}

// libtorch has one generator for all threads.
ABSL_CONST_INIT absl::Mutex seeding(absl::kConstInit);

template <typename F>
auto Seeded(int seed, const F& make) {
  absl::MutexLock lock(&seeding);
  torch::manual_seed(seed);
  return make();
}

Tensor Input(int seed, std::vector<int64_t> sizes = {4, 8}) {
  return Seeded(seed, [&] { return torch::rand(sizes); });
}

struct NetImpl : nn::Module {
  NetImpl() {
    fc1 = register_module("fc1", nn::Linear(8, 10));
    fc2 = register_module("fc2", nn::Linear(10, 10));
    fc3 = register_module("fc3", nn::Linear(10, 4));
  }
  Tensor forward(const Tensor& x) { return fc3(torch::relu(fc2(torch::relu(fc1(x))))); }
  nn::Linear fc1{nullptr}, fc2{nullptr}, fc3{nullptr};
};
TORCH_MODULE(Net);

Net NewNet(int seed = 0) {
  return Seeded(seed, [] { return Net(); });
}

// What each rank's gradients would be alone, averaged.
template <typename Holder, typename LossOf>
std::vector<Tensor> ExpectedGradients(Holder module, int size, const LossOf& loss_of) {
  for (const Tensor& parameter : module->parameters()) parameter.mutable_grad().reset();
  for (int rank = 0; rank < size; ++rank) {
    const Tensor loss = loss_of(module, rank);
    if (loss.requires_grad()) loss.backward();
  }
  std::vector<Tensor> gradients;
  for (const Tensor& parameter : module->parameters()) {
    gradients.push_back(parameter.grad().defined() ? parameter.grad() / size : Tensor());
  }
  return gradients;
}

template <typename Holder>
void ExpectGradients(const Holder& module, const std::vector<Tensor>& want) {
  const std::vector<Tensor> parameters = module->parameters();
  ASSERT_EQ(parameters.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_EQ(parameters[i].grad().defined(), want[i].defined()) << i;
    if (!want[i].defined()) continue;
    EXPECT_TRUE(torch::allclose(parameters[i].grad(), want[i], 1e-4, 1e-6)) << i;
  }
}

template <typename Holder>
void ZeroGrad(const Holder& module) {
  for (const Tensor& parameter : module->parameters()) parameter.mutable_grad().reset();
}

// A loss of each rank, once, against the average of all.
template <typename Make, typename LossOf>
void ExpectAverages(int size, const Make& make, const LossOf& loss_of) {
  RunRanks(size, [&](Group group) {
    auto module = make(group->rank());
    const auto averager = Wrap(group, module);
    auto reference = make(0);
    for (int step = 0; step < 2; ++step) {
      const auto want = ExpectedGradients(
          reference, size, [&](auto m, int rank) { return loss_of(m, 10 * step + rank, rank); });
      ZeroGrad(module);
      const Tensor loss = loss_of(module, 10 * step + group->rank(), group->rank());
      loss.backward();
      ExpectGradients(module, want);
    }
  });
}

// ------------------------------------------------------------------------- test_c10d_gloo.py

TEST(DistributedDataParallelConformance, GlooBackendCpuModule) {
  ExpectAverages(2, NewNet, [](Net net, int seed, int) { return net->forward(Input(seed)).sum(); });
}

TEST(DistributedDataParallelConformance, GlooBackendCpuModuleGradIsView) {
  // A gradient of ours may lie in a bucket; it can be kept, changed in place and zeroed.
  RunRanks(2, [](Group group) {
    Net net = NewNet();
    const auto averager = Wrap(group, net);
    for (int step = 0; step < 3; ++step) {
      net->forward(Input(step)).sum().backward();
      for (const Tensor& parameter : net->parameters()) {
        const Tensor before = parameter.grad();
        before.zero_();
        EXPECT_TRUE(parameter.grad().is_same(before));
      }
    }
  });
}

struct PartlyUsedImpl : NetImpl {
  // fc2 on some ranks only, fc1's output alone on others, and `never` nowhere.
  PartlyUsedImpl() { never = register_module("never", nn::Linear(3, 3)); }
  Tensor forward(const Tensor& x, bool long_way) {
    const Tensor hidden = torch::relu(fc1(x));
    return fc3(long_way ? torch::relu(fc2(hidden)) : hidden);
  }
  nn::Linear never{nullptr};
};
TORCH_MODULE(PartlyUsed);

PartlyUsed NewPartlyUsed(int seed) {
  return Seeded(seed, [] { return PartlyUsed(); });
}

TEST(DistributedDataParallelConformance, GlobalLocalUnusedParamsGrad) {
  ExpectAverages(3, NewPartlyUsed, [](PartlyUsed net, int seed, int rank) {
    return net->forward(Input(seed), rank == 1).sum();
  });
}

TEST(DistributedDataParallelConformance, FindUnusedParametersWhenUnusedParametersEmpty) {
  ExpectAverages(2, NewPartlyUsed, [](PartlyUsed net, int seed, int) {
    return net->forward(Input(seed), true).sum();
  });
}

TEST(DistributedDataParallelConformance, DdpControlFlowSameAcrossRanks) {
  ExpectAverages(2, NewPartlyUsed, [](PartlyUsed net, int seed, int) {
    return net->forward(Input(seed), seed >= 10).sum();
  });
}

TEST(DistributedDataParallelConformance, DdpControlFlowDifferentAcrossRanks) {
  ExpectAverages(2, NewPartlyUsed, [](PartlyUsed net, int seed, int rank) {
    return net->forward(Input(seed), (seed >= 10) == (rank == 0)).sum();
  });
}

TEST(DistributedDataParallelConformance, UndefinedGradParityUnusedParameters) {
  // A node that gives no gradient counts as unused.
  struct NoGradient : torch::autograd::Function<NoGradient> {
    static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   torch::autograd::variable_list) {
      return {Tensor()};
    }
  };
  RunRanks(2, [](Group group) {
    Net net = NewNet();
    const auto averager = Wrap(group, net);
    const Tensor hidden = torch::relu(net->fc1(Input(group->rank())));
    net->fc3(NoGradient::apply(hidden)).sum().backward();
    EXPECT_FALSE(net->fc1->weight.grad().defined());
    EXPECT_FALSE(net->fc2->weight.grad().defined());
    EXPECT_TRUE(net->fc3->weight.grad().defined());
  });
}

TEST(DistributedDataParallelConformance, MultipleOutputsMultipleBackward) {
  RunRanks(2, [](Group group) {
    Net net = NewNet(), reference = NewNet();
    const auto averager = Wrap(group, net);
    // Two backwards add up two averages.
    const auto expected = [&](int seed) {
      return ExpectedGradients(
          reference, 2, [&](Net m, int rank) { return m->forward(Input(seed + rank)).sum(); });
    };
    std::vector<Tensor> want = expected(0);
    const std::vector<Tensor> more = expected(10);
    for (size_t i = 0; i < want.size(); ++i) want[i] = want[i] + more[i];
    const Tensor a = net->forward(Input(group->rank())).sum();
    const Tensor b = net->forward(Input(10 + group->rank())).sum();
    a.backward();
    b.backward();
    ExpectGradients(net, want);
  });
}

TEST(DistributedDataParallelConformance, MultipleForwardsInOneBackward) {
  // One module twice in a forward.
  ExpectAverages(2, NewNet, [](Net net, int seed, int) {
    return (net->forward(Input(seed)) * net->forward(Input(seed + 5))).sum();
  });
}

TEST(DistributedDataParallelConformance, IgnoredOutput) {
  RunRanks(2, [](Group group) {
    Net net = NewNet(), reference = NewNet();
    const auto averager = Wrap(group, net);
    // Nothing is expected of a forward that no backward follows.
    for (int i = 0; i < 4; ++i) net->forward(Input(i));
    const auto loss = [](Net m, int rank) { return m->forward(Input(rank)).sum(); };
    const auto want = ExpectedGradients(reference, 2, loss);
    loss(net, group->rank()).backward();
    ExpectGradients(net, want);
  });
}

TEST(DistributedDataParallelConformance, IgnoredOutputWithUnusedParameters) {
  RunRanks(2, [](Group group) {
    PartlyUsed net = NewPartlyUsed(0), reference = NewPartlyUsed(0);
    const auto averager = Wrap(group, net);
    for (int i = 0; i < 4; ++i) net->forward(Input(i), i % 2 == 0);
    const auto loss = [](PartlyUsed m, int rank) { return m->forward(Input(rank), false).sum(); };
    const auto want = ExpectedGradients(reference, 2, loss);
    loss(net, group->rank()).backward();
    ExpectGradients(net, want);
  });
}

struct SparseImpl : nn::Module {
  explicit SparseImpl(bool bag) {
    if (bag) {
      embedding_bag = register_module(
          "embedding_bag",
          nn::EmbeddingBag(nn::EmbeddingBagOptions(10, 3).sparse(true).mode(torch::kSum)));
    } else {
      embedding =
          register_module("embedding", nn::Embedding(nn::EmbeddingOptions(10, 3).sparse(true)));
    }
    fc = register_module("fc", nn::Linear(3, 2));
  }
  Tensor forward(const Tensor& rows) {
    return fc(embedding.is_empty() ? embedding_bag(rows) : embedding(rows).sum(1));
  }
  nn::Embedding embedding{nullptr};
  nn::EmbeddingBag embedding_bag{nullptr};
  nn::Linear fc{nullptr};
};
TORCH_MODULE(Sparse);

void TestSparseGradients(bool bag) {
  RunRanks(2, [bag](Group group) {
    const auto make = [bag] { return Seeded(3, [bag] { return Sparse(bag); }); };
    Sparse net = make(), reference = make();
    const auto averager = Wrap(group, net);
    const auto loss = [](Sparse m, int rank) {
      return m->forward(torch::tensor({{1, 2 + rank}, {2 + rank, 5 + 3 * rank}})).square().sum();
    };
    const auto want = ExpectedGradients(reference, 2, loss);
    loss(net, group->rank()).backward();
    const std::vector<Tensor> parameters = net->parameters();
    ASSERT_TRUE(parameters[0].grad().is_sparse());
    for (size_t i = 0; i < want.size(); ++i) {
      EXPECT_TRUE(torch::allclose(parameters[i].grad().to_dense(), want[i].to_dense())) << i;
    }
    // Unused on one rank, then on both.
    ZeroGrad(net);
    if (group->rank() == 0)
      loss(net, 0).backward();
    else
      net->fc->weight.sum().backward();
    ZeroGrad(reference);
    loss(reference, 0).backward();
    EXPECT_TRUE(torch::allclose(parameters[0].grad().to_dense(),
                                reference->parameters()[0].grad().to_dense() / 2));
    ZeroGrad(net);
    net->fc->weight.sum().backward();
    EXPECT_FALSE(parameters[0].grad().defined());
  });
}
TEST(DistributedDataParallelConformance, SparseGradients) { TestSparseGradients(false); }
TEST(DistributedDataParallelConformance, DdpEmbeddingBag) { TestSparseGradients(true); }

TEST(DistributedDataParallelConformance, SaveLoadCheckpoint) {
  // libtorch's archives share tables of types, and ThreadSanitizer does not see what orders those.
  absl::Mutex archives;
  RunRanks(2, [&](Group group) {
    Net net = NewNet(group->rank());
    const auto averager = Wrap(group, net);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    const auto step = [&](int seed) {
      optimizer.zero_grad();
      net->forward(Input(seed + group->rank())).square().mean().backward();
      optimizer.step();
    };
    step(0);
    std::stringstream checkpoint;
    {
      absl::MutexLock lock(&archives);
      torch::save(net, checkpoint);
    }
    step(10);
    const Tensor want = net->fc1->weight.detach().clone();
    {
      absl::MutexLock lock(&archives);
      torch::load(net, checkpoint);
    }
    step(10);
    EXPECT_TRUE(net->fc1->weight.equal(want));
  });
}

TEST(DistributedDataParallelConformance, DdpWeightSharing) {
  struct TiedImpl : nn::Module {
    TiedImpl() {
      fc = register_module("fc", nn::Linear(8, 8));
      register_parameter("again", fc->weight);
    }
    Tensor forward(const Tensor& x) { return torch::relu(fc(x)).matmul(fc->weight); }
    nn::Linear fc{nullptr};
  };
  const auto make = [](int seed) {
    return Seeded(seed, [] { return std::make_shared<TiedImpl>(); });
  };
  RunRanks(2, [&](Group group) {
    const auto net = make(group->rank()), reference = make(0);
    const auto averager = Wrap(group, net);
    for (int rank = 0; rank < 2; ++rank) reference->forward(Input(rank)).sum().backward();
    net->forward(Input(group->rank())).sum().backward();
    EXPECT_TRUE(torch::allclose(net->fc->weight.grad(), reference->fc->weight.grad() / 2));
  });
}

// ---------------------------------------------------------------------- test_c10d_common.py

void TestNoSync(int micro_batches, bool by_hand) {
  RunRanks(2, [&](Group group) {
    Net net = NewNet(), reference = NewNet();
    const auto averager = Wrap(group, net);
    for (int step = 0; step < 2; ++step) {
      const auto loss = [&](Net m, int i, int rank) {
        return m->forward(Input(100 * step + 10 * i + rank)).sum();
      };
      const auto want = ExpectedGradients(reference, 2, [&](Net m, int rank) {
        Tensor sum = loss(m, 0, rank);
        for (int i = 1; i < micro_batches; ++i) sum = sum + loss(m, i, rank);
        return sum;
      });
      ZeroGrad(net);
      const int64_t before = group->collectives();
      {
        const GradientAverager::NoSync no_sync(*averager);
        const GradientAverager::NoSync nested(*averager);
        for (int i = 0; i < micro_batches - 1; ++i) loss(net, i, group->rank()).backward();
        if (by_hand) loss(net, micro_batches - 1, group->rank()).backward();
      }
      EXPECT_EQ(group->collectives(), before);
      if (by_hand) {
        EXPECT_TRUE(averager->Average().ok());
      } else {
        loss(net, micro_batches - 1, group->rank()).backward();
      }
      ExpectGradients(net, want);
    }
  });
}
TEST(DistributedDataParallelConformance, AccumulateGradientsNoSync) { TestNoSync(3, false); }
TEST(DistributedDataParallelConformance, AccumulateGradientsModule) { TestNoSync(2, false); }
TEST(DistributedDataParallelConformance, AccumulateGradientsNoSyncAverageByHand) {
  TestNoSync(2, true);
}

TEST(DistributedDataParallelConformance, DdpSharedGradAccUnusedParams) {
  // What was added up without averaging counts, also where the last backward does not reach it.
  RunRanks(2, [](Group group) {
    PartlyUsed net = NewPartlyUsed(0), reference = NewPartlyUsed(0);
    const auto averager = Wrap(group, net);
    const auto want = ExpectedGradients(reference, 2, [](PartlyUsed m, int rank) {
      return m->forward(Input(rank), true).sum() + m->forward(Input(10 + rank), false).sum();
    });
    {
      const GradientAverager::NoSync no_sync(*averager);
      net->forward(Input(group->rank()), true).sum().backward();
    }
    net->forward(Input(10 + group->rank()), false).sum().backward();
    ExpectGradients(net, want);
  });
}

TEST(DistributedDataParallelConformance, NoGrad) {
  RunRanks(2, [](Group group) {
    Net net = NewNet();
    const auto averager = Wrap(group, net);
    const int64_t before = group->collectives();
    {
      const torch::NoGradGuard no_grad;
      EXPECT_FALSE(net->forward(Input(group->rank())).requires_grad());
    }
    EXPECT_EQ(group->collectives(), before);
    net->forward(Input(group->rank())).sum().backward();
    EXPECT_TRUE(net->fc1->weight.grad().defined());
  });
}

TEST(DistributedDataParallelConformance, VerifyModelAcrossRankWithoutLogger) {
  RunRanks(2, [](Group group) {
    nn::Linear net(4, group->rank() == 0 ? 3 : 2);
    const absl::Status status = GradientAverager::Create(group, *net).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "rank 1 has parameter 'bias': Float [2]"))
        << status;
  });
}

TEST(DistributedDataParallelConformance, DdpModelDiffNumParamsAcrossRanks) {
  RunRanks(2, [](Group group) {
    nn::Linear net(nn::LinearOptions(4, 3).bias(group->rank() == 0));
    const absl::Status status = GradientAverager::Create(group, *net).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "1 parameters")) << status;
  });
}

// ------------------------------------------------------------------------ distributed_test.py

TEST(DistributedDataParallelConformance, DdpSyncModuleStates) {
  RunRanks(3, [](Group group) {
    nn::BatchNorm1d net(3);
    {
      const torch::NoGradGuard no_grad;
      net->weight.fill_(group->rank());
      net->running_mean.fill_(group->rank());
      net->num_batches_tracked.fill_(group->rank());
    }
    const auto averager = Wrap(group, net);
    EXPECT_TRUE(net->weight.equal(torch::zeros({3})));
    EXPECT_TRUE(net->running_mean.equal(torch::zeros({3})));
    EXPECT_EQ(net->num_batches_tracked.item<int64_t>(), 0);
  });
}

TEST(DistributedDataParallelConformance, DdpBroadcastBuffer) {
  // Buffers are those of rank 0 after each averaged backward.
  RunRanks(2, [](Group group) {
    nn::BatchNorm1d net(3), alone(3);
    const auto averager = Wrap(group, net);
    for (int step = 0; step < 3; ++step) {
      net->forward(Input(10 * step + group->rank(), {4, 3})).sum().backward();
      alone->forward(Input(10 * step, {4, 3}));
      EXPECT_TRUE(net->running_mean.equal(alone->running_mean));
      EXPECT_TRUE(net->running_var.equal(alone->running_var));
      EXPECT_EQ(net->num_batches_tracked.item<int64_t>(), step + 1);
    }
  });
}

TEST(DistributedDataParallelConformance, DdpDevicesFrozenParameters) {
  RunRanks(2, [](Group group) {
    Net net = NewNet(), reference = NewNet();
    for (Net each : {net, reference}) each->fc2->weight.set_requires_grad(false);
    const auto averager = Wrap(group, net);
    const auto loss = [](Net m, int rank) { return m->forward(Input(rank)).sum(); };
    const auto want = ExpectedGradients(reference, 2, loss);
    loss(net, group->rank()).backward();
    EXPECT_FALSE(net->fc2->weight.grad().defined());
    ExpectGradients(net, want);
  });
}

// Ranks have 2, 4, 6... batches.
int Batches(int rank) { return 2 * (rank + 1); }

TEST(DistributedDataParallelConformance, DdpUnevenInputs) {
  // Those that go on divide by the size of the group.
  RunRanks(3, [](Group group) {
    Net net = NewNet(), reference = NewNet();
    const auto averager = Wrap(group, net);
    for (int step = 0; step < Batches(group->rank()); ++step) {
      const auto want = ExpectedGradients(reference, 3, [&](Net m, int rank) {
        return m->forward(Input(10 * step + rank)).sum() * (step < Batches(rank) ? 1 : 0);
      });
      ZeroGrad(net);
      net->forward(Input(10 * step + group->rank())).sum().backward();
      ExpectGradients(net, want);
    }
    StepWithTheOthers(
        *averager, [&] { ZeroGrad(net); }, [] {});
  });
}

TEST(DistributedDataParallelConformance, DdpGradDivUnevenInputs) {
  RunRanks(3, [](Group group) {
    Net net = NewNet(), reference = NewNet();
    GradientAveragerOptions options = kSmallBuckets;
    options.divide_by_active = true;
    const auto averager = Wrap(group, net, options);
    for (int step = 0; step < Batches(group->rank()); ++step) {
      int active = 0;
      for (int rank = 0; rank < 3; ++rank) active += step < Batches(rank) ? 1 : 0;
      const auto want = ExpectedGradients(reference, active, [&](Net m, int i) {
        return m->forward(Input(10 * step + (3 - active) + i)).sum();
      });
      ZeroGrad(net);
      net->forward(Input(10 * step + group->rank())).sum().backward();
      ExpectGradients(net, want);
    }
    StepWithTheOthers(
        *averager, [&] { ZeroGrad(net); }, [] {});
  });
}

struct NormedImpl : nn::Module {
  NormedImpl() {
    fc = register_module("fc", nn::Linear(8, 3));
    norm = register_module("norm", nn::BatchNorm1d(3));
  }
  Tensor forward(const Tensor& x) { return norm(fc(x)); }
  nn::Linear fc{nullptr};
  nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Normed);

TEST(DistributedDataParallelConformance, DdpJoinModelEquivalence) {
  // The last to go on is rank 2, or rank 0: all end with its parameters and buffers.
  for (const bool backwards : {false, true}) {
    const auto batches = [&](int rank) { return Batches(backwards ? 2 - rank : rank); };
    std::vector<std::vector<Tensor>> parameters(3), buffers(3);
    RunRanks(3, [&](Group group) {
      Normed net = Seeded(group->rank(), [] { return Normed(); });
      const auto averager = Wrap(group, net);
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      for (int step = 0; step < batches(group->rank()); ++step) {
        optimizer.zero_grad();
        net->forward(Input(10 * step + group->rank())).square().mean().backward();
        optimizer.step();
      }
      StepWithTheOthers(
          *averager, [&] { optimizer.zero_grad(); }, [&] { optimizer.step(); });
      EXPECT_EQ(net->norm->num_batches_tracked.item<int64_t>(), 6);
      parameters[group->rank()] = net->parameters();
      buffers[group->rank()] = net->buffers();
      // And it goes on.
      net->forward(Input(group->rank())).sum().backward();
    });
    for (int rank = 1; rank < 3; ++rank) {
      for (size_t i = 0; i < parameters[0].size(); ++i) {
        EXPECT_TRUE(parameters[rank][i].equal(parameters[0][i])) << rank << ", " << i;
      }
      for (size_t i = 0; i < buffers[0].size(); ++i) {
        EXPECT_TRUE(buffers[rank][i].equal(buffers[0][i])) << rank << ", " << i;
      }
    }
  }
}

TEST(DistributedDataParallelConformance, DdpUnevenInputJoinNobodyHadAny) {
  RunRanks(2, [](Group group) {
    Net net = NewNet();
    const auto averager = Wrap(group, net);
    EXPECT_FALSE(averager->Join().value());
  });
}

TEST(DistributedDataParallelConformance, DdpUnevenInputException) {
  // Without Join() a rank that has ended is an error of those that go on, rather than a hang.
  RunRanks(2, [](Group group) {
    Net net = NewNet();
    const auto averager = Wrap(group, net);
    net->forward(Input(0)).sum().backward();
    if (group->rank() == 0) return;
    EXPECT_THROW(net->forward(Input(0)).sum().backward(), c10::Error);
  });
}

TEST(DistributedDataParallelConformance, DdpZeroOutputFeatures) {
  struct EmptyImpl : nn::Module {
    EmptyImpl() {
      weight = register_parameter("weight", torch::ones({8, 3}));
      nothing = register_parameter("nothing", torch::ones({0, 3}));
    }
    Tensor forward(const Tensor& x) { return x.matmul(weight).sum() + nothing.sum(); }
    Tensor weight, nothing;
  };
  RunRanks(2, [](Group group) {
    const auto net = std::make_shared<EmptyImpl>();
    const auto averager = Wrap(group, net);
    net->forward(Input(group->rank())).backward();
    EXPECT_EQ(net->nothing.grad().numel(), 0);
    EXPECT_TRUE(torch::allclose(net->weight.grad(),
                                (Input(0) + Input(1)).sum(0).div(2).unsqueeze(1).expand({8, 3})));
  });
}

}  // namespace
}  // namespace distgrad
