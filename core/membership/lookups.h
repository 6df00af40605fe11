// Looks up workers in the store, on a thread of its own, so that no other thread waits for the
// store. All that is asked meanwhile goes with the next question.
#ifndef DISTGRAD_CORE_MEMBERSHIP_LOOKUPS_H_
#define DISTGRAD_CORE_MEMBERSHIP_LOOKUPS_H_

#include <atomic>
#include <cstdint>
#include <list>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/base/deadline.h"
#include "core/base/thread_pool.h"
#include "core/membership/directory.h"
#include "core/membership/membership.h"

namespace distgrad {

// Thread-safe.
class Lookups final : public Directory {
 public:
  // `members` must have entered the job before the first question, and outlive this. The thread
  // is named for `worker`, and starts with the first question.
  Lookups(const std::string& worker, Membership* members)
      : members_(members), thread_(worker + "-find", 1) {}
  ~Lookups() override { Close(); }

  // Find a worker. kDeadlineExceeded where the store is silent: for `patience`, or until the
  // deadline. kResourceExhausted where there is no memory to ask it; where these throw
  // std::bad_alloc nobody is answered.
  void Find(WorkerRank worker, absl::Duration patience, Found found) override;
  void Find(std::string name, Deadline deadline, Found found);

  // Runs `task` in its turn, for what else waits for the store; destroys it unrun after Close().
  // Returns false, and does so at once, where there is no thread to be had, or after Close(). One
  // that throws std::bad_alloc runs again: so what must not be done twice comes last.
  bool Run(absl::AnyInvocable<void()> task);

  // Answers what waits with kCancelled, and waits for its thread.
  void Close();

 private:
  // The number of questions at once, more than a worker can have reason to ask.
  static constexpr int kMaxWaiting = 4096;

  struct Question {
    Membership::Who who;
    Deadline deadline;
    Found found;
    uint64_t number;
  };

  using Questions = std::list<Question>;  // which go from one list to another without memory

  void Ask(Membership::Who who, Deadline deadline, Found found);
  // Asks all that waits, and answers what it can.
  void AskAll();
  // Asks these, and leaves those that are to be asked again.
  void AskEach(Questions* questions);
  // Has AskAll() run on the thread. Returns false if that is not to be.
  bool Schedule();

  Membership* const members_;
  std::atomic<bool> closed_{false};

  absl::Mutex mu_;
  Questions waiting_ ABSL_GUARDED_BY(mu_);
  uint64_t last_number_ ABSL_GUARDED_BY(mu_) = 0;
  int asked_ ABSL_GUARDED_BY(mu_) = 0;  // by AskAll(), and not answered yet

  // Synchronizes itself.
  ThreadPool thread_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_MEMBERSHIP_LOOKUPS_H_
