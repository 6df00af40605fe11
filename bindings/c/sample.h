/* The common part of the samples: an error ends the program, and fork starts a job of two
 * processes. */
#ifndef DISTGRAD_BINDINGS_C_SAMPLE_H_
#define DISTGRAD_BINDINGS_C_SAMPLE_H_

#include <distgrad/distgrad.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* Takes the result of a function; prints an error, and ends this process. */
static inline void must(dg_error* error) {
  if (error == NULL) return;
  const dg_str message = dg_error_message(error);
  fprintf(stderr, "error %d: %.*s\n", (int)dg_error_code(error), (int)message.size, message.data);
  exit(1);
}

/* One of the two processes of the job. */
typedef struct job {
  int rank;        /* 0: the process that was started, 1: its child */
  pid_t child;     /* of rank 0 */
  char folder[64]; /* of the rendezvous file */
  dg_worker* worker;
} job;

/* Forks the process, before any use of the library, and creates the worker of each: "front" and
 * "back". On several machines a launcher starts the processes instead, and they find each other by
 * "env://" or "tcp://host:port". */
static inline job start(void) {
  job self = {0};
  strcpy(self.folder, "/tmp/distgrad.XXXXXX");
  if (mkdtemp(self.folder) == NULL) {
    perror("a temporary folder");
    exit(1);
  }
  self.child = fork();
  if (self.child < 0) {
    perror("fork");
    exit(1);
  }
  self.rank = self.child == 0;

  char rendezvous[128];
  const int size = snprintf(rendezvous, sizeof(rendezvous), "file://%s/workers", self.folder);
  dg_worker_options options = DG_WORKER_OPTIONS_INIT;
  options.name = self.rank == 0 ? DG_STR("front") : DG_STR("back");
  options.rank = (uint32_t)self.rank;
  options.world_size = 2;
  options.rendezvous.data = rendezvous;
  options.rendezvous.size = (size_t)size;
  must(dg_worker_create(&options, &self.worker));
  return self;
}

/* Ends the job in good order, and returns the exit status. The back process only answers the front
 * process, until the job ends. */
static inline int finish(job* self) {
  if (self->rank == 1) {
    must(dg_worker_serve(self->worker, 0));
  } else {
    must(dg_worker_shutdown(self->worker, DG_FOREVER, 0));
  }
  dg_worker_destroy(self->worker);
  if (self->rank == 1) return 0;
  int status = 1;
  waitpid(self->child, &status, 0);
  char path[96];
  snprintf(path, sizeof(path), "%s/workers", self->folder);
  unlink(path);
  rmdir(self->folder);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

#endif /* DISTGRAD_BINDINGS_C_SAMPLE_H_ */
