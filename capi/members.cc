// The members of a job, and the callback for their events.
#include "capi/guard.h"
#include "capi/worker_object.h"
#include "core/base/blocking.h"
#include "core/worker/worker.h"

namespace distgrad {

const std::string& SharedWorker::Keep(const std::string& name) {
  absl::MutexLock lock(&mu_);
  return *names_.insert(name).first;
}

absl::Status SharedWorker::OnMember(std::shared_ptr<const MemberHandler> handler) {
  DG_ASSIGN_OR_RETURN(const Use use, Begin());
  if (handler == nullptr) {
    use->OnMember(nullptr);
    return absl::OkStatus();
  }
  use->OnMember([this, handler = std::move(handler)](const MemberEvent& event) {
    dg_member_event borrowed = {};
    borrowed.struct_size = sizeof(borrowed);
    borrowed.kind = static_cast<uint64_t>(event.kind);
    borrowed.name = ToStr(event.name);
    borrowed.rank = event.rank;
    borrowed.incarnation = event.incarnation;
    borrowed.reason = ToStr(event.reason);
    const ServingScope scope({.worker = this});
    handler->function(handler->user_data.get(), &borrowed);
  });
  return absl::OkStatus();
}

}  // namespace distgrad

using namespace distgrad;

namespace {

// What `get` gives for the worker, or 0 where it is not a valid handle.
template <typename F>
uint32_t Ask(const dg_worker* worker, F&& get) noexcept {
  return GuardValue<uint32_t>(0, [&]() -> uint32_t {
    absl::StatusOr<Pinned<WorkerObject>> pinned = Pin<WorkerObject>(worker, "worker");
    return pinned.ok() ? get(*(*pinned)->shared) : 0;
  });
}

}  // namespace

extern "C" {

uint32_t dg_worker_rank(const dg_worker* worker) noexcept {
  return Ask(worker, [](const SharedWorker& shared) { return shared.rank(); });
}

uint32_t dg_worker_local_rank(const dg_worker* worker) noexcept {
  return Ask(worker, [](const SharedWorker& shared) { return shared.local_rank(); });
}

uint32_t dg_worker_local_world_size(const dg_worker* worker) noexcept {
  return Ask(worker, [](const SharedWorker& shared) { return shared.local_world_size(); });
}

uint32_t dg_worker_world_size(const dg_worker* worker) noexcept {
  return Ask(worker, [](SharedWorker& shared) -> uint32_t {
    const absl::StatusOr<SharedWorker::Use> use = shared.Begin();
    return use.ok() ? static_cast<uint32_t>((*use)->world_size()) : 0;
  });
}

dg_str dg_worker_name(const dg_worker* worker, uint32_t rank) noexcept {
  return GuardValue<dg_str>(ToStr(""), [&] {
    const absl::StatusOr<SharedWorker::Use> use = UseWorker(worker);
    if (!use.ok()) return ToStr("");
    for (const Member& member : (*use)->members()) {
      if (member.rank == rank) return ToStr(use->shared().Keep(member.name));
    }
    return ToStr("");
  });
}

dg_error* dg_worker_update_members(dg_worker* worker) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(const SharedWorker::Use use, UseWorker(worker));
    BlockingScope blocking;
    return use->UpdateMembers();
  });
}

dg_error* dg_worker_members(const dg_worker* worker,
                            void (*visit)(void* user_data, const dg_member* member),
                            void* user_data) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckCallback(visit != nullptr, "visit"));
    std::vector<Member> members;
    {
      DG_ASSIGN_OR_RETURN(const SharedWorker::Use use, UseWorker(worker));
      members = use->members();
    }
    for (const Member& member : members) {
      dg_member borrowed = {};
      borrowed.struct_size = sizeof(borrowed);
      borrowed.name = ToStr(member.name);
      borrowed.rank = member.rank;
      borrowed.incarnation = member.incarnation;
      visit(user_data, &borrowed);
    }
    return absl::OkStatus();
  });
}

dg_error* dg_worker_on_member(dg_worker* worker,
                              void (*callback)(void* user_data, const dg_member_event* event),
                              void* user_data, void (*destroy)(void* user_data)) noexcept {
  UserData taken(user_data, destroy);
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckMayWait());
    std::shared_ptr<SharedWorker> shared;
    {
      DG_ASSIGN_OR_RETURN(const Pinned<WorkerObject> pinned, Pin<WorkerObject>(worker, "worker"));
      shared = pinned->shared;
    }
    if (callback == nullptr) return shared->OnMember(nullptr);
    return shared->OnMember(
        std::make_shared<const MemberHandler>(MemberHandler{callback, std::move(taken)}));
  });
}

}  // extern "C"
