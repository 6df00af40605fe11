// The replicas of a module, made once and then only refreshed.
//
// A replica is a clone of the module: its structure and its plain members are those of the moment
// when it was made. Parameters and buffers follow the module:
//
// - on the module's own device every replica shares the parameters' memory, and replica 0 the
//   buffers', so what it does to them (the statistics of a batch norm) is done to the module;
// - on other devices, and for other replicas' buffers, they are new memory at each refresh, copied
//   in flat buckets; a graph of an earlier forward fails if a version says that they have changed,
//   as on the module's own device;
// - parameters that the module has twice, or that are frozen, are so in each replica;
// - whether each submodule is training is copied at each refresh.
//
// The gradient of a replica's parameter goes to the module's: one node for each bucket of
// parameters adds those of all replicas, as soon as they are there.
#ifndef DISTGRAD_CORE_PARALLEL_REPLICAS_H_
#define DISTGRAD_CORE_PARALLEL_REPLICAS_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/parallel/bucket.h"
#include "core/parallel/device_collectives.h"

namespace torch::nn {
class Module;
}

namespace distgrad {

struct ReplicasOptions {
  // Gradients are reduced in buckets of so many bytes; the first of a backward is smaller, so
  // that it begins early.
  size_t bucket_bytes = size_t{25} << 20;
  size_t first_bucket_bytes = size_t{1} << 20;
  // Sets the default generator of the CPU back to where it was before the replicas were made,
  // because reset() fills a clone's parameters with random numbers. Another thread that draws from
  // it meanwhile draws the same numbers again. False for a module whose clone() draws none.
  bool preserve_rng_state = true;
};

// Returns the device of the module's parameters and buffers; `otherwise` if it has none. Throws
// c10::ValueError if they are on several devices.
c10::Device HomeOf(const torch::nn::Module& module, c10::Device otherwise);

// For one thread at a time, as the module itself; but Install is for the replicas' own threads.
// Throws as torch does.
class Replicas {
 public:
  // `module` must be Cloneable or have a clone() of its own; its parameters and buffers lie on one
  // device, which need not be one of the collectives'.
  Replicas(std::shared_ptr<torch::nn::Module> module,
           std::shared_ptr<DeviceCollectives> collectives, ReplicasOptions options = {});
  ~Replicas();

  const std::vector<std::shared_ptr<torch::nn::Module>>& modules() const { return replicas_; }

  // Prepares the first `count` replicas for a forward; then Install(i) for each of them.
  void Refresh(size_t count);
  void Install(size_t replica);

  // Keeps the buffers of replica 0, after the forward. An error if a module wrote to parameters
  // that several of the `count` replicas share, or of which a replica has a copy.
  void Keep(size_t count);

 private:
  // A distinct parameter or buffer.
  struct Source {
    std::string name;
    at::Tensor tensor;  // the module's own
    bool is_buffer;
    // What it was when the gradient edges were made.
    torch::autograd::Edge edge = {};
    // The node of its edge, and its number there; null where it needs no gradient.
    std::shared_ptr<torch::autograd::Node> node = nullptr;
    uint32_t slot = 0, slots = 0;
    uint32_t version = 0;  // at the last refresh
  };
  // A replica's tensors, by the module's order, and the sources that they follow.
  struct Member {
    at::Tensor tensor;
    size_t source;
    // Where it has memory of its own: the source's version of which it has the values, and its own
    // when it got them.
    std::optional<uint32_t> source_version = std::nullopt;
    uint32_t version = 0;
  };

  void MakeEdges();
  std::optional<c10::Stream> SideStream();
  void FollowTraining(size_t replica);

  // Constant after construction.
  const std::shared_ptr<torch::nn::Module> module_;
  const std::shared_ptr<DeviceCollectives> collectives_;
  const ReplicasOptions options_;
  std::vector<std::shared_ptr<torch::nn::Module>> replicas_;
  std::vector<std::vector<Member>> members_;  // by replica
  std::vector<std::shared_ptr<torch::nn::Module>> submodules_;
  std::vector<std::vector<std::shared_ptr<torch::nn::Module>>> replica_submodules_;

  // Changed by Refresh.
  c10::Device home_ = c10::kCPU;
  std::vector<Source> sources_;
  std::vector<TensorVector> values_;  // by replica and source; undefined where memory is shared
  uint64_t edges_made_ = 0;
  bool edges_complete_ = false;       // no exception has come between
  std::vector<c10::Stream> streams_;  // that were current when the edges were made
  std::optional<c10::Stream> side_stream_;

  // Changed by a replica's Install; by replica.
  std::vector<uint64_t> edges_installed_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_REPLICAS_H_
