// Copies a module's structure once, and its parameters before each forward.
#include "core/parallel/replicas.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/nn/module.h>

#include <mutex>
#include <unordered_map>
#include <utility>

#include "core/parallel/broadcast_node.h"
#include "core/parallel/devices.h"
#include "core/parallel/recording.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

namespace autograd_impl = torch::autograd::impl;

using torch::autograd::Edge;
using torch::nn::Module;

// Sets the default generator of the CPU back. The generator is one for all threads, and so are the
// numbers that the others draw meanwhile.
class RandomStateGuard {
 public:
  RandomStateGuard() : generator_(at::detail::getDefaultCPUGenerator()) {
    const std::lock_guard<std::mutex> lock(generator_.mutex());
    state_ = generator_.get_state();
  }
  ~RandomStateGuard() {
    const std::lock_guard<std::mutex> lock(generator_.mutex());
    generator_.set_state(state_);
  }

 private:
  at::Generator generator_;
  at::Tensor state_;
};

struct Named {
  std::string name;
  at::Tensor tensor;
  bool is_buffer;
};

std::vector<Named> TensorsOfModule(const Module& module) {
  std::vector<Named> tensors;
  for (const auto& item : module.named_parameters()) {
    tensors.push_back({item.key(), item.value(), false});
  }
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) tensors.push_back({item.key(), item.value(), true});
  }
  return tensors;
}

uint32_t VersionOf(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}

bool SameMemory(const at::Tensor& a, const at::Tensor& b) {
  if (!a.has_storage() || !b.has_storage()) return false;  // sparse, say
  return a.is_alias_of(b) && a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.scalar_type() == b.scalar_type();
}

}  // namespace

c10::Device HomeOf(const Module& module, c10::Device otherwise) {
  const std::vector<Named> tensors = TensorsOfModule(module);
  for (const Named& item : tensors) {
    TORCH_CHECK_VALUE(item.tensor.device() == tensors[0].tensor.device(), "replicate: ", item.name,
                      " is on ", item.tensor.device(), ", and ", tensors[0].name, " on ",
                      tensors[0].tensor.device(),
                      "; a module that is to be replicated lies on one device");
  }
  return tensors.empty() ? otherwise : tensors[0].tensor.device();
}

Replicas::Replicas(std::shared_ptr<Module> module, std::shared_ptr<DeviceCollectives> collectives,
                   ReplicasOptions options)
    : module_(std::move(module)), collectives_(std::move(collectives)), options_(options) {
  TORCH_CHECK_VALUE(module_ != nullptr, "replicate: no module");
  home_ = HomeOf(*module_, collectives_->devices()[0]);
  const c10::InferenceMode no_inference(false);
  std::optional<RandomStateGuard> rng_state;
  if (options_.preserve_rng_state) rng_state.emplace();
  const std::vector<Named> tensors = TensorsOfModule(*module_);
  std::vector<size_t> source_of;
  std::unordered_map<const void*, size_t> known;  // shared ones count once
  for (const Named& item : tensors) {
    const auto [place, is_new] = known.emplace(item.tensor.unsafeGetTensorImpl(), sources_.size());
    if (is_new) sources_.push_back({item.name, item.tensor, item.is_buffer});
    source_of.push_back(place->second);
  }
  submodules_ = module_->modules();
  const std::vector<c10::Device>& devices = collectives_->devices();
  for (size_t i = 0; i < devices.size(); ++i) {
    replicas_.push_back(module_->clone(devices[i]));
    const std::vector<Named> clones = TensorsOfModule(*replicas_[i]);
    replica_submodules_.push_back(replicas_[i]->modules());
    bool same =
        clones.size() == tensors.size() && replica_submodules_[i].size() == submodules_.size();
    members_.emplace_back();
    for (size_t k = 0; same && k < clones.size(); ++k) {
      same = clones[k].name == tensors[k].name;
      members_[i].push_back({clones[k].tensor, source_of[k]});
    }
    TORCH_CHECK_VALUE(same, "replicate: a clone of ", module_->name(),
                      " has other parameters, buffers or submodules than the module itself; are "
                      "all of them registered in reset()?");
  }
  values_.resize(devices.size());
  edges_installed_.resize(devices.size());
}

Replicas::~Replicas() = default;

void Replicas::FollowTraining(size_t replica) {
  // train() goes down to children, which come later in the list and then get what is theirs.
  for (size_t k = 0; k < submodules_.size(); ++k) {
    Module& theirs = *replica_submodules_[replica][k];
    const bool training = submodules_[k]->is_training();
    if (theirs.is_training() != training) theirs.train(training);
  }
}

// On a stream of its own a reduction does not hold up the rest of the backward.
std::optional<c10::Stream> Replicas::SideStream() {
  if (home_.is_cpu() || collectives_->devices()[0] != home_) return std::nullopt;
  if (!side_stream_.has_value() || side_stream_->device() != home_) {
    side_stream_ = c10::impl::VirtualGuardImpl(home_.type()).getNewStream(home_);
  }
  return side_stream_;
}

void Replicas::MakeEdges() {
  // Nodes expect their gradients on the streams that are current when they are made.
  std::vector<c10::Stream> streams = CurrentStreams(collectives_->devices());
  bool changed = !std::exchange(edges_complete_, false) || streams != streams_;
  streams_ = std::move(streams);
  std::optional<c10::Stream> reader;
  std::optional<c10::MultiStreamGuard> on_side_stream;
  if (const std::optional<c10::Stream> side = SideStream()) {
    reader = c10::impl::VirtualGuardImpl(home_.type()).getStream(home_);
    on_side_stream.emplace(*side);
  }
  for (Source& source : sources_) {
    Edge edge =
        source.tensor.requires_grad() ? autograd_impl::gradient_edge(source.tensor) : Edge();
    changed = changed || edge != source.edge;
    source.edge = std::move(edge);
  }
  if (!changed) {
    edges_complete_ = true;
    return;
  }
  ++edges_made_;
  // Gradients come in the reverse order, more or less.
  TensorVector reversed(sources_.size());
  for (size_t k = 0; k < sources_.size(); ++k) {
    sources_[k].node = nullptr;
    if (sources_[k].edge.is_valid()) reversed[sources_.size() - 1 - k] = sources_[k].tensor;
  }
  for (const Bucket& bucket :
       AssignBuckets(reversed, options_.bucket_bytes, options_.first_bucket_bytes)) {
    torch::autograd::edge_list edges;
    for (const Bucket::Slot& slot : bucket.slots) {
      edges.push_back(sources_[sources_.size() - 1 - slot.tensor].edge);
    }
    const auto node =
        std::make_shared<BroadcastNode>(std::move(edges), home_, collectives_, reader);
    for (const c10::Device device : collectives_->devices()) {
      for (const Bucket::Slot& slot : bucket.slots) {
        const at::Tensor& tensor = sources_[sources_.size() - 1 - slot.tensor].tensor;
        node->add_input_metadata(tensor.options().device(device), tensor.sym_sizes(),
                                 /*is_tensor_subclass=*/false, tensor.is_nested(),
                                 tensor.scalar_type());
      }
    }
    for (uint32_t p = 0; p < bucket.slots.size(); ++p) {
      Source& source = sources_[sources_.size() - 1 - bucket.slots[p].tensor];
      source.node = node;
      source.slot = p;
      source.slots = static_cast<uint32_t>(bucket.slots.size());
    }
  }
  edges_complete_ = true;
}

void Replicas::Refresh(size_t count) {
  if (!sources_.empty()) home_ = sources_[0].tensor.device();
  for (const Source& source : sources_) {
    // It may have been moved since.
    if (source.tensor.device() != home_) HomeOf(*module_, home_);
  }
  if (at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled()) MakeEdges();
  for (size_t i = 0; i < count; ++i) FollowTraining(i);
  TensorVector tensors;
  TensorVector buffers(sources_.size());
  bool elsewhere = false;
  for (const c10::Device device : collectives_->devices()) elsewhere = elsewhere || device != home_;
  for (size_t k = 0; k < sources_.size(); ++k) {
    sources_[k].version = VersionOf(sources_[k].tensor);
    tensors.push_back(sources_[k].tensor);
    if (sources_[k].is_buffer) buffers[k] = sources_[k].tensor;
  }
  // Graphs of earlier forwards may hold the values of then, so these are new.
  const c10::InferenceMode no_inference(false);
  const at::NoGradGuard no_grad;
  if (elsewhere && !sources_.empty()) {
    values_ = ValueOrThrow(collectives_->Broadcast(tensors));
  } else {
    for (TensorVector& list : values_) list.assign(sources_.size(), at::Tensor());
  }
  const std::vector<Bucket> buckets = AssignBuckets(buffers, options_.bucket_bytes);
  for (size_t i = 0; i < count; ++i) {
    if (collectives_->devices()[i] != home_) continue;
    values_[i].assign(sources_.size(), at::Tensor());
    if (i == 0) continue;
    for (const Bucket& bucket : buckets) {
      if (!bucket.flat) {
        values_[i][bucket.slots[0].tensor] = buffers[bucket.slots[0].tensor].clone();
        continue;
      }
      const TensorVector parts = Parts(bucket, Pack(bucket, buffers));
      for (size_t p = 0; p < parts.size(); ++p) values_[i][bucket.slots[p].tensor] = parts[p];
    }
  }
}

void Replicas::Install(size_t replica) {
  for (Member& member : members_[replica]) {
    const Source& source = sources_[member.source];
    const at::Tensor& own = values_[replica][member.source];
    const at::Tensor& value = own.defined() ? own : source.tensor;
    if (SameMemory(member.tensor, value)) continue;
    if (own.defined()) {
      // An earlier graph has saved this tensor itself, and must notice other values, as on the
      // module's own device.
      const uint32_t before = VersionOf(member.tensor);
      const bool same = member.source_version == source.version && member.version == before;
      member.version = same ? before : before + 1;
      member.source_version = std::nullopt;  // should there be no memory for the counter
      const c10::VariableVersion counter(member.version);
      member.tensor.set_data(value);
      autograd_impl::set_version_counter(member.tensor, counter);
      member.source_version = source.version;
      continue;
    }
    member.source_version = std::nullopt;
    member.tensor.set_data(value);
    // What is shared is changed by whoever changes it; then an earlier graph must notice.
    if (source.tensor.is_inference()) continue;
    autograd_impl::set_version_counter(member.tensor, autograd_impl::version_counter(value));
  }
  if (edges_installed_[replica] == edges_made_) return;
  for (Member& member : members_[replica]) {
    const Source& source = sources_[member.source];
    if (source.node != nullptr) {
      const auto number = static_cast<uint32_t>(replica) * source.slots + source.slot;
      autograd_impl::set_gradient_edge(member.tensor, {source.node, number});
    } else {
      autograd_impl::set_gradient_edge(member.tensor, Edge());
      member.tensor.set_requires_grad(false);
    }
  }
  // Last: where there is no memory for one of them the next forward begins anew.
  edges_installed_[replica] = edges_made_;
}

void Replicas::Keep(size_t count) {
  size_t sharing = 0;
  for (size_t i = 0; i < count; ++i) sharing += collectives_->devices()[i] == home_ ? 1 : 0;
  for (const Source& source : sources_) {
    TORCH_CHECK_VALUE(sharing < 2 || source.is_buffer || source.version == VersionOf(source.tensor),
                      "replicas: the module wrote to its parameter ", source.name, " in forward; ",
                      sharing, " replicas on ", home_, " share its memory, and cannot all do so");
  }
  for (size_t i = 0; i < count; ++i) {
    for (const Member& member : members_[i]) {
      const Source& source = sources_[member.source];
      TORCH_CHECK_VALUE(source.is_buffer || !member.source_version.has_value() ||
                            member.version == VersionOf(member.tensor),
                        "replicas: the module wrote to its parameter ", source.name,
                        " in forward; replica ", i, ", on ", collectives_->devices()[i],
                        ", has a copy of it, and what is written to that is lost");
    }
  }
  const bool is_home = collectives_->devices()[0] == home_;
  const at::NoGradGuard no_grad;
  for (const Member& member : members_[0]) {
    const Source& source = sources_[member.source];
    if (is_home) {
      // They share memory, but what writes to a sparse one gives it another.
      if (source.is_buffer && !source.tensor.has_storage()) source.tensor.set_data(member.tensor);
      continue;
    }
    if (!source.is_buffer || source.tensor.requires_grad()) continue;
    {
      // No version counts what forward wrote past the counter, as batch norm does.
      const at::AutoDispatchBelowADInplaceOrView below;
      source.tensor.copy_(member.tensor);
    }
    // One without a version is known by another name, too.
    if (!member.source_version.has_value() || member.version == VersionOf(member.tensor) ||
        source.tensor.is_inference()) {
      continue;
    }
    source.tensor.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace distgrad
