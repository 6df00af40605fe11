// The calls that an agent has made and that have not ended. Each ends once: with its answer, at its
// deadline, by a cancel, or with the link that it goes over.
#ifndef DISTGRAD_CORE_RPC_CALL_TABLE_H_
#define DISTGRAD_CORE_RPC_CALL_TABLE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/base/clock.h"
#include "core/base/future.h"
#include "core/base/ids.h"
#include "core/base/trace.h"
#include "core/rpc/call_metrics.h"
#include "core/rpc/incoming_call.h"
#include "core/rpc/limits.h"
#include "core/rpc/link.h"
#include "core/rpc/peers.h"
#include "core/transport/packet.h"

namespace distgrad {

// Thread-safe. Calls what a call ends with without its lock, under which it only asks a link
// whether it is ready. LinkTable calls Add() under its own.
class CallTable : public Canceller, public std::enable_shared_from_this<CallTable> {
 public:
  // Agent::ReplyCallback.
  using Done = absl::AnyInvocable<void(absl::StatusOr<Body>, bool has_left)>;

  // A call: before it begins, and as long as it has not ended.
  struct Call {
    WorkerRank to = 0;
    std::string function;
    uint64_t bytes = 0;  // of the request
    absl::Time begun, deadline;
    Done done;
    std::unique_ptr<TraceSpan> span = nullptr;  // null unless a trace runs
    // Set by Begin():
    std::shared_ptr<Link> link = nullptr;
    CallCounters* counters = nullptr;
    bool has_left = false;  // the peer may have heard of it
  };

  // The clock must outlive Close().
  CallTable(Clock* clock, const Limits& limits, std::shared_ptr<TraceRecorder> trace,
            std::shared_ptr<const Peers> peers)
      : clock_(clock), limits_(limits), trace_(std::move(trace)), peers_(std::move(peers)) {}

  // Calls may go over that link from now on, until EndCallsOver() it.
  void Add(const Link& link);

  // What is left of a call's time, in microseconds, for the header of its request: 0 if it has no
  // deadline, nothing if that has passed.
  static std::optional<int64_t> TimeLeft(absl::Time deadline, absl::Time now);

  // Gives a call its number, which goes into the request's header, and keeps it, so that it may
  // end at once; leaves it alone unless OK. `leaves_now`: the link need not ask OnLeaving() before
  // the request leaves. kAborted: the link is over, and another is to be found; kCancelled after
  // Close(); kResourceExhausted past a limit.
  struct Begun {
    uint64_t number = 0;
    bool leaves_now = false;
  };
  absl::StatusOr<Begun> Begin(Call& call, std::shared_ptr<Link> link, Packet& request);
  // Forgets a call whose request could not be sent; its Done is not called, and ends.
  void Drop(uint64_t number);
  // See Link::Owner::OnLeaving().
  bool OnLeaving(uint64_t number, Packet& request);

  // Takes the call that such a reply is for; nullopt if it has ended.
  std::optional<Call> Take(uint64_t number, WorkerRank from);
  // Ends one that was taken, or has not begun.
  void End(Call call, absl::StatusOr<Body> reply);
  // Does the same with an error that names the call and the worker, if there is memory for that.
  void EndWithError(Call call, const absl::Status& why);

  // Canceller: ends it with kCancelled, and tells the worker that serves it.
  void Cancel(uint64_t number) override;
  // Ends a call of so many bytes, whose deadline has passed by the time its request was sent over
  // that link, as the timer does, or that has lost its timer by then; and tells the worker that
  // serves it, behind the request. Before that, so that the error is not what that worker makes of
  // it.
  void EndIfLate(uint64_t number, absl::Time deadline, Link& link, uint64_t bytes);
  // Ends the calls that went over a link, and those that wait for it: the contexts of both are
  // lost.
  void EndCallsOver(const Link& link, const absl::Status& why);
  // Ends all, and lets none begin.
  void Close(const absl::Status& why);

  size_t size() const;
  CallMetrics& metrics() { return metrics_; }

 private:
  using Calls = absl::flat_hash_map<uint64_t, Call>;

  // The timer of the deadlines, which call_table.cc explains.
  struct Timer {
    uint64_t number = 0;  // of its own; 0: there is none
    absl::Time at = absl::InfiniteFuture();
    std::optional<Clock::TimerId> id = {};  // once the clock has it
  };
  // Makes the timer stand at `deadline`, or earlier. The result is for SetTimer(), at once.
  struct Arming {
    uint64_t number = 0;  // 0: nothing is to be done
    absl::Time at;
    Timer before;  // which this one replaces
  };
  Arming ArmTimer(absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Returns false if there is no memory for it; then EndThoseWithDeadlines() comes next.
  bool SetTimer(const Arming& arming) ABSL_LOCKS_EXCLUDED(mu_);
  void EndThoseWithDeadlines(const Arming& arming) ABSL_LOCKS_EXCLUDED(mu_);
  void OnTimer(uint64_t number);

  absl::Status CheckLimits(const Link& link) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  Call TakeOut(Calls::iterator call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Tells the worker that serves a call of so many bytes, behind its request, that nobody waits for
  // it any more. Does no harm where the call has ended there, or never came.
  static void SendCancel(Link& link, uint64_t number, uint64_t bytes);
  // Ends one that was taken and has no answer: keeps its request from leaving, or tells the worker
  // that serves it, unless there is no memory for that.
  void EndEarly(uint64_t number, Call call, const absl::Status& why);
  // Takes out the calls of which `which` is true, and gives each to `end`. Throws nothing where
  // there is no memory: that a deadline has passed, or a link is over, is said once.
  void EndAll(absl::FunctionRef<bool(uint64_t number, const Call& call)> which,
              absl::FunctionRef<void(uint64_t number, Call call)> end) ABSL_LOCKS_EXCLUDED(mu_);

  Clock* const clock_;
  const Limits limits_;
  const std::shared_ptr<TraceRecorder> trace_;
  const std::shared_ptr<const Peers> peers_;
  // Made before there may be no memory for them.
  const absl::Status late_ = absl::DeadlineExceededError("no answer before the deadline");
  const absl::Status no_timer_ =
      absl::ResourceExhaustedError("there is no memory for the timer of its deadline");
  // Synchronize themselves.
  CallMetrics metrics_;
  // Those up to this number that have a deadline have ended, or are about to, for want of a timer;
  // maybe before their requests were sent.
  std::atomic<uint64_t> without_timer_{0};

  mutable absl::Mutex mu_;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  Calls calls_ ABSL_GUARDED_BY(mu_);
  // The number of calls over each link that stands, by the link's number.
  absl::flat_hash_map<uint64_t, size_t> links_ ABSL_GUARDED_BY(mu_);
  uint64_t last_call_ ABSL_GUARDED_BY(mu_) = 0;
  Timer timer_ ABSL_GUARDED_BY(mu_);
  uint64_t last_timer_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_CALL_TABLE_H_
