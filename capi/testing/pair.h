/* Two workers in this process, "front" and "back", for tests in plain C. The test defines
 * _POSIX_C_SOURCE before all includes. */
#ifndef DISTGRAD_CAPI_TESTING_PAIR_H_
#define DISTGRAD_CAPI_TESTING_PAIR_H_

#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <unistd.h>

#include "capi/testing/check.h"

static dg_worker* workers[2];
static char rendezvous[512], key_file[512];
/* Of the handler `multiply`, on both workers. */
static dg_tensor* parameter;
/* Of the handler `hold`: it runs; it may end; it has heard of that. */
static sem_t entered, released, left;
/* Of the handler `later`: it runs; it saw that nobody waits; what it has left to the test. */
static sem_t asked, seen;
static const dg_request* later_request;
static dg_responder* later_responder;

/* The part of each of two workers at the same time. */
typedef struct both {
  void (*run)(int rank);
  int rank;
} both;
static inline void* run_one(void* argument) {
  both* part = (both*)argument;
  part->run(part->rank);
  return NULL;
}
static inline void on_both(void (*run)(int rank)) {
  both parts[2];
  pthread_t thread;
  for (int i = 0; i < 2; ++i) {
    parts[i].run = run;
    parts[i].rank = i;
  }
  CHECK(pthread_create(&thread, NULL, run_one, &parts[1]) == 0);
  run_one(&parts[0]);
  CHECK(pthread_join(thread, NULL) == 0);
}

static inline void create(int rank) {
  dg_worker_options options = DG_WORKER_OPTIONS_INIT;
  options.name = rank == 0 ? DG_STR("front") : DG_STR("back");
  options.rank = (uint32_t)rank;
  options.world_size = 2;
  options.rendezvous.data = rendezvous;
  options.rendezvous.size = strlen(rendezvous);
  options.key_file.data = key_file;
  options.key_file.size = strlen(key_file);
  options.thread_count = 2;
  OK(dg_worker_create(&options, &workers[rank]));
}
static inline void barrier(int rank) { OK(dg_worker_barrier(workers[rank], DG_FOREVER, 0)); }
static inline void shut_down(int rank) { OK(dg_worker_shutdown(workers[rank], DG_FOREVER, 0)); }

/* Before anything else. */
static inline void prepare(void) {
  const char* folder = getenv("TEST_TMPDIR");
  const float three = 3;
  int file;
  snprintf(rendezvous, sizeof(rendezvous), "file://%s/rendezvous.%d", folder ? folder : "/tmp",
           (int)getpid());
  snprintf(key_file, sizeof(key_file), "%s/key.%d", folder ? folder : "/tmp", (int)getpid());
  file = open(key_file, O_WRONLY | O_CREAT | O_EXCL, 0600);
  CHECK(file >= 0 && write(file, "0123456789abcdef0123456789abcdef", 32) == 32);
  close(file);
  parameter = floats(&three, 1, 1);
  OK(dg_tensor_require_grad(parameter));
  CHECK(sem_init(&entered, 0, 0) == 0 && sem_init(&released, 0, 0) == 0);
  CHECK(sem_init(&left, 0, 0) == 0);
  CHECK(sem_init(&asked, 0, 0) == 0 && sem_init(&seen, 0, 0) == 0);
}

/* Behind everything else. */
static inline void clean_up(void) {
  dg_tensor_destroy(parameter);
  unlink(key_file);
  unlink(rendezvous + strlen("file://"));
}

static inline dg_message* message_of(const dg_tensor* tensor) {
  dg_message* message = NULL;
  OK(dg_message_create(NULL, 0, &tensor, tensor != NULL, &message));
  return message;
}

/* ---------------------------------------------------------------------------------- Handlers */

static inline void add(int rank, const char* name, dg_handler handler, void* user_data) {
  dg_str text;
  text.data = name;
  text.size = strlen(name);
  OK(dg_worker_register(workers[rank], text, handler, user_data, NULL));
}

static inline dg_error* multiply(void* user_data, const dg_request* request, dg_message** reply) {
  dg_tensor *x = NULL, *y;
  const dg_tensor* result;
  (void)user_data;
  CHECK(request->struct_size >= sizeof(dg_request));
  CHECK(request->timeout_ms > 0 && request->timeout_ms <= 60000);
  OK(dg_message_tensor(request->message, 0, &x));
  y = op2("aten::mul.Tensor", x, parameter);
  result = y;
  OK(dg_message_create("done", 4, &result, 1, reply));
  dg_tensor_destroy(x);
  dg_tensor_destroy(y);
  return NULL;
}

/* Calls back to who called, within its context; and tries to wait for the end of its own worker. */
static inline dg_error* relay(void* user_data, const dg_request* request, dg_message** reply) {
  dg_worker* self = (dg_worker*)user_data;
  dg_call_options options = DG_CALL_OPTIONS_INIT;
  FAILS(DG_FAILED_PRECONDITION, dg_worker_close(self, DG_FOREVER));
  FAILS(DG_FAILED_PRECONDITION, dg_worker_leave(self, DG_FOREVER));
  CHECK(dg_worker_world_size(self) == 2);
  options.context = request->context;
  options.timeout_ms = request->timeout_ms;
  return dg_worker_call(self, dg_worker_name(self, (uint32_t)request->from), DG_STR("multiply"),
                        request->message, &options, reply);
}

static inline dg_error* fail(void* user_data, const dg_request* request, dg_message** reply) {
  (void)user_data;
  OK(dg_message_create(NULL, 0, NULL, 0, reply)); /* not to be leaked */
  CHECK(str_is(request->function, "fail"));
  return dg_error_create(DG_DATA_LOSS, DG_STR("the dog ate it"));
}

static inline dg_error* nothing(void* user_data, const dg_request* request, dg_message** reply) {
  (void)user_data;
  (void)request;
  (void)reply;
  return NULL;
}

static inline void post(void* user_data) { CHECK(sem_post((sem_t*)user_data) == 0); }
static inline void wait_at_gate(void* user_data) {
  while (sem_wait((sem_t*)user_data) != 0) continue;
}

/* Says that it was entered, and waits to be released. */
static inline dg_error* hold(void* user_data, const dg_request* request, dg_message** reply) {
  (void)user_data, (void)request, (void)reply;
  CHECK(sem_post(&entered) == 0);
  while (sem_wait(&released) != 0) continue;
  CHECK(sem_post(&left) == 0);
  return NULL;
}

/* Leaves its answer to the test. */
static inline void later(void* user_data, const dg_request* request, dg_responder* responder) {
  (void)user_data;
  FAILS(DG_FAILED_PRECONDITION, dg_worker_close(workers[1], DG_FOREVER));
  OK(dg_cancellation_on_cancel(request->cancellation, post, &seen, NULL, NULL));
  later_request = request;
  later_responder = responder;
  CHECK(sem_post(&asked) == 0);
}

/* A call that is in flight: `function` of the back worker has begun. */
static inline dg_future* begin(dg_worker* from, dg_str function,
                               const dg_cancellation* cancellation) {
  dg_call_options options = DG_CALL_OPTIONS_INIT;
  dg_message* request = NULL;
  dg_future* future = NULL;
  options.cancellation = cancellation;
  OK(dg_message_create("ask", 3, NULL, 0, &request));
  OK(dg_worker_call_async(from, DG_STR("back"), function, request, &options, &future));
  wait_at_gate(&asked);
  dg_message_destroy(request);
  return future;
}

/* How it ended, and what it gave. */
static inline dg_code end(dg_future* future, dg_message** reply) {
  bool done = false;
  dg_code code;
  OK(dg_future_wait(future, DG_FOREVER, &done));
  CHECK(done);
  code = code_of(dg_future_result(future, reply));
  dg_future_destroy(future);
  return code;
}

#endif /* DISTGRAD_CAPI_TESTING_PAIR_H_ */
