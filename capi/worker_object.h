// A worker behind its handle, and who is using it.
#ifndef DISTGRAD_CAPI_WORKER_OBJECT_H_
#define DISTGRAD_CAPI_WORKER_OBJECT_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/node_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "capi/guard.h"
#include "capi/handles.h"
#include "core/base/deadline.h"
#include "core/worker/worker.h"

namespace distgrad {

// Of a function that others may call; one of the two answers later.
struct Handler {
  dg_handler function;
  dg_async_handler async_function;
  UserData user_data;
};

// A callback for members.
struct MemberHandler {
  void (*function)(void* user_data, const dg_member_event* event);
  UserData user_data;
};

// Shared by a worker's handle and whatever needs the worker and may outlive that handle.
// Thread-safe.
class SharedWorker : public std::enable_shared_from_this<SharedWorker> {
 public:
  explicit SharedWorker(std::unique_ptr<Worker> worker);
  ~SharedWorker() { Close(Deadline::Never()).IgnoreError(); }

  // Keeps the worker from ending. Movable.
  class Use {
   public:
    Use(std::shared_ptr<SharedWorker> owner, bool counted)
        : owner_(std::move(owner)), counted_(counted) {}
    Use(Use&& other) noexcept
        : owner_(other.owner_), counted_(std::exchange(other.counted_, false)) {}
    Use& operator=(Use&&) = delete;
    ~Use() {
      if (counted_) owner_->End();
    }
    Worker* operator->() const { return owner_->worker_; }
    Worker* get() const { return owner_->worker_; }
    SharedWorker& shared() const { return *owner_; }

   private:
    const std::shared_ptr<SharedWorker> owner_;
    bool counted_;
  };

  // kFailedPrecondition once the worker is gone.
  absl::StatusOr<Use> Begin();

  // Fails what is in flight, waits until nobody uses the worker and nothing of the user's runs on
  // its threads, and ends it. kDeadlineExceeded says who still does: then the worker stays, closed,
  // and this may be called again. kFailedPrecondition in a handler of this worker. Idempotent.
  absl::Status Close(Deadline deadline);

  // Close(), with a thread of its own that waits for as long as it takes, and destroys `handle`.
  // Once; later calls do nothing. Does not wait.
  void CloseOnOwnThread(const dg_worker* handle);
  // Whether a Close() has waited in vain.
  bool was_late() const;

  // Constant, also after Close().
  const std::string& name() const { return name_; }
  uint32_t rank() const { return rank_; }
  uint32_t local_rank() const { return local_rank_; }
  uint32_t local_world_size() const { return local_world_size_; }

  // A member's name for as long as this lives.
  const std::string& Keep(const std::string& name);

  absl::Status Register(std::string function, std::shared_ptr<Handler> handler);
  // Null: none.
  absl::Status OnMember(std::shared_ptr<const MemberHandler> handler);

 private:
  absl::StatusOr<Message> Serve(const Handler& handler, Request& request) const;
  Future<Message> ServeLater(const Handler& handler, Request& request) const;

  void End();
  absl::Status CloseAlone(Deadline deadline);
  bool Unused() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return uses_ == 0; }
  bool NobodyCloses() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return !closing_; }

  const std::string name_;
  const uint32_t rank_;
  const uint32_t local_rank_;
  const uint32_t local_world_size_;

  mutable absl::Mutex mu_;
  // Guarded by mu_.
  bool closed_ ABSL_GUARDED_BY(mu_) = false;   // nobody begins to use it
  bool closing_ ABSL_GUARDED_BY(mu_) = false;  // a thread is in CloseAlone()
  bool ended_ ABSL_GUARDED_BY(mu_) = false;    // worker_ is gone
  bool was_late_ ABSL_GUARDED_BY(mu_) = false;
  bool handed_over_ ABSL_GUARDED_BY(mu_) = false;  // to CloseOnOwnThread()
  // Of threads other than those that run this worker's handlers: the worker's end waits for those.
  int uses_ ABSL_GUARDED_BY(mu_) = 0;
  absl::node_hash_set<std::string> names_ ABSL_GUARDED_BY(mu_);
  // Ended with the worker, though contexts may keep what is left of it.
  std::vector<std::shared_ptr<Handler>> handlers_ ABSL_GUARDED_BY(mu_);

  // Owned. Constant, for handlers use it until its destructor has waited for them; gone after
  // Close().
  Worker* const worker_;
};

// While it lives, this thread does the work of a handler of `worker`; of none if that is null.
class ServingScope {
 public:
  explicit ServingScope(const SharedWorker* worker);
  ~ServingScope();
  ServingScope(const ServingScope&) = delete;
  ServingScope& operator=(const ServingScope&) = delete;

 private:
  const SharedWorker* const outer_;
};

// The worker of which this thread runs a handler, or null; whether it is that one.
const SharedWorker* Serving();
bool InHandlerOf(const SharedWorker& worker);

struct WorkerObject : HandleObject {
  using Handle = dg_worker;
  static constexpr HandleKind kKind = HandleKind::kWorker;
  static constexpr char kName[] = "dg_worker";

  explicit WorkerObject(std::unique_ptr<Worker> worker)
      : shared(std::make_shared<SharedWorker>(std::move(worker))) {}
  const std::shared_ptr<SharedWorker> shared;
};

struct ContextObject : HandleObject {
  using Handle = dg_context;
  static constexpr HandleKind kKind = HandleKind::kContext;
  static constexpr char kName[] = "dg_context";

  explicit ContextObject(Context context) : context(std::move(context)) {}
  Context context;  // thread-safe
};

// A worker that is alive, from its handle.
absl::StatusOr<SharedWorker::Use> UseWorker(const dg_worker* worker);

}  // namespace distgrad

#endif  // DISTGRAD_CAPI_WORKER_OBJECT_H_
