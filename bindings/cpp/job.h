// The common part of the samples: starts a job of several processes on this machine.
#ifndef DISTGRAD_BINDINGS_CPP_JOB_H_
#define DISTGRAD_BINDINGS_CPP_JOB_H_

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <distgrad/distgrad.hpp>
#include <exception>
#include <fstream>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>

// [doc: trace]
// Ends the worker's trace, and writes it to FOLDER/trace.RANK.json.
inline void WriteTrace(dg::Worker& worker, const std::string& folder) {
  std::ofstream file(folder + "/trace." + std::to_string(worker.rank()) + ".json");
  file << worker.StopTrace();
  if (!file.flush()) throw std::runtime_error("cannot write to the folder " + folder);
}
// [doc: end]

// Runs `body` with a worker, and ends the job in good order. Returns the exit status of the
// process. If TRACE is set, it is the folder for a trace of all that the worker does.
inline int RunWorker(const dg_worker_options& options,
                     const std::function<void(dg::Worker&)>& body) {
  const char* const trace = getenv("TRACE");
  try {
    dg::Worker worker(options);
    if (trace != nullptr) worker.StartTrace();
    body(worker);
    worker.Shutdown();  // waits for the others
    if (trace != nullptr) WriteTrace(worker, trace);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

// Runs `body` in `processes` processes, each with a worker of its own ("worker0", "worker1", ...).
// Of the processes that are killed, the first `restarts` are started again. Returns what main()
// does: 0 if all of them have succeeded.
//
// The processes are forked by one that never uses the library. Where RANK is set, a launcher has
// started this process instead, perhaps on one of several machines: it is one worker of that job.
inline int RunJob(int processes, const std::function<void(dg::Worker&)>& body, int restarts = 0) {
  dg_worker_options options = DG_WORKER_OPTIONS_INIT;
  if (getenv("RANK") != nullptr) return RunWorker(options, body);

  // Where they find each other: a file without a name, of which nothing is left, however they end.
  std::FILE* const file = std::tmpfile();
  if (file == nullptr) {
    std::perror("a temporary file");
    return 1;
  }
  const std::string rendezvous = "file:///proc/self/fd/" + std::to_string(fileno(file));
  options.world_size = static_cast<uint32_t>(processes);
  options.rendezvous = dg::Str(rendezvous);
  int status = 0;
  std::map<pid_t, int> rank_of;
  const auto start = [&](int rank) {
    options.rank = static_cast<uint32_t>(rank);
    const pid_t child = fork();
    if (child == 0) exit(RunWorker(options, body));
    if (child > 0) {
      rank_of[child] = rank;
    } else {
      std::perror("fork");
      status = 1;
    }
  };
  for (int rank = 0; rank < processes; ++rank) start(rank);
  while (!rank_of.empty()) {
    int of_child = 0;
    const pid_t child = wait(&of_child);
    if (child < 0) {
      std::perror("wait");
      return 1;
    }
    const int rank = rank_of[child];
    rank_of.erase(child);
    if (WIFSIGNALED(of_child) && restarts > 0) {
      --restarts;
      start(rank);
    } else if (!WIFEXITED(of_child) || WEXITSTATUS(of_child) != 0) {
      status = 1;
    }
  }
  return status;
}

#endif  // DISTGRAD_BINDINGS_CPP_JOB_H_
