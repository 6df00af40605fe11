// Adds edges, peers and gradients to a context, and ends it on this worker.
#include "core/autograd/context_record.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/autograd/executor/cheap_graph.h"
#include "core/autograd/executor/post_accumulate.h"
#include "core/base/status.h"
#include "core/tensor/exception.h"

namespace distgrad {

absl::Status ContextRecord::ReleasedError() const {
  return absl::FailedPreconditionError(absl::StrCat("context ", id_, " is released"));
}

absl::Status ContextRecord::CheckAlive() const {
  return released_ ? ReleasedError() : absl::OkStatus();
}

absl::Status ContextRecord::CheckReachable(WorkerRank peer) const {
  auto it = lost_.find(peer);
  if (it == lost_.end()) return absl::OkStatus();
  return Annotate(it->second, absl::StrCat("context ", id_, " has lost worker ", peer));
}

absl::Status ContextRecord::AddSend(SendEnd send) {
  absl::MutexLock lock(&mu_);
  DG_RETURN_IF_ERROR(CheckAlive());
  DG_RETURN_IF_ERROR(CheckReachable(send.end.peer));
  edges_.sends.push_back(std::move(send));
  return absl::OkStatus();
}

std::shared_ptr<SourceNode> ContextRecord::RemoveSend(EdgeId edge) {
  absl::MutexLock lock(&mu_);
  auto& sends = edges_.sends;
  const auto found = std::find_if(sends.begin(), sends.end(),
                                  [&](const SendEnd& s) { return s.end.edge == edge; });
  if (found == sends.end()) return nullptr;
  std::shared_ptr<SourceNode> node = std::move(found->node);
  sends.erase(found);
  return node;
}

absl::StatusOr<std::pair<size_t, std::vector<std::shared_ptr<PassHandle>>>> ContextRecord::AddRecv(
    RecvEnd recv) {
  absl::MutexLock lock(&mu_);
  DG_RETURN_IF_ERROR(CheckAlive());
  DG_RETURN_IF_ERROR(CheckReachable(recv.end.peer));
  edges_.recvs.push_back(std::move(recv));
  std::vector<std::shared_ptr<PassHandle>> passes;
  for (const auto& [pass, run] : passes_) passes.push_back(run);
  for (const auto& [pass, run] : done_) passes.push_back(run);
  return std::pair(edges_.recvs.size() - 1, std::move(passes));
}

absl::Status ContextRecord::AddPeer(WorkerRank peer) {
  absl::MutexLock lock(&mu_);
  DG_RETURN_IF_ERROR(CheckAlive());
  peers_.insert(peer);
  return absl::OkStatus();
}

bool ContextRecord::CheapToRunInline() const {
  constexpr size_t kEdges = 16;
  // Also while they are looked at: without it a release might leave the last references here, and
  // the thread may be the sockets'.
  absl::MutexLock lock(&mu_);
  std::vector<std::shared_ptr<torch::autograd::Node>> sends;
  if (edges_.sends.size() > kEdges || edges_.recvs.size() > kEdges) return false;
  for (const SendEnd& send : edges_.sends) sends.push_back(send.node);
  return distgrad::CheapToRunInline(sends, RecvNode::Is);
}

bool ContextRecord::LosePeer(WorkerRank peer, const absl::Status& why) {
  absl::MutexLock lock(&mu_);
  if (peers_.count(peer) == 0) return false;
  lost_.try_emplace(peer, why);
  return true;
}

std::vector<WorkerRank> ContextRecord::Peers() const {
  absl::MutexLock lock(&mu_);
  return {peers_.begin(), peers_.end()};
}

std::vector<std::shared_ptr<PassHandle>> ContextRecord::Passes() const {
  absl::MutexLock lock(&mu_);
  std::vector<std::shared_ptr<PassHandle>> passes;
  for (const auto& [pass, run] : passes_) passes.push_back(run);
  return passes;
}

absl::StatusOr<ContextRecord::Edges> ContextRecord::Claim(PassId pass, bool retain_graph) {
  absl::MutexLock lock(&mu_);
  DG_RETURN_IF_ERROR(CheckAlive());
  // The message that was to make the other end of an edge may be lost, and nothing would come.
  for (const SendEnd& send : edges_.sends) DG_RETURN_IF_ERROR(CheckReachable(send.end.peer));
  for (const RecvEnd& recv : edges_.recvs) DG_RETURN_IF_ERROR(CheckReachable(recv.end.peer));
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

void ContextRecord::LeafGradient::Add(at::Tensor gradient) {
  absl::MutexLock lock(&mu_);
  ready_.Await(gradient_);
  // Another view of the same memory may become the gradient of another leaf, or be on its way to
  // another worker; the next pass adds to this one in place.
  if (!gradient_.defined() && gradient.has_storage() && gradient.storage().use_count() > 1) {
    gradient = gradient.clone();
  }
  // `gradient` is the one reference that we know of; a tensor with more is copied, not taken.
  torch::autograd::AccumulateGrad::accumulateGrad(
      leaf_, gradient_, gradient, /*num_expected_refs=*/1,
      [this](at::Tensor&& sum) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { gradient_ = std::move(sum); });
  ready_ = ReadyMark({gradient_});
}

bool ContextRecord::LeafGradient::defined() const {
  absl::MutexLock lock(&mu_);
  return gradient_.defined();
}

at::Tensor ContextRecord::LeafGradient::Get() const {
  absl::MutexLock lock(&mu_);
  ready_.Await(gradient_);
  return gradient_;
}

at::Tensor ContextRecord::LeafGradient::Take() {
  absl::MutexLock lock(&mu_);
  ready_.Await(gradient_);
  return std::exchange(gradient_, at::Tensor());
}

void ContextRecord::LeafGradient::Set(at::Tensor gradient) {
  absl::MutexLock lock(&mu_);
  std::swap(gradient_, gradient);
  ready_ = ReadyMark({gradient_});
}

bool ContextRecord::LeafGradient::Replace(at::Tensor gradient) {
  absl::MutexLock lock(&mu_);
  if (!gradient_.defined()) return false;
  ready_ = ReadyMark({gradient});  // may throw; then the old one stays
  std::swap(gradient_, gradient);
  return true;
}

bool ContextRecord::LeafGradient::counts_in_norms() const {
  absl::MutexLock lock(&mu_);
  return counts_in_norms_;
}

void ContextRecord::LeafGradient::SetCountsInNorms(bool counts) {
  absl::MutexLock lock(&mu_);
  counts_in_norms_ = counts;
}

std::shared_ptr<ContextRecord::LeafGradient> ContextRecord::GradientToAddTo(
    const at::Tensor& leaf) {
  if (gradients_dropped_) return nullptr;
  const auto found = gradients_.find(leaf.unsafeGetTensorImpl());
  if (found != gradients_.end()) return found->second;
  return gradients_.emplace(leaf.unsafeGetTensorImpl(), std::make_shared<LeafGradient>(leaf))
      .first->second;
}

void ContextRecord::AddToGradient(const at::Tensor& leaf, at::Tensor gradient) {
  std::shared_ptr<LeafGradient> sum;
  {
    absl::MutexLock lock(&gradients_mu_);
    sum = GradientToAddTo(leaf);
  }
  if (sum != nullptr) sum->Add(std::move(gradient));
}

void ContextRecord::SetCountsInNorms(const at::Tensor& leaf, bool counts) {
  absl::MutexLock lock(&gradients_mu_);
  if (const auto gradient = GradientToAddTo(leaf)) gradient->SetCountsInNorms(counts);
}

absl::Status ContextRecord::TakeGradientsOf(ContextRecord& other) {
  // The averages would take the place of the sums.
  const auto averaged = [](ContextId id) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the gradients of context ", id,
        " are averaged in its backward: take the averages (GradientAverager::Average) before they "
        "are summed with others, or average the sums without AverageInBackward"));
  };
  {
    absl::MutexLock lock(&gradients_mu_);
    if (gradients_dropped_) return ReleasedError();
    if (observer_ != nullptr) return averaged(id_);
  }
  LeafGradients taken;
  {
    absl::MutexLock lock(&other.gradients_mu_);
    if (other.gradients_dropped_) return other.ReleasedError();
    if (other.observer_ != nullptr) return averaged(other.id_);
    taken.swap(other.gradients_);
  }
  try {
    // Passes add to what it sets in any mode.
    const c10::InferenceMode off(false);
    const at::NoGradGuard no_grad;
    for (const auto& [impl, slot] : taken) {
      // A hook may have dropped it.
      if (at::Tensor gradient = slot->Take(); gradient.defined()) {
        AddToGradient(slot->leaf(), std::move(gradient));
        SetCountsInNorms(slot->leaf(), slot->counts_in_norms());
      }
    }
  } catch (...) {  // there was no memory, or an error of a device
    return StatusFromException(std::current_exception());
  }
  // A release may have come meanwhile, and nothing was added since.
  absl::MutexLock lock(&gradients_mu_);
  return gradients_dropped_ ? ReleasedError() : absl::OkStatus();
}

void ContextRecord::Accumulate(torch::autograd::AccumulateGrad& leaf, at::Tensor gradient) {
  std::shared_ptr<LeafGradient> sum;
  std::shared_ptr<const LeafObserver> observer;
  {
    absl::MutexLock lock(&gradients_mu_);
    sum = GradientToAddTo(leaf.variable);
    observer = observer_;
  }
  if (sum == nullptr) return;
  if (HasPostAccumulateHook(leaf)) {
    CallPostAccumulateHook(
        leaf,
        [&] {
          sum->Add(std::move(gradient));
          return sum->Get();
        },
        [&](at::Tensor left) { sum->Set(std::move(left)); });
    if (!sum->defined()) return;
  } else {
    sum->Add(std::move(gradient));
  }
  if (observer != nullptr) (*observer)(leaf.variable);
}

void ContextRecord::SetLeafObserver(LeafObserver observer) {
  auto next =
      observer == nullptr ? nullptr : std::make_shared<const LeafObserver>(std::move(observer));
  absl::MutexLock lock(&gradients_mu_);
  if (!gradients_dropped_) observer_.swap(next);
}

bool ContextRecord::has_leaf_observer() const {
  absl::MutexLock lock(&gradients_mu_);
  return observer_ != nullptr;
}

absl::Status ContextRecord::NoGradient() const {
  return absl::NotFoundError(absl::StrCat("context ", id_, " has no gradient for this tensor"));
}

absl::StatusOr<at::Tensor> ContextRecord::Gradient(const at::Tensor& leaf) const {
  DG_ASSIGN_OR_RETURN(std::vector<at::Tensor> gradients, GradientsOf({leaf}));
  if (gradients[0].defined()) return std::move(gradients[0]);
  const absl::string_view why = !leaf.defined()         ? "it is undefined"
                                : !leaf.requires_grad() ? "it does not require grad"
                                : !leaf.is_leaf()
                                    ? "it is not a leaf; with retain_grad() it gets one in grad()"
                                    : "no backward of the context has led to it";
  return absl::NotFoundError(absl::StrCat(NoGradient().message(), ": ", why));
}

absl::StatusOr<std::vector<std::shared_ptr<ContextRecord::LeafGradient>>> ContextRecord::Find(
    absl::Span<const at::Tensor> leaves) const {
  std::vector<std::shared_ptr<LeafGradient>> found;
  found.reserve(leaves.size());
  absl::MutexLock lock(&gradients_mu_);
  if (gradients_dropped_) return ReleasedError();
  for (const at::Tensor& leaf : leaves) {
    const auto it = gradients_.find(leaf.unsafeGetTensorImpl());
    found.push_back(it == gradients_.end() ? nullptr : it->second);
  }
  return found;
}

absl::StatusOr<std::vector<at::Tensor>> ContextRecord::Read(
    absl::Span<const at::Tensor> leaves, absl::FunctionRef<bool(const LeafGradient&)> wants) const {
  DG_ASSIGN_OR_RETURN(const auto found, Find(leaves));
  std::vector<at::Tensor> gradients;
  gradients.reserve(leaves.size());
  try {
    for (const auto& slot : found) {
      gradients.push_back(slot == nullptr || !wants(*slot) ? at::Tensor() : slot->Get());
    }
  } catch (...) {  // an error of a device
    return StatusFromException(std::current_exception());
  }
  return gradients;
}

absl::StatusOr<std::vector<at::Tensor>> ContextRecord::GradientsOf(
    absl::Span<const at::Tensor> leaves) const {
  return Read(leaves, [](const LeafGradient&) { return true; });
}

absl::StatusOr<std::vector<at::Tensor>> ContextRecord::GradientsInNorms(
    absl::Span<const at::Tensor> leaves) const {
  return Read(leaves, [](const LeafGradient& gradient) { return gradient.counts_in_norms(); });
}

ContextRecord::LeafGradients ContextRecord::AllGradients() const {
  absl::MutexLock lock(&gradients_mu_);
  return gradients_;
}

absl::StatusOr<std::vector<std::pair<at::Tensor, at::Tensor>>> ContextRecord::Gradients() const {
  LeafGradients all;
  {
    absl::MutexLock lock(&gradients_mu_);
    if (gradients_dropped_) return ReleasedError();
    all = gradients_;
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients;
  gradients.reserve(all.size());
  try {
    for (const auto& [impl, slot] : all) {
      // A hook may have dropped it.
      if (at::Tensor gradient = slot->Get(); gradient.defined()) {
        gradients.emplace_back(slot->leaf(), std::move(gradient));
      }
    }
  } catch (...) {  // an error of a device
    return StatusFromException(std::current_exception());
  }
  return gradients;
}

absl::Status ContextRecord::SetGradient(const at::Tensor& leaf, at::Tensor gradient) {
  std::shared_ptr<LeafGradient> slot;
  {
    absl::MutexLock lock(&gradients_mu_);
    if (gradients_dropped_) return ReleasedError();
    const auto it = gradients_.find(leaf.unsafeGetTensorImpl());
    if (it == gradients_.end()) return NoGradient();
    slot = it->second;
  }
  if (!gradient.defined()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the new gradient in context ", id_, " is undefined"));
  }
  if (gradient.sizes() != leaf.sizes() || gradient.scalar_type() != leaf.scalar_type() ||
      gradient.device() != leaf.device()) {
    const auto kind = [](const at::Tensor& tensor) {
      return c10::str(tensor.sizes(), " ", tensor.scalar_type(), " on ", tensor.device());
    };
    return absl::InvalidArgumentError(absl::StrCat("the new gradient in context ", id_, " is ",
                                                   kind(gradient), ", and its leaf is ",
                                                   kind(leaf)));
  }
  try {
    return slot->Replace(std::move(gradient)) ? absl::OkStatus() : NoGradient();
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
}

absl::StatusOr<std::shared_ptr<PassHandle>> ContextRecord::BeginPass(
    WorkerRank self, absl::FunctionRef<std::shared_ptr<PassHandle>(PassId settled)> make) {
  std::vector<std::shared_ptr<PassHandle>> over;  // ends outside the lock
  absl::MutexLock lock(&mu_);
  DG_RETURN_IF_ERROR(CheckAlive());
  PassId settled = last_begun_;
  for (const auto& [pass, run] : passes_) {
    if (MakerOf(pass) == self) settled = std::min(settled, pass - 1);
  }
  std::shared_ptr<PassHandle> run = make(settled);
  last_begun_ = run->id();
  passes_.emplace(run->id(), run);
  over = TakeSettled(settled);
  return run;
}

ContextRecord::Found ContextRecord::FindPassLocked(PassId pass) const {
  if (released_) return {nullptr, CheckAlive()};
  if (auto it = passes_.find(pass); it != passes_.end()) return {it->second, absl::OkStatus()};
  if (auto it = done_.find(pass); it != done_.end()) return {it->second, absl::OkStatus(), true};
  if (auto it = failed_.find(pass); it != failed_.end()) return {nullptr, it->second};
  return {nullptr, absl::OkStatus()};
}

ContextRecord::Found ContextRecord::FindPass(PassId pass) const {
  absl::MutexLock lock(&mu_);
  return FindPassLocked(pass);
}

ContextRecord::Found ContextRecord::FindOrAddPass(PassId pass, WorkerRank from, PassId settled,
                                                  MakeRun make) {
  std::vector<std::shared_ptr<PassHandle>> over;  // ends outside the lock
  absl::MutexLock lock(&mu_);
  Found found = FindPassLocked(pass);
  if (!found.over.ok()) return found;
  found.over = CheckReachable(from);
  if (found.run != nullptr || !found.over.ok()) return found;
  // Of its own passes a worker knows all but those of which nobody has anything more to say, and
  // one that it did not begin would stand in the way of the one that it will.
  if (MakerOf(pass) == holder_.rank) {
    found.over = absl::FailedPreconditionError(
        absl::StrCat("pass ", pass, " of context ", id_, " is over, or was never begun"));
    return found;
  }
  found.run = passes_.emplace(pass, make()).first->second;
  over = TakeSettled(settled);
  return found;
}

std::vector<std::shared_ptr<PassHandle>> ContextRecord::TakeSettled(PassId settled) {
  std::vector<std::shared_ptr<PassHandle>> over;
  auto it = done_.lower_bound(MakeId(MakerOf(settled), 0));
  while (it != done_.end() && it->first <= settled) {
    over.push_back(std::move(it->second));
    it = done_.erase(it);
  }
  return over;
}

void ContextRecord::EndPass(PassId pass, const absl::Status& status) {
  std::shared_ptr<PassHandle> run;  // declared first, so that it ends outside the lock
  absl::MutexLock lock(&mu_);
  const auto it = passes_.find(pass);
  // First, as there may be no memory for it.
  if (!released_ && status.ok()) {
    if (it != passes_.end()) done_.emplace(pass, it->second);
  } else if (!released_ && failed_.count(pass) == 0) {
    // What is in order alone does no harm, and is there where this is done again for memory.
    if (failed_order_.empty() || failed_order_.back() != pass) failed_order_.push_back(pass);
    failed_.emplace(pass, status);
    if (failed_order_.size() > kRemembered) {
      failed_.erase(failed_order_.front());
      failed_order_.pop_front();
    }
  }
  if (it != passes_.end()) {
    run = std::move(it->second);
    passes_.erase(it);
  }
  claims_.erase(std::remove(claims_.begin(), claims_.end(), pass), claims_.end());
}

ContextRecord::Released ContextRecord::Release() {
  Released released;
  {
    absl::MutexLock lock(&mu_);
    // Before what there may be no memory for: so that whoever releases it again finds it.
    released_ = true;
    for (const auto& [pass, run] : passes_) released.passes.push_back(run);
    std::swap(released.edges, edges_);
    released.done.swap(done_);
  }
  absl::MutexLock lock(&gradients_mu_);
  released.gradients.swap(gradients_);
  released.observer.swap(observer_);
  gradients_dropped_ = true;
  return released;
}

ContextState ContextRecord::State() const {
  ContextState state;
  state.id = id_;
  {
    absl::MutexLock lock(&mu_);
    state.peers.assign(peers_.begin(), peers_.end());
    state.sends = edges_.sends.size();
    state.receives = edges_.recvs.size();
  }
  for (const auto& [impl, slot] : AllGradients()) state.gradients += slot->defined();
  return state;
}

bool ContextRecord::released() const {
  absl::MutexLock lock(&mu_);
  return released_;
}

}  // namespace distgrad
