// A worker behind its handle, and its uses.
#ifndef DISTGRAD_CAPI_WORKER_OBJECT_H_
#define DISTGRAD_CAPI_WORKER_OBJECT_H_

#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/worker_trace.h"
#include "core/base/deadline.h"
#include "core/base/sleepers.h"
#include "core/worker/worker.h"

namespace distgrad {

// The handler of a function that peers may call; one of the two answers later.
struct Handler {
  dg_handler function;
  dg_responder_handler async_function;
  UserData user_data;
};

// A callback for members.
struct MemberHandler {
  void (*function)(void* user_data, const dg_member_event* event);
  UserData user_data;
};

// What uses a worker until it is ended itself.
class EndsWithWorker {
 public:
  virtual ~EndsWithWorker() = default;
  // When nothing of the worker runs any more, and before the worker is gone. Idempotent.
  virtual void End() = 0;
};

// A worker shared by its handle and whatever needs the worker and may outlive that handle.
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

  // Begins a use. kFailedPrecondition once the worker is gone.
  absl::StatusOr<Use> Begin();
  // For what outlasts the caller, who may be a handler of this worker.
  absl::StatusOr<Use> BeginInBackground();

  // Lets no use begin from now on. Does not wait. True if that was so before, and a Close() has
  // waited in vain for uses to end.
  bool Refuse();

  // Fails what is in flight, waits until no thread uses the worker and nothing of the user's runs
  // on its threads, and ends it with its handlers' user data. kDeadlineExceeded says what still
  // uses it: then the worker stays, closed, and this may be called again. kFailedPrecondition in a
  // handler of this worker. Idempotent.
  absl::Status Close(Deadline deadline);

  // Constant, also after Close().
  const std::string& name() const { return name_; }
  uint32_t rank() const { return rank_; }
  uint32_t local_rank() const { return local_rank_; }
  uint32_t local_world_size() const { return local_world_size_; }

  WorkerTrace& trace() { return trace_; }

  // Keeps a member's name for as long as this lives.
  const std::string& Keep(const std::string& name);

  // What belongs to the worker and runs functions of the user's on threads of its own. Thread-safe.
  class Part {
   public:
    virtual ~Part() = default;
    // Ends it. False if a function of its still runs when the deadline has passed; then it may be
    // called again. The worker lives until one of them has returned true.
    virtual bool Close(Deadline deadline) = 0;
    // "the stages of pipeline 'model'".
    virtual std::string Describe() const = 0;
  };
  // Close() ends it. kFailedPrecondition where that has come so far already.
  absl::Status Attach(std::shared_ptr<Part> part);
  // Forgets one that was closed.
  void Detach(const Part* part);

  absl::Status Register(std::string function, std::shared_ptr<Handler> handler);
  // Sets the handler; null: none.
  absl::Status OnMember(std::shared_ptr<const MemberHandler> handler);

  // Ends it with the worker, unless it is detached before; for those who use the worker.
  void Attach(std::shared_ptr<EndsWithWorker> what);
  void Detach(const std::shared_ptr<EndsWithWorker>& what);

 private:
  absl::StatusOr<Message> Serve(const Handler& handler, Request& request) const;
  Future<Message> ServeLater(const Handler& handler, Request& request) const;

  enum class State {
    kOpen,    // any thread may begin to use it
    kClosed,  // no use begins; those that are left are yet to be waited for, perhaps once more
    kEnding,  // a thread in Close() waits for those, and ends it
    kEnded,   // worker_ is gone, and so is the handlers' user data
  };

  void End();
  absl::StatusOr<Use> Begin(bool counted);
  absl::Status EndWorker(Deadline deadline);
  void Advance(State to) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool Unused() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return uses_ == 0; }
  bool NobodyEndsIt() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return state_ != State::kEnding; }

  const std::string name_;
  const uint32_t rank_;
  const uint32_t local_rank_;
  const uint32_t local_world_size_;

  // Synchronizes itself.
  WorkerTrace trace_;

  mutable absl::Mutex mu_;
  // Guarded by mu_.
  State state_ ABSL_GUARDED_BY(mu_) = State::kOpen;
  Sleepers closers_ ABSL_GUARDED_BY(mu_);  // threads in Close()
  // The uses of threads other than those that run this worker's handlers: the worker's end waits
  // for them.
  int uses_ ABSL_GUARDED_BY(mu_) = 0;
  std::set<std::string> names_ ABSL_GUARDED_BY(mu_);
  std::set<std::shared_ptr<EndsWithWorker>> attached_ ABSL_GUARDED_BY(mu_);
  // Ended with the worker, though contexts may keep what is left of it.
  std::vector<std::shared_ptr<Handler>> handlers_ ABSL_GUARDED_BY(mu_);
  std::vector<std::shared_ptr<Part>> parts_ ABSL_GUARDED_BY(mu_);
  bool parts_closed_ ABSL_GUARDED_BY(mu_) = false;  // there come no others

  // Owned. Constant, for handlers use it until its destructor has waited for them; gone after
  // Close().
  Worker* const worker_;
};

// For whom this thread runs a function of the program's: what waits for that function must not be
// waited for here. All is null on a thread that runs none.
struct Role {
  const SharedWorker* worker = nullptr;        // whose handlers it counts among
  const EndsWithWorker* part = nullptr;        // the part of a checkpoint whose function it is
  const SharedWorker::Part* stages = nullptr;  // the stages of a pipeline of which it is one
};

// The scope in which this thread has that role.
class ServingScope {
 public:
  explicit ServingScope(const Role& role);
  ~ServingScope();
  ServingScope(const ServingScope&) = delete;
  ServingScope& operator=(const ServingScope&) = delete;

 private:
  const Role outer_;
};

// The role of this thread, and whether it runs a handler of that worker. A thread on which others
// wait, as those of replicas, takes over the role of the one that waits.
const Role& Serving();
bool InHandlerOf(const SharedWorker& worker);

struct WorkerObject : HandleObject {
  using Handle = dg_worker;
  static constexpr HandleKind kKind = HandleKind::kWorker;
  static constexpr char kName[] = "dg_worker";

  explicit WorkerObject(std::unique_ptr<Worker> worker)
      : shared(std::make_shared<SharedWorker>(std::move(worker))) {}
  const std::shared_ptr<SharedWorker> shared;
  std::atomic<bool> destroyed{false};  // a DestroyWorker() has it
};

struct ContextObject : HandleObject {
  using Handle = dg_context;
  static constexpr HandleKind kKind = HandleKind::kContext;
  static constexpr char kName[] = "dg_context";

  explicit ContextObject(Context own) : own_(std::move(own)), context(own_) {}

 protected:
  // One that somebody else has, and keeps until this ends.
  explicit ContextObject(Context* lent) : context(*lent) {}

 private:
  Context own_;

 public:
  Context& context;  // thread-safe
};

// A worker that is alive, from its handle.
absl::StatusOr<SharedWorker::Use> UseWorker(const dg_worker* worker);

// What dg_worker_destroy does, with its bound: closes the worker, and ends the handle. Where it
// must not wait, or has waited in vain, a thread of its own does both. Once; what comes later, or
// at the same time, does nothing.
void DestroyWorker(dg_worker* worker, absl::Duration bound);

}  // namespace distgrad

#endif  // DISTGRAD_CAPI_WORKER_OBJECT_H_
