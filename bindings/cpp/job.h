// The common part of the samples: starts a job of several processes on this machine.
#ifndef DISTGRAD_BINDINGS_CPP_JOB_H_
#define DISTGRAD_BINDINGS_CPP_JOB_H_

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <distgrad/distgrad.hpp>
#include <exception>
#include <functional>
#include <string>

// Runs `body` in `processes` processes, each with a worker of its own ("worker0", "worker1", ...),
// and ends the job in good order. Returns what main() does: 0 if all of them have succeeded.
//
// The processes are forked, before any use of the library. On several machines a launcher starts
// them instead, and DG_WORKER_OPTIONS_INIT alone finds the job that it has made.
inline int RunJob(int processes, const std::function<void(dg::Worker&)>& body) {
  std::string folder = "/tmp/distgrad.XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) {
    std::perror("a temporary folder");
    return 1;
  }
  int rank = processes - 1;  // of the last child that is to be forked
  while (rank > 0) {
    const pid_t child = fork();
    if (child < 0) std::perror("fork");
    if (child <= 0) break;
    --rank;
  }
  int status = 0;
  try {
    const std::string rendezvous = "file://" + folder + "/workers";
    dg_worker_options options = DG_WORKER_OPTIONS_INIT;
    options.rank = static_cast<uint32_t>(rank);
    options.world_size = static_cast<uint32_t>(processes);
    options.rendezvous = dg::Str(rendezvous);
    dg::Worker worker(options);
    body(worker);
    worker.Shutdown();  // waits for the others
  } catch (const std::exception& error) {
    std::fprintf(stderr, "worker %d: %s\n", rank, error.what());
    status = 1;
  }
  if (rank > 0) return status;
  for (int child = 1, of_child = 0; child < processes && wait(&of_child) > 0; ++child) {
    if (!WIFEXITED(of_child) || WEXITSTATUS(of_child) != 0) status = 1;
  }
  unlink((folder + "/workers").c_str());
  rmdir(folder.c_str());
  return status;
}

#endif  // DISTGRAD_BINDINGS_CPP_JOB_H_
