// Answers a manager's messages, one at a time.
#include "core/checkpoint/job/part.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <sys/mman.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "core/base/blocking.h"
#include "core/base/cancellation.h"
#include "core/base/crc32c.h"
#include "core/base/ids.h"
#include "core/base/origin.h"
#include "core/base/status.h"
#include "core/checkpoint/job/json_text.h"
#include "core/checkpoint/job/manifest.h"
#include "core/checkpoint/job/messages.h"
#include "core/checkpoint/job/shard.h"
#include "core/checkpoint/optimizer_checkpoint.h"
#include "core/checkpoint/row_major.h"
#include "core/checkpoint/safetensors_header.h"
#include "core/checkpoint/shared_memory.h"
#include "core/optim/local_optimizer.h"
#include "core/tensor/exception.h"
#include "core/worker/optimizer.h"
#include "core/worker/worker.h"
#include "nlohmann/json.hpp"

namespace distgrad {
namespace {

// Of the files of parameters and buffers; Hugging Face's tools look for it.
const std::map<std::string, std::string>& ModelMetadata() {
  static const auto& metadata = *new std::map<std::string, std::string>{{"format", "pt"}};
  return metadata;
}

// The kernel gives fresh memory page by page, when it is first written to: with the small pages
// that takes longer than the copy does. Where there are no large ones, it stays as it is.
void AskForLargePages(const at::Tensor& memory) {
  constexpr size_t kLargePage = 2 << 20;
  char* const begin = static_cast<char*>(memory.mutable_data_ptr());
  const size_t before = (kLargePage - reinterpret_cast<uintptr_t>(begin) % kLargePage) % kLargePage;
  if (memory.nbytes() < before + kLargePage) return;
  madvise(begin + before, (memory.nbytes() - before) / kLargePage * kLargePage, MADV_HUGEPAGE);
}

// Puts copies on the CPU, which nobody else has, in the place of tensors. They are all in one piece
// of memory. `check` is asked before each.
absl::Status Copy(absl::FunctionRef<absl::Status()> check, TensorMap* tensors) {
  constexpr size_t kAlignment = 64;
  const auto padded = [](const at::Tensor& tensor) {
    return static_cast<int64_t>((tensor.nbytes() + kAlignment - 1) / kAlignment * kAlignment);
  };
  // So that each of them has its elements in memory.
  DG_RETURN_IF_ERROR(CheckSafetensors(*tensors));
  int64_t bytes = 0;
  for (const auto& [name, tensor] : *tensors) bytes += padded(tensor);
  const at::Tensor memory = at::empty({bytes}, at::kByte);
  AskForLargePages(memory);
  int64_t begin = 0;
  for (auto& [name, tensor] : *tensors) {
    DG_RETURN_IF_ERROR(check());
    const at::Tensor from = AsBits(tensor.detach());
    const at::Tensor to = memory.narrow(0, begin, static_cast<int64_t>(from.nbytes()))
                              .view(from.scalar_type())
                              .view(from.sizes());
    to.copy_(from);
    begin += padded(tensor);
    tensor = to.view(tensor.scalar_type());
  }
  return absl::OkStatus();
}

Incarnation IncarnationOf(const Worker& worker) {
  for (const Member& member : worker.members()) {
    if (member.rank == worker.rank()) return member.incarnation;
  }
  return 0;  // it has left
}

// The files of a checkpoint, each opened when something of it is asked for. For one thread.
class Shards {
 public:
  Shards(std::string folder, Manifest manifest)
      : folder_(std::move(folder)), manifest_(std::move(manifest)) {
    for (const ManifestWorker& worker : manifest_.workers) {
      for (const ManifestFile& file : worker.files) {
        if (file.optimizer.has_value()) {
          optimizers_[*file.optimizer].push_back(&file);
          continue;
        }
        for (const auto& [name, sum] : file.checksums.tensors) tensors_[name] = &file;
      }
    }
  }
  Shards(const Shards&) = delete;
  Shards& operator=(const Shards&) = delete;

  const Manifest& manifest() const { return manifest_; }

  // Null if none has it.
  const ManifestFile* FileOf(const std::string& tensor) const {
    const auto found = tensors_.find(tensor);
    return found == tensors_.end() ? nullptr : found->second;
  }
  std::vector<const ManifestFile*> FilesOf(const std::string& optimizer) const {
    const auto found = optimizers_.find(optimizer);
    return found == optimizers_.end() ? std::vector<const ManifestFile*>() : found->second;
  }

  // kDataLoss unless its size and header are what they were.
  absl::StatusOr<const SafetensorsFile*> Open(const ManifestFile& file) {
    if (const auto found = open_.find(file.name); found != open_.end()) return &found->second;
    DG_ASSIGN_OR_RETURN(SafetensorsFile opened, OpenShard(folder_, file));
    return &open_.emplace(file.name, std::move(opened)).first->second;
  }

  absl::Status DamagedTensor(const ManifestFile& file, const std::string& name) const {
    std::string where;
    if (const auto found = open_.find(file.name); found != open_.end()) {
      const SafetensorsFile& open = found->second;
      const SafetensorsInfo& info = open.header().tensors.at(name);
      const uint64_t begins = open.size() - DataBytes(open.header());
      where = absl::StrCat(" (its bytes ", begins + info.begin, " to ", begins + info.end, ")");
    }
    return DamagedShard(folder_, file,
                        absl::StrCat("another tensor ", QuoteName(name), where,
                                     " than was saved: its checksum is wrong"));
  }

 private:
  static uint64_t DataBytes(const SafetensorsHeader& header) {
    uint64_t end = 0;
    for (const auto& [name, info] : header.tensors) end = std::max(end, info.end);
    return end;
  }

  const std::string folder_;
  const Manifest manifest_;
  std::map<std::string, const ManifestFile*> tensors_;
  std::map<std::string, std::vector<const ManifestFile*>> optimizers_;
  std::map<std::string, SafetensorsFile> open_;
};

}  // namespace

absl::Status CheckValueName(const std::string& name) {
  if (IsUtf8(name)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "the name of a value, '", absl::CHexEscape(name.substr(0, 100)), "', is not UTF-8"));
}

CheckpointOptimizer::CheckpointOptimizer(torch::optim::Optimizer* optimizer)
    : use_([optimizer](Use use) { return use(*optimizer); }) {}
CheckpointOptimizer::CheckpointOptimizer(LocalOptimizer* optimizer)
    : use_([optimizer](Use use) { return optimizer->Use(use); }) {}
CheckpointOptimizer::CheckpointOptimizer(const Optimizer* optimizer)
    : use_([optimizer](Use use) { return optimizer->Use(use); }) {}
CheckpointOptimizer::CheckpointOptimizer(std::shared_ptr<const Optimizer> optimizer)
    : use_([optimizer = std::move(optimizer)](Use use) { return optimizer->Use(use); }) {}
absl::Status CheckpointOptimizer::operator()(Use use) const { return use_(use); }

// Thread-safe.
class CheckpointPart::Impl {
 public:
  Impl(Worker* worker, std::string name, CheckpointContents contents)
      : worker_(worker),
        name_(std::move(name)),
        contents_(std::move(contents)),
        incarnation_(IncarnationOf(*worker)) {}

  Worker* worker() const { return worker_; }
  const std::string& name() const { return name_; }

  absl::Status CheckContents() {
    // The name of this worker is in the manifest.
    if (!IsUtf8(worker_->name())) {
      return absl::InvalidArgumentError("the name of its worker is not UTF-8");
    }
    DG_RETURN_IF_ERROR(
        Annotate(CheckSafetensors(contents_.tensors, ModelMetadata()), "it cannot be saved"));
    for (const auto& [name, tensor] : contents_.tensors) {
      if (MayOverlapItself(tensor)) {
        return absl::InvalidArgumentError(absl::StrCat(
            "the tensor ", QuoteName(name), " cannot be loaded: it has elements that are one in ",
            "memory, as expand() and unfold() make them; give the part a clone() of it"));
      }
    }
    for (const auto& [name, use] : contents_.optimizers) {
      if (!IsOptimizerName(name)) {
        return absl::InvalidArgumentError(absl::StrCat(
            QuoteName(name), " is no name of an optimizer: letters, digits, '_' and '-' are"));
      }
      // As a save does, so that what cannot be saved is an error before anything is trained.
      std::set<const void*> with_state;
      const absl::StatusOr<std::vector<std::string>> parameters =
          PlanOptimizer(name, use, &with_state);
      DG_RETURN_IF_ERROR(parameters.status());
      DG_RETURN_IF_ERROR(
          UseOptimizer(name, use, [&](torch::optim::Optimizer& optimizer) -> absl::Status {
            size_t number = 0;
            for (const auto& group : optimizer.param_groups()) {
              if (!group.params().empty()) {
                ++number;
                continue;
              }
              // A file has options by parameters, so a load would not find those of this group.
              return absl::InvalidArgumentError(
                  absl::StrCat("its group ", number, " has no parameters; leave it out"));
            }
            DG_ASSIGN_OR_RETURN(
                const OptimizerSnapshot view,
                ViewOptimizer(optimizer, contents_.tensors,
                              std::set<std::string>(parameters->begin(), parameters->end())));
            return CheckSafetensors(view.tensors, view.metadata);
          }));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<Message> Plan(Request& request) {
    return InTurn(request, [&]() -> absl::StatusOr<std::string> {
      PartPlan plan;
      for (const auto& [name, tensor] : contents_.tensors) {
        plan.tensors[name] = {absl::StrCat(SafetensorsDtype(tensor.scalar_type()), " [",
                                           absl::StrJoin(tensor.sizes(), ", "), "]"),
                              static_cast<uint64_t>(tensor.numel()) * tensor.element_size()};
      }
      for (const auto& [name, use] : contents_.optimizers) {
        std::set<const void*> parameters, with_state;
        DG_ASSIGN_OR_RETURN(plan.optimizers[name], PlanOptimizer(name, use, &with_state));
        for (const std::string& parameter : plan.optimizers[name]) {
          parameters.insert(contents_.tensors.at(parameter).unsafeGetTensorImpl());
        }
        for (const auto& [alias, tensor] : contents_.tensors) {
          if (parameters.count(tensor.unsafeGetTensorImpl()) == 0) continue;
          plan.aliases[name].push_back(alias);
          if (with_state.count(tensor.unsafeGetTensorImpl()) == 0) continue;
          plan.with_state[name].push_back(alias);
        }
      }
      return Encode(plan);
    });
  }

  absl::StatusOr<Message> Hold(Request& request) {
    return InTurn(request, [&]() -> absl::StatusOr<std::string> {
      DG_ASSIGN_OR_RETURN(const HoldRequest hold, DecodeHold(request.message.payload));
      held_.reset();  // its memory first
      DG_RETURN_IF_ERROR(CheckGoesOn(request, hold.token));
      // Once more: a program may have taken a tensor's memory since the part was made.
      DG_RETURN_IF_ERROR(CheckSafetensors(contents_.tensors, ModelMetadata()));
      Held held{hold.token, {}, {}, {}};
      for (const std::string& name : hold.tensors) {
        const auto found = contents_.tensors.find(name);
        if (found == contents_.tensors.end()) {
          return absl::InvalidArgumentError(absl::StrCat("it has no tensor ", QuoteName(name)));
        }
        held.tensors[name] = found->second;
      }
      const auto goes_on = [&] { return CheckGoesOn(request, hold.token); };
      if (hold.copy) DG_RETURN_IF_ERROR(Copy(goes_on, &held.tensors));
      for (const auto& [name, only] : hold.optimizers) {
        const auto found = contents_.optimizers.find(name);
        if (found == contents_.optimizers.end()) {
          return absl::InvalidArgumentError(absl::StrCat("it has no optimizer ", QuoteName(name)));
        }
        DG_RETURN_IF_ERROR(UseOptimizer(
            name, found->second,
            [&, &name = name, only = &only](torch::optim::Optimizer& optimizer) -> absl::Status {
              DG_ASSIGN_OR_RETURN(OptimizerSnapshot view,
                                  ViewOptimizer(optimizer, contents_.tensors, *only));
              if (hold.copy) DG_RETURN_IF_ERROR(Copy(goes_on, &view.tensors));
              held.optimizers.emplace(name, std::move(view));
              return absl::OkStatus();
            }));
      }
      if (contents_.save_values != nullptr) {
        DG_RETURN_IF_ERROR(CallProgram("save_values", [&]() -> absl::Status {
          DG_ASSIGN_OR_RETURN(held.values, contents_.save_values());
          return absl::OkStatus();
        }));
        size_t size = 0;
        for (const auto& [name, value] : held.values) {
          DG_RETURN_IF_ERROR(CheckValueName(name));
          size += name.size() + value.size();
        }
        if (size > kMaxCheckpointValues) {
          return absl::InvalidArgumentError(
              absl::StrCat("its values have ", size, " bytes, and may have ", kMaxCheckpointValues,
                           ": what is large belongs into a tensor"));
        }
      }
      HoldReply reply{incarnation_, loaded_, {}};
      for (const std::string& name : hold.replicas) {
        const auto found = contents_.tensors.find(name);
        if (found == contents_.tensors.end()) {
          return absl::InvalidArgumentError(absl::StrCat("it has no tensor ", QuoteName(name)));
        }
        DG_RETURN_IF_ERROR(CheckGoesOn(request, hold.token));
        const auto copied = held.tensors.find(name);
        reply.checksums[name] =
            RowMajorChecksum(copied == held.tensors.end() ? found->second : copied->second);
      }
      held_ = std::move(held);
      return Encode(reply);
    });
  }

  absl::StatusOr<Message> Write(Request& request) {
    return InTurn(request, [&]() -> absl::StatusOr<std::string> {
      DG_ASSIGN_OR_RETURN(const WriteRequest write, DecodeWrite(request.message.payload));
      if (!held_.has_value() || held_->token != write.token) return Superseded();
      const Held held = *std::exchange(held_, std::nullopt);
      ManifestWorker wrote{worker_->name(), held.values, {}};
      const std::string which =
          absl::StrFormat("-%05d-of-%05d.safetensors", write.number, write.count);
      const auto save = [&](std::string file, std::optional<std::string> optimizer,
                            const TensorMap& tensors,
                            const std::map<std::string, std::string>& metadata) -> absl::Status {
        ManifestFile& to = wrote.files.emplace_back();
        to.name = std::move(file);
        to.optimizer = std::move(optimizer);
        return SaveSafetensors(tensors, absl::StrCat(write.folder, "/", to.name), metadata,
                               {.checksums = &to.checksums,
                                .check = [&] { return CheckGoesOn(request, write.token); },
                                .calls = contents_.file_calls});
      };
      if (!held.tensors.empty()) {
        DG_RETURN_IF_ERROR(
            save(absl::StrCat("model", which), std::nullopt, held.tensors, ModelMetadata()));
      }
      for (const auto& [name, snapshot] : held.optimizers) {
        DG_RETURN_IF_ERROR(
            save(absl::StrCat("optimizer", name.empty() ? "" : absl::StrCat(".", name), which),
                 name, snapshot.tensors, snapshot.metadata));
      }
      return JsonText(ToJson(wrote));
    });
  }

  absl::StatusOr<Message> Check(Request& request) {
    return InTurn(request, [&]() -> absl::StatusOr<std::string> {
      DG_ASSIGN_OR_RETURN(const CheckRequest check, DecodeCheck(request.message.payload));
      staged_.reset();
      DG_RETURN_IF_ERROR(CheckGoesOn(request, check.token));
      const absl::StatusOr<std::string> text = ReadManifestText(check.folder);
      if (!text.ok() && !absl::IsNotFound(text.status())) return text.status();
      if (!text.ok() || Crc32c(*text) != check.manifest) {
        return absl::FailedPreconditionError(
            absl::StrCat("it does not see the manifest in ", check.folder, " that the manager sees",
                         text.ok() ? "" : absl::StrCat(" (", text.status().message(), ")"),
                         ": the folder has to be one that all workers see"));
      }
      DG_ASSIGN_OR_RETURN(Manifest manifest, ParseManifest(*text));
      Staged staged{
          check.token, std::make_unique<Shards>(check.folder, std::move(manifest)), {}, {}};
      CheckReply reply{.incarnation = incarnation_};
      const absl::Status fits = Stage(request, check, &staged, &reply);
      // What else is read here are these files.
      if (absl::IsDataLoss(fits)) {
        return Encode(
            CheckReply{.incarnation = incarnation_, .damage = std::string(fits.message())});
      }
      DG_RETURN_IF_ERROR(fits);
      // What does not fit is not loaded.
      if (!check.strict || (reply.missing.empty() && reply.mismatched.empty())) {
        staged_ = std::move(staged);
      }
      return Encode(reply);
    });
  }

  absl::StatusOr<Message> Load(Request& request) {
    return InTurn(request, [&]() -> absl::StatusOr<std::string> {
      DG_ASSIGN_OR_RETURN(const uint64_t token, DecodeToken(request.message.payload));
      if (!staged_.has_value() || staged_->token != token) return Superseded();
      const Staged staged = *std::exchange(staged_, std::nullopt);
      for (const auto& [name, file] : staged.tensors) {
        DG_RETURN_IF_ERROR(CheckGoesOn(request, token));
        DG_ASSIGN_OR_RETURN(const SafetensorsFile* const open, staged.shards->Open(*file));
        const at::Tensor& tensor = contents_.tensors.at(name);
        DG_RETURN_IF_ERROR(open->ReadInto(name, tensor));
        // These are other bytes than were checked: they are read once more.
        if (RowMajorChecksum(tensor) != file->checksums.tensors.at(name)) {
          return staged.shards->DamagedTensor(*file, name);
        }
      }
      for (const auto& [name, parts] : staged.optimizers) {
        DG_RETURN_IF_ERROR(
            UseOptimizer(name, contents_.optimizers.at(name),
                         [&, parts = &parts](torch::optim::Optimizer& optimizer) -> absl::Status {
                           // Somebody else may have used it for long.
                           DG_RETURN_IF_ERROR(CheckGoesOn(request, token));
                           return LoadState(parts->state, &optimizer, parts->form);
                         }));
      }
      DG_RETURN_IF_ERROR(CheckGoesOn(request, token));
      DG_RETURN_IF_ERROR(LoadValues(staged.shards->manifest()));
      loaded_ = true;
      return std::string();
    });
  }

  absl::StatusOr<Message> Drop(Request& request) {
    DG_ASSIGN_OR_RETURN(const uint64_t token, DecodeToken(request.message.payload));
    stopped_.store(token);  // for whoever has the turn, or is still to get it
    return InTurn(request, [&]() -> absl::StatusOr<std::string> {
      if (held_.has_value() && held_->token == token) held_.reset();
      if (staged_.has_value() && staged_->token == token) staged_.reset();
      return std::string();
    });
  }

  // Has the name, until Unregister().
  void Claimed() { claimed_ = true; }
  void Unregister() {
    if (!claimed_) return;
    for (const std::string& function : functions_) worker_->UnregisterOwn(function);
  }

  void Close() {
    const BlockingScope blocking;
    closed_.store(true);
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(this, &Impl::IsFree));
    // Nobody else comes to these any more.
    held_.reset();
    staged_.reset();
  }

 private:
  // What a save will write.
  struct Held {
    uint64_t token;
    TensorMap tensors;
    std::map<std::string, OptimizerSnapshot> optimizers;
    CheckpointValues values;
  };
  // What a load will read, or has.
  struct Staged {
    uint64_t token;
    std::unique_ptr<Shards> shards;
    std::vector<std::pair<std::string, const ManifestFile*>> tensors;
    std::map<std::string, OptimizerParts> optimizers;
  };

  // One message after the other: a manager that was given up may be at it still.
  template <typename F>
  absl::StatusOr<Message> InTurn(const Request& request, const F& f) {
    // The disk is waited for, too.
    const BlockingScope blocking;
    // Has the wait below look again.
    const uint64_t watch =
        request.cancellation->OnCancel([this] { const absl::MutexLock lock(&mu_); });
    absl::Status goes_on;
    {
      absl::MutexLock lock(&mu_);
      const auto may_go = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
        return IsFree() || request.cancellation->cancelled();
      };
      mu_.Await(absl::Condition(&may_go));
      goes_on = CheckGoesOn(request, 0);
      if (goes_on.ok()) busy_ = true;
    }
    request.cancellation->Forget(watch);
    DG_RETURN_IF_ERROR(goes_on);
    absl::StatusOr<std::string> reply = absl::UnknownError("");
    try {
      reply = f();
    } catch (...) {
      reply = StatusFromException(std::current_exception());
    }
    {
      absl::MutexLock lock(&mu_);
      busy_ = false;
    }
    DG_RETURN_IF_ERROR(reply.status());
    return Message{*std::move(reply), {}};
  }
  bool IsFree() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return !busy_; }

  absl::Status CheckGoesOn(const Request& request, uint64_t token) const {
    if (token != 0 && stopped_.load() == token) {
      return absl::CancelledError("another worker's part of it has failed");
    }
    if (closed_.load()) {
      return absl::CancelledError(absl::StrCat("the part of checkpoint '", name_, "' on worker '",
                                               worker_->name(), "' was taken off"));
    }
    return request.cancellation->cancelled() ? request.cancellation->why() : absl::OkStatus();
  }
  static absl::Status Superseded() {
    return absl::AbortedError(
        "it has nothing of this save or load any more: another one has begun since, or the worker "
        "has been replaced");
  }

  // Calls a function of the program's, whose errors are its own.
  absl::Status CallProgram(absl::string_view name, absl::FunctionRef<absl::Status()> call) const {
    absl::Status status;
    try {
      status = call();
    } catch (...) {
      status = StatusFromException(std::current_exception());
    }
    return Annotate(WithOrigin(std::move(status), {worker_->rank(), ErrorOrigin::By::kHandler}),
                    name);
  }

  absl::Status LoadValues(const Manifest& manifest) const {
    if (contents_.load_values == nullptr) return absl::OkStatus();
    LoadedValues loaded{manifest.step, {}, {}};
    for (const ManifestWorker& worker : manifest.workers) {
      loaded.workers[worker.name] = worker.values;
      if (worker.name == worker_->name()) loaded.values = worker.values;
    }
    return CallProgram("load_values", [&] { return contents_.load_values(loaded); });
  }

  // Errors name the optimizer. One that was removed is no part that is not there, nor a checkpoint.
  static absl::Status UseOptimizer(const std::string& name, const CheckpointOptimizer& optimizer,
                                   CheckpointOptimizer::Use use) {
    bool is_there = false;
    absl::Status used = optimizer([&](torch::optim::Optimizer& of_torch) {
      is_there = true;
      return use(of_torch);
    });
    if (!is_there && absl::IsNotFound(used)) {
      used = absl::FailedPreconditionError(
          "it was removed, and the part of the checkpoint that has it was not: remove that first");
    }
    return Annotate(used, absl::StrCat("optimizer '", name, "'"));
  }

  // `with_state` gets the parameters that have one, by what libtorch knows them by.
  absl::StatusOr<std::vector<std::string>> PlanOptimizer(const std::string& name,
                                                         const CheckpointOptimizer& use,
                                                         std::set<const void*>* with_state) const {
    absl::StatusOr<std::vector<std::string>> names = absl::UnknownError("");
    DG_RETURN_IF_ERROR(UseOptimizer(name, use, [&](torch::optim::Optimizer& optimizer) {
      for (const auto& [parameter, state] : optimizer.state()) with_state->insert(parameter);
      names = OptimizerParameters(optimizer, contents_.tensors);
      return names.status();
    }));
    return names;
  }

  // Finds what is wanted in the files, and verifies its checksums. kDataLoss if one of them is
  // damaged.
  absl::Status Stage(const Request& request, const CheckRequest& check, Staged* staged,
                     CheckReply* reply) {
    Shards& shards = *staged->shards;
    for (const auto& [name, tensor] : contents_.tensors) {
      const ManifestFile* const file = shards.FileOf(name);
      if (file == nullptr) {
        reply->missing.push_back(
            absl::StrCat(QuoteName(name), " of worker '", worker_->name(), "'"));
        continue;
      }
      DG_ASSIGN_OR_RETURN(const SafetensorsFile* const open, shards.Open(*file));
      if (const std::string mismatch = open->Mismatch(name, tensor); !mismatch.empty()) {
        reply->mismatched.push_back(
            absl::StrCat(QuoteName(name), " of worker '", worker_->name(), "' ", mismatch));
        continue;
      }
      staged->tensors.emplace_back(name, file);
    }
    for (const auto& [name, use] : contents_.optimizers) {
      DG_RETURN_IF_ERROR(StageOptimizer(request, name, use, staged, reply));
    }
    // What does not fit is not read for nothing.
    if (check.strict && (!reply->missing.empty() || !reply->mismatched.empty())) {
      return absl::OkStatus();
    }
    for (const auto& [name, file] : staged->tensors) {
      DG_ASSIGN_OR_RETURN(const SafetensorsFile* const open, shards.Open(*file));
      const absl::StatusOr<uint32_t> sum =
          open->Checksum(name, [&] { return CheckGoesOn(request, check.token); });
      // A BOOL that no load takes, though it may be what was saved.
      if (absl::IsInvalidArgument(sum.status())) {
        return absl::DataLossError(absl::StrCat("it is damaged: ", sum.status().message()));
      }
      DG_RETURN_IF_ERROR(sum.status());
      if (*sum != file->checksums.tensors.at(name)) return shards.DamagedTensor(*file, name);
    }
    return StageWhatSharesMemory(request, check, staged, reply);
  }

  // Leaves out what would take the place of another tensor in memory. The files are verified.
  absl::Status StageWhatSharesMemory(const Request& request, const CheckRequest& check,
                                     Staged* staged, CheckReply* reply) {
    TensorMap tensors;
    std::map<std::string, const ManifestFile*> files;
    for (const auto& [name, file] : staged->tensors) {
      tensors[name] = contents_.tensors.at(name);
      files[name] = file;
    }
    DG_ASSIGN_OR_RETURN(
        const auto conflicts,
        FindConflicts(
            tensors,
            [&](const std::string& name) { return files.at(name)->checksums.tensors.at(name); },
            [&](const std::string& name) -> absl::StatusOr<at::Tensor> {
              DG_RETURN_IF_ERROR(CheckGoesOn(request, check.token));
              DG_ASSIGN_OR_RETURN(const SafetensorsFile* const open,
                                  staged->shards->Open(*files.at(name)));
              return open->Read(name);
            }));
    for (const auto& [name, why] : conflicts) {
      reply->mismatched.push_back(
          absl::StrCat(QuoteName(name), " of worker '", worker_->name(), "' ", why));
    }
    const auto is_left_out = [&](const auto& each) { return conflicts.count(each.first) > 0; };
    staged->tensors.erase(
        std::remove_if(staged->tensors.begin(), staged->tensors.end(), is_left_out),
        staged->tensors.end());
    return absl::OkStatus();
  }

  absl::Status StageOptimizer(const Request& request, const std::string& name,
                              const CheckpointOptimizer& use, Staged* staged, CheckReply* reply) {
    const std::string who =
        absl::StrCat("optimizer '", name, "' of worker '", worker_->name(), "'");
    const std::vector<const ManifestFile*> files = staged->shards->FilesOf(name);
    std::vector<const SafetensorsFile*> open;
    for (const ManifestFile* const file : files) {
      DG_ASSIGN_OR_RETURN(const SafetensorsFile* const each, staged->shards->Open(*file));
      open.push_back(each);
    }
    const auto read = [&](size_t file, const std::string& tensor) -> absl::StatusOr<at::Tensor> {
      DG_RETURN_IF_ERROR(CheckGoesOn(request, staged->token));
      DG_ASSIGN_OR_RETURN(at::Tensor is, open[file]->Read(tensor));
      if (RowMajorChecksum(is) != files[file]->checksums.tensors.at(tensor)) {
        return staged->shards->DamagedTensor(*files[file], tensor);
      }
      return is;
    };
    return UseOptimizer(name, use, [&](torch::optim::Optimizer& optimizer) -> absl::Status {
      absl::StatusOr<OptimizerParts> parts =
          CollectOptimizer(open, contents_.tensors, optimizer, read);
      if (absl::IsInvalidArgument(parts.status())) {
        reply->mismatched.push_back(absl::StrCat(who, ": ", parts.status().message()));
        return absl::OkStatus();
      }
      DG_RETURN_IF_ERROR(parts.status());
      for (const std::string& parameter : parts->missing) {
        reply->missing.push_back(absl::StrCat("the state of ", QuoteName(parameter), " in ", who));
      }
      if (parts->missing.empty()) staged->optimizers.emplace(name, *std::move(parts));
      return absl::OkStatus();
    });
  }

  Worker* const worker_;
  const std::string name_;
  const CheckpointContents contents_;
  const Incarnation incarnation_;  // of the worker
  // What claims the name is the last that goes.
  const std::array<std::string, 6> functions_{
      absl::StrCat(kCheckpointHold, name_),  absl::StrCat(kCheckpointWrite, name_),
      absl::StrCat(kCheckpointCheck, name_), absl::StrCat(kCheckpointLoad, name_),
      absl::StrCat(kCheckpointDrop, name_),  absl::StrCat(kCheckpointPlan, name_)};

  bool claimed_ = false;  // set before others have the part
  std::atomic<bool> closed_{false};
  std::atomic<uint64_t> stopped_{0};  // the token of a save or load that has failed
  mutable absl::Mutex mu_;
  bool busy_ ABSL_GUARDED_BY(mu_) = false;
  // Of whoever has the turn.
  std::optional<Held> held_;
  std::optional<Staged> staged_;
  bool loaded_ = false;
};

absl::StatusOr<std::unique_ptr<CheckpointPart>> CheckpointPart::Create(Worker* worker,
                                                                       CheckpointContents contents,
                                                                       absl::string_view name) {
  const std::string who =
      absl::StrCat("the part of checkpoint '", name, "' on worker '", worker->name(), "'");
  if (name.size() > kMaxCheckpointName || absl::StrContains(name, "::")) {
    return absl::InvalidArgumentError(
        absl::StrCat(who, ": a name has at most ", kMaxCheckpointName, " bytes, and no '::'"));
  }
  const auto impl = std::make_shared<Impl>(worker, std::string(name), std::move(contents));
  DG_RETURN_IF_ERROR(Annotate(impl->CheckContents(), who));
  using Answer = absl::StatusOr<Message> (Impl::*)(Request&);
  const auto serve = [&](absl::string_view function, Answer answer) {
    return worker->RegisterOwn(absl::StrCat(function, name), [impl, answer](Request& request) {
      return (impl.get()->*answer)(request);
    });
  };
  // Its end takes off what is registered by then.
  std::unique_ptr<CheckpointPart> part(new CheckpointPart(impl));
  // Who comes first here has the name.
  const absl::Status claimed = serve(kCheckpointPlan, &Impl::Plan);
  if (absl::IsAlreadyExists(claimed)) {
    return absl::AlreadyExistsError(absl::StrCat(who, ": there is one already"));
  }
  DG_RETURN_IF_ERROR(claimed);
  impl->Claimed();
  DG_RETURN_IF_ERROR(serve(kCheckpointHold, &Impl::Hold));
  DG_RETURN_IF_ERROR(serve(kCheckpointWrite, &Impl::Write));
  DG_RETURN_IF_ERROR(serve(kCheckpointCheck, &Impl::Check));
  DG_RETURN_IF_ERROR(serve(kCheckpointLoad, &Impl::Load));
  DG_RETURN_IF_ERROR(serve(kCheckpointDrop, &Impl::Drop));
  return part;
}

CheckpointPart::~CheckpointPart() {
  impl_->Close();
  impl_->Unregister();
}

}  // namespace distgrad
