/* Two workers in this process, from plain C: calls, futures, contexts, backward, optimizers; and
 * what becomes of wrong use, in callbacks and after the end. */
#define _POSIX_C_SOURCE 200809L
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <semaphore.h>
#include <unistd.h>

#include "capi/testing/check.h"

static dg_worker* workers[2];
static int handlers_ended;

/* The part of each of two workers at the same time. */
typedef struct both {
  void (*run)(int rank);
  int rank;
} both;
static void* run_one(void* argument) {
  both* part = (both*)argument;
  part->run(part->rank);
  return NULL;
}
static void on_both(void (*run)(int rank)) {
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

static char rendezvous[512], key_file[512];

static void create(int rank) {
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

static void test_options(void) {
  struct {
    dg_worker_options known;
    uint64_t unknown;
  } longer;
  dg_worker_options options = DG_WORKER_OPTIONS_INIT;
  dg_worker* worker = NULL;
  FAILS(DG_INVALID_ARGUMENT, dg_worker_create(&options, NULL));
  options.struct_size = 0;
  FAILS(DG_INVALID_ARGUMENT, dg_worker_create(&options, &worker));
  options.struct_size = (size_t)-1;
  FAILS(DG_INVALID_ARGUMENT, dg_worker_create(&options, &worker));
  options.struct_size = sizeof(options);
  options.flags = ~UINT64_C(0);
  FAILS(DG_UNIMPLEMENTED, dg_worker_create(&options, &worker));
  options.flags = 0;
  options.rank = 1;
  FAILS(DG_INVALID_ARGUMENT, dg_worker_create(&options, &worker)); /* without a world_size */
  options.world_size = 1;
  FAILS(DG_INVALID_ARGUMENT, dg_worker_create(&options, &worker));
  options.rank = 0;
  options.rendezvous = DG_STR("smoke://signals");
  FAILS(DG_INVALID_ARGUMENT, dg_worker_create(&options, &worker));
  options.rendezvous.data = NULL;
  FAILS(DG_INVALID_ARGUMENT, dg_worker_create(&options, &worker));
  options.rendezvous.data = rendezvous;
  options.rendezvous.size = strlen(rendezvous);
  options.transport = DG_STR("pigeon");
  FAILS(DG_INVALID_ARGUMENT, dg_worker_create(&options, &worker));
  options.transport = DG_STR("");
  options.key_file = DG_STR("/no/such/key");
  CHECK(code_of(dg_worker_create(&options, &worker)) != DG_OK);
  /* A newer program's struct is taken if it asks for nothing unknown. */
  memset(&longer, 0, sizeof(longer));
  longer.known.struct_size = sizeof(longer);
  longer.known.world_size = 1;
  longer.known.rendezvous = DG_STR("smoke://signals");
  longer.unknown = 1;
  FAILS(DG_UNIMPLEMENTED, dg_worker_create(&longer.known, &worker));
  longer.unknown = 0;
  FAILS(DG_INVALID_ARGUMENT, dg_worker_create(&longer.known, &worker)); /* the rendezvous */
  CHECK(worker == NULL);
}

/* ------------------------------------------------------------------------ Workers of their own */

static bool has(const dg_message* message, const char* part) {
  const dg_str text = dg_message_payload(message);
  const size_t size = strlen(part);
  for (size_t i = 0; i + size <= text.size; ++i) {
    if (memcmp(text.data + i, part, size) == 0) return true;
  }
  return false;
}

static dg_code call_operator(dg_worker* worker, dg_str op, dg_value argument) {
  dg_values* values = NULL;
  const dg_code code = code_of(
      dg_worker_call_op(worker, dg_worker_name(worker, 0), op, &argument, 1, NULL, &values));
  dg_values_destroy(values);
  return code;
}

/* Three jobs of one worker each, that share a rendezvous and serve other operators. */
static void test_jobs(void) {
  const float one = 1;
  const char* const launcher[4][2] = {
      {"RANK", "0"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "3"}, {"LOCAL_WORLD_SIZE", "4"}};
  const dg_str names[3] = {DG_STR("pure"), DG_STR("none"), DG_STR("all")};
  const dg_value file = dg_value_string(DG_STR("/no/such/file"));
  dg_tensor* x = floats(&one, 1, 1);
  dg_worker *jobs[3] = {NULL, NULL, NULL}, *refused = NULL;
  dg_worker_options options = DG_WORKER_OPTIONS_INIT;
  dg_context* context = NULL;
  dg_message* text = NULL;
  char shared[600];
  /* As the fourth worker of a launcher's machine would be, were the job not of one. */
  for (int i = 0; i < 4; ++i) CHECK(setenv(launcher[i][0], launcher[i][1], 1) == 0);
  snprintf(shared, sizeof(shared), "%s.jobs?world_size=1", rendezvous);
  options.rendezvous.data = shared;
  options.rendezvous.size = strlen(shared);
  options.thread_count = 1;
  for (uint64_t i = 0; i < 3; ++i) {
    options.job = names[i];
    options.flags = i; /* 1: DG_WORKER_NO_OPERATORS, 2: DG_WORKER_ALL_OPERATORS */
    options.heartbeat_limit_ms = i == 0 ? 0 : i == 1 ? DG_FOREVER : 100;
    OK(dg_worker_create(&options, &jobs[i]));
  }
  options.job = DG_STR("refused");
  options.flags = DG_WORKER_NO_OPERATORS | DG_WORKER_ALL_OPERATORS;
  FAILS(DG_INVALID_ARGUMENT, dg_worker_create(&options, &refused));
  options.flags = 0;
  options.heartbeat_limit_ms = 99;
  FAILS(DG_INVALID_ARGUMENT, dg_worker_create(&options, &refused));
  options.heartbeat_limit_ms = 0;
  options.job = DG_STR("a/b");
  FAILS(DG_INVALID_ARGUMENT, dg_worker_create(&options, &refused));
  options.job.data = NULL;
  FAILS(DG_INVALID_ARGUMENT, dg_worker_create(&options, &refused));
  for (int i = 0; i < 4; ++i) CHECK(unsetenv(launcher[i][0]) == 0);

  CHECK(call_operator(jobs[0], DG_STR("aten::neg"), dg_value_tensor(x)) == DG_OK);
  CHECK(call_operator(jobs[0], DG_STR("aten::from_file"), file) == DG_PERMISSION_DENIED);
  CHECK(call_operator(jobs[1], DG_STR("aten::neg"), dg_value_tensor(x)) == DG_PERMISSION_DENIED);
  CHECK(call_operator(jobs[2], DG_STR("aten::from_file"), file) != DG_PERMISSION_DENIED);

  CHECK(dg_worker_local_rank(jobs[0]) == 3 && dg_worker_local_world_size(jobs[0]) == 4);
  CHECK(dg_worker_local_rank(NULL) == 0 && dg_worker_local_world_size(NULL) == 0);
  OK(dg_worker_metrics_text(jobs[0], &text));
  CHECK(has(text, "distgrad_calls_total{worker=\"worker0\"") && has(text, "\"aten::from_file\""));
  CHECK(dg_message_tensor_count(text) == 0);
  dg_message_destroy(text);
  text = NULL;
  FAILS(DG_INVALID_ARGUMENT, dg_worker_metrics_text(jobs[0], NULL));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_metrics_text(NULL, &text));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_metrics_text((const dg_worker*)(const void*)x, &text));

  OK(dg_worker_leave_alone(jobs[0], DG_FOREVER)); /* nothing is under way */
  FAILS(DG_FAILED_PRECONDITION, dg_worker_leave_alone(jobs[0], 1));
  OK(dg_context_create(jobs[2], &context));
  FAILS(DG_DEADLINE_EXCEEDED, dg_worker_leave_alone(jobs[2], 1));
  dg_context_destroy(context);
  FAILS(DG_INVALID_ARGUMENT, dg_worker_leave_alone(NULL, 1));
  for (int i = 0; i < 3; ++i) dg_worker_destroy(jobs[i]);
  FAILS(DG_INVALID_ARGUMENT, dg_worker_leave_alone(jobs[0], 1));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_metrics_text(jobs[0], &text));
  CHECK(dg_worker_local_world_size(jobs[0]) == 0 && text == NULL && refused == NULL);
  dg_tensor_destroy(x);
  *strchr(shared, '?') = '\0';
  unlink(shared + strlen("file://"));
}

/* ---------------------------------------------------------------------------------- Handlers */

/* The tensor times the parameter that is the handler's own. */
static dg_tensor* parameter;

static dg_error* multiply(void* user_data, const dg_request* request, dg_message** reply) {
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

static dg_error* fail(void* user_data, const dg_request* request, dg_message** reply) {
  (void)user_data;
  OK(dg_message_create(NULL, 0, NULL, 0, reply)); /* not to be leaked */
  CHECK(str_is(request->function, "fail"));
  return dg_error_create(DG_DATA_LOSS, DG_STR("the dog ate it"));
}

static dg_error* lie(void* user_data, const dg_request* request, dg_message** reply) {
  (void)user_data;
  if (dg_message_payload(request->message).size > 0) {
    *reply = (dg_message*)(uintptr_t)parameter; /* a handle, but of a tensor */
    return NULL;
  }
  return (dg_error*)(uintptr_t)parameter;
}

static dg_error* nothing(void* user_data, const dg_request* request, dg_message** reply) {
  (void)user_data;
  (void)request;
  (void)reply;
  return NULL;
}

/* Calls back to who called, within its context; and tries to end its own worker. */
static dg_error* relay(void* user_data, const dg_request* request, dg_message** reply) {
  dg_worker* self = (dg_worker*)user_data;
  dg_call_options options = DG_CALL_OPTIONS_INIT;
  dg_worker_destroy(self); /* refused, and logged */
  FAILS(DG_FAILED_PRECONDITION, dg_worker_leave_alone(self, DG_FOREVER));
  CHECK(dg_worker_world_size(self) == 2);
  options.context = request->context;
  options.timeout_ms = request->timeout_ms;
  return dg_worker_call(self, dg_worker_name(self, (uint32_t)request->from), DG_STR("multiply"),
                        request->message, &options, reply);
}

/* ------------------------------------------------------------------------------- Answers later */

static sem_t asked, seen, watched; /* a handler runs; each saw that nobody waits */
static const dg_request* later_request;
static dg_responder* later_responder;

static void post(void* user_data) { CHECK(sem_post((sem_t*)user_data) == 0); }
static void wait_at_gate(void* user_data) {
  while (sem_wait((sem_t*)user_data) != 0) continue;
}

static void later(void* user_data, const dg_request* request, dg_responder* responder) {
  (void)user_data;
  dg_worker_destroy(workers[1]); /* refused, and logged */
  OK(dg_cancellation_then(request->cancellation, post, &seen, NULL));
  later_request = request;
  later_responder = responder;
  CHECK(sem_post(&asked) == 0);
}

/* Waits until its caller has gone. */
static dg_error* watch(void* user_data, const dg_request* request, dg_message** reply) {
  (void)user_data, (void)reply;
  OK(dg_cancellation_check(request->cancellation));
  OK(dg_cancellation_then(request->cancellation, post, &watched, NULL));
  CHECK(sem_post(&asked) == 0);
  OK(dg_wait(wait_at_gate, &watched));
  FAILS(DG_CANCELLED, dg_cancellation_check(request->cancellation));
  CHECK(sem_post(&asked) == 0);
  return dg_cancellation_check(request->cancellation);
}

/* For a worker that ends while its handler waits for another. */
static sem_t entered, released;
static dg_code blocked_code = DG_OK;

static dg_error* hold(void* user_data, const dg_request* request, dg_message** reply) {
  (void)user_data, (void)request, (void)reply;
  CHECK(sem_post(&entered) == 0);
  while (sem_wait(&released) != 0) continue;
  return NULL;
}

static dg_error* block(void* user_data, const dg_request* request, dg_message** reply) {
  dg_error* error = dg_worker_call((dg_worker*)user_data, DG_STR("front"), DG_STR("hold"),
                                   request->message, NULL, reply);
  blocked_code = dg_error_code(error);
  return error;
}

static void add(int rank, const char* name, dg_handler handler, void* user_data) {
  dg_str text;
  text.data = name;
  text.size = strlen(name);
  OK(dg_worker_register(workers[rank], text, handler, user_data, NULL));
}

static void test_register(void) {
  int ended = 0;
  dg_worker* w = workers[1];
  char longest[1002];
  dg_str text;
  for (int rank = 0; rank < 2; ++rank) {
    OK(dg_worker_register(workers[rank], DG_STR("multiply"), multiply, &handlers_ended, count_up));
    add(rank, "relay", relay, workers[rank]);
  }
  CHECK(sem_init(&entered, 0, 0) == 0 && sem_init(&released, 0, 0) == 0);
  add(0, "hold", hold, NULL);
  add(1, "block", block, workers[1]);
  add(1, "fail", fail, NULL);
  add(1, "lie", lie, NULL);
  add(1, "nothing", nothing, NULL);
  add(1, "watch", watch, NULL);
  CHECK(sem_init(&asked, 0, 0) == 0 && sem_init(&seen, 0, 0) == 0);
  CHECK(sem_init(&watched, 0, 0) == 0);
  OK(dg_worker_register_async(w, DG_STR("later"), later, &handlers_ended, count_up));
  FAILS(DG_ALREADY_EXISTS, dg_worker_register_async(w, DG_STR("later"), later, &ended, count_up));
  FAILS(DG_ALREADY_EXISTS, dg_worker_register_async(w, DG_STR("watch"), later, &ended, count_up));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_register_async(w, DG_STR(""), later, &ended, count_up));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_register_async(w, DG_STR("l"), NULL, &ended, count_up));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_register_async(NULL, DG_STR("l"), later, &ended, count_up));
  CHECK(ended == 5);
  memset(longest, 'a', sizeof(longest));
  text.data = longest;
  text.size = 1001;
  FAILS(DG_INVALID_ARGUMENT, dg_worker_register(w, text, fail, &ended, count_up));
  FAILS(DG_ALREADY_EXISTS, dg_worker_register(w, DG_STR("fail"), fail, &ended, count_up));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_register(w, DG_STR(""), fail, &ended, count_up));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_register(w, DG_STR("aten::mm"), fail, &ended, count_up));
  FAILS(DG_INVALID_ARGUMENT,
        dg_worker_register(w, DG_STR("distgrad.optimizer.step/"), fail, &ended, count_up));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_register(w, DG_STR("null"), NULL, &ended, count_up));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_register(NULL, DG_STR("g"), fail, &ended, count_up));
  CHECK(ended == 12);
}

static void test_names(void) {
  CHECK(dg_worker_rank(workers[1]) == 1 && dg_worker_world_size(workers[0]) == 2);
  CHECK(str_is(dg_worker_name(workers[0], 1), "back"));
  CHECK(dg_worker_name(workers[0], 2).size == 0);
  CHECK(dg_worker_rank(NULL) == 0 && dg_worker_world_size(NULL) == 0);
  CHECK(dg_worker_name(NULL, 0).size == 0 && dg_worker_context_count(NULL) == 0);
}

static dg_message* message_of(const dg_tensor* tensor) {
  dg_message* message = NULL;
  OK(dg_message_create(NULL, 0, &tensor, tensor != NULL, &message));
  return message;
}

static void test_calls(void) {
  const float two = 2;
  dg_tensor *x = floats(&two, 1, 1), *y = NULL;
  dg_message *request = message_of(x), *empty = message_of(NULL), *reply = NULL, *some = NULL;
  dg_call_options options = DG_CALL_OPTIONS_INIT;
  dg_worker* w = workers[0];
  OK(dg_worker_call(w, DG_STR("back"), DG_STR("multiply"), request, NULL, &reply));
  CHECK(str_is(dg_message_payload(reply), "done"));
  OK(dg_message_tensor(reply, 0, &y));
  CHECK(data_of(y)[0] == 6 && !dg_tensor_requires_grad(y)); /* no context */
  dg_tensor_destroy(y);
  dg_message_destroy(reply);
  OK(dg_worker_call(w, DG_STR("front"), DG_STR("multiply"), request, NULL, &reply)); /* itself */
  dg_message_destroy(reply);
  OK(dg_worker_call(w, DG_STR("back"), DG_STR("relay"), request, &options, &reply));
  dg_message_destroy(reply);
  OK(dg_worker_call(w, DG_STR("back"), DG_STR("nothing"), request, NULL, &reply));
  CHECK(dg_message_tensor_count(reply) == 0 && dg_message_payload(reply).size == 0);
  dg_message_destroy(reply);

  reply = NULL;
  OK(dg_message_create("x", 1, NULL, 0, &some));
  FAILS(DG_DATA_LOSS, dg_worker_call(w, DG_STR("back"), DG_STR("fail"), empty, NULL, &reply));
  FAILS(DG_INTERNAL, dg_worker_call(w, DG_STR("back"), DG_STR("lie"), empty, NULL, &reply));
  FAILS(DG_INTERNAL, dg_worker_call(w, DG_STR("back"), DG_STR("lie"), some, NULL, &reply));
  FAILS(DG_NOT_FOUND, dg_worker_call(w, DG_STR("back"), DG_STR("no"), empty, NULL, &reply));
  FAILS(DG_NOT_FOUND, dg_worker_call(w, DG_STR("nobody"), DG_STR("fail"), empty, NULL, &reply));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_call(w, DG_STR("back"), DG_STR(""), empty, NULL, &reply));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_call(w, DG_STR("back"), DG_STR("fail"), NULL, NULL, &reply));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_call(w, DG_STR("back"), DG_STR("fail"), empty, NULL, NULL));
  options.context = (const dg_context*)(const void*)x;
  FAILS(DG_INVALID_ARGUMENT,
        dg_worker_call(w, DG_STR("back"), DG_STR("fail"), empty, &options, &reply));
  options.context = NULL;
  options.struct_size = 8;
  FAILS(DG_INVALID_ARGUMENT,
        dg_worker_call(w, DG_STR("back"), DG_STR("fail"), empty, &options, &reply));
  CHECK(reply == NULL);
  dg_message_destroy(some);
  dg_message_destroy(empty);
  dg_message_destroy(request);
  dg_tensor_destroy(x);
}

static void test_remote_operators(void) {
  const float data[4] = {1, 2, 3, 4};
  dg_tensor* x = floats(data, 2, 2);
  dg_value arguments[2], result;
  dg_values* values = NULL;
  dg_future* future = NULL;
  dg_message* reply = NULL;
  bool done = false;
  arguments[0] = dg_value_tensor(x);
  arguments[1] = dg_value_integer(1);
  OK(dg_worker_call_op(workers[0], DG_STR("back"), DG_STR("aten::max.dim"), arguments, 2, NULL,
                       &values));
  CHECK(dg_values_count(values) == 2);
  OK(dg_values_get(values, 0, &result));
  CHECK(data_of(result.as.tensor)[1] == 4);
  dg_values_destroy(values);
  OK(dg_worker_call_op_async(workers[0], DG_STR("back"), DG_STR("aten::size.int"), arguments, 2,
                             NULL, &future));
  OK(dg_future_wait(future, DG_FOREVER, &done));
  CHECK(done);
  FAILS(DG_FAILED_PRECONDITION, dg_future_result(future, &reply));
  OK(dg_future_values(future, &values));
  OK(dg_values_get(values, 0, &result));
  CHECK(result.kind == DG_VALUE_INTEGER && result.as.integer == 2);
  dg_values_destroy(values);
  dg_future_destroy(future);
  FAILS(DG_NOT_FOUND, dg_worker_call_op(workers[0], DG_STR("back"), DG_STR("aten::no"), arguments,
                                        1, NULL, &values));
  arguments[0] = dg_value_tensor((const dg_tensor*)(const void*)workers);
  FAILS(DG_INVALID_ARGUMENT,
        dg_worker_call_op_async(workers[0], DG_STR("back"), DG_STR("aten::exp"), arguments, 1, NULL,
                                &future));
  dg_tensor_destroy(x);
}

/* ----------------------------------------------------------------------------------- Futures */

static sem_t ended;
static dg_code codes[9];
static dg_future* waited_for;

/* Everything that waits fails, and nothing hangs. */
static void when_done(void* user_data) {
  bool done = false;
  dg_message* reply = NULL;
  dg_values* values = NULL;
  dg_worker* worker = NULL;
  double norm = 0;
  (void)user_data;
  codes[0] = code_of(dg_future_wait(waited_for, 1000, &done));
  codes[1] =
      code_of(dg_worker_call(workers[0], DG_STR("back"), DG_STR("fail"), NULL, NULL, &reply));
  codes[2] = code_of(
      dg_worker_call_op(workers[0], DG_STR("back"), DG_STR("aten::exp"), NULL, 0, NULL, &values));
  codes[3] = code_of(dg_worker_create(NULL, &worker));
  codes[4] = code_of(dg_worker_wait_for_all(workers[0], DG_FOREVER));
  codes[5] = code_of(dg_context_backward(NULL, NULL, 0, NULL));
  codes[6] = code_of(dg_optimizer_step(NULL, NULL));
  codes[7] = code_of(dg_optimizer_clip_gradients(NULL, NULL, 1, &norm));
  codes[8] = code_of(dg_worker_leave_alone(workers[0], 1));
  dg_worker_destroy(workers[0]);            /* refused, and logged */
  OK(dg_future_wait(waited_for, 0, &done)); /* to poll is no wait */
  dg_grad_set_enabled(false);               /* undone behind us */
}

static void nothing_done(void* user_data) { (void)user_data; }

static void test_futures(void) {
  dg_message *empty = message_of(NULL), *reply = NULL;
  dg_values* values = NULL;
  bool done = false;
  int count = 0;
  CHECK(sem_init(&ended, 0, 0) == 0);
  for (int i = 0; i < 2; ++i) {
    OK(dg_worker_call_async(workers[0], DG_STR("back"), i == 0 ? DG_STR("nothing") : DG_STR("fail"),
                            empty, NULL, &waited_for));
    OK(dg_future_then(waited_for, when_done, &ended, post));
    while (sem_wait(&ended) != 0) continue;
    for (int c = 0; c < 9; ++c) CHECK(codes[c] == DG_FAILED_PRECONDITION);
    CHECK(dg_worker_world_size(workers[0]) == 2);
    OK(dg_future_then(waited_for, count_up, &count, NULL)); /* done: at once */
    CHECK(count == 2 * i + 1);
    CHECK(dg_grad_set_enabled(true));
    FAILS(DG_INVALID_ARGUMENT, dg_future_then(waited_for, NULL, &ended, post));
    while (sem_wait(&ended) != 0) continue;
    if (i == 0) {
      FAILS(DG_FAILED_PRECONDITION, dg_future_values(waited_for, &values));
      for (int twice = 0; twice < 2; ++twice) {
        OK(dg_future_cancel(waited_for)); /* too late */
        OK(dg_future_result(waited_for, &reply));
        dg_message_destroy(reply);
      }
    } else {
      FAILS(DG_DATA_LOSS, dg_future_result(waited_for, &reply));
      FAILS(DG_DATA_LOSS, dg_future_values(waited_for, &values));
    }
    dg_future_destroy(waited_for);
    FAILS(DG_INVALID_ARGUMENT, dg_future_wait(waited_for, 1, &done));
    FAILS(DG_INVALID_ARGUMENT, dg_future_result(waited_for, &reply));
    FAILS(DG_INVALID_ARGUMENT, dg_future_then(waited_for, nothing_done, &count, count_up));
    CHECK(count == 2 * i + 2); /* taken */
  }
  dg_message_destroy(empty);
}

/* The caller waits no longer, though the handler does. */
static void test_cancel(void) {
  dg_message *empty = message_of(NULL), *reply = NULL;
  dg_future* future = NULL;
  bool done = false;
  int count = 0;
  OK(dg_worker_call_async(workers[1], DG_STR("front"), DG_STR("hold"), empty, NULL, &future));
  OK(dg_future_then(future, nothing_done, &count, count_up));
  while (sem_wait(&entered) != 0) continue;
  OK(dg_future_wait(future, 0, &done));
  CHECK(!done);
  OK(dg_future_cancel(future));
  OK(dg_future_wait(future, DG_FOREVER, &done));
  CHECK(done && count == 1);
  FAILS(DG_CANCELLED, dg_future_result(future, &reply));
  CHECK(sem_post(&released) == 0);
  dg_future_destroy(future);
  FAILS(DG_INVALID_ARGUMENT, dg_future_cancel(future));
  FAILS(DG_INVALID_ARGUMENT, dg_future_cancel(NULL));
  FAILS(DG_INVALID_ARGUMENT, dg_future_cancel((const dg_future*)(const void*)empty));
  CHECK(reply == NULL);
  dg_message_destroy(empty);
}

/* A call that is under way: `function` of the back worker has begun. */
static dg_future* begin(dg_worker* from, dg_str function, const dg_cancellation* cancellation) {
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
static dg_code end(dg_future* future, dg_message** reply) {
  bool done = false;
  dg_code code;
  OK(dg_future_wait(future, DG_FOREVER, &done));
  CHECK(done);
  code = code_of(dg_future_result(future, reply));
  dg_future_destroy(future);
  return code;
}

static void test_answers_later(void) {
  dg_future* future = begin(workers[0], DG_STR("later"), NULL);
  dg_message *answer = NULL, *reply = NULL;
  dg_responder* gone = later_responder;
  bool done = true;
  OK(dg_future_wait(future, 0, &done));
  CHECK(!done);
  /* All of the request is still there. */
  CHECK(str_is(dg_message_payload(later_request->message), "ask") && later_request->from == 0);
  CHECK(str_is(later_request->function, "later") && later_request->context == NULL);
  OK(dg_cancellation_check(later_request->cancellation));
  OK(dg_message_create("at last", 7, NULL, 0, &answer));
  OK(dg_responder_answer(later_responder, answer, NULL));
  CHECK(end(future, &reply) == DG_OK && str_is(dg_message_payload(reply), "at last"));
  dg_message_destroy(reply);
  reply = NULL;
  /* Once; and what was taken is gone. */
  OK(dg_message_create("again", 5, NULL, 0, &answer));
  FAILS(DG_INVALID_ARGUMENT, dg_responder_answer(gone, answer, NULL));
  CHECK(dg_message_payload(answer).size == 0);
  FAILS(DG_INVALID_ARGUMENT,
        dg_responder_answer(NULL, NULL, dg_error_create(DG_ABORTED, DG_STR(""))));
  dg_responder_destroy(gone);
  dg_responder_destroy(NULL);

  future = begin(workers[0], DG_STR("later"), NULL);
  OK(dg_responder_answer(later_responder, NULL, NULL));
  CHECK(end(future, &reply) == DG_OK && dg_message_payload(reply).size == 0);
  dg_message_destroy(reply);
  reply = NULL;
  future = begin(workers[0], DG_STR("later"), NULL);
  OK(dg_message_create("not this", 8, NULL, 0, &answer));
  OK(dg_responder_answer(later_responder, answer,
                         dg_error_create(DG_DATA_LOSS, DG_STR("the dog"))));
  CHECK(end(future, &reply) == DG_DATA_LOSS);
  future = begin(workers[0], DG_STR("later"), NULL);
  FAILS(DG_INVALID_ARGUMENT,
        dg_responder_answer(later_responder, (dg_message*)(uintptr_t)parameter, NULL));
  CHECK(end(future, &reply) == DG_INTERNAL);
  future = begin(workers[0], DG_STR("later"), NULL);
  OK(dg_responder_answer(later_responder, NULL, (dg_error*)(uintptr_t)parameter));
  CHECK(end(future, &reply) == DG_INTERNAL);
  future = begin(workers[0], DG_STR("later"), NULL);
  dg_responder_destroy(later_responder);
  CHECK(end(future, &reply) == DG_INTERNAL && reply == NULL);
}

/* Handlers of both kinds see that their caller has given up. */
static void test_cancelled_handlers(void) {
  dg_message* reply = NULL;
  dg_future* future = begin(workers[0], DG_STR("later"), NULL);
  OK(dg_future_cancel(future));
  CHECK(end(future, &reply) == DG_CANCELLED);
  wait_at_gate(&seen);
  FAILS(DG_CANCELLED, dg_cancellation_check(later_request->cancellation));
  OK(dg_responder_answer(later_responder, NULL, NULL)); /* dropped */
  future = begin(workers[0], DG_STR("watch"), NULL);
  OK(dg_future_cancel(future));
  CHECK(end(future, &reply) == DG_CANCELLED);
  wait_at_gate(&asked); /* it has seen it */
  CHECK(reply == NULL);
}

static void test_cancellations(void) {
  dg_cancellation *cancellation = NULL, *unused = NULL;
  dg_call_options options = DG_CALL_OPTIONS_INIT;
  dg_message *reply = NULL, *empty = message_of(NULL);
  dg_future* futures[2];
  int count = 0, ended = 0;
  FAILS(DG_INVALID_ARGUMENT, dg_cancellation_create(NULL));
  OK(dg_cancellation_create(&cancellation));
  OK(dg_cancellation_check(cancellation));
  OK(dg_cancellation_then(cancellation, count_up, &count, NULL));
  futures[0] = begin(workers[0], DG_STR("watch"), cancellation);
  futures[1] = begin(workers[0], DG_STR("later"), cancellation);
  CHECK(count == 0);
  OK(dg_cancellation_cancel(cancellation));
  OK(dg_cancellation_cancel(cancellation));
  CHECK(count == 1);
  for (int i = 0; i < 2; ++i) CHECK(end(futures[i], &reply) == DG_CANCELLED);
  wait_at_gate(&asked); /* the one has seen it, */
  wait_at_gate(&seen);  /* and the other */
  dg_responder_destroy(later_responder);
  FAILS(DG_CANCELLED, dg_cancellation_check(cancellation));
  OK(dg_cancellation_then(cancellation, count_up, &count, NULL)); /* at once */
  CHECK(count == 2);
  options.cancellation = cancellation;
  FAILS(DG_CANCELLED,
        dg_worker_call(workers[0], DG_STR("back"), DG_STR("nothing"), empty, &options, &reply));
  dg_cancellation_destroy(cancellation);
  FAILS(DG_INVALID_ARGUMENT,
        dg_worker_call(workers[0], DG_STR("back"), DG_STR("nothing"), empty, &options, &reply));
  /* A program of before has a shorter struct. */
  options.struct_size = offsetof(dg_call_options, cancellation);
  OK(dg_worker_call(workers[0], DG_STR("back"), DG_STR("nothing"), empty, &options, &reply));
  dg_message_destroy(reply);

  OK(dg_cancellation_create(&unused));
  OK(dg_cancellation_then(unused, count_up, &ended, count_up));
  CHECK(ended == 0);
  FAILS(DG_INVALID_ARGUMENT, dg_cancellation_then(unused, NULL, &ended, count_up));
  dg_cancellation_destroy(unused);
  CHECK(ended == 2); /* never called, but ended */
  FAILS(DG_INVALID_ARGUMENT, dg_cancellation_cancel(unused));
  FAILS(DG_INVALID_ARGUMENT, dg_cancellation_cancel(NULL));
  FAILS(DG_INVALID_ARGUMENT, dg_cancellation_check(unused));
  FAILS(DG_INVALID_ARGUMENT, dg_cancellation_check((dg_cancellation*)(uintptr_t)empty));
  FAILS(DG_INVALID_ARGUMENT, dg_cancellation_then(unused, count_up, &ended, count_up));
  CHECK(ended == 3);
  dg_message_destroy(empty);
}

/* ---------------------------------------------------------------------------------- Autograd */

static void visit(void* user_data, const dg_tensor* leaf, const dg_tensor* gradient) {
  CHECK(dg_tensor_requires_grad(leaf));
  *(float*)user_data += data_of(gradient)[0];
}

/* The reply of a remote multiplication with the parameter, in the context. */
static dg_tensor* remote(dg_context* context, const dg_tensor* x, dg_str function) {
  dg_call_options options = DG_CALL_OPTIONS_INIT;
  dg_message *request = message_of(x), *reply = NULL;
  dg_tensor* y = NULL;
  options.context = context;
  OK(dg_worker_call(workers[0], DG_STR("back"), function, request, &options, &reply));
  OK(dg_message_tensor(reply, 0, &y));
  CHECK(dg_tensor_requires_grad(y));
  dg_message_destroy(reply);
  dg_message_destroy(request);
  return y;
}

static void test_backward(void) {
  const float two = 2, ten = 10, pair[2] = {1, 2};
  dg_tensor *x = floats(&two, 1, 1), *y, *gradient = NULL, *ones = floats(&ten, 1, 1), *wide;
  const dg_tensor *root, *root_gradient = ones;
  dg_context* context = NULL;
  dg_backward_options options = DG_BACKWARD_OPTIONS_INIT;
  dg_future* future = NULL;
  dg_message* reply = (dg_message*)(uintptr_t)parameter;
  bool done = false;
  float sum = 0;
  OK(dg_tensor_require_grad(x));
  OK(dg_context_create(workers[0], &context));
  CHECK(dg_context_id(context) != 0 && dg_worker_context_count(workers[0]) == 1);
  root = y = remote(context, x, DG_STR("relay"));
  options.flags = DG_BACKWARD_RETAIN_GRAPH;
  OK(dg_context_backward(context, &root, 1, &options));
  OK(dg_context_gradient(context, x, &gradient));
  CHECK(data_of(gradient)[0] == 3); /* the parameter */
  dg_tensor_destroy(gradient);
  options.flags = 0;
  options.root_gradients = &root_gradient;
  OK(dg_context_backward_async(context, &root, 1, &options, &future));
  OK(dg_future_wait(future, DG_FOREVER, &done));
  OK(dg_future_result(future, &reply));
  CHECK(done && reply == NULL);
  dg_future_destroy(future);
  OK(dg_context_gradient(context, x, &gradient));
  CHECK(data_of(gradient)[0] == 33); /* they add up */
  dg_tensor_destroy(gradient);
  OK(dg_context_gradients(context, visit, &sum));
  CHECK(sum == 33 + 22); /* x, and the parameter, which lives in this process too */
  OK(dg_context_set_gradient(context, x, ones));
  OK(dg_context_gradient(context, x, &gradient));
  CHECK(data_of(gradient)[0] == 10);
  dg_tensor_destroy(gradient);

  gradient = NULL;
  FAILS(DG_FAILED_PRECONDITION, dg_context_backward(context, &root, 1, NULL)); /* once more */
  FAILS(DG_INVALID_ARGUMENT, dg_context_backward(context, NULL, 0, NULL));
  FAILS(DG_INVALID_ARGUMENT, dg_context_backward(context, NULL, 1, NULL));
  FAILS(DG_INVALID_ARGUMENT, dg_context_backward(NULL, &root, 1, NULL));
  FAILS(DG_INVALID_ARGUMENT, dg_context_backward_async(context, &root, 1, NULL, NULL));
  options.flags = 2;
  FAILS(DG_UNIMPLEMENTED, dg_context_backward(context, &root, 1, &options));
  FAILS(DG_NOT_FOUND, dg_context_gradient(context, y, &gradient));
  FAILS(DG_INVALID_ARGUMENT, dg_context_gradient(context, NULL, &gradient));
  FAILS(DG_INVALID_ARGUMENT, dg_context_set_gradient(context, x, NULL));
  wide = floats(pair, 1, 2);
  SAYS(DG_INVALID_ARGUMENT, "[1, 2] Float on cpu", dg_context_set_gradient(context, x, wide));
  dg_tensor_destroy(wide);
  FAILS(DG_NOT_FOUND, dg_context_set_gradient(context, ones, ones));
  FAILS(DG_INVALID_ARGUMENT, dg_context_gradients(context, NULL, NULL));
  CHECK(gradient == NULL);
  OK(dg_context_release(context));
  OK(dg_context_release(context));
  FAILS(DG_FAILED_PRECONDITION, dg_context_set_gradient(context, x, ones));
  dg_context_destroy(context);
  CHECK(dg_context_id(context) == 0);

  /* A cancel comes in time, or too late. */
  OK(dg_context_create(workers[0], &context));
  dg_tensor_destroy(y);
  root = y = remote(context, x, DG_STR("relay"));
  OK(dg_context_backward_async(context, &root, 1, NULL, &future));
  OK(dg_future_cancel(future));
  OK(dg_future_wait(future, DG_FOREVER, &done));
  {
    const dg_code code = code_of(dg_future_result(future, &reply));
    CHECK(done && (code == DG_OK || code == DG_CANCELLED));
  }
  dg_future_destroy(future);
  dg_context_destroy(context);
  FAILS(DG_INVALID_ARGUMENT, dg_context_release(context));
  CHECK(dg_worker_context_count(workers[0]) == 0);
  dg_tensor_destroy(x);
  dg_tensor_destroy(y);
  dg_tensor_destroy(ones);
}

static sem_t gate;

static dg_error* serve_gate(void* user_data, const dg_request* request, dg_message** reply) {
  (void)reply;
  if (dg_message_tensor_count(request->message) == 0) return dg_wait(wait_at_gate, user_data);
  CHECK(sem_post(&gate) == 0 && sem_post(&gate) == 0);
  return NULL;
}

static void wait_in_callback(void* user_data) {
  *(dg_code*)user_data = code_of(dg_wait(wait_at_gate, &gate));
}

/* The worker has two threads: both wait, and the call that frees them is served all the same. */
static void test_wait(void) {
  const float one = 1;
  dg_tensor* tensor = floats(&one, 1, 1);
  dg_message *empty = message_of(NULL), *full = message_of(tensor), *reply = NULL;
  dg_future* waiting[2];
  bool done = false;
  dg_code code = DG_OK;
  CHECK(sem_init(&gate, 0, 0) == 0);
  OK(dg_worker_register(workers[1], DG_STR("gate"), serve_gate, &gate, NULL));
  for (int i = 0; i < 2; ++i) {
    OK(dg_worker_call_async(workers[0], DG_STR("back"), DG_STR("gate"), empty, NULL, &waiting[i]));
  }
  OK(dg_worker_call(workers[0], DG_STR("back"), DG_STR("gate"), full, NULL, &reply));
  for (int i = 0; i < 2; ++i) {
    OK(dg_future_wait(waiting[i], DG_FOREVER, &done));
    CHECK(done);
    OK(dg_future_then(waiting[i], wait_in_callback, &code, NULL));
    CHECK(code == DG_FAILED_PRECONDITION);
    dg_future_destroy(waiting[i]);
  }
  FAILS(DG_INVALID_ARGUMENT, dg_wait(NULL, NULL));
  CHECK(sem_destroy(&gate) == 0);
  dg_message_destroy(reply);
  dg_message_destroy(empty);
  dg_message_destroy(full);
  dg_tensor_destroy(tensor);
}

static void test_end_while_a_handler_waits(void) {
  dg_message *empty = message_of(NULL), *reply = NULL;
  dg_future* future = NULL;
  bool done = false;
  OK(dg_worker_call_async(workers[0], DG_STR("back"), DG_STR("block"), empty, NULL, &future));
  while (sem_wait(&entered) != 0) continue;
  dg_worker_destroy(workers[1]); /* fails the handler's call, and waits for the handler */
  CHECK(blocked_code == DG_CANCELLED);
  OK(dg_future_wait(future, DG_FOREVER, &done));
  CHECK(done && code_of(dg_future_result(future, &reply)) != DG_OK);
  CHECK(sem_post(&released) == 0);
  dg_future_destroy(future);
  dg_message_destroy(empty);
}

/* The gradient of `leaf` is 3, and `norm` that of the gradients of both workers. */
static void test_clip(dg_optimizer* optimizer, dg_context* context, const dg_tensor* leaf,
                      double norm) {
  const float infinite = (float)INFINITY;
  dg_tensor *gradient = NULL, *too_much = floats(&infinite, 1, 1);
  double before = -1;
  OK(dg_optimizer_clip_gradients(optimizer, context, norm / 2, &before));
  CHECK(before == norm);
  OK(dg_context_gradient(context, leaf, &gradient));
  CHECK(data_of(gradient)[0] > 1.4999f && data_of(gradient)[0] < 1.5001f);
  FAILS(DG_INVALID_ARGUMENT, dg_optimizer_clip_gradients(optimizer, context, -1, &before));
  FAILS(DG_INVALID_ARGUMENT, dg_optimizer_clip_gradients(optimizer, context, NAN, &before));
  FAILS(DG_INVALID_ARGUMENT, dg_optimizer_clip_gradients(optimizer, context, 1, NULL));
  FAILS(DG_INVALID_ARGUMENT, dg_optimizer_clip_gradients(optimizer, NULL, 1, &before));
  FAILS(DG_INVALID_ARGUMENT, dg_optimizer_clip_gradients(NULL, context, 1, &before));
  FAILS(DG_INVALID_ARGUMENT,
        dg_optimizer_clip_gradients((dg_optimizer*)(uintptr_t)context, context, 1, &before));
  OK(dg_context_set_gradient(context, leaf, too_much));
  FAILS(DG_OUT_OF_RANGE, dg_optimizer_clip_gradients(optimizer, context, 1, &before));
  CHECK(before == norm);
  dg_tensor_destroy(gradient);
  dg_tensor_destroy(too_much);
}

static void test_optimizers(void) {
  const float one = 1;
  const dg_tensor* parameters[1];
  dg_tensor *mine = floats(&one, 1, 1), *plain = floats(&one, 1, 1), *y;
  const dg_tensor *root, *no_leaf = plain;
  dg_optimizer *fronts[3], *back[3], *none = NULL;
  dg_context* context = NULL;
  dg_future* outliving[2];
  dg_responder* responders[2];
  dg_message* reply = NULL;
  double norm = -1;
  dg_sgd_options sgd = DG_SGD_OPTIONS_INIT;
  dg_adam_options adam = DG_ADAM_OPTIONS_INIT, adamw = DG_ADAMW_OPTIONS_INIT;
  sgd.learning_rate = adam.learning_rate = adamw.learning_rate = 0.25;
  OK(dg_tensor_require_grad(mine));
  parameters[0] = mine;
  OK(dg_optimizer_create_sgd(workers[0], DG_STR("s"), parameters, 1, &sgd, &fronts[0]));
  OK(dg_optimizer_create_adam(workers[0], DG_STR("a"), parameters, 1, &adam, &fronts[1]));
  OK(dg_optimizer_create_adamw(workers[0], DG_STR("w"), parameters, 1, &adamw, &fronts[2]));
  OK(dg_context_create(workers[0], &context));
  root = y = remote(context, mine, DG_STR("multiply"));
  OK(dg_context_backward(context, &root, 1, NULL));
  FAILS(DG_NOT_FOUND, dg_optimizer_clip_gradients(fronts[0], context, 1, &norm));
  FAILS(DG_NOT_FOUND, dg_optimizer_step(fronts[0], context)); /* the other has no part */
  data_of(mine)[0] = 1;
  parameters[0] = parameter;
  OK(dg_optimizer_create_sgd(workers[1], DG_STR("s"), parameters, 1, &sgd, &back[0]));
  OK(dg_optimizer_create_adam(workers[1], DG_STR("a"), NULL, 0, NULL, &back[1]));
  OK(dg_optimizer_create_adamw(workers[1], DG_STR("w"), NULL, 0, NULL, &back[2]));
  CHECK(norm == -1);
  OK(dg_optimizer_clip_gradients(fronts[0], context, 100,
                                 &norm)); /* of 3 and 1: left as they are */
  CHECK(norm > 3.1622 && norm < 3.1623);
  OK(dg_optimizer_step(fronts[0], context));
  CHECK(data_of(mine)[0] == 1 - 0.25f * 3);      /* on both workers */
  CHECK(data_of(parameter)[0] == 3 - 0.25f * 1); /* the first, failed try took no part here */
  OK(dg_optimizer_step(fronts[1], context));
  OK(dg_optimizer_step(fronts[2], context));
  CHECK(data_of(mine)[0] < 0.25f - 0.4f);
  test_clip(fronts[0], context, mine, norm);

  FAILS(DG_ALREADY_EXISTS, dg_optimizer_create_sgd(workers[0], DG_STR("s"), NULL, 0, NULL, &none));
  SAYS(DG_INVALID_ARGUMENT, "'net::head'",
       dg_optimizer_create_adam(workers[0], DG_STR("net::head"), NULL, 0, NULL, &none));
  FAILS(DG_INVALID_ARGUMENT,
        dg_optimizer_create_sgd(workers[0], DG_STR("p"), &no_leaf, 1, NULL, &none));
  sgd.learning_rate = -1;
  FAILS(DG_INVALID_ARGUMENT,
        dg_optimizer_create_sgd(workers[0], DG_STR("p"), NULL, 0, &sgd, &none));
  sgd.learning_rate = 1;
  sgd.flags = DG_SGD_NESTEROV;
  FAILS(DG_INVALID_ARGUMENT,
        dg_optimizer_create_sgd(workers[0], DG_STR("p"), NULL, 0, &sgd, &none));
  adam.beta1 = 1;
  FAILS(DG_INVALID_ARGUMENT,
        dg_optimizer_create_adam(workers[0], DG_STR("p"), NULL, 0, &adam, &none));
  adam.flags = 2;
  FAILS(DG_UNIMPLEMENTED,
        dg_optimizer_create_adamw(workers[0], DG_STR("p"), NULL, 0, &adam, &none));
  FAILS(DG_INVALID_ARGUMENT, dg_optimizer_step(NULL, context));
  FAILS(DG_INVALID_ARGUMENT, dg_optimizer_step(fronts[0], NULL));
  CHECK(none == NULL);
  for (int i = 0; i < 3; ++i) {
    dg_optimizer_destroy(back[i]);
    if (i > 0) dg_optimizer_destroy(fronts[i]);
  }
  dg_context_destroy(context);

  /* What outlives its worker gives errors. */
  OK(dg_context_create(workers[0], &context));
  root = (dg_tensor_destroy(y), y = remote(context, mine, DG_STR("multiply")));
  for (int i = 0; i < 2; ++i) {
    outliving[i] = begin(workers[i], DG_STR("later"), NULL);
    responders[i] = later_responder;
  }
  test_end_while_a_handler_waits();
  for (int i = 0; i < 2; ++i) {
    dg_worker* gone = workers[i];
    dg_worker_destroy(gone);
    dg_worker_destroy(gone);
    FAILS(DG_INVALID_ARGUMENT, dg_worker_wait_for_all(gone, 1));
    FAILS(DG_INVALID_ARGUMENT, dg_worker_leave(gone, 1));
  }
  CHECK(handlers_ended == 3);
  for (int i = 0; i < 2; ++i) CHECK(end(outliving[i], &reply) != DG_OK);
  OK(dg_responder_answer(responders[0], NULL, NULL)); /* to nobody */
  dg_responder_destroy(responders[1]);
  FAILS(DG_CANCELLED, dg_context_backward(context, &root, 1, NULL));
  FAILS(DG_FAILED_PRECONDITION, dg_optimizer_step(fronts[0], context));
  FAILS(DG_FAILED_PRECONDITION, dg_optimizer_clip_gradients(fronts[0], context, 1, &norm));
  dg_optimizer_destroy(fronts[0]);
  FAILS(DG_INVALID_ARGUMENT, dg_optimizer_clip_gradients(fronts[0], context, 1, &norm));
  OK(dg_context_release(context));
  dg_context_destroy(context);
  dg_tensor_destroy(y);
  dg_tensor_destroy(mine);
  dg_tensor_destroy(plain);
}

static void wait_for_all(int rank) { OK(dg_worker_wait_for_all(workers[rank], DG_FOREVER)); }
static void leave(int rank) { OK(dg_worker_leave(workers[rank], DG_FOREVER)); }

static void write_key(void) {
  const int file = open(key_file, O_WRONLY | O_CREAT | O_EXCL, 0600);
  CHECK(file >= 0 && write(file, "0123456789abcdef0123456789abcdef", 32) == 32);
  close(file);
}

int main(void) {
  const char* folder = getenv("TEST_TMPDIR");
  const float three = 3;
  snprintf(rendezvous, sizeof(rendezvous), "file://%s/rendezvous.%d", folder ? folder : "/tmp",
           (int)getpid());
  snprintf(key_file, sizeof(key_file), "%s/key.%d", folder ? folder : "/tmp", (int)getpid());
  write_key();
  test_options();
  test_jobs();
  parameter = floats(&three, 1, 1);
  OK(dg_tensor_require_grad(parameter));
  on_both(create);
  test_names();
  test_register();
  on_both(wait_for_all);
  test_calls();
  test_remote_operators();
  test_futures();
  test_cancel();
  test_answers_later();
  test_cancelled_handlers();
  test_cancellations();
  test_backward();
  test_wait();
  on_both(leave);
  test_optimizers();
  dg_tensor_destroy(parameter);
  unlink(key_file);
  unlink(rendezvous + strlen("file://"));
  return 0;
}
