// Runs the thread that asks the store, and answers all who wait with one question.
#include "core/membership/lookups.h"

#include <algorithm>
#include <new>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/base/await_memory.h"
#include "core/base/exception.h"

namespace distgrad {
namespace {

// How long the questions before a new one wait for a store that is silent; one that is served over
// TCP has five seconds all the same.
constexpr absl::Duration kRound = absl::Seconds(1);

// Made before main(), for later there may be no memory for them.
const absl::Status* const kClosed =
    new absl::Status(absl::CancelledError("this worker is shutting down"));
const absl::Status* const kNoMemory =
    new absl::Status(absl::ResourceExhaustedError("there is no memory to ask the job's store"));

}  // namespace

void Lookups::Find(WorkerRank worker, absl::Duration patience, Found found) {
  Ask(worker, Deadline::After(patience), std::move(found));
}

void Lookups::Find(std::string name, Deadline deadline, Found found) {
  Ask(std::move(name), deadline, std::move(found));
}

void Lookups::Ask(Membership::Who who, Deadline deadline, Found found) {
  if (const absl::Status started = thread_.Start(); !started.ok()) return found(started);
  Questions one;
  one.push_back({std::move(who), deadline, std::move(found), 0});
  uint64_t number;
  {
    absl::ReleasableMutexLock lock(&mu_);
    if (waiting_.size() + asked_ >= kMaxWaiting) {
      lock.Release();
      return one.front().found(absl::ResourceExhaustedError(
          absl::StrCat("more than ", kMaxWaiting, " questions wait for the store")));
    }
    one.front().number = number = ++last_number_;
    waiting_.splice(waiting_.end(), one);
  }
  try {
    // One task for each question, of which the first may answer many.
    if (!Schedule()) AskAll();
  } catch (const std::bad_alloc&) {
    absl::MutexLock lock(&mu_);
    const auto asked = std::find_if(waiting_.begin(), waiting_.end(),
                                    [number](const Question& q) { return q.number == number; });
    if (asked == waiting_.end()) return;  // another task has it
    one.splice(one.end(), waiting_, asked);
    throw;
  }
}

bool Lookups::Schedule() {
  return thread_.Schedule([this] { AskAll(); });
}

void Lookups::AskAll() {
  for (bool is_over = false; !is_over;) {
    Questions questions;
    {
      absl::MutexLock lock(&mu_);
      questions.swap(waiting_);
      asked_ += static_cast<int>(questions.size());
    }
    if (questions.empty()) return;
    const int count = static_cast<int>(questions.size());
    AskEach(&questions);
    is_over = questions.empty();
    {
      absl::MutexLock lock(&mu_);
      asked_ -= count;
      waiting_.splice(waiting_.end(), questions);
    }
    try {
      // Other tasks have their turn before them.
      is_over = is_over || Schedule();
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): here, then
    }
  }
}

void Lookups::AskEach(Questions* questions) {
  std::vector<absl::StatusOr<WorkerInfo>> found;
  try {
    std::vector<Membership::Who> workers;
    for (const Question& question : *questions) workers.push_back(question.who);
    if (closed_) {
      found.assign(workers.size(), *kClosed);
    } else {
      found = members_->FindEach(workers, Deadline::After(kRound));
    }
  } catch (const std::bad_alloc&) {
    found.clear();
  }
  auto it = questions->begin();
  for (size_t i = 0; it != questions->end(); ++i) {
    absl::StatusOr<WorkerInfo> answer = *kNoMemory;
    if (!found.empty()) answer = std::move(found[i]);
    if (absl::IsDeadlineExceeded(answer.status()) && !it->deadline.Passed()) {
      if (!closed_) {
        ++it;
        continue;
      }
      answer = *kClosed;
    }
    try {
      it->found(std::move(answer));
    } catch (const std::bad_alloc&) {
      LogThrown("what hears of an answer of the job's store");
    }
    it = questions->erase(it);
  }
}

bool Lookups::Run(absl::AnyInvocable<void()> task) {
  if (!thread_.Start().ok()) return false;
  return thread_.Schedule([this, task = std::move(task)]() mutable {
    AwaitMemory([&] {
      if (!closed_) task();
    });
  });
}

void Lookups::Close() {
  closed_ = true;
  thread_.Join();
}

}  // namespace distgrad
