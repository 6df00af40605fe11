/* Calls that wait for credit to send, and a worker that ends while threads wait in it. From plain
 * C.
 */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <semaphore.h>
#include <unistd.h>

#include "capi/testing/check.h"

static char rendezvous[512];
static dg_worker *first, *second;

static void start(uint64_t bytes_per_peer) {
  dg_limits limits = DG_LIMITS_INIT;
  dg_worker_options options = DG_WORKER_OPTIONS_INIT;
  limits.bytes_per_peer = bytes_per_peer;
  options.limits = &limits;
  options.name = DG_STR("first");
  options.world_size = 1;
  options.rendezvous.data = rendezvous;
  options.rendezvous.size = strlen(rendezvous);
  OK(dg_worker_create(&options, &first));
  options.limits = NULL;
  options.name = DG_STR("second");
  options.flags = DG_WORKER_JOIN;
  OK(dg_worker_create(&options, &second));
  OK(dg_worker_update_members(first));
}

static dg_error* nothing(void* user_data, const dg_request* request, dg_message** reply) {
  (void)user_data, (void)request, (void)reply;
  return NULL;
}

/* ------------------------------------------------------------------------------------- Room */

/* Takes all the credit, until it has left. */
static dg_future* fill(const dg_message* large) {
  dg_future* future = NULL;
  OK(dg_worker_call_async(first, DG_STR("second"), DG_STR("nothing"), large, NULL, &future));
  return future;
}

static void await(dg_future* future) {
  dg_message* reply = NULL;
  bool done = false;
  OK(dg_future_wait(future, DG_FOREVER, &done));
  OK(dg_future_result(future, &reply));
  dg_message_destroy(reply);
  dg_future_destroy(future);
}

static void test_credit(void) {
  enum { COLUMNS = 8 << 20 };
  float* data = (float*)calloc(COLUMNS, sizeof(float));
  dg_tensor* x = floats(data, 1, COLUMNS);
  const dg_tensor* tensors[1];
  const dg_value argument = dg_value_tensor(x);
  dg_message *large = NULL, *reply = NULL;
  dg_values* values = NULL;
  dg_future* filled;
  tensors[0] = x;
  start(1 << 20);
  OK(dg_worker_register(second, DG_STR("nothing"), nothing, NULL, NULL));
  OK(dg_message_create(NULL, 0, tensors, 1, &large));
  filled = fill(large);
  OK(dg_worker_call(first, DG_STR("second"), DG_STR("nothing"), large, NULL, &reply));
  dg_message_destroy(reply);
  await(filled);
  filled = fill(large);
  OK(dg_worker_call_op(first, DG_STR("second"), DG_STR("aten::sum"), &argument, 1, NULL, &values));
  dg_values_destroy(values);
  await(filled);
  dg_message_destroy(large);
  dg_tensor_destroy(x);
  free(data);
  dg_worker_destroy(first);
  dg_worker_destroy(second);
  unlink(rendezvous + strlen("file://"));
}

/* ---------------------------------------------------------------------------------- The end */

static sem_t begun, entered, released;

static dg_error* hold(void* user_data, const dg_request* request, dg_message** reply) {
  (void)user_data, (void)request, (void)reply;
  CHECK(sem_post(&entered) == 0);
  while (sem_wait(&released) != 0) continue;
  return NULL;
}
/* The same for callers without a deadline. */
static dg_error* hold_for_ever(void* user_data, const dg_request* request, dg_message** reply) {
  CHECK(request->timeout_ms == DG_FOREVER);
  return hold(user_data, request, reply);
}

static void await_semaphore(sem_t* semaphore, int count) {
  for (int i = 0; i < count; ++i) {
    while (sem_wait(semaphore) != 0) continue;
  }
}

/* Each waits for ever, and gives the code with which it was ended. */
static void* call_for_ever(void* empty) {
  dg_call_options options = DG_CALL_OPTIONS_INIT;
  dg_message* reply = NULL;
  options.timeout_ms = DG_FOREVER;
  return (void*)(intptr_t)code_of(dg_worker_call(first, DG_STR("second"), DG_STR("hold"),
                                                 (const dg_message*)empty, &options, &reply));
}
static void* call_each_for_ever(void* empty) {
  const dg_str to = DG_STR("second");
  dg_call_options options = DG_CALL_OPTIONS_INIT;
  dg_message* reply = NULL;
  dg_error* error = NULL;
  options.timeout_ms = DG_FOREVER;
  OK(dg_worker_call_each(first, &to, 1, DG_STR("hold"), (const dg_message*)empty, &options, &reply,
                         &error));
  return (void*)(intptr_t)code_of(error);
}
static void* barrier_for_ever(void* unused) {
  (void)unused;
  CHECK(sem_post(&begun) == 0);
  return (void*)(intptr_t)code_of(dg_worker_barrier(first, DG_FOREVER, 0));
}
static void* shut_down_for_ever(void* unused) {
  (void)unused;
  CHECK(sem_post(&begun) == 0);
  return (void*)(intptr_t)code_of(dg_worker_shutdown(first, DG_FOREVER, 0));
}

static void test_end(void) {
  void* (*const waits[4])(void*) = {call_for_ever, call_each_for_ever, barrier_for_ever,
                                    shut_down_for_ever};
  pthread_t threads[4];
  dg_message* empty = NULL;
  CHECK(sem_init(&begun, 0, 0) == 0 && sem_init(&entered, 0, 0) == 0);
  CHECK(sem_init(&released, 0, 0) == 0);
  OK(dg_message_create(NULL, 0, NULL, 0, &empty));
  start(0);
  OK(dg_worker_register(second, DG_STR("hold"), hold_for_ever, NULL, NULL));
  for (int i = 0; i < 4; ++i) CHECK(pthread_create(&threads[i], NULL, waits[i], empty) == 0);
  await_semaphore(&begun, 2);
  await_semaphore(&entered, 2);
  dg_worker_destroy(first);
  for (int i = 0; i < 4; ++i) {
    void* result = NULL;
    dg_code code;
    CHECK(pthread_join(threads[i], &result) == 0);
    code = (dg_code)(intptr_t)result;
    /* The last two may come too late. */
    CHECK(code == DG_CANCELLED ||
          (i > 1 && (code == DG_INVALID_ARGUMENT || code == DG_FAILED_PRECONDITION)));
  }
  for (int i = 0; i < 2; ++i) CHECK(sem_post(&released) == 0);
  dg_worker_destroy(second);
  dg_message_destroy(empty);
  unlink(rendezvous + strlen("file://"));
}

/* ------------------------------------------------------------------------- The end with a bound */

static sem_t ended; /* what a handler had is ended: the worker is */

static void post(void* semaphore) { CHECK(sem_post((sem_t*)semaphore) == 0); }

/* `first` alone, in a call of its own `handler`, which has begun. */
static dg_future* start_call(dg_handler handler) {
  dg_worker_options options = DG_WORKER_OPTIONS_INIT;
  dg_message* empty = NULL;
  dg_future* future = NULL;
  CHECK(sem_init(&entered, 0, 0) == 0 && sem_init(&released, 0, 0) == 0);
  CHECK(sem_init(&ended, 0, 0) == 0);
  options.name = DG_STR("first");
  options.world_size = 1;
  options.rendezvous.data = rendezvous;
  options.rendezvous.size = strlen(rendezvous);
  OK(dg_worker_create(&options, &first));
  OK(dg_worker_register(first, DG_STR("handler"), handler, &ended, post));
  OK(dg_message_create(NULL, 0, NULL, 0, &empty));
  OK(dg_worker_call_async(first, DG_STR("first"), DG_STR("handler"), empty, NULL, &future));
  dg_message_destroy(empty);
  await_semaphore(&entered, 1);
  return future;
}

/* The end has failed the call. */
static void end_call(dg_future* future) {
  dg_message* reply = NULL;
  bool done = false;
  OK(dg_future_wait(future, DG_FOREVER, &done));
  FAILS(DG_CANCELLED, dg_future_result(future, &reply));
  dg_future_destroy(future);
  unlink(rendezvous + strlen("file://"));
}

static void test_close(void) {
  dg_future* future = start_call(hold);
  FAILS(DG_INVALID_ARGUMENT, dg_worker_close(NULL, 0));
  SAYS(DG_DEADLINE_EXCEEDED, "'first' is closed, and ", dg_worker_close(first, 0));
  FAILS(DG_DEADLINE_EXCEEDED, dg_worker_close(first, 10));
  FAILS(DG_FAILED_PRECONDITION, dg_worker_barrier(first, DG_FOREVER, 0));
  CHECK(sem_trywait(&ended) != 0);
  post(&released);
  OK(dg_worker_close(first, DG_FOREVER));
  CHECK(sem_trywait(&ended) == 0);
  OK(dg_worker_close(first, 0));
  FAILS(DG_FAILED_PRECONDITION, dg_worker_barrier(first, DG_FOREVER, 0));
  dg_worker_destroy(first);
  FAILS(DG_INVALID_ARGUMENT, dg_worker_close(first, 0));
  end_call(future);
}

static dg_error* reply_at_once(void* user_data, const dg_request* request, dg_message** reply) {
  (void)user_data, (void)request, (void)reply;
  post(&entered);
  return NULL;
}

static void end_late(void* semaphore) {
  post(&begun);
  while (sem_wait(&released) != 0) continue;
  post(semaphore);
}

static void* close_first(void* unused) {
  OK(dg_worker_close(first, DG_FOREVER));
  return unused;
}

/* No close returns as if all were over while another one ends the handlers' user data. */
static void test_close_while_user_data_ends(void) {
  dg_future* future = start_call(reply_at_once);
  pthread_t closer;
  CHECK(sem_init(&begun, 0, 0) == 0);
  OK(dg_worker_register(first, DG_STR("late"), reply_at_once, &ended, end_late));
  CHECK(pthread_create(&closer, NULL, close_first, NULL) == 0);
  await_semaphore(&begun, 1);
  SAYS(DG_DEADLINE_EXCEEDED, "another thread is closing worker 'first'", dg_worker_close(first, 0));
  post(&released);
  OK(dg_worker_close(first, DG_FOREVER));
  CHECK(sem_trywait(&ended) == 0 && sem_trywait(&ended) == 0); /* of both handlers */
  CHECK(pthread_join(closer, NULL) == 0);
  dg_worker_destroy(first);
  dg_future_destroy(future);
  unlink(rendezvous + strlen("file://"));
}

typedef struct lines {
  int count, ended;
  uint32_t severity;
  char text[512];
} lines;
static void take_line(void* user_data, uint32_t severity, dg_str text) {
  lines* to = (lines*)user_data;
  const size_t size = text.size < sizeof(to->text) ? text.size : sizeof(to->text) - 1;
  ++to->count;
  to->severity = severity;
  memcpy(to->text, text.data, size);
  to->text[size] = '\0';
}
static void end_lines(void* user_data) { ++((lines*)user_data)->ended; }

/* Who has waited in vain already need not wait for a minute more; and the log says so. */
static void test_destroy_after_a_close_in_vain(void) {
  dg_future* future = start_call(hold);
  lines log = {0};
  FAILS(DG_DEADLINE_EXCEEDED, dg_worker_close(first, 0));
  OK(dg_log_set_sink(take_line, &log, end_lines));
  dg_worker_destroy(first);
  OK(dg_log_set_sink(NULL, NULL, NULL));
  CHECK(log.count == 1 && log.severity == DG_LOG_ERROR && log.ended == 1);
  CHECK(strstr(log.text, "worker 'first' is closed, and ") == log.text);
  CHECK(sem_trywait(&ended) != 0);
  post(&released);
  await_semaphore(&ended, 1);
  end_call(future);
}

static dg_error* destroy_own(void* user_data, const dg_request* request, dg_message** reply) {
  (void)user_data, (void)request, (void)reply;
  post(&entered);
  while (sem_wait(&released) != 0) continue;
  FAILS(DG_FAILED_PRECONDITION, dg_worker_close(first, DG_FOREVER));
  dg_worker_destroy(first);
  /* Until the handler has returned, its worker is still there, without new work. */
  CHECK(str_is(dg_worker_name(first, 0), "first"));
  dg_worker_destroy(first);
  post(&begun);
  while (sem_wait(&released) != 0) continue;
  return NULL;
}

static void test_destroy_in_a_handler(void) {
  dg_future* future = start_call(destroy_own);
  CHECK(sem_init(&begun, 0, 0) == 0);
  post(&released);
  await_semaphore(&begun, 1);
  end_call(future);
  CHECK(sem_trywait(&ended) != 0);
  post(&released);
  await_semaphore(&ended, 1);
}

static void destroy_first(void* unused) {
  (void)unused;
  FAILS(DG_FAILED_PRECONDITION, dg_worker_close(first, 0));
  dg_worker_destroy(first);
}

static void test_destroy_in_a_callback(void) {
  dg_future* future = start_call(hold);
  OK(dg_future_then(future, destroy_first, NULL, NULL));
  OK(dg_future_cancel(future));
  post(&released);
  await_semaphore(&ended, 1);
  end_call(future);
}

int main(void) {
  const char* folder = getenv("TEST_TMPDIR");
  snprintf(rendezvous, sizeof(rendezvous), "file://%s/waiting.%d", folder ? folder : "/tmp",
           (int)getpid());
  test_credit();
  test_end();
  test_close();
  test_close_while_user_data_ends();
  test_destroy_after_a_close_in_vain();
  test_destroy_in_a_handler();
  test_destroy_in_a_callback();
  return 0;
}
