// Runs the thread that asks the store, and answers all who wait with one question.
#include "core/membership/lookups.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace distgrad {
namespace {

// The longest that a new question waits for those before it when the store is silent.
constexpr absl::Duration kRound = absl::Seconds(1);

absl::Status Closed() { return absl::CancelledError("this worker is shutting down"); }

}  // namespace

void Lookups::Find(WorkerRank worker, absl::Duration patience, Found found) {
  Ask({worker, Deadline::After(patience), std::move(found)});
}

void Lookups::Find(std::string name, Deadline deadline, Found found) {
  Ask({std::move(name), deadline, std::move(found)});
}

void Lookups::Ask(Question question) {
  if (const absl::Status started = thread_.Start(); !started.ok()) return question.found(started);
  absl::ReleasableMutexLock lock(&mu_);
  if (waiting_.size() + asked_ >= kMaxWaiting) {
    lock.Release();
    return question.found(absl::ResourceExhaustedError(
        absl::StrCat("more than ", kMaxWaiting, " questions wait for the store")));
  }
  waiting_.push_back(std::move(question));
  lock.Release();
  // One task for each question, of which the first may answer many.
  if (!thread_.Schedule([this] { AskAll(); })) AskAll();
}

void Lookups::AskAll() {
  std::vector<Question> questions;
  {
    absl::MutexLock lock(&mu_);
    questions.swap(waiting_);
    asked_ += static_cast<int>(questions.size());
  }
  if (questions.empty()) return;
  std::vector<Membership::Who> workers;
  for (const Question& question : questions) workers.push_back(question.who);
  std::vector<absl::StatusOr<WorkerInfo>> found;
  if (closed_) {
    found.assign(questions.size(), Closed());
  } else {
    found = members_->FindEach(workers, Deadline::After(kRound));
  }
  std::vector<Question> again;
  for (size_t i = 0; i < questions.size(); ++i) {
    const bool silent = absl::IsDeadlineExceeded(found[i].status());
    if (!silent || questions[i].deadline.Passed()) {
      questions[i].found(std::move(found[i]));
    } else if (closed_) {
      questions[i].found(Closed());
    } else {
      again.push_back(std::move(questions[i]));
    }
  }
  {
    absl::MutexLock lock(&mu_);
    asked_ -= static_cast<int>(questions.size());
    std::move(again.begin(), again.end(), std::back_inserter(waiting_));
  }
  if (again.empty()) return;
  if (!thread_.Schedule([this] { AskAll(); })) AskAll();
}

bool Lookups::Run(absl::AnyInvocable<void()> task) {
  if (!thread_.Start().ok()) return false;
  return thread_.Schedule([this, task = std::move(task)]() mutable {
    if (!closed_) task();
  });
}

void Lookups::Close() {
  closed_ = true;
  thread_.Join();
}

}  // namespace distgrad
