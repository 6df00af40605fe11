// The communicators of one list of GPUs: begins collectives on them in one order, and watches what
// NCCL has left running.
#ifndef DISTGRAD_CORE_PARALLEL_NCCL_NCCL_COMMUNICATORS_H_
#define DISTGRAD_CORE_PARALLEL_NCCL_NCCL_COMMUNICATORS_H_

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/base/clock.h"
#include "core/base/sleepers.h"
#include "core/parallel/nccl/nccl_group.h"

namespace distgrad {

// What communicators that may be in use at the same time share, so that all devices see their
// collectives in one order: two that wait for each other on two devices would do so for ever.
// Thread-safe.
class NcclOrder {
 public:
  // Waits, in the order of the calls, until this thread has the turn: it then begins a collective,
  // or sets communicators up. `who` is for the errors of others. kDeadlineExceeded after `timeout`
  // says who has the turn.
  absl::Status TakeTurn(const std::string& who, absl::Duration timeout);
  void GiveTurn();
  // The device's one stream for collectives.
  c10::Stream StreamOf(c10::Device device);

 private:
  absl::Mutex mu_;
  std::list<std::string> turns_ ABSL_GUARDED_BY(mu_);  // the first has it, the others wait
  Sleepers waiting_ ABSL_GUARDED_BY(mu_);
  std::map<c10::DeviceIndex, c10::Stream> streams_ ABSL_GUARDED_BY(mu_);
};

// A communicator that fails, and a collective that does not end in time, is noticed within a tenth
// of a second, whoever waits or does not; then all communicators are aborted, so that nothing hangs
// on the devices, and this and all later calls fail. Deadlines are looked at on a thread that calls
// nothing of CUDA but in an abort: where the driver itself stands still behind a kernel of NCCL,
// the abort is begun a second after the deadline, and ends that if NCCL can.
//
// Thread-safe.
class NcclCommunicators {
 public:
  // What a device sends, or receives where nothing is sent.
  struct Buffer {
    at::Tensor tensor;
    bool in_place = false;  // it is a tensor of the caller's
  };
  // What one collective does, and with what.
  struct Collective {
    std::string what;
    std::vector<Buffer> buffers;  // by device
    at::Tensor result;            // what the root receives, if not its buffer
    size_t root = 0;
    std::vector<bool> waits;  // by device: has results, for its current stream
    std::function<absl::Status(NcclGroup&, absl::Span<const NcclGroup::Part>)> run;
  };

  // For a thread that has the turn. `devices` are distinct, of one type that `platform`
  // knows. Waits until the communicators stand, or `timeout`, and where CUDA's driver stands still
  // in a call, as in cudaSetDevice(), longer: nothing ends that. The clocks must outlive the
  // communicators: one is for deadlines, the other one for what asks the devices, which may take
  // any time. Without them there are two of its own.
  static absl::StatusOr<std::shared_ptr<NcclCommunicators>> Create(
      std::vector<c10::Device> devices, absl::Duration timeout, NcclPlatform platform,
      std::shared_ptr<NcclOrder> order, Clock* clock = nullptr, Clock* query_clock = nullptr);
  // Waits for what runs on the devices, as long as each may take.
  ~NcclCommunicators();
  NcclCommunicators(const NcclCommunicators&) = delete;
  NcclCommunicators& operator=(const NcclCommunicators&) = delete;

  // "NCCL over cuda:0, cuda:1".
  static std::string NameOf(const std::vector<c10::Device>& devices);

  const std::vector<c10::Device>& devices() const { return devices_; }
  const std::string& name() const { return name_; }
  NcclOrder& order() { return *order_; }

  // OK, or why all calls fail.
  absl::Status status() const;
  // status(), or kFailedPrecondition where the calling thread's current stream of one of the
  // devices is being captured into a graph: NCCL would be, too, and no deadline would hold.
  absl::Status MayBegin(const std::string& what) const;
  // For a thread that has the turn. The collective may take `timeout`, from now on.
  absl::Status Launch(Collective collective, absl::Duration timeout);
  void Abort(const absl::Status& why);
  // For the end of the process, while CUDA is still there, again and again until it is true: then
  // nothing asks the devices any more, and no deadline is kept. False while a thread asks, or
  // another one aborts, either of which may never end. From the first call on nobody begins to ask.
  bool TryLeave();

 private:
  // A collective that was launched.
  struct Running {
    Running() = default;
    ~Running();  // any thread's, whose current device is left without a context if it has none
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;

    std::string what;
    absl::Duration timeout;
    absl::Time deadline;
    std::vector<c10::Event> ends;  // by device
  };

  NcclCommunicators(std::vector<c10::Device> devices, NcclPlatform platform,
                    std::shared_ptr<NcclOrder> order);

  absl::Status AwaitReady(const std::string& what, absl::Duration timeout);
  void Watch();
  void Query();
  void QueryUntilOneRuns();
  void SetTimers() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Does so at the end of one of them, whose flag is given.
  void SetAgain(bool& timer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Check() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void FailIfLate(absl::Duration grace) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Fail(absl::Status why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Late(const std::string& what, absl::Duration timeout) const;

  // Constant after construction; synchronize themselves.
  const std::vector<c10::Device> devices_;
  const NcclPlatform platform_;
  const std::shared_ptr<NcclOrder> order_;
  const std::string name_;
  std::vector<c10::Stream> streams_;
  Clock* clock_ = nullptr;
  Clock* query_clock_ = nullptr;

  mutable absl::Mutex mu_;
  // Guarded by mu_. The group is called with mu_ held: it takes one call at a time, none waits, and
  // none calls back. Events are not asked with mu_ held, for that may wait.
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<NcclGroup> group_ ABSL_GUARDED_BY(mu_);  // none after it was aborted
  std::deque<std::shared_ptr<const Running>> running_ ABSL_GUARDED_BY(mu_);
  bool watched_ ABSL_GUARDED_BY(mu_) = false;  // a timer is set or firing
  Clock::TimerId watch_ ABSL_GUARDED_BY(mu_) = 0;
  bool queried_ ABSL_GUARDED_BY(mu_) = false;  // so is the one on query_clock_
  Clock::TimerId query_ ABSL_GUARDED_BY(mu_) = 0;
  std::atomic<bool> left_ = false;  // not guarded: an abort that does not end holds mu_

  // The last members: they wait for timers that are firing.
  std::unique_ptr<Clock> own_clock_, own_query_clock_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_NCCL_NCCL_COMMUNICATORS_H_
