// Checkpoints of a job: the part of a worker, with a program's functions; managers; what was
// loaded.
#include <climits>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "capi/guard.h"
#include "capi/objects.h"
#include "capi/optimizer_object.h"
#include "capi/tensor_map.h"
#include "capi/worker_object.h"
#include "core/base/blocking.h"
#include "core/base/log.h"
#include "core/base/status.h"
#include "core/checkpoint/job/checkpoint_manager.h"

namespace distgrad {
namespace {

// ------------------------------------------------------------------------------ Parts and values

// What save_values fills. Thread-safe: a program may keep the handle and use it elsewhere.
struct CheckpointValuesObject : HandleObject {
  using Handle = dg_checkpoint_values;
  static constexpr HandleKind kKind = HandleKind::kCheckpointValues;
  static constexpr char kName[] = "dg_checkpoint_values";

  absl::Mutex mu;
  CheckpointValues values ABSL_GUARDED_BY(mu);
};

// A program's functions for a part.
struct PartFunctions {
  dg_error* (*save_values)(void* user_data, dg_checkpoint_values* values);
  dg_error* (*load_values)(void* user_data, const dg_loaded_values* loaded);
  UserData user_data;
  // Of a thread that runs one. What it names is not owned: they do not run after that.
  Role role;
};

// A save or load in a function of a part would wait for the one that runs the function.
absl::Status CheckMayLead() {
  DG_RETURN_IF_ERROR(CheckMayWait());
  if (Serving().part == nullptr) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "save_values and load_values of a dg_checkpoint_part cannot save or load: that would wait "
      "for itself");
}

absl::StatusOr<CheckpointValues> SaveValues(const PartFunctions& functions) {
  const auto handle = NewOwnedHandle<CheckpointValuesObject>();
  {
    const ServingScope scope(functions.role);
    DG_RETURN_IF_ERROR(TakeError(functions.save_values(functions.user_data.get(), handle.get())));
  }
  DG_ASSIGN_OR_RETURN(const Pinned<CheckpointValuesObject> pinned,
                      Pin<CheckpointValuesObject>(handle.get(), "values"));
  absl::MutexLock lock(&pinned->mu);
  return std::move(pinned->values);
}

std::vector<dg_entry> ToEntries(const CheckpointValues& values) {
  std::vector<dg_entry> entries;
  for (const auto& [name, value] : values) entries.push_back({ToStr(name), ToStr(value)});
  return entries;
}

absl::Status LoadValues(const PartFunctions& functions, const LoadedValues& loaded) {
  const std::vector<dg_entry> own = ToEntries(loaded.values);
  std::map<std::string, std::vector<dg_entry>> entries;
  std::vector<dg_checkpoint_worker_values> workers;
  for (const auto& [name, values] : loaded.workers) {
    const std::vector<dg_entry>& those = entries[name] = ToEntries(values);
    workers.push_back(
        {sizeof(dg_checkpoint_worker_values), ToStr(name), those.data(), those.size()});
  }
  std::vector<const dg_checkpoint_worker_values*> pointers;
  for (const dg_checkpoint_worker_values& worker : workers) pointers.push_back(&worker);
  const dg_loaded_values given = {.struct_size = sizeof(dg_loaded_values),
                                  .step = loaded.step,
                                  .values = own.data(),
                                  .value_count = own.size(),
                                  .workers = pointers.data(),
                                  .worker_count = pointers.size()};
  const ServingScope scope(functions.role);
  return TakeError(functions.load_values(functions.user_data.get(), &given));
}

// A part, until it or its worker ends. Thread-safe.
class EndingPart : public EndsWithWorker {
 public:
  void Begin(std::unique_ptr<CheckpointPart> part) {
    absl::MutexLock lock(&mu_);
    part_ = std::move(part);
  }

  // Waits for a save or load that runs, and for another End().
  void End() override {
    std::unique_ptr<CheckpointPart> part;
    {
      absl::MutexLock lock(&mu_);
      part.swap(part_);
      if (part == nullptr) {
        mu_.Await(absl::Condition(&ended_));
        return;
      }
    }
    part = nullptr;
    absl::MutexLock lock(&mu_);
    ended_ = true;
  }

  bool RunsHere() const { return Serving().part == this; }

 private:
  absl::Mutex mu_;
  std::unique_ptr<CheckpointPart> part_ ABSL_GUARDED_BY(mu_);
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
};

// Immutable after construction.
struct CheckpointPartObject : HandleObject {
  using Handle = dg_checkpoint_part;
  static constexpr HandleKind kKind = HandleKind::kCheckpointPart;
  static constexpr char kName[] = "dg_checkpoint_part";

  CheckpointPartObject(std::shared_ptr<SharedWorker> worker, std::shared_ptr<EndingPart> part)
      : worker(std::move(worker)), part(std::move(part)) {}
  const std::shared_ptr<SharedWorker> worker;
  const std::shared_ptr<EndingPart> part;
};

// Of a part of `owner`, with which its optimizers end.
absl::StatusOr<CheckpointContents> ToContents(const dg_checkpoint_contents& given,
                                              const SharedWorker& owner) {
  CheckpointContents contents;
  DG_ASSIGN_OR_RETURN(contents.tensors,
                      PinTensorMap(given.tensor_names, given.tensors, given.tensor_count, "tensors",
                                   "tensor_names"));
  DG_ASSIGN_OR_RETURN(std::vector<std::string> names,
                      FromStrs(given.optimizer_names, given.optimizer_count, "optimizer_names"));
  DG_RETURN_IF_ERROR(CheckArray(given.optimizers, given.optimizer_count, "optimizers"));
  for (size_t i = 0; i < given.optimizer_count; ++i) {
    DG_ASSIGN_OR_RETURN(const Pinned<OptimizerObject> pinned,
                        PinElement<OptimizerObject>(given.optimizers, i, "optimizers"));
    const SharedWorker* const worker = pinned->worker.get();
    if (worker != nullptr && worker != &owner) {
      return absl::InvalidArgumentError(
          absl::StrCat("optimizers[", i, "] is a part of worker '", worker->name(),
                       "': give one of the part's own worker, or a local one"));
    }
    const auto [at, is_new] = contents.optimizers.emplace(std::move(names[i]), pinned->optimizer);
    if (is_new) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("the name '", at->first, "' of an optimizer is there twice"));
  }
  return contents;
}

// -------------------------------------------------------------------------------------- Managers

struct CheckpointManagerObject : HandleObject {
  using Handle = dg_checkpoint_manager;
  static constexpr HandleKind kKind = HandleKind::kCheckpointManager;
  static constexpr char kName[] = "dg_checkpoint_manager";

  explicit CheckpointManagerObject(std::shared_ptr<SharedWorker> worker)
      : worker(std::move(worker)) {}
  // Waits for what is written in the background; where it must not, another thread does. In a
  // function of a part it might wait for that very part.
  ~CheckpointManagerObject() override {
    if (MayWait() && Serving().part == nullptr) {
      const BlockingScope blocking;
      manager = nullptr;
      return;
    }
    CheckpointManager* const last = manager.release();
    const absl::Status ended = EndInBackground([last] { delete last; });
    if (ended.ok()) return;
    // Ending it here might wait for this very thread.
    DG_LOG(ERROR) << "a dg_checkpoint_manager cannot be destroyed in the background, and its "
                  << "folder stays locked: " << ended.message();
  }

  const std::shared_ptr<SharedWorker> worker;
  std::unique_ptr<CheckpointManager> manager;  // constant until the end; thread-safe
};

struct LoadedCheckpointObject : HandleObject {
  using Handle = dg_loaded_checkpoint;
  static constexpr HandleKind kKind = HandleKind::kLoadedCheckpoint;
  static constexpr char kName[] = "dg_loaded_checkpoint";

  explicit LoadedCheckpointObject(LoadedCheckpoint loaded) : loaded(std::move(loaded)) {}

  // Null for no list.
  const std::vector<std::string>* List(uint64_t list) const {
    switch (list) {
      case DG_LOADED_MISSING:
        return &loaded.missing;
      case DG_LOADED_UNEXPECTED:
        return &loaded.unexpected;
      case DG_LOADED_MISMATCHED:
        return &loaded.mismatched;
      default:
        return nullptr;
    }
  }

  const LoadedCheckpoint loaded;
};

absl::StatusOr<CheckpointManagerOptions> ToOptions(const dg_checkpoint_manager_options* given) {
  DG_ASSIGN_OR_RETURN(
      const dg_checkpoint_manager_options read,
      ReadOptions<dg_checkpoint_manager_options>(given, DG_CHECKPOINT_MANAGER_OPTIONS_INIT,
                                                 "dg_checkpoint_manager_options"));
  DG_RETURN_IF_ERROR(
      CheckFlags(read.flags, DG_CHECKPOINT_ALLOW_DROPPING, "dg_checkpoint_manager_options.flags"));
  CheckpointManagerOptions options;
  DG_ASSIGN_OR_RETURN(options.name, FromStr(read.name, "name"));
  DG_ASSIGN_OR_RETURN(options.workers, FromStrs(read.workers, read.worker_count, "workers"));
  if (read.keep > INT_MAX) {
    return absl::InvalidArgumentError(
        absl::StrCat(read.keep, " checkpoints are to be kept, and at most ", INT_MAX, " are"));
  }
  if (read.keep > 0) options.keep = static_cast<int>(read.keep);
  options.allow_dropping = (read.flags & DG_CHECKPOINT_ALLOW_DROPPING) != 0;
  return options;
}

absl::StatusOr<LoadOptions> ToOptions(const dg_checkpoint_load_options* given) {
  DG_ASSIGN_OR_RETURN(const dg_checkpoint_load_options read,
                      ReadOptions<dg_checkpoint_load_options>(
                          given, DG_CHECKPOINT_LOAD_OPTIONS_INIT, "dg_checkpoint_load_options"));
  DG_RETURN_IF_ERROR(CheckFlags(read.flags,
                                DG_CHECKPOINT_LOAD_NOT_STRICT | DG_CHECKPOINT_LOAD_FALL_BACK,
                                "dg_checkpoint_load_options.flags"));
  LoadOptions options;
  if (read.step >= 0) options.step = read.step;
  options.strict = (read.flags & DG_CHECKPOINT_LOAD_NOT_STRICT) == 0;
  options.fall_back = (read.flags & DG_CHECKPOINT_LOAD_FALL_BACK) != 0;
  options.deadline = ToDeadline(read.timeout_ms, Deadline::Never());
  return options;
}

}  // namespace
}  // namespace distgrad

using namespace distgrad;

extern "C" {

dg_error* dg_checkpoint_values_set(dg_checkpoint_values* values, dg_str name,
                                   dg_str value) noexcept {
  return Guard([&]() -> absl::Status {
    DG_ASSIGN_OR_RETURN(const Pinned<CheckpointValuesObject> pinned,
                        Pin<CheckpointValuesObject>(values, "values"));
    DG_ASSIGN_OR_RETURN(std::string text, FromStr(name, "name"));
    DG_RETURN_IF_ERROR(CheckValueName(text));
    DG_ASSIGN_OR_RETURN(std::string bytes, FromStr(value, "value"));
    absl::MutexLock lock(&pinned->mu);
    pinned->values.insert_or_assign(std::move(text), std::move(bytes));
    return absl::OkStatus();
  });
}

dg_error* dg_checkpoint_part_create(dg_worker* worker, dg_str name,
                                    const dg_checkpoint_contents* given, void* user_data,
                                    void (*destroy)(void* user_data),
                                    dg_checkpoint_part** out) noexcept {
  UserData taken(user_data, destroy);
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(const dg_checkpoint_contents read,
                        ReadOptions<dg_checkpoint_contents>(given, DG_CHECKPOINT_CONTENTS_INIT,
                                                            "dg_checkpoint_contents"));
    DG_ASSIGN_OR_RETURN(const std::string text, FromStr(name, "name"));
    DG_ASSIGN_OR_RETURN(const SharedWorker::Use use, UseWorker(worker));
    DG_ASSIGN_OR_RETURN(CheckpointContents contents, ToContents(read, use.shared()));
    const auto part = std::make_shared<EndingPart>();
    const auto functions = std::make_shared<const PartFunctions>(
        PartFunctions{read.save_values, read.load_values, std::move(taken),
                      Role{.worker = &use.shared(), .part = part.get()}});
    if (read.save_values != nullptr) {
      contents.save_values = [functions] { return SaveValues(*functions); };
    }
    // There is always one, so that the part keeps the user data.
    contents.load_values = [functions](const LoadedValues& loaded) {
      return functions->load_values == nullptr ? absl::OkStatus() : LoadValues(*functions, loaded);
    };
    OwnedHandle<CheckpointPartObject> handle =
        NewOwnedHandle<CheckpointPartObject>(use.shared().shared_from_this(), part);
    {
      const BlockingScope blocking;
      DG_ASSIGN_OR_RETURN(std::unique_ptr<CheckpointPart> made,
                          CheckpointPart::Create(use.get(), std::move(contents), text));
      part->Begin(std::move(made));
    }
    use.shared().Attach(part);
    *out = handle.release();
    return absl::OkStatus();
  });
}

dg_error* dg_checkpoint_part_remove(dg_checkpoint_part* part) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(const Pinned<CheckpointPartObject> pinned,
                        Pin<CheckpointPartObject>(part, "part"));
    if (pinned->part->RunsHere()) {
      return absl::FailedPreconditionError(
          "a part of a checkpoint cannot be removed in its own save_values or load_values, since "
          "that waits for these");
    }
    DG_ASSIGN_OR_RETURN(const SharedWorker::Use use, pinned->worker->Begin());
    const BlockingScope blocking;
    pinned->part->End();
    use.shared().Detach(pinned->part);
    return absl::OkStatus();
  });
}

void dg_checkpoint_part_destroy(dg_checkpoint_part* part) noexcept {
  DestroyHandle<CheckpointPartObject>(part);
}

dg_error* dg_checkpoint_manager_create(dg_worker* worker, dg_str folder,
                                       const dg_checkpoint_manager_options* options,
                                       dg_checkpoint_manager** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(CheckpointManagerOptions core_options, ToOptions(options));
    DG_ASSIGN_OR_RETURN(const std::string path, FromStr(folder, "folder"));
    DG_ASSIGN_OR_RETURN(const SharedWorker::Use use, UseWorker(worker));
    const BlockingScope blocking;
    HandleAhead<CheckpointManagerObject> made(use.shared().shared_from_this());
    DG_ASSIGN_OR_RETURN(made->manager,
                        CheckpointManager::Create(use.get(), path, std::move(core_options)));
    *out = made.Release();
    return absl::OkStatus();
  });
}

dg_error* dg_checkpoint_manager_save(dg_checkpoint_manager* manager, int64_t step,
                                     int64_t timeout_ms) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckMayLead());
    DG_ASSIGN_OR_RETURN(const Pinned<CheckpointManagerObject> pinned,
                        Pin<CheckpointManagerObject>(manager, "manager"));
    DG_ASSIGN_OR_RETURN(const SharedWorker::Use use, pinned->worker->Begin());
    const BlockingScope blocking;
    return pinned->manager->Save(step, ToDeadline(timeout_ms, absl::InfinitePast()));
  });
}

dg_error* dg_checkpoint_manager_save_async(dg_checkpoint_manager* manager, int64_t step,
                                           int64_t timeout_ms, dg_future** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_RETURN_IF_ERROR(CheckMayLead());
    DG_ASSIGN_OR_RETURN(const Pinned<CheckpointManagerObject> pinned,
                        Pin<CheckpointManagerObject>(manager, "manager"));
    HandleAhead<FutureObject> made;
    DG_ASSIGN_OR_RETURN(SharedWorker::Use use, pinned->worker->BeginInBackground());
    const auto kept = std::make_shared<std::optional<SharedWorker::Use>>(std::move(use));
    const BlockingScope blocking;
    DG_ASSIGN_OR_RETURN(
        const Future<Unit> future,
        pinned->manager->SaveAsync(step, ToDeadline(timeout_ms, absl::InfinitePast())));
    made->work = future;
    *out = made.Release();
    // What writes uses the worker until then.
    try {
      future.Then([kept](const absl::StatusOr<Unit>&) { kept->reset(); });
    } catch (const std::bad_alloc&) {
      future.Wait().status().IgnoreError();
    }
    return absl::OkStatus();
  });
}

dg_error* dg_checkpoint_manager_load(dg_checkpoint_manager* manager,
                                     const dg_checkpoint_load_options* options,
                                     dg_loaded_checkpoint** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_RETURN_IF_ERROR(CheckMayLead());
    DG_ASSIGN_OR_RETURN(const LoadOptions core_options, ToOptions(options));
    DG_ASSIGN_OR_RETURN(const Pinned<CheckpointManagerObject> pinned,
                        Pin<CheckpointManagerObject>(manager, "manager"));
    DG_ASSIGN_OR_RETURN(const SharedWorker::Use use, pinned->worker->Begin());
    const BlockingScope blocking;
    DG_ASSIGN_OR_RETURN(LoadedCheckpoint loaded, pinned->manager->Load(core_options));
    *out = NewHandle<LoadedCheckpointObject>(std::move(loaded));
    return absl::OkStatus();
  });
}

void dg_checkpoint_manager_destroy(dg_checkpoint_manager* manager) noexcept {
  DestroyHandle<CheckpointManagerObject>(manager);
}

dg_error* dg_checkpoint_load(dg_worker* worker, dg_str folder,
                             const dg_checkpoint_load_options* options,
                             const dg_checkpoint_manager_options* of,
                             dg_loaded_checkpoint** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_RETURN_IF_ERROR(CheckMayLead());
    DG_ASSIGN_OR_RETURN(const LoadOptions core_options, ToOptions(options));
    DG_ASSIGN_OR_RETURN(const CheckpointManagerOptions core_of, ToOptions(of));
    DG_ASSIGN_OR_RETURN(const std::string path, FromStr(folder, "folder"));
    DG_ASSIGN_OR_RETURN(const SharedWorker::Use use, UseWorker(worker));
    const BlockingScope blocking;
    DG_ASSIGN_OR_RETURN(LoadedCheckpoint loaded,
                        LoadCheckpoint(use.get(), path, core_options, core_of));
    *out = NewHandle<LoadedCheckpointObject>(std::move(loaded));
    return absl::OkStatus();
  });
}

int64_t dg_loaded_checkpoint_step(const dg_loaded_checkpoint* loaded) noexcept {
  return GuardValue<int64_t>(-1, [&]() -> int64_t {
    absl::StatusOr<Pinned<LoadedCheckpointObject>> pinned =
        Pin<LoadedCheckpointObject>(loaded, "loaded");
    return pinned.ok() ? (*pinned)->loaded.step : -1;
  });
}

dg_str dg_loaded_checkpoint_folder(const dg_loaded_checkpoint* loaded) noexcept {
  return GuardValue<dg_str>(ToStr(""), [&] {
    absl::StatusOr<Pinned<LoadedCheckpointObject>> pinned =
        Pin<LoadedCheckpointObject>(loaded, "loaded");
    return pinned.ok() ? ToStr((*pinned)->loaded.folder) : ToStr("");
  });
}

size_t dg_loaded_checkpoint_count(const dg_loaded_checkpoint* loaded, uint64_t list) noexcept {
  return GuardValue<size_t>(0, [&]() -> size_t {
    absl::StatusOr<Pinned<LoadedCheckpointObject>> pinned =
        Pin<LoadedCheckpointObject>(loaded, "loaded");
    if (!pinned.ok()) return 0;
    const std::vector<std::string>* const items = (*pinned)->List(list);
    return items == nullptr ? 0 : items->size();
  });
}

dg_str dg_loaded_checkpoint_item(const dg_loaded_checkpoint* loaded, uint64_t list,
                                 size_t index) noexcept {
  return GuardValue<dg_str>(ToStr(""), [&] {
    absl::StatusOr<Pinned<LoadedCheckpointObject>> pinned =
        Pin<LoadedCheckpointObject>(loaded, "loaded");
    if (!pinned.ok()) return ToStr("");
    const std::vector<std::string>* const items = (*pinned)->List(list);
    return items == nullptr || index >= items->size() ? ToStr("") : ToStr((*items)[index]);
  });
}

void dg_loaded_checkpoint_destroy(dg_loaded_checkpoint* loaded) noexcept {
  DestroyHandle<LoadedCheckpointObject>(loaded);
}

}  // extern "C"
