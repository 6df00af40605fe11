// Makes the optimizers that Python has trained, and trains them on to compare.
#include "core/checkpoint/optimizer_cases.h"

#include <ATen/ATen.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/checkpoint/optimizer_checkpoint.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace distgrad {
namespace {

using Json = nlohmann::json;
using torch::optim::Optimizer;

constexpr int kSteps = 3;

std::vector<at::Tensor> All(TensorMap& parameters) {
  std::vector<at::Tensor> all;
  for (const auto& [name, parameter] : parameters) all.push_back(parameter);
  return all;
}

template <typename Kind, typename Options>
OptimizerCase Simple(std::string name) {
  return {std::move(name), [](TensorMap& parameters) -> std::unique_ptr<Optimizer> {
            return std::make_unique<Kind>(All(parameters), Options(7.0));
          }};
}

TensorMap LoadAll(const std::string& path) {
  absl::StatusOr<TensorMap> tensors = LoadSafetensors(path);
  EXPECT_TRUE(tensors.ok()) << tensors.status();
  return tensors.ok() ? *std::move(tensors) : TensorMap();
}

// Its groups by the first of their names, with the options that libtorch has.
std::map<std::string, Json> GroupsOf(const std::string& path, const std::string& kind) {
  const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(path);
  EXPECT_TRUE(file.ok()) << file.status();
  std::map<std::string, Json> groups;
  if (!file.ok()) return groups;
  const auto& metadata = file->header().metadata;
  EXPECT_EQ(metadata.at("optimizer"), kind);
  for (Json group : Json::parse(metadata.at("param_groups"))) {
    EXPECT_EQ(group["params"].size(), group["param_names"].size());
    for (const char* key : {"params", "maximize", "foreach", "capturable", "differentiable",
                            "fused", "decoupled_weight_decay"}) {
      group.erase(key);
    }
    std::vector<std::string> names = group["param_names"];
    std::sort(names.begin(), names.end());
    group["param_names"] = names;
    groups[names.front()] = group;
  }
  return groups;
}

}  // namespace

const std::vector<OptimizerCase>& OptimizerCases() {
  using namespace torch::optim;
  static const auto* const cases = new std::vector<OptimizerCase>{
      Simple<SGD, SGDOptions>("sgd"),
      Simple<SGD, SGDOptions>("sgd_plain"),
      {"sgd_groups",
       [](TensorMap& p) -> std::unique_ptr<Optimizer> {
         std::vector<OptimizerParamGroup> groups;
         groups.emplace_back(std::vector<at::Tensor>{p["fc.bias"], p["embedding.weight"]});
         groups.emplace_back(std::vector<at::Tensor>{p["unused"], p["fc.weight"]});
         return std::make_unique<SGD>(groups, SGDOptions(7.0));
       }},
      Simple<Adam, AdamOptions>("adam"),
      Simple<Adam, AdamOptions>("amsgrad"),
      Simple<AdamW, AdamWOptions>("adamw"),
      Simple<Adagrad, AdagradOptions>("adagrad"),
      Simple<RMSprop, RMSpropOptions>("rmsprop"),
      Simple<RMSprop, RMSpropOptions>("rmsprop_centered"),
  };
  return *cases;
}

TensorMap ParametersOf(const std::string& folder, const std::string& name) {
  TensorMap parameters;
  for (auto& [key, tensor] : LoadAll(absl::StrCat(folder, "/", name, ".run.safetensors"))) {
    constexpr absl::string_view kStart = "start.";
    if (absl::StartsWith(key, kStart)) {
      parameters[key.substr(kStart.size())] = tensor.requires_grad_();
    }
  }
  EXPECT_EQ(parameters.size(), 4u);
  return parameters;
}

void ExpectGoesOnAsInPython(const OptimizerCase& which, const std::string& folder,
                            const std::string& saved_folder) {
  SCOPED_TRACE(which.name);
  const std::string path = absl::StrCat(folder, "/", which.name, ".optimizer.safetensors");
  const std::string saved_path =
      absl::StrCat(saved_folder, "/", which.name, ".optimizer.safetensors");
  const TensorMap run = LoadAll(absl::StrCat(folder, "/", which.name, ".run.safetensors"));
  TensorMap parameters = ParametersOf(folder, which.name);
  const std::unique_ptr<Optimizer> optimizer = which.make(parameters);
  const absl::Status loaded = LoadOptimizer(path, parameters, optimizer.get());
  ASSERT_TRUE(loaded.ok()) << loaded;
  const absl::Status saved = SaveOptimizer(*optimizer, parameters, saved_path);
  ASSERT_TRUE(saved.ok()) << saved;

  const std::string kind = absl::StartsWith(which.name, "sgd")   ? "SGD"
                           : absl::StartsWith(which.name, "rms") ? "RMSprop"
                           : which.name == "adagrad"             ? "Adagrad"
                           : which.name == "adamw"               ? "AdamW"
                                                                 : "Adam";
  EXPECT_EQ(GroupsOf(saved_path, kind), GroupsOf(path, kind));
  // Python rounds otherwise where it has lerp and libtorch mul and add: the last bits differ.
  const bool has_lerp = kind == "Adam" || kind == "AdamW" || which.name == "rmsprop_centered";
  const TensorMap theirs = LoadAll(path), ours = LoadAll(saved_path);
  EXPECT_EQ(ours.size(), theirs.size());
  EXPECT_EQ(theirs.empty(), which.name == "sgd_plain");
  for (const auto& [name, tensor] : theirs) {
    ASSERT_EQ(ours.count(name), 1u) << name;
    const at::Tensor& other = ours.at(name);
    EXPECT_EQ(other.scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(other.equal(tensor)) << name << other << tensor;
  }

  for (int i = 0; i < kSteps; ++i) {
    for (auto& [name, parameter] : parameters) {
      const auto gradient = run.find(absl::StrCat("gradient.", i, ".", name));
      parameter.mutable_grad() = gradient == run.end() ? at::Tensor() : gradient->second;
    }
    optimizer->step();
  }
  for (const auto& [name, parameter] : parameters) {
    const at::Tensor& end = run.at("end." + name);
    if (!has_lerp) {
      EXPECT_TRUE(parameter.equal(end)) << name << parameter << end;
    } else {
      EXPECT_TRUE(parameter.allclose(end, 1e-5, 1e-7)) << name << parameter << end;
    }
    EXPECT_EQ(parameter.equal(run.at("start." + name)), name == "unused") << name;
  }
}

}  // namespace distgrad
