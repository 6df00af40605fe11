// Starts a process that forks processes.
#include "tests/simulation/runner.h"

#include <fcntl.h>
#include <malloc.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/check.h"

namespace distgrad::simulation {

struct Runner::Shared {
  char order[1 << 16];
  size_t order_size;
  int patience;
  int status;  // of the process
  char wrong[1 << 12];
  Course course;
};

namespace {

// The descriptors of a process that serves, the same each time.
constexpr int kOrders = 900, kAnswers = 901, kStderr = 902, kShared = 903;
constexpr char kServes[] = "DISTGRAD_SIMULATION_SERVES";

// To a process that is about to begin anew.
void Give(int descriptor, int number) { DG_CHECK(dup2(descriptor, number) == number); }

// What variables and arguments there are decides where memory is, and so in which order some tables
// are gone through: all but those that are needed are left out. libgomp reads its own as the
// program begins; threads of its own would wait where no simulator sees.
[[noreturn]] void BeginAnew() {
  personality(ADDR_NO_RANDOMIZE);  // where it cannot, seeds are the same within this process alone
  std::vector<std::string> variables = {absl::StrCat(kServes, "=1"), "OMP_NUM_THREADS=1"};
  for (const char* const name : {"DISTGRAD_PLANTED", "LD_LIBRARY_PATH"}) {
    const char* const value = getenv(name);
    if (value != nullptr) variables.push_back(absl::StrCat(name, "=", value));
  }
  std::vector<char*> environment;
  for (std::string& variable : variables) environment.push_back(variable.data());
  environment.push_back(nullptr);
  char name[] = "simulation";
  char* arguments[] = {name, nullptr};
  execve("/proc/self/exe", arguments, environment.data());
  _exit(127);
}

}  // namespace

void Runner::Serve(Function function, void (*warm_up)()) {
  if (getenv(kServes) == nullptr) return;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  auto* const shared = static_cast<Shared*>(
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, kShared, 0));
  DG_CHECK(shared != MAP_FAILED);
  mallopt(M_ARENA_MAX, 1);
  // One thread runs at a time. Where it has one processor it is handed on faster, and nobody polls.
  cpu_set_t processors;
  if (sched_getaffinity(0, sizeof(processors), &processors) == 0) {
    for (int i = 0, found = 0; i < CPU_SETSIZE; ++i) {
      if (CPU_ISSET(i, &processors) && found++ > 0) CPU_CLR(i, &processors);
    }
    sched_setaffinity(0, sizeof(processors), &processors);
  }
  warm_up();
  char byte;
  while (read(kOrders, &byte, 1) == 1) {
    shared->wrong[0] = '\0';
    shared->course = {};
    const pid_t child = fork();
    DG_CHECK(child >= 0);
    if (child == 0) {
      dup2(kStderr, 2);
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      // Of a processor's time, for other programs may have it meanwhile; one that waits for the
      // system uses none.
      const itimerval patience = {.it_interval = {}, .it_value = {shared->patience, 0}};
      setitimer(ITIMER_PROF, &patience, nullptr);
      alarm(20 * shared->patience);
      const std::string wrong =
          function(absl::string_view(shared->order, shared->order_size), &shared->course);
      strncpy(shared->wrong, wrong.c_str(), sizeof(shared->wrong) - 1);
      _exit(wrong.empty() ? 0 : 1);
    }
    DG_CHECK(waitpid(child, &shared->status, 0) == child);
    if (write(kAnswers, &byte, 1) != 1) break;
  }
  _exit(0);
}

Runner::Runner() {
  const int shared = memfd_create("shared", MFD_CLOEXEC);
  DG_CHECK(shared >= 0 && ftruncate(shared, sizeof(Shared)) == 0);
  shared_ = static_cast<Shared*>(
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, shared, 0));
  DG_CHECK(shared_ != MAP_FAILED);
  int orders[2], answers[2];
  DG_CHECK(pipe2(orders, O_CLOEXEC) == 0 && pipe2(answers, O_CLOEXEC) == 0);
  stderr_ = memfd_create("stderr", MFD_CLOEXEC);
  DG_CHECK(stderr_ >= 0);
  server_ = fork();
  DG_CHECK(server_ >= 0);
  if (server_ == 0) {
    Give(orders[0], kOrders);
    Give(answers[1], kAnswers);
    Give(stderr_, kStderr);
    Give(shared, kShared);
    BeginAnew();
  }
  close(orders[0]);
  close(answers[1]);
  close(shared);
  orders_ = orders[1];
  answers_ = answers[0];
}

Runner::~Runner() {
  close(orders_);
  close(answers_);
  close(stderr_);
  munmap(shared_, sizeof(Shared));
  waitpid(server_, nullptr, 0);
}

Outcome Runner::Run(absl::string_view order, int patience) {
  DG_CHECK(order.size() < sizeof(shared_->order));
  memcpy(shared_->order, order.data(), order.size());
  shared_->order_size = order.size();
  shared_->patience = patience;
  DG_CHECK(ftruncate(stderr_, 0) == 0 && lseek(stderr_, 0, SEEK_SET) == 0);
  char byte = 'r';
  DG_CHECK(write(orders_, &byte, 1) == 1);
  DG_CHECK(read(answers_, &byte, 1) == 1) << "the process that runs simulations is gone";
  Outcome outcome;
  outcome.course = shared_->course;
  const int status = shared_->status;
  outcome.ok = WIFEXITED(status) && WEXITSTATUS(status) == 0;
  if (WIFSIGNALED(status)) {
    outcome.wrong = absl::StrCat(WTERMSIG(status) == SIGPROF || WTERMSIG(status) == SIGALRM
                                     ? "it took too long: signal "
                                     : "it ended by signal ",
                                 WTERMSIG(status));
  } else if (WEXITSTATUS(status) == kDeadlockExit) {
    outcome.wrong = "threads wait for each other for ever";
  } else if (WEXITSTATUS(status) == kTooLongExit) {
    outcome.wrong = "it takes too long by its own clock";
  } else if (!outcome.ok) {
    outcome.wrong = shared_->wrong;
    if (outcome.wrong.empty()) outcome.wrong = absl::StrCat("it ended with ", WEXITSTATUS(status));
  }
  outcome.printed.resize(static_cast<size_t>(lseek(stderr_, 0, SEEK_END)));
  const ssize_t got = pread(stderr_, outcome.printed.data(), outcome.printed.size(), 0);
  outcome.printed.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
  return outcome;
}

}  // namespace distgrad::simulation
