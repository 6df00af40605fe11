#include "core/autograd/context_record.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace distgrad {

absl::Status ContextRecord::CheckAlive() const {
  if (!released_) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("context ", id_, " is released"));
}

absl::Status ContextRecord::AddSend(SendEnd send) {
  absl::MutexLock lock(&mu_);
  DG_RETURN_IF_ERROR(CheckAlive());
  edges_.sends.push_back(std::move(send));
  return absl::OkStatus();
}

void ContextRecord::RemoveSend(EdgeId edge) {
  absl::MutexLock lock(&mu_);
  auto& sends = edges_.sends;
  sends.erase(std::remove_if(sends.begin(), sends.end(),
                             [&](const SendEnd& s) { return s.end.edge == edge; }),
              sends.end());
}

absl::StatusOr<std::pair<size_t, std::vector<std::shared_ptr<PassRun>>>> ContextRecord::AddRecv(
    std::shared_ptr<RecvNode> recv) {
  absl::MutexLock lock(&mu_);
  DG_RETURN_IF_ERROR(CheckAlive());
  edges_.recvs.push_back(std::move(recv));
  std::vector<std::shared_ptr<PassRun>> passes;
  for (const auto& [pass, run] : passes_) passes.push_back(run);
  return std::pair(edges_.recvs.size() - 1, std::move(passes));
}

void ContextRecord::AddPeer(WorkerId peer) {
  absl::MutexLock lock(&mu_);
  peers_.insert(peer);
}

std::vector<WorkerId> ContextRecord::Peers() const {
  absl::MutexLock lock(&mu_);
  return {peers_.begin(), peers_.end()};
}

std::vector<std::shared_ptr<PassRun>> ContextRecord::Passes() const {
  absl::MutexLock lock(&mu_);
  std::vector<std::shared_ptr<PassRun>> passes;
  for (const auto& [pass, run] : passes_) passes.push_back(run);
  return passes;
}

absl::StatusOr<ContextRecord::Edges> ContextRecord::Claim(PassId pass, bool retain_graph) {
  absl::MutexLock lock(&mu_);
  DG_RETURN_IF_ERROR(CheckAlive());
  if (last_pass_ != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("a backward of context ", id_,
                     " without retain_graph has run, or is running: its graph is used up"));
  }
  if (!retain_graph) {
    if (!claims_.empty()) {
      return absl::FailedPreconditionError(
          absl::StrCat("another backward of context ", id_,
                       " is running, and one without retain_graph would free its graph"));
    }
    last_pass_ = pass;
  }
  claims_.push_back(pass);
  return edges_;
}

void ContextRecord::Accumulate(torch::autograd::AccumulateGrad& leaf, at::Tensor gradient) {
  absl::MutexLock lock(&gradients_mu_);
  LeafGradient& slot = gradients_[leaf.variable.unsafeGetTensorImpl()];
  slot.leaf = leaf.variable;
  // `gradient` is the one reference that we know of; a tensor with more is copied, not taken.
  torch::autograd::AccumulateGrad::accumulateGrad(
      leaf.variable, slot.gradient, gradient, /*num_expected_refs=*/1,
      [&slot](at::Tensor&& sum) { slot.gradient = std::move(sum); });
}

absl::StatusOr<at::Tensor> ContextRecord::Gradient(const at::Tensor& leaf) const {
  absl::MutexLock lock(&gradients_mu_);
  auto it = gradients_.find(leaf.unsafeGetTensorImpl());
  if (it != gradients_.end()) return it->second.gradient;
  return absl::NotFoundError(absl::StrCat("context ", id_, " has no gradient for this tensor"));
}

std::vector<std::pair<at::Tensor, at::Tensor>> ContextRecord::Gradients() const {
  absl::MutexLock lock(&gradients_mu_);
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients;
  gradients.reserve(gradients_.size());
  for (const auto& [impl, slot] : gradients_) gradients.emplace_back(slot.leaf, slot.gradient);
  return gradients;
}

absl::Status ContextRecord::SetGradient(const at::Tensor& leaf, at::Tensor gradient) {
  absl::MutexLock lock(&gradients_mu_);
  auto it = gradients_.find(leaf.unsafeGetTensorImpl());
  if (it == gradients_.end()) {
    return absl::NotFoundError(absl::StrCat("context ", id_, " has no gradient for this tensor"));
  }
  it->second.gradient = std::move(gradient);
  return absl::OkStatus();
}

ContextRecord::Found ContextRecord::FindOrAddPass(
    PassId pass, absl::FunctionRef<std::shared_ptr<PassRun>()> make) {
  absl::MutexLock lock(&mu_);
  if (released_) return {nullptr, CheckAlive()};
  if (auto it = over_.find(pass); it != over_.end()) return {nullptr, it->second};
  auto [it, is_new] = passes_.try_emplace(pass);
  if (is_new) it->second = make();
  return {it->second, absl::OkStatus()};
}

void ContextRecord::EndPass(PassId pass, const absl::Status& status) {
  std::shared_ptr<PassRun> run;  // declared first, so that it ends outside the lock
  absl::MutexLock lock(&mu_);
  if (auto it = passes_.find(pass); it != passes_.end()) {
    run = std::move(it->second);
    passes_.erase(it);
  }
  over_.emplace(pass, status);
  claims_.erase(std::remove(claims_.begin(), claims_.end(), pass), claims_.end());
}

std::vector<std::shared_ptr<PassRun>> ContextRecord::Release() {
  Edges edges;  // end outside the lock
  std::vector<std::shared_ptr<PassRun>> passes;
  {
    absl::MutexLock lock(&mu_);
    released_ = true;
    std::swap(edges, edges_);
    for (const auto& [pass, run] : passes_) passes.push_back(run);
  }
  absl::flat_hash_map<const c10::TensorImpl*, LeafGradient> gradients;
  absl::MutexLock lock(&gradients_mu_);
  gradients.swap(gradients_);
  return passes;
}

bool ContextRecord::released() const {
  absl::MutexLock lock(&mu_);
  return released_;
}

}  // namespace distgrad
