// Callbacks for members, and whether what they hear is in order and true.
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "tests/simulation/job_run.h"
#include "tests/simulation/scheduler.h"

namespace distgrad::simulation {
namespace {

// Longer than a callback waits for its turn: what it hears later has been told later.
constexpr absl::Duration kTurn = absl::Milliseconds(200);

std::string Text(const MemberEvent& event) {
  static const char* const kKinds[] = {"?", "joined", "left", "lost"};
  return absl::StrCat(event.name, " (", event.rank, ") ", kKinds[static_cast<int>(event.kind)],
                      " as incarnation ", StartOf(event.incarnation),
                      event.reason.empty() ? "" : absl::StrCat(": ", event.reason));
}

}  // namespace

void Job::RunWatch(Process* process) {
  const auto heard = std::make_shared<Heard>();
  process->heard = heard;
  process->worker->OnMember([this, heard, who = process->worker->name()](const MemberEvent& event) {
    Hear(who, heard.get(), event);
  });
}

void Job::NoteDeath(const Process& process, Deadline when) {
  absl::MutexLock lock(&mu_);
  died_.emplace(std::pair(process.worker->rank(), process.incarnation), when.at());
}

// The events of a member are in turns "joined", and "left" or "lost". It joins again as a later
// incarnation; or, when it was only taken for lost, as the same one, and so not when it was dead.
void Job::Hear(const std::string& who, Heard* heard, const MemberEvent& event) {
  using Kind = MemberEvent::Kind;
  Note(Text(event).c_str(), event.rank);
  if ((event.kind == Kind::kLost) == event.reason.empty()) {
    Wrong(absl::StrCat("a reason, or none, of ", Text(event)));
  }
  bool is_legal = true;
  std::string before;
  {
    absl::MutexLock lock(&mu_);
    const auto now = Deadline::Clock::now();
    const auto [found, is_first] = heard->try_emplace(event.rank, event, now);
    if (is_first) return;
    const auto [last, at] = std::exchange(found->second, std::pair(event, now));
    before = Text(last);
    const bool is_same = event.incarnation == last.incarnation;
    if (event.kind != Kind::kJoined) {
      is_legal = last.kind == Kind::kJoined && is_same;
    } else if (is_same) {
      const auto died = died_.find({event.rank, event.incarnation});
      const bool was_dead =
          died != died_.end() && died->second < at && absl::FromChrono(at - died->second) > kTurn;
      is_legal = last.kind == Kind::kLost && !was_dead;
    } else {
      is_legal = last.kind != Kind::kJoined && event.incarnation > last.incarnation;
    }
  }
  if (is_legal) return;
  Wrong(absl::StrCat("the callback for members of ", who, " hears ", Text(event),
                     "; and before that ", before));
}

void Job::CheckHeard() {
  for (int i = 0; i < plan_.workers; ++i) {
    const std::shared_ptr<Process> process = ProcessAt(i);
    if (process == nullptr || process->heard == nullptr) continue;
    std::string wrong;
    {
      absl::MutexLock lock(&mu_);
      for (const auto& [rank, heard] : *process->heard) {
        const MemberEvent& event = heard.first;
        if (event.kind != MemberEvent::Kind::kJoined) continue;
        if (died_.count({rank, event.incarnation}) > 0) wrong = Text(event);
      }
    }
    if (wrong.empty()) continue;
    Wrong(absl::StrCat("the callback for members of ", process->worker->name(),
                       " has heard last of one that is dead: ", wrong));
  }
}

}  // namespace distgrad::simulation
