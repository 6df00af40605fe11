// Leads the parts of all workers through a save or a load: all of them through one stage before any
// of them begins the next.
#include "core/checkpoint/job/checkpoint_manager.h"

#include <algorithm>
#include <exception>
#include <filesystem>
#include <map>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/cord.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "core/base/blocking.h"
#include "core/base/crc32c.h"
#include "core/base/error_list.h"
#include "core/base/ids.h"
#include "core/base/log.h"
#include "core/base/origin.h"
#include "core/base/random.h"
#include "core/base/sleepers.h"
#include "core/base/status.h"
#include "core/base/thread.h"
#include "core/checkpoint/job/json_text.h"
#include "core/checkpoint/job/manifest.h"
#include "core/checkpoint/job/messages.h"
#include "core/checkpoint/job/shard.h"
#include "core/checkpoint/job/step_folders.h"
#include "core/checkpoint/safetensors_header.h"
#include "core/checkpoint/state_name.h"
#include "core/tensor/exception.h"
#include "nlohmann/json.hpp"

namespace distgrad {
namespace {

// The same error, with its origin, under another code and with another text.
absl::Status Rephrased(const absl::Status& status, absl::StatusCode code, absl::string_view text) {
  absl::Status rephrased(code, text);
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    rephrased.SetPayload(url, payload);
  });
  return rephrased;
}

// The error of what the manager does itself, with its worker: who reads it on another machine has
// to know whose disk or limit it is.
absl::Status OfLeader(const Worker& worker, const absl::Status& status) {
  return Annotate(WithOrigin(status, {worker.rank(), ErrorOrigin::By::kDistgrad}),
                  absl::StrCat("worker '", worker.name(), "'"));
}

// What `f` returns, or the exception that it throws as a Status.
template <typename F>
auto Caught(const F& f) -> decltype(f()) {
  try {
    return f();
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
}

// The parts of a checkpoint on these workers. Thread-safe.
class Parts {
 public:
  static absl::StatusOr<Parts> Of(Worker* worker, const CheckpointManagerOptions& options,
                                  Deadline deadline) {
    if (!options.workers.empty()) {
      std::set<std::string> names;
      for (const std::string& name : options.workers) {
        if (names.insert(name).second) continue;
        return absl::InvalidArgumentError(
            absl::StrCat("worker '", name, "' is given twice among those that have a part"));
      }
      return Parts(worker, options.name, options.workers);
    }
    // Who has joined, and was not heard of, would be left out.
    const Deadline until = std::min(deadline, worker->DefaultDeadline());
    DG_RETURN_IF_ERROR(Annotate(worker->UpdateMembers(until), "asking who is in the job"));
    return Parts(worker, options.name, worker->names());
  }

  const std::vector<std::string>& workers() const { return workers_; }

  // Calls a function of all, each with its payload or all with one, and waits for all: whoever is
  // still at it when the next function is called would mix up the two. The error, with the name of
  // the worker, is that of the call that failed first: with a token, that has the others stop.
  absl::StatusOr<std::vector<std::string>> CallAll(absl::string_view function,
                                                   const std::vector<std::string>& payloads,
                                                   uint64_t token, Deadline deadline) const {
    // For a call, a deadline of the infinite past is that of its worker's options.
    if (deadline.Passed()) {
      if (token != 0) Drop(token);
      return absl::DeadlineExceededError("the time for it is over");
    }
    // A call counts as ended when it has said which was first, which its own thread does after it
    // has woken who waits for the call.
    struct Calls {
      absl::Mutex mu;
      size_t left ABSL_GUARDED_BY(mu);
      std::optional<size_t> first_failed ABSL_GUARDED_BY(mu);
    };
    const auto calls = std::make_shared<Calls>();
    {
      const absl::MutexLock lock(&calls->mu);
      calls->left = workers_.size();
    }
    std::vector<Future<Message>> replies;
    for (size_t i = 0; i < workers_.size(); ++i) {
      replies.push_back(worker_->CallAsync(workers_[i], absl::StrCat(function, name_),
                                           {payloads[payloads.size() == 1 ? 0 : i], {}},
                                           {.deadline = deadline}));
      replies.back().Then([parts = *this, token, calls, i](const absl::StatusOr<Message>& reply) {
        bool is_first = false;
        {
          const absl::MutexLock lock(&calls->mu);
          is_first = !reply.ok() && !calls->first_failed.has_value();
          if (is_first) calls->first_failed = i;
          --calls->left;
        }
        if (is_first && token != 0) parts.Drop(token);
      });
    }
    for (const Future<Message>& reply : replies) reply.Wait();
    std::optional<size_t> first_failed;
    {
      const BlockingScope blocking;
      const absl::MutexLock lock(&calls->mu);
      const auto all_ended = [&]()
                                 ABSL_SHARED_LOCKS_REQUIRED(calls->mu) { return calls->left == 0; };
      calls->mu.Await(absl::Condition(&all_ended));
      first_failed = calls->first_failed;
    }
    if (first_failed.has_value()) {
      return Annotate(replies[*first_failed].Wait().status(),
                      absl::StrCat("worker '", workers_[*first_failed], "'"));
    }
    std::vector<std::string> texts;
    for (const Future<Message>& reply : replies) texts.push_back(reply.Wait()->payload);
    return texts;
  }

  absl::StatusOr<std::vector<PartPlan>> Plans(Deadline deadline) const {
    const absl::StatusOr<std::vector<std::string>> replies =
        CallAll(kCheckpointPlan, {"{}"}, /*token=*/0, deadline);
    // kNotFound is for a checkpoint that is not there: whoever gets it may begin at step 0.
    if (absl::IsNotFound(replies.status())) {
      return Rephrased(replies.status(), absl::StatusCode::kFailedPrecondition,
                       absl::StrCat("a worker has no part of checkpoint '", name_,
                                    "': ", replies.status().message()));
    }
    DG_RETURN_IF_ERROR(replies.status());
    std::vector<PartPlan> plans;
    for (const std::string& reply : *replies) {
      DG_ASSIGN_OR_RETURN(PartPlan plan, DecodePlanReply(reply));
      plans.push_back(std::move(plan));
    }
    return plans;
  }

  // What they hold for a save or load that has failed. Does not wait.
  void Drop(uint64_t token) const {
    for (const std::string& worker : workers_) {
      worker_->CallAsync(worker, absl::StrCat(kCheckpointDrop, name_), {EncodeToken(token), {}});
    }
  }

 private:
  Parts(Worker* worker, std::string name, std::vector<std::string> workers)
      : worker_(worker), name_(std::move(name)), workers_(std::move(workers)) {}

  Worker* worker_;
  std::string name_;
  std::vector<std::string> workers_;
};

// Gives each tensor to one of those that have it: the large ones first, each to whom was given the
// least so far. The state of a parameter goes where the parameter goes; where that worker has none,
// as its optimizer was made anew, to one that has it.
absl::StatusOr<std::vector<HoldRequest>> Divide(const std::vector<std::string>& workers,
                                                const std::vector<PartPlan>& plans) {
  struct Have {
    const PartPlan::Tensor* tensor = nullptr;
    std::vector<size_t> workers;
  };
  std::map<std::string, Have> have;
  for (size_t i = 0; i < plans.size(); ++i) {
    for (const auto& [name, tensor] : plans[i].tensors) {
      Have& those = have[name];
      if (those.tensor == nullptr) those.tensor = &tensor;
      if (those.tensor->type != tensor.type) {
        return absl::InvalidArgumentError(
            absl::StrCat("the tensor ", QuoteName(name), " is ", those.tensor->type, " on worker '",
                         workers[those.workers[0]], "' and ", tensor.type, " on worker '",
                         workers[i], "': what has one name is one tensor"));
      }
      those.workers.push_back(i);
    }
  }
  std::vector<std::pair<uint64_t, const std::string*>> by_size;
  for (const auto& [name, those] : have) by_size.emplace_back(those.tensor->bytes, &name);
  std::stable_sort(by_size.begin(), by_size.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<HoldRequest> holds(plans.size());
  std::vector<uint64_t> given(plans.size());
  std::map<std::string, size_t> owner;
  for (const auto& [bytes, name] : by_size) {
    const std::vector<size_t>& those = have[*name].workers;
    const size_t to = *std::min_element(those.begin(), those.end(),
                                        [&](size_t a, size_t b) { return given[a] < given[b]; });
    given[to] += bytes;
    owner[*name] = to;
    holds[to].tensors.insert(*name);
    if (those.size() == 1) continue;
    for (const size_t replica : those) holds[replica].replicas.insert(*name);
  }
  struct Best {
    std::pair<bool, bool> is;  // whether it has a state, and whether it is the parameter's owner
    size_t worker;
  };
  std::map<std::pair<std::string, std::string>, Best> states;
  for (size_t i = 0; i < plans.size(); ++i) {
    for (const auto& [optimizer, parameters] : plans[i].optimizers) {
      std::set<std::string> with_state;
      if (const auto found = plans[i].with_state.find(optimizer);
          found != plans[i].with_state.end()) {
        with_state.insert(found->second.begin(), found->second.end());
      }
      for (const std::string& parameter : parameters) {
        const auto found = owner.find(parameter);
        const bool is_owner = found != owner.end() && found->second == i;
        const Best best{{with_state.count(parameter) > 0, is_owner}, i};
        const auto [at, is_new] = states.emplace(std::pair(optimizer, parameter), best);
        if (at->second.is < best.is) at->second = best;
      }
    }
  }
  for (const auto& [of, best] : states) holds[best.worker].optimizers[of.first].insert(of.second);
  return holds;
}

// Only one of several replicas is saved, and another one each time: what differs would be mixed.
absl::Status CheckReplicas(const std::vector<std::string>& workers,
                           const std::vector<std::string>& replies) {
  std::map<std::string, std::pair<uint32_t, size_t>> first;  // and whose it is
  std::vector<std::string> differ;
  for (size_t i = 0; i < replies.size(); ++i) {
    DG_ASSIGN_OR_RETURN(const HoldReply reply, DecodeHoldReply(replies[i]));
    for (const auto& [name, sum] : reply.checksums) {
      const auto [at, is_new] = first.emplace(name, std::pair(sum, i));
      if (at->second.first == sum) continue;
      differ.push_back(absl::StrCat(QuoteName(name), " of workers '", workers[at->second.second],
                                    "' and '", workers[i], "'"));
    }
  }
  if (differ.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "what has one name is one tensor, and these differ: ", FirstOf(differ),
      "; give those that are not replicas names of their own, or save when replicas are equal"));
}

// Which worker had a part, by names.
using Incarnations = std::map<std::string, Incarnation>;

// Whether the manager, which is on `leader`, sees what a worker says that it has written.
absl::Status CheckWritten(const Worker& leader, const std::string& folder,
                          const ManifestWorker& worker) {
  for (const ManifestFile& file : worker.files) {
    const absl::StatusOr<SafetensorsFile> seen = OpenShard(folder, file);
    if (seen.ok()) continue;
    if (!IsDamage(seen.status())) return OfLeader(leader, seen.status());
    return absl::FailedPreconditionError(
        absl::StrCat("worker '", worker.name, "' has written ", folder, "/", file.name,
                     ", and the manager does not see it there as it is (", seen.status().message(),
                     "): the folder has to be one that all workers see"));
  }
  return absl::OkStatus();
}

// A save on its way.
struct Saving {
  Parts parts;
  int64_t step;
  Deadline deadline;
  uint64_t token;
  Incarnations incarnations;
};

std::string Absolute(const std::string& folder) {
  std::error_code error;
  const std::filesystem::path path = std::filesystem::absolute(folder, error);
  // What is above a link need not be what is before it in the path.
  const bool goes_up = std::find(path.begin(), path.end(), "..") != path.end();
  const std::filesystem::path plain =
      goes_up ? std::filesystem::weakly_canonical(path, error) : path.lexically_normal();
  std::string text = error ? folder : plain.string();
  while (text.size() > 1 && text.back() == '/') text.pop_back();
  return text;
}

// The folder's absolute path. An empty one is a program's mistake, such as a variable that is not
// set, and not a folder without checkpoints.
absl::StatusOr<std::string> PathOf(const std::string& folder) {
  if (folder.empty() || folder.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError(
        "the folder of the checkpoints is an empty path, or has a zero byte in it");
  }
  std::string path = Absolute(folder);
  if (IsUtf8(path)) return path;
  return absl::InvalidArgumentError(
      absl::StrCat("the path of the folder of the checkpoints, '", absl::CHexEscape(path),
                   "', is not UTF-8, as what the workers tell each other is: give another one"));
}

// The folder of one checkpoint is not the folder of a job's: a load would find none there, and what
// is saved there would go when that checkpoint is removed. kInvalidArgument says which to give.
absl::Status CheckIsNoCheckpoint(const std::string& path) {
  const absl::StatusOr<Manifest> itself = ReadManifest(path);
  std::error_code error;
  // What it has to do with is said of what is no folder.
  const bool has_none =
      absl::IsNotFound(itself.status()) || !std::filesystem::is_directory(path, error);
  if (has_none) return absl::OkStatus();
  // Others give their files that name, too. A link, "latest", has the name of what it leads to.
  const std::filesystem::path target = std::filesystem::weakly_canonical(path, error);
  const bool is_foreign = !itself.ok() && IsDamage(itself.status()) && !error &&
                          !IsStepName(target.filename().string());
  if (is_foreign) return absl::OkStatus();
  DG_RETURN_IF_ERROR(
      Annotate(itself.status(), absl::StrCat("asking whether ", path, " is one checkpoint")));
  return absl::InvalidArgumentError(absl::StrCat(
      path, " is one checkpoint, of step ", itself->step, ": give the folder that it is in, ",
      std::filesystem::path(path).parent_path().string(), ", and that step"));
}

std::string Listed(const char* what, const std::vector<std::string>& items) {
  return items.empty() ? "" : absl::StrCat(" ", what, ": ", FirstOf(items), ".");
}

// What a checkpoint has and nobody asks for, for people. `states_of`: whose of an optimizer's
// parameters are asked for.
std::vector<std::string> Unexpected(
    const Manifest& manifest, const std::vector<PartPlan>& plans,
    std::map<std::string, std::vector<std::string>> PartPlan::*states_of) {
  std::set<std::string> tensors, optimizers, states;
  std::set<std::pair<std::string, std::string>> parameters;
  for (const PartPlan& plan : plans) {
    for (const auto& [name, tensor] : plan.tensors) tensors.insert(name);
    for (const auto& [name, those] : plan.optimizers) optimizers.insert(name);
    for (const auto& [name, those] : plan.*states_of) {
      for (const std::string& parameter : those) parameters.emplace(name, parameter);
    }
  }
  std::vector<std::string> unexpected;
  for (const ManifestWorker& worker : manifest.workers) {
    for (const ManifestFile& file : worker.files) {
      if (file.optimizer.has_value() && optimizers.count(*file.optimizer) == 0) {
        states.insert(absl::StrCat("optimizer '", *file.optimizer, "'"));
        continue;
      }
      for (const auto& [name, sum] : file.checksums.tensors) {
        if (!file.optimizer.has_value()) {
          if (tensors.count(name) == 0) unexpected.push_back(QuoteName(name));
          continue;
        }
        const std::optional<StateName> of = ParseStateName(name);
        const std::string& parameter = of.has_value() ? of->parameter : name;
        if (parameters.count({*file.optimizer, parameter}) == 0) {
          states.insert(absl::StrCat("the state of ", QuoteName(parameter), " in optimizer '",
                                     *file.optimizer, "'"));
        }
      }
    }
  }
  unexpected.insert(unexpected.end(), states.begin(), states.end());
  return unexpected;
}

// What one worker has found, of files that all of them see.
absl::Status DamageSeenBy(const Worker& leader, const std::string& worker,
                          const std::string& what) {
  const absl::Status status = absl::DataLossError(absl::StrCat("worker '", worker, "': ", what));
  for (const Member& member : leader.members()) {
    if (member.name == worker) {
      return WithOrigin(status, {member.rank, ErrorOrigin::By::kDistgrad});
    }
  }
  return status;
}

// Whether the job that writes it has removed or renamed it, or saved another one in its place.
bool IsGone(const StepFolder& folder, const std::string& text) {
  const absl::StatusOr<std::string> now = ReadManifestText(folder.path);
  return now.ok() ? *now != text : absl::IsNotFound(now.status());
}

// How far a load came: kGone and kDamaged are ends without anything loaded.
enum class Reached { kNothing, kGone, kDamaged, kSomeIsLoaded };

// What a load has found besides what it returns.
struct LoadNotes {
  Reached reached = Reached::kNothing;
  StepFolders::Damaged damaged;  // all that are
  Incarnations incarnations;     // whom it has loaded, if it succeeds
};

absl::StatusOr<LoadedCheckpoint> LoadOne(const Worker& leader, const Parts& parts,
                                         const StepFolder& from, const LoadOptions& options,
                                         LoadNotes* notes) {
  notes->reached = Reached::kNothing;
  if (from.has_other_name()) {
    notes->reached = Reached::kDamaged;
    return OfLeader(leader,
                    absl::InvalidArgumentError(absl::StrCat(
                        "it has the checkpoint of step ", from.manifest->step,
                        ", and so has been copied or renamed: give it the name of its step")));
  }
  DG_ASSIGN_OR_RETURN(const std::vector<PartPlan> plans, parts.Plans(options.deadline));
  const absl::StatusOr<std::string> read = ReadManifestText(from.path);
  const auto gone = [&](const absl::Status& why) {
    notes->reached = Reached::kGone;
    return Rephrased(why, absl::StatusCode::kAborted,
                     absl::StrCat("it has been removed or replaced meanwhile: ", why.message()));
  };
  if (absl::IsNotFound(read.status())) return gone(read.status());
  if (!read.ok()) return OfLeader(leader, read.status());
  const std::string& text = *read;
  // Another may have taken its place since it was listed.
  const absl::StatusOr<Manifest> manifest = ParseManifest(text);
  if (!manifest.ok()) return gone(manifest.status());
  if (manifest->step != from.step) {
    return gone(absl::FailedPreconditionError(
        absl::StrCat("it has the checkpoint of step ", manifest->step, " now")));
  }
  LoadedCheckpoint loaded{manifest->step, from.path, {}, {}, {}};
  loaded.unexpected = Unexpected(*manifest, plans, &PartPlan::aliases);
  const uint64_t token = RandomNumber();
  DG_ASSIGN_OR_RETURN(const std::string check, Encode(CheckRequest{.token = token,
                                                                   .folder = from.path,
                                                                   .manifest = Crc32c(text),
                                                                   .strict = options.strict}));
  const auto checked = parts.CallAll(kCheckpointCheck, {check}, token, options.deadline);
  absl::Status status = checked.status();
  bool is_damaged = false;
  if (checked.ok()) {
    for (size_t i = 0; i < checked->size(); ++i) {
      const absl::StatusOr<CheckReply> reply = DecodeCheckReply((*checked)[i]);
      if (!reply.ok()) {
        status = reply.status();
        break;
      }
      if (!reply->damage.empty()) {
        status = DamageSeenBy(leader, parts.workers()[i], reply->damage);
        is_damaged = true;
        break;
      }
      notes->incarnations[parts.workers()[i]] = reply->incarnation;
      loaded.missing.insert(loaded.missing.end(), reply->missing.begin(), reply->missing.end());
      loaded.mismatched.insert(loaded.mismatched.end(), reply->mismatched.begin(),
                               reply->mismatched.end());
    }
  }
  const bool fits =
      loaded.missing.empty() && loaded.unexpected.empty() && loaded.mismatched.empty();
  if (status.ok() && options.strict && !fits) {
    status = absl::InvalidArgumentError(absl::StrCat(
        "it does not fit, and nothing is loaded.", Listed("Missing", loaded.missing),
        Listed("Unexpected", loaded.unexpected), Listed("Different", loaded.mismatched),
        " (What fits can be loaded without ", "strict.)"));
  }
  if (!status.ok()) {
    parts.Drop(token);
    if (IsGone(from, text)) return gone(status);
    if (is_damaged) notes->reached = Reached::kDamaged;
    return status;
  }
  notes->reached = Reached::kSomeIsLoaded;
  DG_RETURN_IF_ERROR(Annotate(
      parts.CallAll(kCheckpointLoad, {EncodeToken(token)}, token, options.deadline).status(),
      "some of it may have been loaded"));
  return loaded;
}

// kNotFound is for a checkpoint that is not there: whoever gets it may begin at step 0.
absl::Status NotNotFound(const absl::Status& status) {
  if (!absl::IsNotFound(status)) return status;
  return Rephrased(status, absl::StatusCode::kFailedPrecondition, status.message());
}

absl::StatusOr<LoadedCheckpoint> LoadFrom(const Worker& leader, const Parts& parts,
                                          const std::string& folder, const LoadOptions& options,
                                          LoadNotes* notes) {
  notes->reached = Reached::kNothing;
  const absl::StatusOr<std::vector<StepFolder>> steps = ListSteps(folder);
  if (absl::IsNotFound(steps.status())) return steps.status();
  if (!steps.ok()) return OfLeader(leader, steps.status());
  if (steps->empty()) {
    return absl::NotFoundError(absl::StrCat("there is no checkpoint in ", folder));
  }
  std::vector<const StepFolder*> good, bad;
  // Of one whose manifest cannot be read, though it may be good, and the newest.
  absl::Status unreadable;
  for (const StepFolder& each : *steps) {
    (each.manifest.ok() ? good : bad).push_back(&each);
    const absl::Status& read = each.manifest.status();
    if (!read.ok() && !IsDamage(read)) unreadable.Update(OfLeader(leader, read));
  }
  // The one to begin with, and those before it.
  std::vector<const StepFolder*> candidates;
  if (options.step.has_value()) {
    const auto is_it = [&](const StepFolder* each) { return each->step == *options.step; };
    auto found = std::find_if(good.begin(), good.end(), is_it);
    candidates.assign(found, good.end());
    if (found == good.end()) {
      const auto wrong = std::find_if(bad.begin(), bad.end(), is_it);
      if (wrong != bad.end()) return OfLeader(leader, (*wrong)->manifest.status());
      std::vector<int64_t> there;
      for (const StepFolder* each : good) there.push_back(each->step);
      return absl::NotFoundError(absl::StrCat("there is no checkpoint of step ", *options.step,
                                              " in ", folder, ", but of ", FirstOf(there)));
    }
  } else {
    candidates = good;
    // A manifest that is not read does not say when it was saved. One that is damaged may be passed
    // over.
    absl::Status why = unreadable;
    if (!bad.empty() && (good.empty() || !options.fall_back)) {
      why.Update(OfLeader(leader, bad[0]->manifest.status()));
    }
    if (!why.ok()) {
      return Rephrased(
          why, why.code(),
          absl::StrCat(why.message(), good.empty()
                                          ? "; there is no other checkpoint"
                                          : absl::StrCat("; the checkpoint of step ", good[0]->step,
                                                         " can be asked for")));
    }
  }
  for (size_t i = 0;; ++i) {
    const absl::StatusOr<LoadedCheckpoint> loaded =
        LoadOne(leader, parts, *candidates[i], options, notes);
    if (loaded.ok()) return loaded;
    // Also where it is not passed over: the program may ask for an older one.
    const bool is_damaged = notes->reached == Reached::kDamaged;
    if (is_damaged) {
      notes->damaged.emplace(candidates[i]->path, candidates[i]->manifest->sequence);
    }
    const bool has_older = is_damaged && i + 1 < candidates.size();
    if (has_older && options.fall_back) {
      DG_RETURN_IF_ERROR(unreadable);
      continue;
    }
    const absl::Status failed =
        Annotate(loaded.status(), absl::StrCat("loading ", candidates[i]->path));
    if (!has_older) return NotNotFound(failed);
    return Rephrased(
        failed, failed.code(),
        absl::StrCat(failed.message(), "; the checkpoint of step ", candidates[i + 1]->step,
                     ", which was saved before it, can be asked for"));
  }
}

absl::StatusOr<LoadedCheckpoint> LoadNewest(Worker* worker, const std::string& folder,
                                            const LoadOptions& options,
                                            const CheckpointManagerOptions& of, LoadNotes* notes) {
  DG_ASSIGN_OR_RETURN(const std::string path, PathOf(folder));
  const absl::StatusOr<Parts> parts = Parts::Of(worker, of, options.deadline);
  if (!parts.ok()) return NotNotFound(parts.status());
  DG_RETURN_IF_ERROR(OfLeader(*worker, CheckIsNoCheckpoint(path)));
  // Another job may remove or rename checkpoints meanwhile.
  constexpr int kTries = 10;
  for (int i = 1;; ++i) {
    absl::StatusOr<LoadedCheckpoint> loaded = LoadFrom(*worker, *parts, path, options, notes);
    if (notes->reached != Reached::kGone || loaded.ok() || i == kTries) return loaded;
  }
}

}  // namespace

absl::StatusOr<LoadedCheckpoint> LoadCheckpoint(Worker* worker, const std::string& folder,
                                                const LoadOptions& options,
                                                const CheckpointManagerOptions& of) {
  LoadNotes notes;
  return LoadNewest(worker, folder, options, of, &notes);
}

// On a thread that has written for a manager: which one.
static thread_local const void* written_on_this_thread = nullptr;

// Thread-safe.
class CheckpointManager::Impl {
 public:
  Impl(Worker* worker, CheckpointManagerOptions options, std::unique_ptr<StepFolders> folders)
      : worker_(worker), options_(std::move(options)), folders_(std::move(folders)) {}
  ~Impl() {
    TakeTurn(Deadline::Never()).IgnoreError();
    std::thread last;
    {
      absl::MutexLock lock(&mu_);
      last = std::move(thread_);
    }
    if (!last.joinable()) return;
    // In the callback of a future of ours there is nobody to wait for: the threads have written,
    // and use nothing of this any more.
    if (written_on_this_thread == this) {
      last.detach();
    } else {
      last.join();
    }
  }

  absl::Status Save(int64_t step, Deadline deadline) {
    DG_RETURN_IF_ERROR(Annotated(TakeTurn(deadline), step));
    const absl::Status saved = Caught([&]() -> absl::Status {
      DG_ASSIGN_OR_RETURN(const Saving saving, Hold(step, deadline, /*copy=*/false));
      return Write(saving);
    });
    EndTurn();
    return Annotated(saved, step);
  }

  absl::StatusOr<Future<Unit>> SaveAsync(int64_t step, Deadline deadline) {
    DG_RETURN_IF_ERROR(Annotated(TakeTurn(deadline), step));
    absl::StatusOr<Future<Unit>> begun = Caught([&]() -> absl::StatusOr<Future<Unit>> {
      DG_ASSIGN_OR_RETURN(const Saving saving, Hold(step, deadline, /*copy=*/true));
      // Where no writer is started the parts would keep their copies; without memory that may
      // throw.
      absl::Cleanup drop = [&saving] {
        Caught([&saving] {
          saving.parts.Drop(saving.token);
          return absl::OkStatus();
        }).IgnoreError();
      };
      Promise<Unit> promise;
      const Future<Unit> future = promise.future();
      const absl::Status started = StartWriting(saving, std::move(promise));
      if (!started.ok()) return OfLeader(*worker_, started);
      std::move(drop).Cancel();
      return future;
    });
    if (begun.ok()) return begun;
    EndTurn();
    return Annotated(begun.status(), step);
  }

  absl::StatusOr<LoadedCheckpoint> Load(const LoadOptions& options) {
    DG_RETURN_IF_ERROR(TakeTurn(options.deadline));
    absl::StatusOr<LoadedCheckpoint> loaded = Caught([&] { return LoadInTurn(options); });
    EndTurn();
    return loaded;
  }

 private:
  absl::Status TakeTurn(Deadline deadline) {
    const BlockingScope blocking;
    absl::MutexLock lock(&mu_);
    if (!waiting_.Await(&mu_, absl::Condition(this, &Impl::IsFree), deadline)) {
      return absl::DeadlineExceededError("the save or load before it has not ended");
    }
    busy_ = true;
    return absl::OkStatus();
  }
  void EndTurn() {
    absl::MutexLock lock(&mu_);
    busy_ = false;
    waiting_.WakeAll();
  }
  bool IsFree() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return !busy_; }

  absl::Status Annotated(const absl::Status& status, int64_t step) const {
    if (status.ok()) return status;  // who has the turn has to give it back, and throws nothing
    return Annotate(status,
                    absl::StrCat("saving the checkpoint of step ", step, " to ", folders_->path()));
  }

  // Starts the thread that writes, and ends the turn.
  absl::Status StartWriting(const Saving& saving, Promise<Unit> promise) {
    // So that it does not end its turn before it is known.
    absl::MutexLock lock(&mu_);
    // The one before has ended its turn, but not the callbacks of its future, which may wait for
    // the turn. So nobody who has the turn waits for it, but the next thread at its end.
    const auto before = std::make_shared<std::thread>(std::move(thread_));
    absl::StatusOr<std::thread> thread = absl::ResourceExhaustedError("");
    // Also where there is no memory: a thread that is joinable may not be forgotten.
    absl::Cleanup put_back = [&] {
      mu_.AssertHeld();
      thread_ = std::move(*before);
    };
    thread = StartThread("dg-checkpoint",
                         [this, before, saving, promise = std::move(promise)]() mutable {
                           const absl::Status saved = WriteInBackground(saving);
                           written_on_this_thread = this;
                           EndTurn();
                           if (saved.ok()) {
                             promise.Set(Unit{});
                           } else {
                             promise.Set(saved);
                           }
                           // It may be the one that began this.
                           if (before->joinable()) before->join();
                         });
    DG_RETURN_IF_ERROR(thread.status());
    std::move(put_back).Cancel();
    thread_ = *std::move(thread);
    return absl::OkStatus();
  }

  // Throws nothing: the thread that it is called on would end the process.
  absl::Status WriteInBackground(const Saving& saving) {
    absl::Status saved = Caught([&] { return Write(saving); });
    // Where there is no memory for that the error stays as it is.
    Caught([&] {
      saved = Annotated(saved, saving.step);
      // Whoever has the future may have dropped it.
      if (!saved.ok()) DG_LOG(WARNING) << saved.message();
      return absl::OkStatus();
    }).IgnoreError();
    return saved;
  }

  absl::StatusOr<LoadedCheckpoint> LoadInTurn(const LoadOptions& options) {
    LoadNotes notes;
    absl::StatusOr<LoadedCheckpoint> loaded =
        Caught([&] { return LoadNewest(worker_, folders_->path(), options, options_, &notes); });
    damaged_.merge(notes.damaged);
    if (loaded.ok()) {
      Remember(loaded->step, loaded->folder, std::move(notes.incarnations));
    } else if (notes.reached == Reached::kSomeIsLoaded) {
      half_loaded_ = loaded.status();
    } else if (absl::IsNotFound(loaded.status()) && !options.step.has_value()) {
      RememberWhoBegins(options.deadline);
    }
    return loaded;
  }

  // Where there is no checkpoint the job begins with those that are there now.
  void RememberWhoBegins(Deadline deadline) {
    // With `workers` nobody has asked who is there. If that fails, those are who were known of.
    const Deadline until = std::min(deadline, worker_->DefaultDeadline());
    if (!options_.workers.empty()) worker_->UpdateMembers(until).IgnoreError();
    Incarnations incarnations;
    for (const Member& member : worker_->members()) incarnations[member.name] = member.incarnation;
    Remember(std::nullopt, "", std::move(incarnations));
  }

  // Has all parts keep what they are to save.
  absl::StatusOr<Saving> Hold(int64_t step, Deadline deadline, bool copy) {
    if (step < 0) return absl::InvalidArgumentError(absl::StrCat("the step is ", step));
    DG_ASSIGN_OR_RETURN(Parts parts, Parts::Of(worker_, options_, deadline));
    Saving saving{std::move(parts), step, deadline, RandomNumber(), {}};
    DG_ASSIGN_OR_RETURN(const std::vector<PartPlan> plans, saving.parts.Plans(deadline));
    if (!half_loaded_.ok() && !options_.allow_dropping) {
      return absl::FailedPreconditionError(absl::StrCat(
          "a load has failed when some of it may have been loaded (", half_loaded_.message(),
          "), so workers may have values of different steps: load first; or, if what they have is ",
          "good, set allow_dropping"));
    }
    if (!options_.allow_dropping) DG_RETURN_IF_ERROR(CheckNothingIsDropped(plans));
    DG_ASSIGN_OR_RETURN(std::vector<HoldRequest> holds, Divide(saving.parts.workers(), plans));
    std::vector<std::string> payloads;
    for (HoldRequest& hold : holds) {
      hold.token = saving.token;
      hold.copy = copy;
      DG_ASSIGN_OR_RETURN(payloads.emplace_back(), Encode(hold));
    }
    DG_ASSIGN_OR_RETURN(const std::vector<std::string> replies,
                        saving.parts.CallAll(kCheckpointHold, payloads, saving.token, deadline));
    absl::Status good = CheckNoneIsFresh(replies, &saving);
    if (good.ok()) good = CheckReplicas(saving.parts.workers(), replies);
    if (!good.ok()) {
      saving.parts.Drop(saving.token);
      return good;
    }
    return saving;
  }

  // A worker that was started again has none of what it was trained to; nor would a job have that
  // any more, `keep` saves later.
  absl::Status CheckNoneIsFresh(const std::vector<std::string>& replies, Saving* saving) const {
    const std::vector<std::string>& workers = saving->parts.workers();
    for (size_t i = 0; i < workers.size(); ++i) {
      DG_ASSIGN_OR_RETURN(const HoldReply reply, DecodeHoldReply(replies[i]));
      saving->incarnations[workers[i]] = reply.incarnation;
      const auto before = last_incarnations_.find(workers[i]);
      if (before == last_incarnations_.end() || before->second == reply.incarnation) continue;
      if (reply.loaded || options_.allow_dropping) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "worker '", workers[i], "' has come back since ",
          last_step_.has_value() ? absl::StrCat("the checkpoint of step ", *last_step_)
                                 : "a load found no checkpoint",
          ", and its part '", options_.name, "' has not been loaded: load first",
          last_step_.has_value() ? "" : ", and begin anew on all workers if there is still none",
          "; or, if it has its values from elsewhere, set allow_dropping"));
    }
    return absl::OkStatus();
  }

  void Remember(std::optional<int64_t> step, std::string loaded_from, Incarnations incarnations) {
    last_step_ = step;
    loaded_from_ = std::move(loaded_from);
    last_incarnations_ = std::move(incarnations);
    half_loaded_ = absl::OkStatus();
  }

  // The older checkpoints, which have it, will be removed.
  absl::Status CheckNothingIsDropped(const std::vector<PartPlan>& plans) {
    const absl::StatusOr<const std::vector<StepFolder>*> listed = folders_->List();
    if (!listed.ok()) return OfLeader(*worker_, listed.status());
    const std::vector<StepFolder>* const steps = *listed;
    // The newest one, unless the job has gone back: it has nothing of what came after that.
    auto last = std::find_if(steps->begin(), steps->end(), [this](const StepFolder& each) {
      return each.path == loaded_from_ && each.manifest.ok();
    });
    if (last == steps->end()) last = steps->begin();
    if (last == steps->end() || !last->manifest.ok()) return absl::OkStatus();
    const std::vector<std::string> lacking =
        Unexpected(*last->manifest, plans, &PartPlan::with_state);
    if (lacking.empty()) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("no worker has what ",
                     last == steps->begin() ? "the newest checkpoint, "
                                            : "the checkpoint that was loaded last, ",
                     last->path, ", has: ", FirstOf(lacking),
                     "; has a worker left, or was an optimizer made anew and took no step? If ",
                     "it is to be saved without, set allow_dropping"));
  }

  absl::Status Write(const Saving& saving) {
    const absl::StatusOr<std::string> attempt =
        Caught([&] { return folders_->Begin(saving.step); });
    if (!attempt.ok()) {
      saving.parts.Drop(saving.token);
      return OfLeader(*worker_, attempt.status());
    }
    absl::StatusOr<Manifest> manifest = Caught([&] { return WriteShards(saving, *attempt); });
    if (!manifest.ok()) {
      // Before any part was asked to write it may have been this worker that failed.
      saving.parts.Drop(saving.token);
      folders_->Abandon(*attempt);
      return manifest.status();
    }
    const absl::Status committed =
        Caught([&] { return folders_->Commit(*attempt, *std::move(manifest)); });
    if (!committed.ok()) return OfLeader(*worker_, committed);
    Remember(saving.step, "", saving.incarnations);
    return OfLeader(*worker_,
                    Annotate(folders_->Prune(options_.keep, damaged_),
                             "it is saved, but an older checkpoint could not be removed"));
  }

  absl::StatusOr<Manifest> WriteShards(const Saving& saving, const std::string& attempt) {
    const std::vector<std::string>& workers = saving.parts.workers();
    std::vector<std::string> payloads;
    for (size_t i = 0; i < workers.size(); ++i) {
      DG_ASSIGN_OR_RETURN(payloads.emplace_back(),
                          Encode(WriteRequest{.token = saving.token,
                                              .folder = attempt,
                                              .number = static_cast<int>(i) + 1,
                                              .count = static_cast<int>(workers.size())}));
    }
    DG_ASSIGN_OR_RETURN(
        const std::vector<std::string> replies,
        saving.parts.CallAll(kCheckpointWrite, payloads, saving.token, saving.deadline));
    Manifest manifest{saving.step, 0, "", {}};
    for (size_t i = 0; i < workers.size(); ++i) {
      DG_ASSIGN_OR_RETURN(const nlohmann::json json, ParseJson(replies[i]));
      DG_ASSIGN_OR_RETURN(ManifestWorker wrote, WorkerFromJson(json));
      wrote.name = workers[i];
      DG_RETURN_IF_ERROR(CheckWritten(*worker_, attempt, wrote));
      manifest.workers.push_back(std::move(wrote));
    }
    return manifest;
  }

  Worker* const worker_;
  const CheckpointManagerOptions options_;
  // Of whoever has the turn.
  const std::unique_ptr<StepFolders> folders_;
  StepFolders::Damaged damaged_;  // as its loads have found
  // Of the last save or load, also one that has found no checkpoint, which has no step.
  std::optional<int64_t> last_step_;
  std::string loaded_from_;  // its folder; empty: it was a save, or there was none
  Incarnations last_incarnations_;
  absl::Status half_loaded_;  // the error of a load since then that may have loaded some of it

  absl::Mutex mu_;
  bool busy_ ABSL_GUARDED_BY(mu_) = false;
  Sleepers waiting_ ABSL_GUARDED_BY(mu_);  // for their turn
  // The last one that was started, which waits for the one before. It writes, and has the turn
  // until it has written.
  std::thread thread_ ABSL_GUARDED_BY(mu_);
};

CheckpointManager::CheckpointManager(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CheckpointManager::~CheckpointManager() = default;

absl::StatusOr<std::unique_ptr<CheckpointManager>> CheckpointManager::Create(
    Worker* worker, const std::string& folder, CheckpointManagerOptions options) {
  if (options.keep < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(options.keep, " checkpoints are to be kept, and at least one is"));
  }
  DG_ASSIGN_OR_RETURN(const std::string path, PathOf(folder));
  DG_RETURN_IF_ERROR(CheckIsNoCheckpoint(path));
  DG_ASSIGN_OR_RETURN(std::unique_ptr<StepFolders> folders,
                      StepFolders::Lock(path, options.file_calls));
  return std::unique_ptr<CheckpointManager>(new CheckpointManager(
      std::make_unique<Impl>(worker, std::move(options), std::move(folders))));
}

absl::Status CheckpointManager::Save(int64_t step, Deadline deadline) {
  return impl_->Save(step, deadline);
}
absl::StatusOr<Future<Unit>> CheckpointManager::SaveAsync(int64_t step, Deadline deadline) {
  return impl_->SaveAsync(step, deadline);
}
absl::StatusOr<LoadedCheckpoint> CheckpointManager::Load(const LoadOptions& options) {
  return impl_->Load(options);
}

}  // namespace distgrad
