// Completion queues: futures that are done, behind a descriptor for a program's own event loop.
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <list>
#include <memory>
#include <type_traits>
#include <utility>
#include <variant>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "capi/guard.h"
#include "capi/objects.h"
#include "core/base/descriptors.h"

namespace distgrad {
namespace {

// The tags of futures that are done, and a descriptor that is readable while there are any.
// Thread-safe.
class CompletionQueue {
 public:
  CompletionQueue() = default;
  ~CompletionQueue() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  CompletionQueue(const CompletionQueue&) = delete;
  CompletionQueue& operator=(const CompletionQueue&) = delete;

  // Before all else.
  absl::Status Open() {
    descriptor_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (descriptor_ < 0) return ErrnoStatus(errno, "the descriptor of a dg_completions");
    return absl::OkStatus();
  }

  int descriptor() const { return descriptor_; }

  // Takes a list of one tag, for which there may be no memory any more.
  void Add(std::list<uint64_t> tag) {
    absl::MutexLock lock(&mu_);
    done_.splice(done_.end(), tag);
    // What was readable stays so. The counter is 0 here, so that the write neither waits nor fails.
    if (done_.size() == 1) eventfd_write(descriptor_, 1);
  }

  size_t Take(uint64_t* tags, size_t size) {
    absl::MutexLock lock(&mu_);
    const size_t count = std::min(size, done_.size());
    const auto end = std::next(done_.begin(), static_cast<std::ptrdiff_t>(count));
    std::copy(done_.begin(), end, tags);
    done_.erase(done_.begin(), end);
    if (count > 0 && done_.empty()) {
      eventfd_t counter = 0;
      eventfd_read(descriptor_, &counter);  // in the lock, so that it takes no later write
    }
    return count;
  }

 private:
  int descriptor_ = -1;  // constant once it is open

  absl::Mutex mu_;
  std::list<uint64_t> done_ ABSL_GUARDED_BY(mu_);
};

struct CompletionsObject : HandleObject {
  using Handle = dg_completions;
  static constexpr HandleKind kKind = HandleKind::kCompletions;
  static constexpr char kName[] = "dg_completions";

  const std::shared_ptr<CompletionQueue> queue =
      std::make_shared<CompletionQueue>();  // futures that are not done have it weakly
};

}  // namespace
}  // namespace distgrad

using namespace distgrad;

extern "C" {

dg_error* dg_completions_create(dg_completions** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    HandleAhead<CompletionsObject> made;
    DG_RETURN_IF_ERROR(made->queue->Open());
    *out = made.Release();
    return absl::OkStatus();
  });
}

int32_t dg_completions_descriptor(const dg_completions* completions) noexcept {
  return GuardValue<int32_t>(-1, [&]() -> int32_t {
    absl::StatusOr<Pinned<CompletionsObject>> pinned =
        Pin<CompletionsObject>(completions, "completions");
    return pinned.ok() ? (*pinned)->queue->descriptor() : -1;
  });
}

dg_error* dg_completions_watch(dg_completions* completions, const dg_future* future,
                               uint64_t tag) noexcept {
  return Guard([&]() -> absl::Status {
    DG_ASSIGN_OR_RETURN(const Pinned<CompletionsObject> pinned,
                        Pin<CompletionsObject>(completions, "completions"));
    DG_ASSIGN_OR_RETURN(const Pinned<FutureObject> watched, Pin<FutureObject>(future, "future"));
    auto add = [queue = std::weak_ptr<CompletionQueue>(pinned->queue),
                of_this = std::list<uint64_t>{tag}](const auto&) mutable {
      if (const auto alive = queue.lock()) alive->Add(std::move(of_this));
    };
    std::visit(
        [&](const auto& work) {
          if constexpr (std::is_same_v<std::decay_t<decltype(work)>, RemoteValues>) {
            work.reply.Then(std::move(add));
          } else {
            work.Then(std::move(add));
          }
        },
        watched->work);
    return absl::OkStatus();
  });
}

dg_error* dg_completions_take(dg_completions* completions, uint64_t* tags, size_t size,
                              size_t* count) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckArray(tags, size, "tags"));
    DG_RETURN_IF_ERROR(CheckOut(count, "count"));
    DG_ASSIGN_OR_RETURN(const Pinned<CompletionsObject> pinned,
                        Pin<CompletionsObject>(completions, "completions"));
    *count = pinned->queue->Take(tags, size);
    return absl::OkStatus();
  });
}

void dg_completions_destroy(dg_completions* completions) noexcept {
  DestroyHandle<CompletionsObject>(completions);
}

}  // extern "C"
