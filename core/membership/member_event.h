// The events of a member's life in a job, as another member hears of them, and what that one does.
#ifndef DISTGRAD_CORE_MEMBERSHIP_MEMBER_EVENT_H_
#define DISTGRAD_CORE_MEMBERSHIP_MEMBER_EVENT_H_

#include <string>

#include "core/base/ids.h"

namespace distgrad {

struct MemberEvent {
  enum class Kind {
    kJoined = 1,  // it is new, or has come back: after kLeft or kLost of that name
    kLeft = 2,    // in good order
    kLost = 3,    // it died, or nothing is heard of it
  };
  Kind kind = Kind::kJoined;
  WorkerRank rank = 0;
  std::string name = {};
  Incarnation incarnation = 0;  // greater for each later start of a worker of that name
  std::string reason = {};      // why it is taken for lost
};

// What a barrier does when a member that it waits for is lost (Membership::MarkLost).
enum class OnLost {
  kFail,         // at once, with kUnavailable and the member's name
  kGoOnWithout,  // as if it had left
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_MEMBERSHIP_MEMBER_EVENT_H_
