// Runs a function in a process of its own for each order, so that what one leaves behind, or
// breaks, is none of the next one's; and so that each starts from the same memory, wherever that
// matters.
//
//   Runner runner([](absl::string_view order) { ... return course; });   // in main(), at once
//   Outcome outcome = runner.Run("seed 7");
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

  // Has the system put the program at the same addresses each time, if it lets us, and OpenMP have
  // no threads of its own: call this first in main(), which it may begin anew.
  static void FixAddresses(char** argv);

  // Forks off the process that later forks one for each order; so no thread must run yet. `warm_up`
  // is run there once.
  Runner(Function function, void (*warm_up)());
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;
  ~Runner();

  // Runs an order, and ends it when it has used so many seconds of a processor, or waited for far
  // longer.
  Outcome Run(absl::string_view order, int patience = 60);

 private:
  struct Shared;
  [[noreturn]] void Serve(Function function, void (*warm_up)());

  Shared* shared_ = nullptr;  // memory that all these processes share
  int orders_[2], answers_[2], stderr_ = -1;
  pid_t server_ = -1;
};

}  // namespace distgrad::simulation

#endif  // DISTGRAD_TESTS_SIMULATION_RUNNER_H_
