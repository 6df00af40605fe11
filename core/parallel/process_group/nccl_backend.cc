// The backend over NCCL itself, with one GPU for each rank; for builds with CUDA. c10d's own does
// not serve: to begin a collective it polls a communicator that another thread may have aborted,
// for half an hour, and its communicators are left to the end of the process.
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "core/base/blocking.h"
#include "core/base/clock.h"
#include "core/base/deadline.h"
#include "core/base/log.h"
#include "core/base/random.h"
#include "core/base/status.h"
#include "core/base/thread.h"
#include "core/parallel/nccl/current_device.h"
#include "core/parallel/nccl/real_nccl_group.h"
#include "core/parallel/process_group/new_backend.h"
#include "core/tensor/exception.h"
#include "nccl.h"

namespace distgrad {
namespace {

// Between two polls: neither NCCL nor CUDA has something to wait on that a deadline could end. What
// is small takes tens of microseconds, and so the first polls follow on each other.
constexpr int kPollsWithoutSleep = 64;
constexpr absl::Duration kPollInterval = absl::Microseconds(50);
// How often it is asked whether another rank has failed, which NCCL does not always notice.
constexpr absl::Duration kOthersInterval = absl::Seconds(1);
// How much later than its deadline a collective is aborted that nobody waits for: meanwhile the GPU
// is asked whether it has ended.
constexpr absl::Duration kGrace = absl::Seconds(1);
// How long a rank that leaves waits, at most, until the others have taken what it has sent.
constexpr absl::Duration kLeaveTimeout = absl::Minutes(1);
// The key under which rank 0 says how NCCL reaches it; and each rank where it is.
constexpr char kId[] = "nccl_id";
std::string PlaceKey(int rank) { return absl::StrCat("nccl_place/", rank); }

// Where a rank is. Machines are told apart as NCCL does it: by name and start (getHostHash() in its
// misc/utils.cc), and by their shared memory, by which it would send (its transport/shm.cc).
struct RankPlace {
  std::string machine;
  std::string process;  // begins with the machine
};
RankPlace PlaceOfThisRank() {
  static const uint64_t this_process = RandomNumber();
  const auto is_set = [](const char* name) {
    const char* const value = std::getenv(name);
    return value != nullptr && absl::string_view(value) != "0";
  };
  std::string machine;
  struct stat shared = {};
  if (is_set("NCCL_SHM_DISABLE") || is_set("NCCL_P2P_DISABLE") || stat("/dev/shm", &shared) != 0) {
    // Then it may send by sockets to its own machine, too.
    machine = absl::StrCat("alone ", this_process);
  } else if (const char* const said = std::getenv("NCCL_HOSTID"); said != nullptr) {
    machine = absl::StrCat(said, " ", shared.st_dev);
  } else {
    char name[256] = "";
    gethostname(name, sizeof(name) - 1);
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    machine = absl::StrCat(name, " ", boot, " ", shared.st_dev);
  }
  absl::StrAppend(&machine, "\n");
  return {machine, absl::StrCat(machine, this_process)};
}

const c10::impl::DeviceGuardImplInterface& GuardOf(c10::Device device) {
  return *c10::impl::getDeviceGuardImpl(device.type());
}

absl::Status Left() { return absl::UnavailableError("NCCL: the group was left"); }

// Aborts are heard of as errors; a sum that was aborted is worth nothing. Thread-safe.
class Communicator {
 public:
  Communicator(const BackendPlace& place, c10::Device device)
      : timeout_(place.timeout),
        failed_elsewhere_(place.failed_elsewhere),
        device_(device),
        platform_(RealNcclPlatform()),
        own_queries_(place.clock != nullptr ? nullptr : ValueOrThrow(NewSystemClock())),
        own_aborts_(place.clock != nullptr ? nullptr : ValueOrThrow(NewSystemClock())),
        queries_(place.clock != nullptr ? place.clock : own_queries_.get()),
        aborts_(place.clock != nullptr ? place.clock : own_aborts_.get()) {
    if (place.clock == nullptr) MakeCurrentDevice(device, aborts_);
  }
  ~Communicator() { Abort(Left()); }

  absl::Duration timeout() const { return timeout_; }
  c10::Device device() const { return device_; }

  // Waits until this rank and all others are connected. Throws StatusError, as all below do.
  void Connect(const BackendPlace& place, Deadline deadline) {
    const ncclUniqueId id = Id(place, deadline);
    const RankPlace here = PlaceOfThisRank();
    ThrowIfNotOk(place.store->Set(PlaceKey(place.rank), here.process, deadline));
    const c10::DeviceGuard on_device(device_);
    {
      absl::MutexLock lock(&mu_);
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = 0;
      Check("ncclCommInitRankConfig",
            ncclCommInitRankConfig(&communicator_, place.size, id, place.rank, &config));
    }
    Await("connecting", deadline, [&] { return IsReady(); });
    // All have said by now where they are.
    std::vector<std::string> keys;
    for (int rank = 0; rank < place.size; ++rank) keys.push_back(PlaceKey(rank));
    sends_late_ = SendsLate(ValueOrThrow(place.store->GetEach(keys, deadline)), place.rank, here);
  }

  // Has `call` begin something, and waits until NCCL has given all of it to the stream.
  void Begin(const char* what, Deadline deadline,
             absl::FunctionRef<ncclResult_t(ncclComm_t communicator)> call) {
    {
      absl::MutexLock lock(&mu_);
      ThrowIfNotOk(why_);
      Check("communicator", communicator_ == nullptr ? ncclInvalidUsage : ncclSuccess);
      Check(what, call(communicator_));
    }
    Await(what, deadline, [&] { return IsReady(); });
  }

  // Waits for what is before `end` in its stream.
  void AwaitEnd(const char* what, Deadline deadline, const c10::Event& end) {
    Await(what, deadline, [&] {
      const bool ended = platform_.query(end);
      IsReady();  // or throws: it may have ended because it was aborted
      return ended;
    });
  }

  // What timers know of a collective that has begun: they keep its deadline while nobody waits for
  // it.
  struct Ending {
    Ending(const char* what, c10::Device device) : what(what), device(device) {}
    ~Ending() {
      const OnDevice on_device(device);  // as for NCCL: an event of CUDA does the same
      const c10::Event ended = std::move(end);
    }
    Ending(const Ending&) = delete;
    Ending& operator=(const Ending&) = delete;

    const char* const what;
    const c10::Device device;
    c10::Event end{c10::kCUDA};
    std::atomic<bool> seen{false};
    absl::Mutex mu;
    bool watched ABSL_GUARDED_BY(mu) = true;
    std::optional<Clock::TimerId> abort ABSL_GUARDED_BY(mu);
  };
  // At the deadline one thread asks whether it has ended, which may stand still with the driver; a
  // second later another one, which calls nothing of CUDA before that, aborts what has not. That
  // second begins with the question: a process that was stopped meanwhile has both late.
  Clock::TimerId Watch(const std::shared_ptr<Ending>& ending, Deadline deadline) {
    return queries_->At(queries_->TimeOf(deadline), [this, ending] {
      {
        absl::MutexLock lock(&ending->mu);
        if (!ending->watched) return;
        ending->abort = aborts_->At(aborts_->Now() + kGrace, [this, ending] {
          if (!ending->seen) Abort(Late(ending->what));
        });
      }
      try {
        // Never back to false: who waits may have seen it end meanwhile.
        if (platform_.query(ending->end)) ending->seen = true;
      } catch (...) {
        Abort(Annotate(StatusFromException(std::current_exception()),
                       absl::StrCat("NCCL: ", ending->what)));
      }
    });
  }
  void Unwatch(Clock::TimerId query, Ending& ending) {
    queries_->Cancel(query);
    std::optional<Clock::TimerId> abort;
    {
      absl::MutexLock lock(&ending.mu);
      ending.watched = false;
      abort = ending.abort;
    }
    if (abort.has_value()) aborts_->Cancel(*abort);
  }

  absl::Status MayBegin() const {
    if (!platform_.is_capturing(GuardOf(device_).getStream(device_))) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("the current stream of ", device_.str(),
                     " is being captured into a graph, which collectives between processes cannot "
                     "be part of; run this step outside of the capture"));
  }

  // Ends the communicator, and has the other ranks get what this one has sent.
  void Leave() {
    const Deadline deadline = Deadline::After(std::min(kLeaveTimeout, timeout_));
    try {
      {
        absl::MutexLock lock(&mu_);
        if (communicator_ == nullptr) return;
        const OnDevice on_device(device_);
        Check("ncclCommFinalize", ncclCommFinalize(communicator_));
      }
      Await("leaving", deadline, [&] { return IsReady(); });
      if (sends_late_) DestroyOnceSent(deadline);
    } catch (...) {
      DG_LOG(WARNING) << "NCCL of " << device_.str() << ": to leave its group failed: "
                      << StatusFromException(std::current_exception());
    }
    Abort(Left());
  }

  // What waits, and comes later, fails with the first `why`.
  void Abort(absl::Status why) {
    absl::MutexLock lock(&mu_);
    if (communicator_ == nullptr) return;
    why_ = std::move(why);
    const OnDevice on_device(device_);
    // What it answers changes nothing: the communicator is gone either way. Set to null after it: a
    // thread of NCCL's that sets it up may write it until then.
    ncclCommAbort(communicator_);
    communicator_ = nullptr;
  }

 private:
  // NCCL's threads still send what a finalized communicator has, and an abort would lose it:
  // ncclCommDestroy() waits for that, as nothing else of NCCL's does, and nothing can end it. So it
  // has a thread of its own, which is left to itself when it takes too long.
  void DestroyOnceSent(Deadline deadline) {
    struct Destroy {
      Sleeper ended;
      ncclResult_t result = ncclSuccess;
    };
    const auto destroy = std::make_shared<Destroy>();
    ncclComm_t communicator = nullptr;
    std::thread destroys;
    {
      absl::MutexLock lock(&mu_);
      ThrowIfNotOk(why_);
      communicator = communicator_;
      destroys =
          ValueOrThrow(StartThread("dg-nccl-leave", [communicator, device = device_, destroy] {
            const OnDevice on_device(device);
            destroy->result = ncclCommDestroy(communicator);
            destroy->ended.Wake();
          }));
      communicator_ = nullptr;
      why_ = Left();
    }
    const BlockingScope blocking;
    absl::Status wrong;
    while (!destroy->ended.Sleep(std::min(deadline, Deadline::After(kOthersInterval)))) {
      wrong = failed_elsewhere_();
      if (wrong.ok() && deadline.Passed()) wrong = Late("leaving");
      if (wrong.ok()) continue;
      destroys.detach();
      DG_LOG(WARNING) << "NCCL of " << device_.str()
                      << ": other ranks have not taken all that this one has sent, or those of its "
                         "machine have not left the group; a thread waits for them, and keeps the "
                         "communicator: "
                      << wrong;
      return;
    }
    destroys.join();
    if (destroy->result == ncclSuccess) return;
    DG_LOG(WARNING) << "NCCL of " << device_.str()
                    << ": ncclCommDestroy: " << ncclGetErrorString(destroy->result);
    // It has freed nothing then (init.cc of NCCL 2.28.9).
    const OnDevice on_device(device_);
    ncclCommAbort(communicator);
  }

  // Whether what this rank sends may be on its way when it has ended here: threads of NCCL's send
  // it to other machines. Within one, GPUs read it from memory which lasts for as long as the
  // reader has it. Not where another rank is a thread of this process: NCCL ends all of a process's
  // communicators with the last of them, and the wait for one would hold up the abort of another.
  static bool SendsLate(const std::vector<Store::Value>& places, int rank, const RankPlace& here) {
    bool late = false;
    for (size_t i = 0; i < places.size(); ++i) {
      if (static_cast<int>(i) == rank || !places[i].has_value()) continue;
      if (*places[i] == here.process) return false;
      late |= !absl::StartsWith(*places[i], here.machine);
    }
    return late;
  }

  // All ranks need that of rank 0.
  ncclUniqueId Id(const BackendPlace& place, Deadline deadline) {
    ncclUniqueId id;
    if (place.rank == 0) {
      {
        absl::MutexLock lock(&mu_);
        Check("ncclGetUniqueId", ncclGetUniqueId(&id));
      }
      // NCCL has read its file by now, and no other rank has begun to connect.
      ThrowIfNotOk(NcclDoesNotBlock());
      ThrowIfNotOk(place.store->Set(kId, std::string(id.internal, sizeof(id.internal)), deadline));
      return id;
    }
    absl::StatusOr<std::string> value;
    do {
      ThrowIfNotOk(failed_elsewhere_());
      value = place.store->Get(kId, std::min(deadline, Deadline::After(kOthersInterval)));
    } while (absl::IsNotFound(value.status()) && !deadline.Passed());
    if (absl::IsNotFound(value.status())) {
      throw StatusError(absl::DeadlineExceededError("NCCL: rank 0 has not begun to connect"));
    }
    ThrowIfNotOk(value.status());
    TORCH_CHECK(value->size() == sizeof(id.internal), "NCCL: the store has ", value->size(),
                " bytes as the address of rank 0, and not ", sizeof(id.internal));
    std::memcpy(id.internal, value->data(), sizeof(id.internal));
    return id;
  }

  bool IsReady() {
    absl::MutexLock lock(&mu_);
    ThrowIfNotOk(why_);
    ncclResult_t state = ncclSuccess;
    Check("ncclCommGetAsyncError", ncclCommGetAsyncError(communicator_, &state));
    Check("communicator", state);
    return state == ncclSuccess;
  }

  // Polls until `done`, which throws what is wrong. Ends the communicator when it is too late, or
  // another rank has failed: what runs in the stream would wait for it.
  void Await(const char* what, Deadline deadline, absl::FunctionRef<bool()> done) {
    std::optional<BlockingScope> blocking;
    Deadline others = Deadline::After(kOthersInterval);
    for (int polls = 0; !done(); ++polls) {
      if (polls < kPollsWithoutSleep) {
        std::this_thread::yield();
        continue;
      }
      if (!blocking.has_value()) blocking.emplace();
      absl::SleepFor(kPollInterval);
      absl::Status wrong;
      if (others.Passed()) {
        wrong = failed_elsewhere_();
        others = Deadline::After(kOthersInterval);
      }
      if (wrong.ok() && deadline.Passed()) {
        wrong = Late(what);
      }
      if (wrong.ok()) continue;
      Abort(wrong);
      throw StatusError(wrong);
    }
  }

  static absl::Status Late(const char* what) {
    return absl::DeadlineExceededError(absl::StrCat("NCCL: ", what, " did not end in time"));
  }

  static void ThrowIfNotOk(const absl::Status& status) {
    if (!status.ok()) throw StatusError(status);
  }

  void Check(const char* what, ncclResult_t result) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (result == ncclSuccess || result == ncclInProgress) return;
    const char* const details =
        communicator_ == nullptr ? nullptr : ncclGetLastError(communicator_);
    std::string message =
        absl::StrCat("NCCL: ", what, " of ", device_.str(), ": ", ncclGetErrorString(result));
    if (details != nullptr && *details != '\0') absl::StrAppend(&message, " (", details, ")");
    throw StatusError(absl::UnavailableError(message));
  }

  // Constant after construction, and Connect().
  const absl::Duration timeout_;
  const std::function<absl::Status()> failed_elsewhere_;
  const c10::Device device_;
  const NcclPlatform platform_;
  bool sends_late_ = false;

  absl::Mutex mu_;
  ncclComm_t communicator_ ABSL_GUARDED_BY(mu_) = nullptr;  // null before and after
  absl::Status why_ ABSL_GUARDED_BY(mu_);                   // why it was aborted

  // The last members: they wait for timers that are firing.
  const std::unique_ptr<Clock> own_queries_, own_aborts_;
  Clock* const queries_;
  Clock* const aborts_;
};

// A collective that NCCL has begun.
class NcclWork final : public c10d::Work {
 public:
  NcclWork(std::shared_ptr<Communicator> communicator, const char* what, Deadline deadline,
           at::Tensor tensor)
      : communicator_(std::move(communicator)),
        deadline_(deadline),
        tensor_(std::move(tensor)),
        ending_(std::make_shared<Communicator::Ending>(what, communicator_->device())) {}
  ~NcclWork() override {
    if (query_.has_value()) communicator_->Unwatch(*query_, *ending_);
  }

  // It ends where `stream` is now.
  void Record(const c10::Stream& stream) {
    ending_->end.record(stream);
    query_ = communicator_->Watch(ending_, deadline_);
  }

  // Until the deadline that it has had since it began.
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    communicator_->AwaitEnd(ending_->what, deadline_, ending_->end);
    // The group keeps its last collective: its timers would ask a device, which may be busy with
    // something else at the deadline and be taken for one that hangs.
    ending_->seen = true;
    if (query_.has_value()) communicator_->Unwatch(*query_, *ending_);
    return true;
  }

 private:
  const std::shared_ptr<Communicator> communicator_;
  const Deadline deadline_;
  const at::Tensor tensor_;  // whose memory NCCL uses
  const std::shared_ptr<Communicator::Ending> ending_;
  std::optional<Clock::TimerId> query_;
};

// Collectives run on a stream of the group's own, which waits for the caller's current one.
class Nccl final : public c10d::Backend {
 public:
  Nccl(int rank, int size, std::shared_ptr<Communicator> communicator)
      : Backend(rank, size),
        communicator_(std::move(communicator)),
        stream_(GuardOf(communicator_->device())
                    .getStreamFromGlobalPool(communicator_->device(), /*isHighPriority=*/true)) {}

  ~Nccl() override {
    try {
      // Those before it are in the same stream.
      if (last_ != nullptr) last_->wait();
    } catch (...) {  // NOLINT(bugprone-empty-catch): whoever waits for it hears of it
    }
    communicator_->Leave();
  }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    TORCH_CHECK(options.reduceOp == c10d::ReduceOp::SUM, "NCCL: this backend adds, and no more");
    const at::Tensor& tensor = tensors.at(0);
    // The parts of complex numbers are added by themselves.
    const c10::ScalarType dtype = c10::toRealValueType(tensor.scalar_type());
    TORCH_CHECK(NcclAdds(dtype), "NCCL: it does not add ", tensor.scalar_type());
    return Begin("ncclAllReduce", tensor, [&](ncclComm_t communicator, void* data) {
      const size_t count = tensor.numel() * (tensor.is_complex() ? 2 : 1);
      return ncclAllReduce(data, data, count, NcclDataType(dtype), ncclSum, communicator,
                           c10::cuda::CUDAStream(stream_).stream());
    });
  }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    const at::Tensor& tensor = tensors.at(0);
    return Begin("ncclBroadcast", tensor, [&](ncclComm_t communicator, void* data) {
      return ncclBroadcast(data, data, tensor.numel() * tensor.itemsize(), ncclUint8,
                           static_cast<int>(options.rootRank), communicator,
                           c10::cuda::CUDAStream(stream_).stream());
    });
  }

  void abort() override {
    communicator_->Abort(absl::UnavailableError("NCCL: the communicator was aborted"));
  }

 private:
  c10::intrusive_ptr<c10d::Work> Begin(
      const char* what, const at::Tensor& tensor,
      absl::FunctionRef<ncclResult_t(ncclComm_t communicator, void* data)> call) {
    const c10::Device device = communicator_->device();
    TORCH_CHECK(tensor.device() == device && tensor.is_non_overlapping_and_dense(),
                "NCCL: a tensor is on ", tensor.device(), " and of strides ", tensor.strides(),
                ": it has to be on ", device, " and without gaps");
    const Deadline deadline = Deadline::After(communicator_->timeout());
    const c10::DeviceGuard on_device(device);
    c10::Event ready(device.type());
    ready.record(GuardOf(device).getStream(device));
    ready.block(stream_);
    // It may be freed before the collective has run.
    GuardOf(device).recordDataPtrOnStream(tensor.storage().data_ptr(), stream_);
    auto work = c10::make_intrusive<NcclWork>(communicator_, what, deadline, tensor);
    try {
      communicator_->Begin(what, deadline, [&](ncclComm_t communicator) {
        return call(communicator, tensor.mutable_data_ptr());
      });
      work->Record(stream_);
    } catch (...) {
      // It may run, and nobody could wait for it.
      communicator_->Abort(StatusFromException(std::current_exception()));
      throw;
    }
    last_ = work;
    return work;
  }

  const std::shared_ptr<Communicator> communicator_;
  const c10::Stream stream_;
  c10::intrusive_ptr<c10d::Work> last_;
};

}  // namespace

absl::StatusOr<c10::Device> NcclDevice() {
  if (c10::cuda::device_count() == 0) {
    return absl::FailedPreconditionError("NCCL: CUDA finds no GPU on this machine");
  }
  const absl::Status does_not_block = NcclDoesNotBlock();
  if (!does_not_block.ok()) return does_not_block;
  return c10::Device(c10::kCUDA, c10::cuda::current_device());
}

NewBackend NewNcclBackend(const BackendPlace& place) {
  // Before its threads begin: one of them asks CUDA for the GPU.
  const Deadline deadline = Deadline::After(place.connect_timeout);
  const auto communicator =
      std::make_shared<Communicator>(place, c10::Device(c10::kCUDA, c10::cuda::current_device()));
  communicator->Connect(place, deadline);
  return {.backend = c10::make_intrusive<Nccl>(place.rank, place.size, communicator),
          .may_begin = [communicator] { return communicator->MayBegin(); },
          .begins_may_wait = true};
}

}  // namespace distgrad
