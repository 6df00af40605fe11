// Forks a process that forks processes.
#include "tests/simulation/runner.h"

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

void Runner::FixAddresses(char** argv) {
  const int persona = personality(0xffffffff);
  if (persona == -1 || (persona & ADDR_NO_RANDOMIZE) != 0) return;
  if (personality(persona | ADDR_NO_RANDOMIZE) == -1) return;
  // libgomp reads it as the program begins; threads of its own would wait where no simulator sees.
  setenv("OMP_NUM_THREADS", "1", /*overwrite=*/1);
  execv("/proc/self/exe", argv);  // where it cannot, seeds are the same within this process alone
}

Runner::Runner(Function function, void (*warm_up)()) {
  shared_ = static_cast<Shared*>(
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  DG_CHECK(shared_ != MAP_FAILED);
  DG_CHECK(pipe(orders_) == 0 && pipe(answers_) == 0);
  stderr_ = memfd_create("stderr", 0);
  DG_CHECK(stderr_ >= 0);
  server_ = fork();
  DG_CHECK(server_ >= 0);
  if (server_ == 0) Serve(function, warm_up);
  close(orders_[0]);
  close(answers_[1]);
}

Runner::~Runner() {
  close(orders_[1]);
  waitpid(server_, nullptr, 0);
}

void Runner::Serve(Function function, void (*warm_up)()) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  close(orders_[1]);
  close(answers_[0]);
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
  while (read(orders_[0], &byte, 1) == 1) {
    shared_->wrong[0] = '\0';
    shared_->course = {};
    const pid_t child = fork();
    DG_CHECK(child >= 0);
    if (child == 0) {
      dup2(stderr_, 2);
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      // Of a processor's time, for other programs may have it meanwhile; one that waits for the
      // system uses none.
      const itimerval patience = {.it_interval = {}, .it_value = {shared_->patience, 0}};
      setitimer(ITIMER_PROF, &patience, nullptr);
      alarm(20 * shared_->patience);
      const std::string wrong =
          function(absl::string_view(shared_->order, shared_->order_size), &shared_->course);
      strncpy(shared_->wrong, wrong.c_str(), sizeof(shared_->wrong) - 1);
      _exit(wrong.empty() ? 0 : 1);
    }
    DG_CHECK(waitpid(child, &shared_->status, 0) == child);
    if (write(answers_[1], &byte, 1) != 1) break;
  }
  _exit(0);
}

Outcome Runner::Run(absl::string_view order, int patience) {
  DG_CHECK(order.size() < sizeof(shared_->order));
  memcpy(shared_->order, order.data(), order.size());
  shared_->order_size = order.size();
  shared_->patience = patience;
  DG_CHECK(ftruncate(stderr_, 0) == 0 && lseek(stderr_, 0, SEEK_SET) == 0);
  char byte = 'r';
  DG_CHECK(write(orders_[1], &byte, 1) == 1);
  DG_CHECK(read(answers_[0], &byte, 1) == 1) << "the process that runs simulations is gone";
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
