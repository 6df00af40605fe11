/* Calls that wait for room to send, and a worker that ends while threads wait in it. From plain C.
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

/* Takes all the room, until it has left. */
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

static void test_room(void) {
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
  OK(dg_worker_register(second, DG_STR("hold"), hold, NULL, NULL));
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

int main(void) {
  const char* folder = getenv("TEST_TMPDIR");
  snprintf(rendezvous, sizeof(rendezvous), "file://%s/waiting.%d", folder ? folder : "/tmp",
           (int)getpid());
  test_room();
  test_end();
  return 0;
}
