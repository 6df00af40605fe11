// Runs a function in a process of its own for each order, so that what one leaves behind, or
// breaks, is none of the next one's; and so that each starts from the same memory, wherever that
// matters.
//
//   Runner::Serve([](absl::string_view order, Course* course) { ... }, WarmUp);  // first in main()
//   Outcome outcome = Runner().Run("seed 7");
#ifndef DISTGRAD_TESTS_SIMULATION_RUNNER_H_
#define DISTGRAD_TESTS_SIMULATION_RUNNER_H_

#include <sys/types.h>

#include <string>

#include "absl/strings/string_view.h"
#include "tests/simulation/scheduler.h"

namespace distgrad::simulation {

struct Outcome {
  bool ok = false;
  std::string wrong;    // why not, in a line
  std::string printed;  // to stderr
  Course course;
};

// For one thread at a time: runs orders in processes of their own.
class Runner {
 public:
  // Returns what is wrong, or "".
  using Function = std::string (*)(absl::string_view order, Course* course);

  // Where this process is one that a Runner has started, runs its orders, and never returns: call
  // this first in main(). `warm_up` is run once, before all of them.
  static void Serve(Function function, void (*warm_up)());

  // Starts the process that forks one for each order: this program, with few variables and no
  // arguments, at the same addresses each time, if the system lets us.
  Runner();
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;
  ~Runner();

  // Runs an order, and ends it when it has used so many seconds of a processor, or waited for far
  // longer.
  Outcome Run(absl::string_view order, int patience = 60);

 private:
  struct Shared;

  Shared* shared_ = nullptr;  // memory that all these processes share
  int orders_ = -1, answers_ = -1, stderr_ = -1;
  pid_t server_ = -1;
};

}  // namespace distgrad::simulation

#endif  // DISTGRAD_TESTS_SIMULATION_RUNNER_H_
