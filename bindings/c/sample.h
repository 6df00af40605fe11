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

/* Runs an operator whose result is one tensor. */
static inline dg_tensor* compute_op(dg_str op, const dg_value* arguments, size_t count) {
  dg_tensor* result = NULL;
  must(dg_op_tensors(op, arguments, count, &result, 1));
  return result;
}

/* Where the processes of a job find each other: a file without a name, which those that are forked
 * from here on have too, and of which nothing is left, however they end. */
static inline FILE* create_rendezvous(void) {
  FILE* file = tmpfile();
  if (file != NULL) return file;
  perror("a temporary file");
  exit(1);
}

/* Creates the worker of one of two processes, "front" (rank 0) or "back", which find each other by
 * the file; or, without one, as the launcher says. If TRACE is set, a trace of all that the worker
 * does begins. */
static inline dg_worker* create_worker(int rank, FILE* file) {
  char rendezvous[64];
  dg_worker_options options = DG_WORKER_OPTIONS_INIT;
  options.name = rank == 0 ? DG_STR("front") : DG_STR("back");
  if (file != NULL) {
    const int size =
        snprintf(rendezvous, sizeof(rendezvous), "file:///proc/self/fd/%d", fileno(file));
    options.rank = (uint32_t)rank;
    options.world_size = 2;
    options.rendezvous.data = rendezvous;
    options.rendezvous.size = (size_t)size;
  }
  dg_worker* worker = NULL;
  must(dg_worker_create(&options, &worker));
  if (getenv("TRACE") != NULL) must(dg_worker_start_trace(worker, NULL));
  return worker;
}

/* [doc: trace] */
/* Ends the worker's trace, and writes it to FOLDER/trace.RANK.json. */
static inline void write_trace(dg_worker* worker, const char* folder) {
  char path[4096];
  dg_message* trace = NULL;
  must(dg_worker_stop_trace(worker, &trace));
  const dg_str text = dg_message_payload(trace);
  snprintf(path, sizeof(path), "%s/trace.%u.json", folder, (unsigned)dg_worker_rank(worker));
  FILE* file = fopen(path, "w");
  if (file == NULL || fwrite(text.data, 1, text.size, file) != text.size || fclose(file) != 0) {
    perror(path);
    exit(1);
  }
  dg_message_destroy(trace);
}
/* [doc: end] */

/* One of the two processes of the job. */
typedef struct job {
  int rank;    /* 0: the process that was started, 1: its child */
  pid_t child; /* of rank 0; 0 where a launcher has started both */
  dg_worker* worker;
} job;

/* Forks the process, before any use of the library, and creates the worker of each. Where RANK is
 * set, a launcher has started this process instead, perhaps on one of two machines. */
static inline job start(void) {
  job self = {0};
  const char* rank = getenv("RANK");
  if (rank != NULL) {
    self.rank = atoi(rank);
    self.worker = create_worker(self.rank, NULL);
    return self;
  }
  FILE* rendezvous = create_rendezvous();
  self.child = fork();
  if (self.child < 0) {
    perror("fork");
    exit(1);
  }
  self.rank = self.child == 0;
  self.worker = create_worker(self.rank, rendezvous);
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
  if (getenv("TRACE") != NULL) write_trace(self->worker, getenv("TRACE"));
  dg_worker_destroy(self->worker);
  if (self->child == 0) return 0;
  int status = 1;
  waitpid(self->child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

#endif /* DISTGRAD_BINDINGS_C_SAMPLE_H_ */
