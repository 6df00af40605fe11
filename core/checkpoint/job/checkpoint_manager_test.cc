// Workers of one process that save and load together; and what a disk and a network do to that.
#include "core/checkpoint/job/checkpoint_manager.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>
#include <sys/resource.h>
#include <torch/optim/adam.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "core/base/crc32c.h"
#include "core/base/origin.h"
#include "core/checkpoint/durable_file.h"
#include "core/checkpoint/job/checkpoint_folder.h"
#include "core/checkpoint/job/manifest.h"
#include "core/checkpoint/job/messages.h"
#include "core/checkpoint/safetensors.h"
#include "core/checkpoint/safetensors_header.h"
#include "core/membership/store/in_process_store.h"
#include "core/optim/local_optimizer.h"
#include "core/worker/optimizer.h"
#include "gtest/gtest.h"
#include "tests/testing/cluster.h"
#include "tests/testing/forwarding_store.h"
#include "tests/testing/no_descriptors.h"

namespace distgrad {
namespace {

namespace fs = std::filesystem;
using Code = absl::StatusCode;
using Strings = std::vector<std::string>;

std::string Read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}
void Write(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}
// Damages a file.
void FlipLastBit(const fs::path& path) {
  std::string bytes = Read(path);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  Write(path, bytes);
}

// What a manager asks a part first when it loads the checkpoint of a folder.
std::string CheckOf(const std::string& folder, uint64_t token) {
  return *Encode(CheckRequest{.token = token,
                              .folder = folder,
                              .manifest = Crc32c(Read(folder + "/manifest.json")),
                              .strict = true});
}

// A model's layer with its optimizer, as one worker has it.
struct Layer {
  explicit Layer(double value, int64_t size = 10) {
    weight = at::full({size, 3}, value).requires_grad_();
    bias = at::full({size}, value + 1).requires_grad_();
    adam = std::make_unique<torch::optim::Adam>(std::vector<at::Tensor>{weight, bias}, 0.1);
  }
  void Step(double gradient) const {
    weight.mutable_grad() = at::full_like(weight, gradient);
    bias.mutable_grad() = at::full_like(bias, -gradient);
    adam->step();
  }
  TensorMap Tensors(const std::string& name) const {
    return {{name + ".weight", weight}, {name + ".bias", bias}};
  }
  bool Equals(const Layer& other) const {
    return at::equal(weight, other.weight) && at::equal(bias, other.bias);
  }

  at::Tensor weight, bias;
  std::unique_ptr<torch::optim::Adam> adam;
};

// Fails the calls of the kind that a test says.
class FaultyCalls final : public FileCalls {
 public:
  ssize_t Write(int fd, const void* data, size_t size) override {
    if (on_write != nullptr) on_write();
    if (write_error == 0) return FileCalls::Write(fd, data, size);
    errno = write_error;
    return -1;
  }
  int Renameat(int folder, const char* from, const char* to) override {
    return is_elsewhere ? unlinkat(folder, from, 0) : FileCalls::Renameat(folder, from, to);
  }

  std::atomic<int> write_error{0};
  std::atomic<bool> is_elsewhere{false};  // what is written is not seen in the folder
  std::function<void()> on_write;
};

class CheckpointManagerTest : public CheckpointFolderTest {
 protected:
  std::unique_ptr<CheckpointPart> Part(Worker& worker, CheckpointContents contents) {
    absl::StatusOr<std::unique_ptr<CheckpointPart>> part =
        CheckpointPart::Create(&worker, std::move(contents));
    EXPECT_TRUE(part.ok()) << part.status();
    return *std::move(part);
  }
  std::unique_ptr<CheckpointManager> Manager(Worker& worker,
                                             CheckpointManagerOptions options = {}) {
    absl::StatusOr<std::unique_ptr<CheckpointManager>> manager =
        CheckpointManager::Create(&worker, folder_, std::move(options));
    EXPECT_TRUE(manager.ok()) << manager.status();
    return *std::move(manager);
  }
};

TEST_F(CheckpointManagerTest, AJobGoesOnWhereItWas) {
  const auto run = [&](bool stops) {
    std::vector<Layer> layers;
    layers.emplace_back(1);
    layers.emplace_back(2);
    CheckpointValues values[2];
    const auto job = [&](int steps, bool loads) {
      Cluster cluster({.workers = 2});
      std::vector<std::unique_ptr<CheckpointPart>> parts;
      for (int i = 0; i < 2; ++i) {
        parts.push_back(Part(cluster[i], {.tensors = layers[i].Tensors(absl::StrCat("layer", i)),
                                          .optimizers = {{"", layers[i].adam.get()}},
                                          .save_values =
                                              [i] {
                                                return CheckpointValues{
                                                    {"who", std::string(1, 'a' + i)},
                                                    {"bytes", std::string("\0\xff", 2)}};
                                              },
                                          .load_values =
                                              [&values, i](const LoadedValues& loaded) {
                                                values[i] = loaded.values;
                                                EXPECT_EQ(loaded.workers.size(), 2u);
                                                EXPECT_EQ(loaded.step, 3);
                                                return absl::OkStatus();
                                              }}));
      }
      const auto manager = Manager(cluster[1]);
      if (loads) {
        const absl::StatusOr<LoadedCheckpoint> loaded = manager->Load();
        ASSERT_TRUE(loaded.ok()) << loaded.status();
        EXPECT_EQ(loaded->step, 3);
      }
      for (int step = 0; step < steps; ++step) {
        for (const Layer& layer : layers) layer.Step(0.5 + step);
      }
      if (!loads) {
        const absl::Status saved = manager->Save(3);
        ASSERT_TRUE(saved.ok()) << saved;
      }
    };
    job(3, false);
    if (stops) {
      layers.clear();
      layers.emplace_back(-1);
      layers.emplace_back(-2);
    }
    job(2, true);
    EXPECT_EQ(values[0]["who"], "a");
    EXPECT_EQ(values[1]["who"], "b");
    EXPECT_EQ(values[1]["bytes"], std::string("\0\xff", 2));
    return layers;
  };
  const std::vector<Layer> whole = run(false), stopped = run(true);
  EXPECT_TRUE(whole[0].Equals(stopped[0]));
  EXPECT_TRUE(whole[1].Equals(stopped[1]));
  EXPECT_FALSE(whole[0].Equals(whole[1]));
  EXPECT_EQ(Names(), Strings{"step-000003"});
  // As others read it.
  const absl::StatusOr<TensorMap> file =
      LoadSafetensors(folder_ + "/step-000003/model-00002-of-00002.safetensors");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->count("layer1.weight"), 1u);
  EXPECT_TRUE(fs::exists(folder_ + "/step-000003/optimizer-00001-of-00002.safetensors"));
}

// Each of our optimizers may be given, and one may be loaded in the place of another.
TEST_F(CheckpointManagerTest, AnotherSplitTakesTheStateByItsNames) {
  std::vector<Layer> layers;
  for (int i = 0; i < 3; ++i) layers.emplace_back(i);
  {
    Cluster cluster({.workers = 3});
    layers[0].Step(1);
    layers[1].Step(2);  // the last one takes none: it has no state
    auto local = LocalOptimizer(std::move(layers[0].adam));
    auto all = *Optimizer::Create(&cluster[1], std::move(layers[1].adam));
    const auto a =
        Part(cluster[0], {.tensors = layers[0].Tensors("l0"), .optimizers = {{"adam", &local}}});
    const auto b =
        Part(cluster[1], {.tensors = layers[1].Tensors("l1"), .optimizers = {{"adam", all.get()}}});
    const auto c = Part(cluster[2], {.tensors = layers[2].Tensors("l2"),
                                     .optimizers = {{"adam", layers[2].adam.get()}}});
    const absl::Status saved = Manager(cluster[0])->Save(1);
    ASSERT_TRUE(saved.ok()) << saved;
    // Back on the same ones, they go on as they would have.
    ASSERT_TRUE(Manager(cluster[2])->Load().ok());
  }
  // All of it on one worker of another name, with one optimizer of one group.
  Cluster cluster({.workers = 2});
  std::vector<Layer> now;
  TensorMap tensors;
  std::vector<at::Tensor> parameters;
  for (int i = 0; i < 3; ++i) {
    now.emplace_back(-1);
    tensors.merge(now[i].Tensors(absl::StrCat("l", i)));
    parameters.push_back(now[i].weight);
    parameters.push_back(now[i].bias);
  }
  torch::optim::Adam adam(parameters, 0.7);
  const auto part = Part(cluster[1], {.tensors = tensors, .optimizers = {{"adam", &adam}}});
  const absl::StatusOr<LoadedCheckpoint> loaded =
      Manager(cluster[0], {.workers = {WorkerName(1)}})->Load();
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(now[i].Equals(layers[i])) << i;
  EXPECT_EQ(adam.param_groups()[0].options().get_lr(), 0.1);
  EXPECT_EQ(adam.state().size(), 4u);
  const auto step_of = [&](const at::Tensor& parameter) {
    return static_cast<torch::optim::AdamParamState&>(
               *adam.state().at(parameter.unsafeGetTensorImpl()))
        .step();
  };
  EXPECT_EQ(step_of(now[1].bias), 1);
}

// `tools:checkpoint` takes both, so both are given here.
TEST_F(CheckpointManagerTest, TheFolderOfOneCheckpointIsNotThatOfAJob) {
  Cluster cluster({.workers = 1});
  Layer a(1);
  const auto part = Part(cluster[0], {.tensors = a.Tensors("a")});
  ASSERT_TRUE(Manager(cluster[0])->Save(7).ok());
  const std::string one = folder_ + "/step-000007";
  // Not kNotFound, at which a program begins at step 0.
  for (const absl::Status& status :
       {LoadCheckpoint(&cluster[0], one).status(), LoadCheckpoint(&cluster[0], one + "/").status(),
        CheckpointManager::Create(&cluster[0], one).status()}) {
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << status;
    EXPECT_TRUE(absl::StrContains(
        status.message(), absl::StrCat("step 7: give the folder that it is in, ", folder_, ",")))
        << status;
  }
  EXPECT_FALSE(fs::exists(one + "/.lock"));
  const std::string manifest = Read(one + "/manifest.json");
  FlipLastBit(one + "/manifest.json");
  const std::string latest = folder_ + "/latest";
  fs::create_directory_symlink("step-000007", latest);
  for (const std::string& folder : {one, latest}) {
    for (const absl::Status& status : {LoadCheckpoint(&cluster[0], folder).status(),
                                       CheckpointManager::Create(&cluster[0], folder).status()}) {
      EXPECT_EQ(status.code(), Code::kDataLoss) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), folder + "/manifest.json")) << status;
    }
  }
  EXPECT_FALSE(fs::exists(one + "/.lock"));
  Write(one + "/manifest.json", manifest);
  EXPECT_TRUE(LoadCheckpoint(&cluster[0], folder_, {.step = 7}).ok());
}

TEST_F(CheckpointManagerTest, AManifestOfSomebodyElsesMakesNoCheckpointOfAFolder) {
  Cluster cluster({.workers = 1});
  const auto part = Part(cluster[0], {.tensors = {{"x", at::ones({1})}}});
  fs::create_directories(folder_);
  for (const char* const text : {"{}", "no JSON", "{\"manifest_version\": 3}"}) {
    Write(folder_ + "/manifest.json", text);
    const auto manager = CheckpointManager::Create(&cluster[0], folder_);
    ASSERT_TRUE(manager.ok()) << manager.status();
    const absl::Status saved = (*manager)->Save(1);
    EXPECT_TRUE(saved.ok()) << saved;
    EXPECT_TRUE((*manager)->Load().ok());
    EXPECT_TRUE(LoadCheckpoint(&cluster[0], folder_).ok());
    EXPECT_EQ(Read(folder_ + "/manifest.json"), text);
  }
}

// Whatever can be saved where it lies can be copied before.
TEST_F(CheckpointManagerTest, ASnapshotHasAnyTensor) {
  Cluster cluster({.workers = 1});
  const at::Tensor bytes = at::arange(8, at::kByte);
  const TensorMap tensors = {{"bool", at::ones({3}, at::kBool)},
                             {"byte", bytes},
                             {"complex", at::full({3}, 2.5, at::kComplexFloat).conj()},
                             {"double", at::full({1}, 2.5, at::kDouble)},
                             {"empty", at::ones({0, 3})},
                             {"f4", bytes.view(at::kFloat4_e2m1fn_x2)},
                             {"f8", bytes.view(at::kFloat8_e8m0fnu)},
                             {"scalar", at::full({}, 3.5)},
                             {"slice", at::arange(10).slice(0, 1, 10, 4)},
                             {"transposed", at::arange(12, at::kFloat).view({3, 4}).t()},
                             {"u16", bytes.view(at::kUInt16)},
                             {"zz", at::full({700'000}, 0.5)}};
  const auto part = Part(cluster[0], {.tensors = tensors});
  const auto manager = Manager(cluster[0]);
  const absl::StatusOr<Future<Unit>> saved = manager->SaveAsync(1);
  ASSERT_TRUE(saved.ok()) << saved.status();
  ASSERT_TRUE(saved->Wait().ok()) << saved->Wait().status();
  ASSERT_TRUE(manager->Save(2).ok());
  const auto file = [&](const char* step) {
    return Read(absl::StrCat(folder_, "/step-00000", step, "/model-00001-of-00001.safetensors"));
  };
  EXPECT_TRUE(file("1") == file("2"));
  EXPECT_GT(file("1").size(), 2'800'000u);
  // No file has it, so no copy is made.
  const at::Tensor table = at::ones({4, 3}).requires_grad_();
  torch::optim::SGD sgd({table}, torch::optim::SGDOptions(0.1).momentum(0.9));
  const auto other = CheckpointPart::Create(
      &cluster[0], {.tensors = {{"table", table}}, .optimizers = {{"sgd", &sgd}}}, "other");
  ASSERT_TRUE(other.ok()) << other.status();
  table.mutable_grad() =
      at::sparse_coo_tensor(at::ones({1, 1}, at::kLong), at::ones({1, 3}), {4, 3});
  sgd.step();
  const absl::StatusOr<std::unique_ptr<CheckpointManager>> of_other =
      CheckpointManager::Create(&cluster[0], folder_ + "/other", {.name = "other"});
  ASSERT_TRUE(of_other.ok()) << of_other.status();
  const absl::Status sparse = (*of_other)->SaveAsync(1).status();
  EXPECT_EQ(sparse.code(), Code::kInvalidArgument) << sparse;
  EXPECT_TRUE(absl::StrContains(sparse.message(), "'state.table.momentum_buffer' is not dense"))
      << sparse;
}

// Each worker's part of an optimizer may be of another class.
TEST_F(CheckpointManagerTest, OneOptimizerMayBeOfSeveralClasses) {
  Cluster cluster({.workers = 2});
  Layer a(1);
  const at::Tensor b = at::ones({4}).requires_grad_();
  torch::optim::SGD sgd({b}, torch::optim::SGDOptions(0.1).momentum(0.9));
  const auto step = [&] {
    a.Step(1);
    b.mutable_grad() = at::full_like(b, 0.5);
    sgd.step();
  };
  step();
  const auto part_a =
      Part(cluster[0], {.tensors = a.Tensors("a"), .optimizers = {{"both", a.adam.get()}}});
  auto part_b = Part(cluster[1], {.tensors = {{"b", b}}, .optimizers = {{"both", &sgd}}});
  const auto manager = Manager(cluster[0]);
  ASSERT_TRUE(manager->Save(1).ok());
  step();
  const at::Tensor weight = a.weight.detach().clone(), b_later = b.detach().clone();
  const absl::StatusOr<LoadedCheckpoint> loaded = manager->Load();
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  step();
  EXPECT_TRUE(at::equal(a.weight, weight));
  EXPECT_TRUE(at::equal(b, b_later));
  // But a parameter's state is that of the class that made it.
  part_b = nullptr;
  torch::optim::Adam adam({b}, 0.1);
  part_b = Part(cluster[1], {.tensors = {{"b", b}}, .optimizers = {{"both", &adam}}});
  const absl::Status other = manager->Load().status();
  EXPECT_EQ(other.code(), Code::kInvalidArgument) << other;
  EXPECT_TRUE(absl::StrContains(
      other.message(), "worker 'worker1': 'b': it is of the optimizer 'SGD', and this is Adam"))
      << other;
}

TEST_F(CheckpointManagerTest, ReplicasSaveEachTensorOnce) {
  Cluster cluster({.workers = 2});
  std::vector<Layer> replicas;
  replicas.emplace_back(5);
  replicas.emplace_back(5);
  std::vector<std::unique_ptr<CheckpointPart>> parts;
  for (int i = 0; i < 2; ++i) {
    replicas[i].Step(1);
    parts.push_back(Part(cluster[i], {.tensors = replicas[i].Tensors("l"),
                                      .optimizers = {{"adam", replicas[i].adam.get()}}}));
  }
  const auto manager = Manager(cluster[0]);
  ASSERT_TRUE(manager->Save(1).ok());
  size_t tensors = 0, states = 0, files = 0;
  for (const auto& entry : fs::directory_iterator(folder_ + "/step-000001")) {
    if (entry.path().extension() != ".safetensors") continue;
    const size_t count = LoadSafetensors(entry.path())->size();
    const bool is_model = absl::StartsWith(entry.path().filename().string(), "model");
    (is_model ? tensors : states) += count;
    files += is_model;
  }
  EXPECT_EQ(tensors, 2u);
  EXPECT_EQ(files, 2u) << "each worker writes its part of what both have";
  EXPECT_EQ(states, 6u);  // step, exp_avg, exp_avg_sq
  const at::Tensor weight = replicas[0].weight.detach().clone();
  for (Layer& replica : replicas) {
    replica.Step(7);
    EXPECT_FALSE(at::equal(replica.weight, weight));
  }
  const absl::StatusOr<LoadedCheckpoint> loaded = manager->Load();
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  for (const Layer& replica : replicas) EXPECT_TRUE(at::equal(replica.weight, weight));
}

TEST_F(CheckpointManagerTest, WhatDoesNotFitIsListed) {
  Cluster cluster({.workers = 2});
  at::Tensor same = at::ones({2}), other = at::ones({3}), old = at::ones({1});
  {
    const auto part =
        Part(cluster[1], {.tensors = {{"same", same}, {"other", other}, {"old", old}}});
    ASSERT_TRUE(Manager(cluster[0], {.workers = {WorkerName(1)}})->Save(1).ok());
  }
  at::Tensor same2 = at::zeros({2}), other2 = at::zeros({4}), new2 = at::zeros({1});
  torch::optim::SGD sgd({same2}, 0.1);
  const auto part =
      Part(cluster[1], {.tensors = {{"same", same2}, {"other", other2}, {"new", new2}},
                        .optimizers = {{"sgd", &sgd}}});
  const CheckpointManagerOptions of = {.workers = {WorkerName(1)}};
  const absl::Status strict = LoadCheckpoint(&cluster[0], folder_, {}, of).status();
  EXPECT_EQ(strict.code(), Code::kInvalidArgument) << strict;
  for (const char* part_of_it :
       {"Missing: 'new' of worker 'worker1'", "Unexpected: 'old'",
        "Different: 'other' of worker 'worker1' has", "'same' in", "step-000001"}) {
    EXPECT_TRUE(absl::StrContains(strict.message(), part_of_it)) << part_of_it << ": " << strict;
  }
  EXPECT_TRUE(at::equal(same2, at::zeros({2})));
  const absl::StatusOr<LoadedCheckpoint> loose =
      LoadCheckpoint(&cluster[0], folder_, {.strict = false}, of);
  ASSERT_TRUE(loose.ok()) << loose.status();
  EXPECT_TRUE(at::equal(same2, same));
  EXPECT_EQ(loose->missing.size(), 2u);  // a parameter's state too
  EXPECT_EQ(loose->unexpected, Strings{"'old'"});
  EXPECT_EQ(loose->mismatched.size(), 1u);
}

// The disk has room again for one that is removed.
TEST_F(CheckpointManagerTest, ALoadThatDoesNotFitLeavesNoFileOpen) {
  Cluster cluster({.workers = 2});
  Layer a(1), b(2);
  const auto part_a = Part(cluster[0], {.tensors = a.Tensors("a")});
  auto part_b = Part(cluster[1], {.tensors = b.Tensors("b")});
  const auto manager = Manager(cluster[0]);
  ASSERT_TRUE(manager->Save(1).ok());
  part_b = nullptr;
  part_b = Part(cluster[1], {.tensors = b.Tensors("c")});
  const absl::Status loaded = manager->Load().status();
  EXPECT_EQ(loaded.code(), Code::kInvalidArgument) << loaded;
  const std::string step = fs::canonical(folder_).string() + "/step-";
  const auto open_files = [&] {
    int count = 0;
    for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      count += absl::StartsWith(fs::read_symlink(entry.path(), gone).string(), step);
    }
    return count;
  };
  const absl::Time patience = absl::Now() + absl::Seconds(30);
  while (open_files() > 0 && absl::Now() < patience) std::this_thread::yield();
  EXPECT_EQ(open_files(), 0);
}

TEST_F(CheckpointManagerTest, ValuesAreNotLarge) {
  Cluster cluster({.workers = 1});
  std::string value(kMaxCheckpointValues, 'x');
  const auto part = Part(cluster[0], {.save_values = [&]() -> absl::StatusOr<CheckpointValues> {
                           return CheckpointValues{{"v", value}};
                         }});
  const auto manager = Manager(cluster[0]);
  const absl::Status saved = manager->Save(1);
  EXPECT_EQ(saved.code(), Code::kInvalidArgument) << saved;
  EXPECT_TRUE(absl::StrContains(saved.message(), "its values have 1048577 bytes")) << saved;
  value.pop_back();
  EXPECT_EQ(manager->Save(1), absl::OkStatus());
}

TEST_F(CheckpointManagerTest, ACopyIsNotTheCheckpointOfItsName) {
  Cluster cluster({.workers = 1});
  const at::Tensor weight = at::zeros({3});
  const auto part = Part(cluster[0], {.tensors = {{"weight", weight}}});
  ASSERT_TRUE(Manager(cluster[0])->Save(100).ok());
  fs::copy(folder_ + "/step-000100", folder_ + "/step-000200", fs::copy_options::recursive);
  const absl::StatusOr<LoadedCheckpoint> last = LoadCheckpoint(&cluster[0], folder_);
  ASSERT_TRUE(last.ok()) << last.status();
  EXPECT_EQ(last->step, 100);
  const absl::Status copy = LoadCheckpoint(&cluster[0], folder_, {.step = 200}).status();
  EXPECT_EQ(copy.code(), Code::kInvalidArgument) << copy;
  EXPECT_TRUE(absl::StrContains(copy.message(), "step-000200: ")) << copy;
  EXPECT_TRUE(absl::StrContains(copy.message(), "it has the checkpoint of step 100")) << copy;
}

// Calls a function when a manager first calls that one of a part. Thread-safe.
class WhenAsked final : public FaultInjector {
 public:
  WhenAsked(absl::string_view asked, std::function<void()> function)
      : asked_(asked), function_(std::move(function)) {}
  Action OnSend(const std::string&, const std::string&, Packet& packet) override {
    if (absl::StrContains(packet.bytes, asked_) && is_on.exchange(false)) function_();
    return Action::kDeliver;
  }
  std::atomic<bool> is_on{false};

 private:
  const std::string asked_;
  const std::function<void()> function_;
};

// Who asks for a step gets that or none, also where another job renames and copies meanwhile.
TEST_F(CheckpointManagerTest, AnotherStepDoesNotTakeThePlaceOfTheOneThatIsAskedFor) {
  const auto faults = std::make_shared<WhenAsked>(kCheckpointPlan, [this] {
    fs::remove_all(folder_ + "/step-000100");
    fs::copy(folder_ + "/step-000200", folder_ + "/step-000100", fs::copy_options::recursive);
  });
  Cluster cluster({.workers = 2, .faults = faults});
  const at::Tensor weight = at::ones({3});
  const auto part = Part(cluster[1], {.tensors = {{"weight", weight}}});
  const auto manager = Manager(cluster[0], {.workers = {WorkerName(1)}});
  for (const int64_t step : {100, 200}) {
    weight.fill_(step);
    ASSERT_TRUE(manager->Save(step).ok());
  }
  weight.zero_();
  faults->is_on = true;
  const absl::Status status = manager->Load({.step = 100}).status();
  EXPECT_FALSE(faults->is_on);
  EXPECT_EQ(status.code(), Code::kInvalidArgument) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "it has the checkpoint of step 200")) << status;
  EXPECT_TRUE(at::equal(weight, at::zeros({3}))) << "nothing is loaded";
}

// One of them would have the values of the other.
TEST_F(CheckpointManagerTest, TensorsThatShareMemoryHaveToHaveTheSameValues) {
  Cluster cluster({.workers = 1});
  const at::Tensor embed = at::arange(12, at::kFloat).view({4, 3});
  {
    const auto part =
        Part(cluster[0], {.tensors = {{"embed", embed}, {"head", embed + 1}, {"row", embed[2]}}});
    const auto manager = Manager(cluster[0]);
    ASSERT_TRUE(manager->Save(1).ok());
  }
  const at::Tensor tied = at::zeros({4, 3});
  {
    const auto part =
        Part(cluster[0], {.tensors = {{"embed", tied}, {"head", tied}, {"row", at::ones({3})}}});
    const absl::Status status = LoadCheckpoint(&cluster[0], folder_).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "'embed'")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "'head'")) << status;
    EXPECT_TRUE(at::equal(tied, at::zeros({4, 3}))) << "nothing is loaded";
    const absl::StatusOr<LoadedCheckpoint> some =
        LoadCheckpoint(&cluster[0], folder_, {.strict = false});
    ASSERT_TRUE(some.ok()) << some.status();
    EXPECT_EQ(some->mismatched.size(), 1u);
    EXPECT_TRUE(at::equal(tied, embed)) << "the first by its name";
  }
  // Nor those that overlap otherwise.
  const at::Tensor other = at::zeros({4, 3});
  const auto part = Part(
      cluster[0], {.tensors = {{"embed", other}, {"head", at::zeros({4, 3})}, {"row", other[1]}}});
  const absl::Status status = LoadCheckpoint(&cluster[0], folder_).status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "'row' of worker 'worker0' shares memory"))
      << status;
  EXPECT_TRUE(at::equal(other, at::zeros({4, 3}))) << "nothing is loaded";
  const absl::StatusOr<LoadedCheckpoint> some =
      LoadCheckpoint(&cluster[0], folder_, {.strict = false});
  ASSERT_TRUE(some.ok()) << some.status();
  EXPECT_EQ(some->mismatched.size(), 1u);
  EXPECT_TRUE(at::equal(other, embed)) << "the first by its name";
}

TEST_F(CheckpointManagerTest, ADamagedByteIsFoundAndNothingIsLoaded) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937 random(seed);
  Cluster cluster({.workers = 2});
  std::vector<Layer> layers;
  std::vector<std::unique_ptr<CheckpointPart>> parts;
  for (int i = 0; i < 2; ++i) {
    layers.emplace_back(i);
    layers[i].Step(1);
    parts.push_back(Part(cluster[i], {.tensors = layers[i].Tensors(absl::StrCat("l", i)),
                                      .optimizers = {{"adam", layers[i].adam.get()}}}));
  }
  const auto manager = Manager(cluster[0]);
  for (const int64_t step : {10, 20}) ASSERT_TRUE(manager->Save(step).ok());
  const at::Tensor saved = layers[1].weight.detach().clone();
  int files = 0;
  for (const auto& entry : fs::directory_iterator(folder_ + "/step-000020")) {
    ++files;
    const std::string whole = Read(entry.path());
    for (int round = 0; round < 8; ++round) {
      std::string bytes = whole;
      const size_t at = random() % bytes.size();
      if (round == 0) {
        bytes.resize(at);
      } else {
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << random() % 8));
      }
      SCOPED_TRACE(absl::StrCat("byte ", at, " of ", entry.path().string(), ", round ", round));
      Write(entry.path(), bytes);
      {
        const at::NoGradGuard no_grad;
        layers[0].weight.fill_(77);
        layers[1].weight.fill_(77);
      }
      const absl::Status loaded = manager->Load().status();
      EXPECT_EQ(loaded.code(), Code::kDataLoss) << loaded;
      EXPECT_TRUE(absl::StrContains(loaded.message(),
                                    absl::StrCat("step-000020/", entry.path().filename().string())))
          << loaded;
      EXPECT_TRUE(absl::StrContains(loaded.message(), "step 10")) << loaded;
      for (const Layer& layer : layers) EXPECT_EQ(layer.weight.mean().item<float>(), 77);
      const absl::StatusOr<LoadedCheckpoint> older = manager->Load({.fall_back = true});
      ASSERT_TRUE(older.ok()) << older.status();
      EXPECT_EQ(older->step, 10);
      EXPECT_TRUE(at::equal(layers[1].weight, saved));
      EXPECT_TRUE(manager->Load({.step = 10}).ok());
      EXPECT_EQ(manager->Load({.step = 20}).status().code(), Code::kDataLoss);
      Write(entry.path(), whole);
      EXPECT_EQ(manager->Load()->step, 20);
    }
  }
  EXPECT_EQ(files, 5);
  fs::remove(folder_ + "/step-000020/model-00001-of-00002.safetensors");
  EXPECT_EQ(manager->Load().status().code(), Code::kDataLoss);
  EXPECT_EQ(manager->Load({.step = 30}).status().code(), Code::kNotFound);
}

// Only what is damaged, or not there, is passed over: another one may be read an hour later.
TEST_F(CheckpointManagerTest, AFileThatCannotBeReadIsNotDamaged) {
  Cluster cluster({.workers = 2});
  Layer a(1), b(2);
  b.Step(1);
  const auto part_a = Part(cluster[0], {.tensors = a.Tensors("a")});
  const auto part_b =
      Part(cluster[1], {.tensors = b.Tensors("b"), .optimizers = {{"adam", b.adam.get()}}});
  const auto manager = Manager(cluster[0]);
  for (const int64_t step : {10, 20}) ASSERT_TRUE(manager->Save(step).ok());
  const LoadOptions falls_back = {.fall_back = true};
  const auto check = [&](const LoadOptions& options, const std::string& names, const char* says) {
    const absl::Status loaded = manager->Load(options).status();
    EXPECT_FALSE(loaded.ok() || absl::IsDataLoss(loaded) || absl::IsNotFound(loaded)) << loaded;
    EXPECT_TRUE(absl::StrContains(loaded.message(), names)) << names << ": " << loaded;
    EXPECT_TRUE(absl::StrContains(loaded.message(), says)) << loaded;
    EXPECT_FALSE(absl::StrContains(loaded.message(), "damaged")) << loaded;
  };
  for (const char* file : {"manifest.json", "model-00002-of-00002.safetensors",
                           "optimizer.adam-00002-of-00002.safetensors"}) {
    const std::string path = absl::StrCat(folder_, "/step-000020/", file);
    fs::rename(path, path + ".away");
    fs::create_symlink(file, path);
    check(falls_back, path, "Too many levels of symbolic links");
    check({.step = 20, .fall_back = true}, path, "Too many levels of symbolic links");
    EXPECT_TRUE(manager->Load({.step = 10}).ok());
    fs::remove(path);
    fs::rename(path + ".away", path);
    EXPECT_EQ(manager->Load(falls_back)->step, 20);
  }
  // Both have their first file open, and no descriptor is left for another one.
  {
    const int next = dup(0);
    ASSERT_EQ(close(next), 0);
    rlimit before = {};
    ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
    const rlimit few = {static_cast<rlim_t>(next) + 1, before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
    check(falls_back, "worker 'worker", "Too many open files");
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  }
  fs::remove(folder_ + "/step-000020/model-00002-of-00002.safetensors");
  EXPECT_EQ(manager->Load(falls_back)->step, 10);
}

// Which need not have a part, so it would not be named by that.
TEST_F(CheckpointManagerTest, ErrorsOfTheLeaderNameIt) {
  Cluster cluster({.workers = 2});
  Layer a(1);
  const auto part = Part(cluster[1], {.tensors = a.Tensors("a")});
  const auto manager = Manager(cluster[0], {.workers = {WorkerName(1)}});
  ASSERT_TRUE(manager->Save(1).ok());
  absl::Status statuses[3];
  {
    const NoDescriptors none;
    statuses[0] = manager->Save(2);
    const absl::StatusOr<Future<Unit>> saved = manager->SaveAsync(2);
    statuses[1] = saved.ok() ? saved->Wait().status() : saved.status();
    statuses[2] = manager->Load().status();
  }
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), Code::kResourceExhausted) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "worker 'worker0'")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "Too many open files")) << status;
    const std::optional<ErrorOrigin> origin = OriginOf(status);
    EXPECT_TRUE(origin == (ErrorOrigin{0, ErrorOrigin::By::kDistgrad})) << status;
  }
}

// Memory may run out anywhere; here it is a function that throws.
TEST_F(CheckpointManagerTest, AnExceptionEndsTheTurn) {
  Cluster cluster({.workers = 1});
  Layer a(1);
  FaultyCalls calls;
  const auto part = Part(cluster[0], {.tensors = a.Tensors("a")});
  const auto manager = Manager(cluster[0], {.file_calls = &calls});
  calls.on_write = [] { throw std::runtime_error("no such disk"); };
  const absl::Status saved = manager->Save(1);
  EXPECT_TRUE(absl::StrContains(saved.message(), "no such disk")) << saved;
  const absl::StatusOr<Future<Unit>> async = manager->SaveAsync(1);
  ASSERT_TRUE(async.ok()) << async.status();
  EXPECT_TRUE(absl::StrContains(async->Wait().status().message(), "no such disk"));
  calls.on_write = nullptr;
  const absl::Status next = manager->Save(1, Deadline::After(absl::Minutes(1)));
  EXPECT_TRUE(next.ok()) << next;
  EXPECT_EQ(Names(), Strings{"step-000001"});
}

TEST_F(CheckpointManagerTest, NamesThatNoFileCanHaveAreRefusedAtOnce) {
  Cluster cluster({.workers = 1});
  const at::Tensor one = at::ones({1});
  for (const std::string& name : {std::string("__metadata__"), std::string("caf\xe9"),
                                  std::string(kMaxSafetensorsHeaderBytes, 'x')}) {
    const absl::Status refused =
        CheckpointPart::Create(&cluster[0], {.tensors = {{"good", one}, {name, one}}}).status();
    EXPECT_EQ(refused.code(), Code::kInvalidArgument) << refused;
    EXPECT_LT(refused.message().size(), 1000u);
  }
  const absl::Status says =
      CheckpointPart::Create(&cluster[0], {.tensors = {{"caf\xe9", one}}}).status();
  EXPECT_TRUE(absl::StrContains(says.message(), "caf\\xe9")) << says;
  EXPECT_TRUE(absl::StrContains(says.message(), "UTF-8")) << says;
  // What gives the values is asked at each save, and before anything is written.
  const auto part = Part(cluster[0], {.tensors = {{"good", one}}, .save_values = [] {
                                        return CheckpointValues{{"caf\xe9", "1"}};
                                      }});
  const auto manager = Manager(cluster[0]);
  const absl::Status saved = manager->SaveAsync(1).status();
  EXPECT_EQ(saved.code(), Code::kInvalidArgument) << saved;
  EXPECT_TRUE(absl::StrContains(saved.message(), "caf\\xe9")) << saved;
  EXPECT_TRUE(absl::StrContains(saved.message(), "worker 'worker0'")) << saved;
}

TEST_F(CheckpointManagerTest, ARemovedOptimizerIsNoMissingPart) {
  Cluster cluster({.workers = 2});
  Layer a(1), b(2);
  const std::unique_ptr<Optimizer> adam = *Optimizer::Create(&cluster[1], std::move(b.adam));
  const auto part_a = Part(cluster[0], {.tensors = a.Tensors("a")});
  const auto part_b =
      Part(cluster[1], {.tensors = b.Tensors("b"), .optimizers = {{"adam", adam.get()}}});
  const auto manager = Manager(cluster[0]);
  ASSERT_TRUE(manager->Save(1).ok());
  adam->Remove();
  for (const absl::Status& status :
       {manager->Save(2), manager->Load().status(),
        CheckpointPart::Create(
            &cluster[1], {.tensors = b.Tensors("b"), .optimizers = {{"adam", adam.get()}}}, "other")
            .status()}) {
    EXPECT_EQ(status.code(), Code::kFailedPrecondition) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "worker1")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "optimizer 'adam'")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "removed")) << status;
    EXPECT_FALSE(absl::StrContains(status.message(), "has no part")) << status;
  }
}

// A program tells what its own functions say from what distgrad says.
TEST_F(CheckpointManagerTest, ErrorsSayWhereTheyAreFrom) {
  Cluster cluster({.workers = 2});
  Layer a(1), b(2);
  absl::Status answer;
  const auto part_a = Part(cluster[0], {.tensors = a.Tensors("a")});
  auto part_b = Part(cluster[1], {.tensors = b.Tensors("b"),
                                  .save_values = [&]() -> absl::StatusOr<CheckpointValues> {
                                    if (absl::IsDataLoss(answer)) throw std::runtime_error("lost");
                                    if (!answer.ok()) return answer;
                                    return CheckpointValues();
                                  },
                                  .load_values =
                                      [&](const LoadedValues&) {
                                        if (absl::IsDataLoss(answer)) {
                                          throw std::runtime_error("lost");
                                        }
                                        return answer;
                                      }});
  // Else what a load that has failed has loaded is not saved.
  const auto manager = Manager(cluster[0], {.allow_dropping = true});
  const auto check = [](const absl::Status& status, const char* says, ErrorOrigin::By by) {
    EXPECT_TRUE(absl::StrContains(status.message(), "worker 'worker1'")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), says)) << status;
    const std::optional<ErrorOrigin> origin = OriginOf(status);
    EXPECT_TRUE(origin == (ErrorOrigin{1, by})) << status;
  };
  for (const int64_t step : {1, 2}) ASSERT_TRUE(manager->Save(step).ok());
  for (const absl::Status& each :
       {absl::NotFoundError("mine"), absl::DataLossError("thrown instead")}) {
    answer = each;
    const char* const says = absl::IsNotFound(each) ? "_values: mine" : "_values: lost";
    check(manager->Save(3), says, ErrorOrigin::By::kHandler);
    check(manager->SaveAsync(3).status(), says, ErrorOrigin::By::kHandler);
    check(manager->Load().status(), says, ErrorOrigin::By::kHandler);
    check(manager->Load({.fall_back = true}).status(), says, ErrorOrigin::By::kHandler);
  }
  answer = absl::OkStatus();
  FlipLastBit(folder_ + "/step-000002/model-00002-of-00002.safetensors");
  check(manager->Load().status(), "another tensor", ErrorOrigin::By::kDistgrad);
  part_b = nullptr;
  check(manager->Load().status(), "has no part", ErrorOrigin::By::kDistgrad);
  check(manager->Save(3), "has no part", ErrorOrigin::By::kDistgrad);
}

TEST_F(CheckpointManagerTest, AFullDiskIsSaidByTheWorkerAndTheOlderStays) {
  Cluster cluster({.workers = 2});
  Layer a(1), b(2);
  FaultyCalls of_worker, of_manager;
  const auto part_a = Part(cluster[0], {.tensors = a.Tensors("a")});
  const auto part_b = Part(cluster[1], {.tensors = b.Tensors("b"), .file_calls = &of_worker});
  const auto manager = Manager(cluster[0], {.keep = 1, .file_calls = &of_manager});
  ASSERT_TRUE(manager->Save(1).ok());
  for (const bool async : {false, true}) {
    const auto save = [&](int64_t step) {
      if (!async) return manager->Save(step);
      return manager->SaveAsync(step)->Wait().status();
    };
    of_worker.write_error = ENOSPC;
    const absl::Status full = save(2);
    EXPECT_TRUE(absl::StrContains(full.message(), "worker 'worker1'")) << full;
    EXPECT_TRUE(absl::StrContains(full.message(), "No space left on device")) << full;
    EXPECT_TRUE(absl::StrContains(full.message(), folder_)) << full;
    of_worker.write_error = 0;
    of_manager.write_error = EDQUOT;
    const absl::Status quota = save(2);
    EXPECT_TRUE(absl::StrContains(quota.message(), "manifest.json")) << quota;
    of_manager.write_error = 0;
    of_worker.is_elsewhere = true;
    const absl::Status unseen = save(2);
    EXPECT_EQ(unseen.code(), Code::kFailedPrecondition) << unseen;
    EXPECT_TRUE(absl::StrContains(unseen.message(), "has to be one that all workers see"))
        << unseen;
    of_worker.is_elsewhere = false;
    EXPECT_EQ(Names(), Strings{"step-000001"});
    EXPECT_EQ(manager->Load()->step, 1);
  }
  ASSERT_TRUE(manager->Save(2).ok());
  EXPECT_EQ(Names(), Strings{"step-000002"});
}

TEST_F(CheckpointManagerTest, AFolderMayVanish) {
  Cluster cluster({.workers = 1});
  Layer a(1);
  FaultyCalls calls;
  const auto part = Part(cluster[0], {.tensors = a.Tensors("a"), .file_calls = &calls});
  const auto manager = Manager(cluster[0]);
  ASSERT_TRUE(manager->Save(1).ok());
  calls.on_write = [&] { fs::remove_all(folder_); };
  const absl::Status during = manager->Save(2);
  EXPECT_EQ(during.code(), Code::kNotFound) << during;
  EXPECT_TRUE(absl::StrContains(during.message(), folder_)) << during;
  const absl::Status after = manager->Save(3);
  EXPECT_EQ(after.code(), Code::kNotFound) << after;
  EXPECT_EQ(manager->Load().status().code(), Code::kNotFound);
}

TEST_F(CheckpointManagerTest, OneJobWritesToAFolder) {
  Cluster cluster({.workers = 2});
  Layer a(1);
  const auto part = Part(cluster[0], {.tensors = a.Tensors("a")});
  const CheckpointManagerOptions of = {.workers = {WorkerName(0)}};
  const auto first = Manager(cluster[0], of);
  ASSERT_TRUE(first->Save(1).ok());
  const absl::Status second = CheckpointManager::Create(&cluster[1], folder_, of).status();
  EXPECT_EQ(second.code(), Code::kAborted) << second;
  EXPECT_TRUE(absl::StrContains(second.message(), "of host")) << second;
  // But another may read.
  EXPECT_TRUE(LoadCheckpoint(&cluster[1], folder_, {}, of).ok());
}

TEST_F(CheckpointManagerTest, TrainingGoesOnWhileASnapshotIsWritten) {
  Cluster cluster({.workers = 2});
  Layer a(1), b(2);
  absl::Notification writing, go_on;
  FaultyCalls calls;
  calls.on_write = [&] {
    if (!writing.HasBeenNotified()) writing.Notify();
    go_on.WaitForNotification();
  };
  a.Step(1);
  const auto part_a = Part(cluster[0], {.tensors = a.Tensors("a")});
  const auto part_b = Part(
      cluster[1],
      {.tensors = b.Tensors("b"), .optimizers = {{"adam", b.adam.get()}}, .file_calls = &calls});
  b.Step(1);
  const at::Tensor weight = b.weight.detach().clone();
  const auto manager = Manager(cluster[0]);
  const absl::StatusOr<Future<Unit>> saved = manager->SaveAsync(1);
  ASSERT_TRUE(saved.ok()) << saved.status();
  writing.WaitForNotification();
  b.Step(2);
  b.Step(3);
  EXPECT_FALSE(saved->Done());
  EXPECT_FALSE(fs::exists(folder_ + "/step-000001"));
  // The next one waits for this one.
  absl::Status second;
  std::thread next([&] { second = manager->Save(2); });
  go_on.Notify();
  EXPECT_TRUE(saved->Wait().ok()) << saved->Wait().status();
  next.join();
  EXPECT_TRUE(second.ok()) << second;
  const at::Tensor later = b.weight.detach().clone();
  ASSERT_TRUE(manager->Load({.step = 1}).ok());
  EXPECT_TRUE(at::equal(b.weight, weight));
  b.Step(2);
  b.Step(3);
  EXPECT_TRUE(at::equal(b.weight, later)) << "the optimizer's state was not that of the snapshot";
}

TEST_F(CheckpointManagerTest, AWorkerThatIsLostWhileItWritesFailsTheSave) {
  Cluster cluster({.workers = 2});
  Layer a(1), b(2);
  absl::Notification writing, go_on;
  FaultyCalls calls;
  const auto part_a = Part(cluster[0], {.tensors = a.Tensors("a")});
  auto part_b = Part(cluster[1], {.tensors = b.Tensors("b"), .file_calls = &calls});
  const auto manager = Manager(cluster[0]);
  ASSERT_TRUE(manager->Save(1).ok());
  calls.on_write = [&] {
    if (!writing.HasBeenNotified()) writing.Notify();
    go_on.WaitForNotification();
  };
  absl::Status saved;
  std::thread save([&] { saved = manager->Save(2); });
  writing.WaitForNotification();
  cluster[1].Abort();
  save.join();
  EXPECT_FALSE(saved.ok());
  EXPECT_TRUE(absl::StrContains(saved.message(), "worker1")) << saved;
  EXPECT_EQ(Names(), Strings{"step-000001"});
  go_on.Notify();
  part_b = nullptr;
  cluster.Kill(1);
  EXPECT_EQ(Names(), Strings{"step-000001"}) << "a late worker has written";
  const CheckpointManagerOptions of = {.workers = {WorkerName(0)}};
  EXPECT_TRUE(LoadCheckpoint(&cluster[0], folder_, {.strict = false}, of).ok());
}

// What comes of a save or load that has begun is no new work.
TEST_F(CheckpointManagerTest, AWorkerThatLeavesGoesOnWithASaveOrLoad) {
  for (const absl::string_view asked : {kCheckpointWrite, kCheckpointLoad}) {
    SCOPED_TRACE(asked);
    const at::Tensor weight = at::ones({3});
    Worker* leaves = nullptr;
    absl::Status left;
    const auto faults =
        std::make_shared<WhenAsked>(asked, [&] { left = leaves->Leave(absl::Now()); });
    Cluster cluster({.workers = 2, .faults = faults});
    leaves = &cluster[1];
    // What it waits for, meanwhile.
    ASSERT_TRUE(cluster[1]
                    .Register("f", [](Request&) -> absl::StatusOr<Message> { return Message{}; })
                    .ok());
    const Context step = cluster[0].NewContext();
    ASSERT_TRUE(cluster[0].Call(WorkerName(1), "f", {}, {.context = &step}).ok());
    auto part = Part(cluster[1], {.tensors = {{"weight", weight}}});
    const auto manager = Manager(cluster[0], {.workers = {WorkerName(1)}});
    ASSERT_TRUE(manager->Save(1).ok());
    weight.zero_();
    faults->is_on = true;
    if (asked == kCheckpointWrite) {
      const absl::Status saved = manager->Save(2);
      EXPECT_TRUE(saved.ok()) << saved;
    } else {
      const absl::Status loaded = manager->Load().status();
      EXPECT_TRUE(loaded.ok()) << loaded;
      EXPECT_TRUE(at::equal(weight, at::ones({3})));
    }
    EXPECT_FALSE(faults->is_on);
    EXPECT_EQ(left.code(), Code::kDeadlineExceeded) << left;
    for (const absl::Status& next : {manager->Save(3), manager->Load().status()}) {
      EXPECT_EQ(next.code(), Code::kUnavailable) << next;
      EXPECT_TRUE(absl::StrContains(next.message(), "it is leaving the job")) << next;
    }
    part = nullptr;
    cluster.Kill(1);  // it is to end, and not to wait for the other one
  }
}

TEST_F(CheckpointManagerTest, OnlyTheNewestAreKept) {
  Cluster cluster({.workers = 1});
  Layer a(1);
  const auto part = Part(cluster[0], {.tensors = a.Tensors("a")});
  const auto manager = Manager(cluster[0], {.keep = 2});
  for (const int64_t step : {1, 2, 3, 4}) ASSERT_TRUE(manager->Save(step).ok());
  EXPECT_EQ(Names(), (Strings{"step-000003", "step-000004"}));
  // Who goes back begins another history.
  ASSERT_TRUE(manager->Load({.step = 3}).ok());
  ASSERT_TRUE(manager->Save(3).ok());
  EXPECT_EQ(manager->Load()->step, 3);
}

// Else there would be fewer than `keep` that can be loaded.
TEST_F(CheckpointManagerTest, ADamagedOneIsNoneOfThoseThatAreKept) {
  Cluster cluster({.workers = 1});
  const Layer layer(1);
  const auto part = Part(cluster[0], {.tensors = layer.Tensors("l")});
  const auto manager = Manager(cluster[0], {.keep = 2});
  for (const int64_t step : {10, 20}) ASSERT_TRUE(manager->Save(step).ok());
  FlipLastBit(folder_ + "/step-000020/model-00001-of-00001.safetensors");
  ASSERT_EQ(manager->Load({.fall_back = true})->step, 10);
  ASSERT_TRUE(manager->Save(30).ok());
  EXPECT_EQ(Names(), (Strings{"step-000010", "step-000020", "step-000030"}));
  ASSERT_TRUE(manager->Save(40).ok());
  EXPECT_EQ(Names(), (Strings{"step-000030", "step-000040"}));
  // Another one of that step, which is whole, counts.
  ASSERT_TRUE(manager->Save(20).ok());
  ASSERT_TRUE(manager->Save(50).ok());
  EXPECT_EQ(Names(), (Strings{"step-000020", "step-000050"}));
}

TEST_F(CheckpointManagerTest, ADamagedOneThatIsNotPassedOverIsNoneOfThemEither) {
  Cluster cluster({.workers = 1});
  const Layer layer(1);
  const auto part = Part(cluster[0], {.tensors = layer.Tensors("l")});
  const auto manager = Manager(cluster[0], {.keep = 2});
  for (const int64_t step : {10, 20}) ASSERT_TRUE(manager->Save(step).ok());
  FlipLastBit(folder_ + "/step-000020/model-00001-of-00001.safetensors");
  EXPECT_EQ(manager->Load().status().code(), Code::kDataLoss);
  ASSERT_EQ(manager->Load({.step = 10})->step, 10);
  ASSERT_TRUE(manager->Save(30).ok());
  EXPECT_EQ(Names(), (Strings{"step-000010", "step-000020", "step-000030"}));
}

// Who gets kNotFound may begin at step 0, and would train over what is loaded already.
TEST_F(CheckpointManagerTest, ALoadThatFailsIsNotACheckpointThatIsNotThere) {
  Cluster cluster({.workers = 2});
  Layer a(1), b(2);
  int calls = 0;
  absl::Status answer;
  const auto part_a = Part(cluster[0], {.tensors = a.Tensors("a")});
  const auto part_b =
      Part(cluster[1], {.tensors = b.Tensors("b"), .load_values = [&](const LoadedValues&) {
                          ++calls;
                          return answer;
                        }});
  const auto manager = Manager(cluster[0]);
  for (const int64_t step : {1, 2}) ASSERT_TRUE(manager->Save(step).ok());
  answer = absl::NotFoundError("no such generator");
  const absl::Status not_found = manager->Load().status();
  EXPECT_EQ(not_found.code(), Code::kFailedPrecondition) << not_found;
  EXPECT_TRUE(absl::StrContains(not_found.message(), "no such generator")) << not_found;
  // Nor is another one loaded over what is loaded of this one.
  answer = absl::DataLossError("a damaged generator");
  calls = 0;
  const absl::Status damaged = manager->Load({.fall_back = true}).status();
  EXPECT_TRUE(absl::StrContains(damaged.message(), "some of it may have been loaded")) << damaged;
  EXPECT_TRUE(absl::StrContains(damaged.message(), "step-000002")) << damaged;
  EXPECT_EQ(calls, 1);
}

// A manifest that is damaged does not say when it was saved.
TEST_F(CheckpointManagerTest, ADamagedManifestMayBeTheNewest) {
  Cluster cluster({.workers = 1});
  Layer a(1);
  const auto part = Part(cluster[0], {.tensors = a.Tensors("a")});
  const auto manager = Manager(cluster[0]);
  for (const int64_t step : {3, 4}) ASSERT_TRUE(manager->Save(step).ok());
  ASSERT_TRUE(manager->Load({.step = 3}).ok());
  ASSERT_TRUE(manager->Save(3).ok());
  Write(folder_ + "/step-000003/manifest.json", "{}");
  const absl::Status damaged = manager->Load().status();
  EXPECT_EQ(damaged.code(), Code::kDataLoss) << damaged;
  EXPECT_TRUE(absl::StrContains(damaged.message(), "step 4")) << damaged;
  EXPECT_EQ(manager->Load({.fall_back = true})->step, 4);
  EXPECT_EQ(manager->Load({.step = 4})->step, 4);
}

TEST_F(CheckpointManagerTest, TheStateOfAForgottenOptimizerIsUnexpected) {
  Cluster cluster({.workers = 2});
  Layer a(1), b(2);
  a.Step(1);
  b.Step(1);
  const auto part_a =
      Part(cluster[0], {.tensors = a.Tensors("a"), .optimizers = {{"adam", a.adam.get()}}});
  auto part_b =
      Part(cluster[1], {.tensors = b.Tensors("b"), .optimizers = {{"adam", b.adam.get()}}});
  const auto manager = Manager(cluster[0]);
  ASSERT_TRUE(manager->Save(1).ok());
  part_b = nullptr;
  part_b = Part(cluster[1], {.tensors = b.Tensors("b")});
  const absl::Status strict = manager->Load().status();
  EXPECT_EQ(strict.code(), Code::kInvalidArgument) << strict;
  EXPECT_TRUE(absl::StrContains(strict.message(), "the state of 'b.weight' in optimizer 'adam'"))
      << strict;
  EXPECT_EQ(manager->Load({.strict = false})->unexpected.size(), 2u);
  const absl::Status saved = manager->Save(2);
  EXPECT_EQ(saved.code(), Code::kFailedPrecondition) << saved;
  EXPECT_TRUE(absl::StrContains(saved.message(), "'b.weight'")) << saved;
}

// Their worker has left, say: `keep` saves later nobody would have them any more.
TEST_F(CheckpointManagerTest, ASaveWithoutWhatTheLastOneHasIsRefused) {
  Cluster cluster({.workers = 2});
  Layer a(1), b(2);
  const auto part_a = Part(cluster[0], {.tensors = a.Tensors("a")});
  const auto part_b = Part(cluster[1], {.tensors = b.Tensors("b")});
  ASSERT_TRUE(Manager(cluster[0])->Save(1).ok());
  CheckpointManagerOptions fewer = {.workers = {WorkerName(0)}};
  const absl::Status refused = Manager(cluster[0], fewer)->Save(2);
  EXPECT_EQ(refused.code(), Code::kFailedPrecondition) << refused;
  EXPECT_TRUE(absl::StrContains(refused.message(), "'b.weight'")) << refused;
  EXPECT_EQ(Names(), Strings{"step-000001"});
  fewer.allow_dropping = true;
  const absl::Status allowed = Manager(cluster[0], fewer)->Save(2);
  EXPECT_TRUE(allowed.ok()) << allowed;
}

// An optimizer that was made anew has none, though its parameters are those that were saved.
TEST_F(CheckpointManagerTest, ASaveWithoutAStateThatTheLastOneHasIsRefused) {
  Cluster cluster({.workers = 1});
  Layer a(1);
  TensorMap tensors = a.Tensors("a");
  tensors["a.tied"] = a.weight;
  const auto make = [&] {
    return Part(cluster[0], {.tensors = tensors, .optimizers = {{"adam", a.adam.get()}}});
  };
  auto part = make();
  const auto manager = Manager(cluster[0]);
  ASSERT_TRUE(manager->Save(1).ok()) << "without a step there is none";
  a.Step(1);
  for (const int64_t step : {2, 3}) ASSERT_TRUE(manager->Save(step).ok());
  part = nullptr;
  a.adam = std::make_unique<torch::optim::Adam>(std::vector<at::Tensor>{a.weight, a.bias}, 0.1);
  part = make();
  const absl::Status refused = manager->Save(4);
  EXPECT_EQ(refused.code(), Code::kFailedPrecondition) << refused;
  for (const char* name : {"'a.bias'", "'a.tied'"}) {
    EXPECT_TRUE(absl::StrContains(refused.message(),
                                  absl::StrCat("the state of ", name, " in optimizer 'adam'")))
        << refused;
  }
  // A load wants it all the same, and whoever steps has it.
  EXPECT_TRUE(manager->Load().ok());
  EXPECT_TRUE(manager->Save(4).ok());
}

// One of them may have an optimizer that was made anew.
TEST_F(CheckpointManagerTest, AReplicaThatHasAStateSavesIt) {
  Cluster cluster({.workers = 2});
  std::vector<Layer> replicas;
  std::vector<std::unique_ptr<CheckpointPart>> parts;
  const auto make = [&](int i) {
    return Part(cluster[i], {.tensors = replicas[i].Tensors("l"),
                             .optimizers = {{"adam", replicas[i].adam.get()}}});
  };
  for (int i = 0; i < 2; ++i) {
    replicas.emplace_back(5).Step(1);
    parts.push_back(make(i));
  }
  const auto manager = Manager(cluster[0]);
  ASSERT_TRUE(manager->Save(1).ok());
  for (int i = 0; i < 2; ++i) {
    Layer& fresh = replicas[i];
    parts[i] = nullptr;
    fresh.adam = std::make_unique<torch::optim::Adam>(std::vector{fresh.weight, fresh.bias}, 0.1);
    parts[i] = make(i);
    const absl::Status saved = manager->Save(2 + i);
    ASSERT_TRUE(saved.ok()) << saved;
    const absl::StatusOr<LoadedCheckpoint> loaded = manager->Load();
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    for (const Layer& replica : replicas) EXPECT_EQ(replica.adam->state().size(), 2u) << i;
  }
}

// What a parameter or a tensor got after that is none that the job has any more.
TEST_F(CheckpointManagerTest, AJobThatHasGoneBackSavesWhatItHasGoneBackTo) {
  Cluster cluster({.workers = 1});
  for (const bool is_damaged : {false, true}) {
    Layer a(1), b(2);
    const auto make = [&](bool has_b) {
      TensorMap tensors = a.Tensors("a");
      if (has_b) tensors.merge(b.Tensors("b"));
      return Part(cluster[0], {.tensors = tensors, .optimizers = {{"adam", a.adam.get()}}});
    };
    auto part = make(false);
    const auto manager = Manager(cluster[0], {.keep = 9});
    ASSERT_TRUE(manager->Save(10).ok());
    part = nullptr;
    part = make(true);
    a.Step(1);
    ASSERT_TRUE(manager->Save(100).ok());
    part = nullptr;
    part = make(false);
    LoadOptions options = {.step = 10};
    if (is_damaged) {
      FlipLastBit(folder_ + "/step-000100/optimizer.adam-00001-of-00001.safetensors");
      options = {.fall_back = true};
    }
    const absl::StatusOr<LoadedCheckpoint> loaded = manager->Load(options);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(loaded->step, 10);
    for (const int64_t step : {20, 30}) {
      const absl::Status saved = manager->Save(step);
      EXPECT_TRUE(saved.ok()) << saved;
    }
    // And from then on it keeps what it has saved.
    a.Step(1);
    ASSERT_TRUE(manager->Save(40).ok());
    ASSERT_TRUE(manager->Load({.step = 40}).ok());
    part = nullptr;
    a.adam = std::make_unique<torch::optim::Adam>(std::vector{a.weight, a.bias}, 0.1);
    part = make(false);
    EXPECT_EQ(manager->Save(50).code(), Code::kFailedPrecondition);
    for (const std::string& name : Names()) fs::remove_all(folder_ + "/" + name);
  }
}

// Some workers have another step than others.
TEST_F(CheckpointManagerTest, WhatALoadHasLoadedInPartIsNotSaved) {
  Cluster cluster({.workers = 2});
  Layer a(1), b(2);
  absl::Status answer;
  const auto part_a =
      Part(cluster[0],
           {.tensors = a.Tensors("a"), .load_values = [&](const LoadedValues&) { return answer; }});
  const auto part_b = Part(cluster[1], {.tensors = b.Tensors("b")});
  auto manager = Manager(cluster[0]);
  ASSERT_TRUE(manager->Save(1).ok());
  answer = absl::InternalError("no such generator");
  const auto check = [&] {
    EXPECT_EQ(manager->Load().status().code(), Code::kInternal);
    // Nothing of this is loaded.
    EXPECT_EQ(manager->Load({.step = 7}).status().code(), Code::kNotFound);
    for (const bool async : {false, true}) {
      const absl::Status refused = async ? manager->SaveAsync(2).status() : manager->Save(2);
      EXPECT_EQ(refused.code(), Code::kFailedPrecondition) << refused;
      EXPECT_TRUE(absl::StrContains(refused.message(), "a load has failed when some")) << refused;
    }
  };
  check();
  answer = absl::OkStatus();
  ASSERT_TRUE(manager->Load().ok());
  EXPECT_TRUE(manager->Save(2).ok());
  // Where it may begin at step 0 there is nothing to load.
  answer = absl::InternalError("no such generator");
  check();
  for (const std::string& name : Names()) fs::remove_all(folder_ + "/" + name);
  EXPECT_EQ(manager->Load().status().code(), Code::kNotFound);
  EXPECT_TRUE(manager->Save(1).ok());
  // The program may know better.
  manager = nullptr;
  manager = Manager(cluster[0], {.allow_dropping = true});
  EXPECT_EQ(manager->Load().status().code(), Code::kInternal);
  EXPECT_TRUE(manager->Save(2).ok());
}

// Its launcher has started it again, and no call has failed: after `keep` saves of its fresh
// weights there would be nothing else.
TEST_F(CheckpointManagerTest, AWorkerThatHasComeBackIsNotSavedBeforeItIsLoaded) {
  Cluster cluster({.workers = 2});
  Layer a(1);
  const auto part_a = Part(cluster[0], {.tensors = a.Tensors("a")});
  std::unique_ptr<CheckpointPart> part_b;
  const auto start_b = [&] {
    part_b = nullptr;
    const Layer b(2);
    part_b = Part(cluster[1], {.tensors = b.Tensors("b")});
  };
  const auto restart_b = [&] {
    part_b = nullptr;
    cluster.Restart(1);
    start_b();
  };
  // A call may find the connection to the one that is gone.
  const auto save = [](CheckpointManager& manager, int64_t step) {
    absl::Status saved;
    const Deadline end = Deadline::After(absl::Minutes(1));
    do {
      saved = manager.Save(step);
    } while (absl::IsUnavailable(saved) && !end.Passed());
    return saved;
  };
  std::unique_ptr<CheckpointManager> manager;
  const auto check = [&](int64_t step) {
    const std::string when =
        step == 0 ? "a load found no checkpoint" : absl::StrCat("the checkpoint of step ", step);
    for (const bool async : {false, true}) {
      const absl::Status refused =
          async ? manager->SaveAsync(step + 1).status() : save(*manager, step + 1);
      EXPECT_EQ(refused.code(), Code::kFailedPrecondition) << refused;
      EXPECT_TRUE(absl::StrContains(
          refused.message(), absl::StrCat("worker 'worker1' has come back since ", when, ", and")))
          << refused;
    }
    EXPECT_FALSE(fs::exists(absl::StrCat(folder_, "/step-00000", step + 1)));
  };
  start_b();
  // A job that begins, with those that are there by then.
  for (const Strings& workers : {Strings{}, Strings{WorkerName(0), WorkerName(1)}}) {
    manager = nullptr;
    manager = Manager(cluster[0], {.workers = workers});
    ASSERT_EQ(manager->Load().status().code(), Code::kNotFound);
    restart_b();
    check(0);
    // That of another step is none at which a job begins anew.
    ASSERT_EQ(manager->Load({.step = 7}).status().code(), Code::kNotFound);
    check(0);
  }
  // It begins anew.
  ASSERT_EQ(manager->Load().status().code(), Code::kNotFound);
  ASSERT_TRUE(manager->Save(1).ok());
  restart_b();
  check(1);
  // Any load does, and what has been loaded may be trained and saved.
  ASSERT_TRUE(LoadCheckpoint(&cluster[0], folder_).ok());
  EXPECT_TRUE(manager->Save(2).ok());
  EXPECT_TRUE(manager->Save(3).ok());
  // In the same worker a program knows what it gives a part.
  start_b();
  EXPECT_TRUE(manager->Save(4).ok());
  // Who has come back since a load has not that either.
  manager = nullptr;
  manager = Manager(cluster[0]);
  ASSERT_TRUE(manager->Load().ok());
  restart_b();
  check(4);
  ASSERT_TRUE(manager->Load().ok());
  EXPECT_TRUE(manager->Save(5).ok());
  // It may have its weights from elsewhere.
  manager = nullptr;
  manager = Manager(cluster[0], {.allow_dropping = true});
  ASSERT_TRUE(manager->Save(6).ok());
  restart_b();
  const absl::Status allowed = save(*manager, 7);
  EXPECT_TRUE(allowed.ok()) << allowed;
  part_b = nullptr;
}

// Two layers that were given one name; or replicas before their average is taken.
TEST_F(CheckpointManagerTest, ReplicasThatDifferAreNotSaved) {
  Cluster cluster({.workers = 2});
  Layer a(1), b(1);
  b.Step(1);
  const auto part_a = Part(cluster[0], {.tensors = a.Tensors("0")});
  const auto part_b = Part(cluster[1], {.tensors = b.Tensors("0")});
  const auto manager = Manager(cluster[0]);
  const size_t owners = a.weight.use_count();
  const absl::Status saved = manager->Save(1);
  EXPECT_EQ(saved.code(), Code::kFailedPrecondition) << saved;
  EXPECT_TRUE(absl::StrContains(saved.message(), "'0.weight' of workers 'worker0' and 'worker1'"))
      << saved;
  // What a part had for it is let go: of a snapshot it would be a copy.
  const absl::Time patience = absl::Now() + absl::Seconds(30);
  while (a.weight.use_count() > owners && absl::Now() < patience) std::this_thread::yield();
  EXPECT_EQ(a.weight.use_count(), owners);
  EXPECT_EQ(manager->SaveAsync(1).status().code(), Code::kFailedPrecondition);
  EXPECT_TRUE(Names().empty());
}

TEST_F(CheckpointManagerTest, ASaveWaitsForItsTurnUntilItsDeadline) {
  Cluster cluster({.workers = 1});
  Layer a(1);
  absl::Notification go_on;
  FaultyCalls calls;
  calls.on_write = [&] { go_on.WaitForNotification(); };
  const auto part = Part(cluster[0], {.tensors = a.Tensors("a"), .file_calls = &calls});
  const auto manager = Manager(cluster[0]);
  const absl::StatusOr<Future<Unit>> first = manager->SaveAsync(1);
  ASSERT_TRUE(first.ok()) << first.status();
  const Deadline passed = absl::InfinitePast();
  EXPECT_EQ(manager->Save(2, passed).code(), Code::kDeadlineExceeded);
  EXPECT_EQ(manager->SaveAsync(2, passed).status().code(), Code::kDeadlineExceeded);
  EXPECT_EQ(manager->Load({.deadline = passed}).status().code(), Code::kDeadlineExceeded);
  go_on.Notify();
  EXPECT_TRUE(first->Wait().ok()) << first->Wait().status();
  // Nor does it begin after that.
  for (const Deadline& over : {passed, Deadline::After(absl::ZeroDuration())}) {
    EXPECT_EQ(manager->Save(2, over).code(), Code::kDeadlineExceeded);
    EXPECT_EQ(manager->SaveAsync(2, over).status().code(), Code::kDeadlineExceeded);
    EXPECT_EQ(manager->Load({.deadline = over}).status().code(), Code::kDeadlineExceeded);
    EXPECT_EQ(LoadCheckpoint(&cluster[0], folder_, {.deadline = over}).status().code(),
              Code::kDeadlineExceeded);
  }
  EXPECT_EQ(Names(), Strings{"step-000001"});
  EXPECT_TRUE(manager->Save(2).ok());
}

// Remembers until when a thread's questions may take. Thread-safe.
class TimedStore final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount, Deadline deadline) override {
    Remember(deadline);
    return ForwardingStore::Add(key, amount, deadline);
  }
  absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline deadline) override {
    Remember(deadline);
    return ForwardingStore::GetEach(keys, deadline);
  }
  // Calls `f`, and returns the latest deadline of the questions that its thread asks.
  Deadline LatestIn(const std::function<void()>& f) {
    asker_ = std::this_thread::get_id();
    latest_ = Deadline(absl::InfinitePast());
    f();
    asker_ = std::thread::id();
    return latest_;
  }

 private:
  void Remember(Deadline deadline) {
    if (asker_ == std::this_thread::get_id()) latest_ = std::max(latest_, deadline);
  }

  std::atomic<std::thread::id> asker_{std::thread::id()};
  Deadline latest_ = absl::InfinitePast();  // the asker's
};

TEST_F(CheckpointManagerTest, TheStoreIsAskedNoLongerThanASaveOrLoadMayTake) {
  const auto store = std::make_shared<TimedStore>(NewInProcessStore());
  Cluster cluster({.workers = 1, .store = store});
  const auto part = Part(cluster[0], {.tensors = {{"x", at::ones({1})}}});
  const auto manager = Manager(cluster[0]);
  ASSERT_TRUE(manager->Save(1).ok());
  // Less than a store is asked for at once where there is no deadline.
  const Deadline deadline = Deadline::After(absl::Milliseconds(100));
  for (const std::function<void()>& f : std::vector<std::function<void()>>{
           [&] { manager->Save(2, deadline).IgnoreError(); },
           [&] { manager->SaveAsync(3, deadline).IgnoreError(); },
           [&] { manager->Load({.deadline = deadline}).IgnoreError(); },
           [&] { LoadCheckpoint(&cluster[0], folder_, {.deadline = deadline}).IgnoreError(); }}) {
    EXPECT_FALSE(deadline < store->LatestIn(f));
  }
  // And no longer than by the worker's options.
  EXPECT_FALSE(store->LatestIn([&] { EXPECT_TRUE(manager->Save(4).ok()); }).is_never());
}

// They run on the thread that has written.
TEST_F(CheckpointManagerTest, CallbacksOfASaveMaySaveAndEndTheManager) {
  Cluster cluster({.workers = 1});
  Layer a(1);
  absl::Notification written, called_back, go_on, saved, ended;
  FaultyCalls calls;
  calls.on_write = [&] { written.WaitForNotification(); };
  const auto part = Part(cluster[0], {.tensors = a.Tensors("a"), .file_calls = &calls});
  auto manager = Manager(cluster[0]);
  const absl::StatusOr<Future<Unit>> first = manager->SaveAsync(1);
  ASSERT_TRUE(first.ok()) << first.status();
  absl::Status third;
  first->Then([&](const absl::StatusOr<Unit>&) {
    called_back.Notify();
    go_on.WaitForNotification();
    third = manager->Save(3);
    const absl::StatusOr<Future<Unit>> fourth = manager->SaveAsync(4);
    if (fourth.ok()) fourth->Wait();
    saved.Notify();
  });
  written.Notify();
  called_back.WaitForNotification();
  const absl::StatusOr<Future<Unit>> other = manager->SaveAsync(2);
  go_on.Notify();
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_TRUE(other->Wait().ok()) << other->Wait().status();
  saved.WaitForNotification();
  EXPECT_TRUE(third.ok()) << third;
  EXPECT_EQ(Names(), (Strings{"step-000002", "step-000003", "step-000004"}));
  absl::Notification attached;
  calls.on_write = [&] { attached.WaitForNotification(); };
  const absl::StatusOr<Future<Unit>> last = manager->SaveAsync(5);
  ASSERT_TRUE(last.ok()) << last.status();
  last->Then([&](const absl::StatusOr<Unit>&) {
    manager = nullptr;
    ended.Notify();
  });
  attached.Notify();
  ended.WaitForNotification();
  EXPECT_TRUE(last->Wait().ok()) << last->Wait().status();
}

// The files are read twice; this is the manager's part of it, with a disk that fails in between.
TEST_F(CheckpointManagerTest, DamageBetweenTheTwoReadsIsFound) {
  Cluster cluster({.workers = 1});
  Layer a(1);
  // One that is copied where it lies, and one that is not.
  const at::Tensor transposed = at::ones({3, 10}).t();
  for (const at::Tensor& tensor : {a.weight, transposed}) {
    const auto part = Part(cluster[0], {.tensors = {{"x", tensor}}});
    ASSERT_TRUE(Manager(cluster[0])->Save(1).ok());
    const std::string folder = folder_ + "/step-000001";
    const auto checked = cluster[0].Call(WorkerName(0), std::string(kCheckpointCheck),
                                         {CheckOf(folder, /*token=*/7), {}});
    ASSERT_TRUE(checked.ok()) << checked.status();
    const std::string file = folder + "/model-00001-of-00001.safetensors";
    FlipLastBit(file);
    const absl::Status loaded =
        cluster[0].Call(WorkerName(0), std::string(kCheckpointLoad), {EncodeToken(7), {}}).status();
    EXPECT_EQ(loaded.code(), Code::kDataLoss) << loaded;
    EXPECT_TRUE(absl::StrContains(loaded.message(), file)) << loaded;
  }
}

// No load would take it, nor does a computation.
TEST_F(CheckpointManagerTest, ABoolIsZeroOrOne) {
  Cluster cluster({.workers = 1});
  Layer a(1);
  TensorMap tensors = a.Tensors("a");
  const at::Tensor m = at::full({3}, 255, at::kByte).view(at::kBool);
  tensors["m"] = m;
  const auto part = Part(cluster[0], {.tensors = tensors});
  const auto manager = Manager(cluster[0]);
  for (const bool async : {false, true}) {
    const absl::Status saved = async ? manager->SaveAsync(1)->Wait().status() : manager->Save(1);
    EXPECT_EQ(saved.code(), Code::kInvalidArgument) << saved;
    EXPECT_TRUE(absl::StrContains(saved.message(), "worker 'worker0'")) << saved;
    EXPECT_TRUE(absl::StrContains(saved.message(), "'m': it is BOOL and has a byte 255")) << saved;
  }
  EXPECT_TRUE(Names().empty());
  m.fill_(true);
  for (const int64_t step : {1, 2}) ASSERT_TRUE(manager->Save(step).ok());
  // One that somebody else has written, with the right checksum.
  const std::string folder = folder_ + "/step-000002";
  absl::StatusOr<Manifest> manifest = ReadManifest(folder);
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  ManifestFile& file = manifest->workers[0].files[0];
  std::string bytes = Read(absl::StrCat(folder, "/", file.name));
  bytes.back() = '\xff';
  Write(absl::StrCat(folder, "/", file.name), bytes);
  file.checksums.tensors["m"] = Crc32c("\1\1\xff");
  Write(folder + "/manifest.json", *EncodeManifest(*manifest));
  a.Step(1);
  const at::Tensor weight = a.weight.detach().clone();
  const absl::Status loaded = manager->Load().status();
  EXPECT_EQ(loaded.code(), Code::kDataLoss) << loaded;
  EXPECT_TRUE(absl::StrContains(loaded.message(), absl::StrCat(folder, "/", file.name))) << loaded;
  EXPECT_TRUE(absl::StrContains(loaded.message(), "it is BOOL and has a byte 255")) << loaded;
  EXPECT_TRUE(at::equal(a.weight, weight)) << "nothing is loaded";
  const absl::StatusOr<LoadedCheckpoint> older = manager->Load({.fall_back = true});
  ASSERT_TRUE(older.ok()) << older.status();
  EXPECT_EQ(older->step, 1);
}

// It has waited for an optimizer that somebody else uses, say, while its caller gave it up.
TEST_F(CheckpointManagerTest, ALoadThatWasGivenUpLoadsNothingMore) {
  Cluster cluster({.workers = 2});
  Layer a(1);
  auto adam = LocalOptimizer(std::move(a.adam));
  int loaded_values = 0;
  const auto part = Part(cluster[1], {.tensors = a.Tensors("a"),
                                      .optimizers = {{"adam", &adam}},
                                      .load_values = [&](const LoadedValues&) {
                                        ++loaded_values;
                                        return absl::OkStatus();
                                      }});
  ASSERT_TRUE(Manager(cluster[0], {.workers = {WorkerName(1)}})->Save(1).ok());
  const std::string folder = folder_ + "/step-000001";
  const auto call = [&](absl::string_view function, const std::string& payload) {
    return cluster[0].CallAsync(WorkerName(1), std::string(function), {payload, {}});
  };
  ASSERT_TRUE(call(kCheckpointCheck, CheckOf(folder, /*token=*/7)).Wait().ok());
  // Tells that a call that was cancelled after the load knows of it, and so does the load.
  absl::Notification serves, knows;
  ASSERT_TRUE(cluster[1]
                  .Register("wait",
                            [&](Request& request) -> absl::StatusOr<Message> {
                              request.cancellation->OnCancel([&knows] { knows.Notify(); });
                              serves.Notify();
                              knows.WaitForNotification();
                              return Message{};
                            })
                  .ok());
  const auto rate = [](torch::optim::Optimizer& of) -> double {
    return of.param_groups()[0].options().get_lr();
  };
  const absl::Status used = adam.Use([&](torch::optim::Optimizer& of) {
    of.param_groups()[0].options().set_lr(0.7);
    const uint32_t before = a.weight._version();  // of the last of the tensors
    const Future<Message> load = call(kCheckpointLoad, EncodeToken(7)), wait = call("wait", "");
    while (a.weight._version() == before && !load.Done()) std::this_thread::yield();
    serves.WaitForNotification();
    load.Cancel();
    wait.Cancel();
    knows.WaitForNotification();
    return absl::OkStatus();
  });
  ASSERT_TRUE(used.ok()) << used;
  ASSERT_TRUE(call(kCheckpointPlan, "{}").Wait().ok()) << "which waits for its turn";
  EXPECT_EQ(loaded_values, 0);
  ASSERT_TRUE(adam.Use([&](torch::optim::Optimizer& of) {
                    EXPECT_EQ(rate(of), 0.7);
                    return absl::OkStatus();
                  })
                  .ok());
}

TEST_F(CheckpointManagerTest, MistakesAreErrors) {
  Cluster cluster({.workers = 2});
  // Not kNotFound, at which a program begins at step 0.
  for (const std::string& no_folder :
       {std::string(), std::string("a\0b", 3), folder_ + "/caf\xe9"}) {
    EXPECT_EQ(CheckpointManager::Create(&cluster[0], no_folder).status().code(),
              Code::kInvalidArgument);
    EXPECT_EQ(LoadCheckpoint(&cluster[0], no_folder).status().code(), Code::kInvalidArgument);
  }
  const absl::Status twice =
      LoadCheckpoint(&cluster[0], folder_, {}, {.workers = {"worker0", "worker0"}}).status();
  EXPECT_EQ(twice.code(), Code::kInvalidArgument) << twice;
  EXPECT_TRUE(absl::StrContains(twice.message(), "worker0")) << twice;
  Layer a(1);
  const at::Tensor other = at::ones({1});
  const auto part = Part(cluster[0], {.tensors = a.Tensors("a")});
  EXPECT_EQ(CheckpointPart::Create(&cluster[0], {}).status().code(), Code::kAlreadyExists);
  EXPECT_EQ(CheckpointPart::Create(&cluster[1], {}, "a::b").status().code(),
            Code::kInvalidArgument);
  EXPECT_EQ(CheckpointPart::Create(&cluster[1], {.tensors = {{"x", at::Tensor()}}}).status().code(),
            Code::kInvalidArgument);
  EXPECT_EQ(
      CheckpointPart::Create(&cluster[1], {.optimizers = {{"a/b", a.adam.get()}}}).status().code(),
      Code::kInvalidArgument);
  const absl::Status no_names =
      CheckpointPart::Create(&cluster[1], {.optimizers = {{"", a.adam.get()}}}).status();
  EXPECT_EQ(no_names.code(), Code::kInvalidArgument) << no_names;
  torch::optim::LBFGS lbfgs({a.bias}, 0.1);
  const absl::Status other_kind =
      CheckpointPart::Create(&cluster[1],
                             {.tensors = {{"bias", a.bias}}, .optimizers = {{"lbfgs", &lbfgs}}})
          .status();
  EXPECT_EQ(other_kind.code(), Code::kUnimplemented) << other_kind;
  const absl::Status no_elements =
      CheckpointPart::Create(&cluster[1], {.tensors = {{"x", at::ones({1}).to(at::kMeta)}}})
          .status();
  EXPECT_EQ(no_elements.code(), Code::kInvalidArgument) << no_elements;
  // What could be saved, and not loaded.
  const absl::Status expanded =
      CheckpointPart::Create(&cluster[1], {.tensors = {{"x", at::ones({1}).expand({3})}}}).status();
  EXPECT_EQ(expanded.code(), Code::kInvalidArgument) << expanded;
  EXPECT_TRUE(absl::StrContains(expanded.message(), "clone()")) << expanded;
  const absl::Status unfolded =
      CheckpointPart::Create(&cluster[1], {.tensors = {{"x", at::ones({3}).unfold(0, 2, 1)}}})
          .status();
  EXPECT_EQ(unfolded.code(), Code::kInvalidArgument) << unfolded;
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  torch::optim::SGD sgd(Groups{torch::optim::OptimizerParamGroup({a.bias}),
                               torch::optim::OptimizerParamGroup(std::vector<at::Tensor>())},
                        0.1);
  const absl::Status empty_group =
      CheckpointPart::Create(&cluster[1],
                             {.tensors = {{"bias", a.bias}}, .optimizers = {{"sgd", &sgd}}})
          .status();
  EXPECT_EQ(empty_group.code(), Code::kInvalidArgument) << empty_group;
  EXPECT_TRUE(absl::StrContains(empty_group.message(), "group 1")) << empty_group;
  EXPECT_EQ(CheckpointManager::Create(&cluster[0], folder_, {.keep = 0}).status().code(),
            Code::kInvalidArgument);
  const auto manager = Manager(cluster[0]);
  const absl::Status lacks = manager->Save(1);
  EXPECT_EQ(lacks.code(), Code::kFailedPrecondition) << lacks;
  EXPECT_TRUE(absl::StrContains(lacks.message(), "worker1")) << lacks;
  EXPECT_EQ(manager->Load().status().code(), Code::kNotFound);
  {
    const auto two = Part(cluster[1], {.tensors = {{"a.bias", other}}});
    const absl::Status differs = manager->Save(1);
    EXPECT_EQ(differs.code(), Code::kInvalidArgument) << differs;
    EXPECT_TRUE(absl::StrContains(differs.message(), "a.bias")) << differs;
  }
  const auto throws = Part(cluster[1], {.save_values = []() -> CheckpointValues {
                             throw std::runtime_error("no values today");
                           }});
  const absl::Status thrown = manager->Save(1);
  EXPECT_TRUE(absl::StrContains(thrown.message(), "no values today")) << thrown;
  EXPECT_EQ(manager->Save(-1).code(), Code::kInvalidArgument);
  EXPECT_TRUE(Names().empty());
}

}  // namespace
}  // namespace distgrad
