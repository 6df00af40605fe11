// A member of a job, as a user sees it.
#ifndef DISTGRAD_CORE_WORKER_MEMBER_H_
#define DISTGRAD_CORE_WORKER_MEMBER_H_

#include <string>

#include "core/base/ids.h"

namespace distgrad {

// A member of the job as another one knows it.
struct Member {
  WorkerRank rank = 0;
  std::string name;
  Incarnation incarnation = 0;  // greater for each later start of a worker of that name
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_MEMBER_H_
