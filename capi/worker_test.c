/* Two workers in this process, from plain C: how they are made, what they call, and how they end;
 * and what becomes of wrong use. */
#define _POSIX_C_SOURCE 200809L
#include "capi/testing/pair.h"

/* Certificates that are given by halves, or that nobody can read. worker_options_test has good
 * ones. */
static void test_tls_options(dg_worker_options options) {
  struct {
    dg_tls_options known;
    uint64_t unknown;
  } longer;
  dg_tls_options tls = DG_TLS_OPTIONS_INIT;
  dg_worker* worker = NULL;
  options.tls = &tls;
  tls.struct_size = 8;
  FAILS(DG_INVALID_ARGUMENT, dg_worker_create(&options, &worker));
  tls.struct_size = sizeof(tls);
  tls.flags = 4;
  FAILS(DG_UNIMPLEMENTED, dg_worker_create(&options, &worker));
  tls.flags = DG_TLS_ENCRYPT_LOCAL | DG_TLS_NO_ENCRYPT_LOCAL;
  SAYS(DG_INVALID_ARGUMENT, "exclude each other", dg_worker_create(&options, &worker));
  tls.flags = DG_TLS_ENCRYPT_LOCAL;
  SAYS(DG_FAILED_PRECONDITION, "tls.encrypt_local", dg_worker_create(&options, &worker));
  tls.flags = 0;
  tls.cert.size = 3; /* of NULL */
  FAILS(DG_INVALID_ARGUMENT, dg_worker_create(&options, &worker));
  tls.cert = DG_STR("/no/such/cert");
  SAYS(DG_INVALID_ARGUMENT, "tls.key is not", dg_worker_create(&options, &worker));
  tls.key = DG_STR("/no/such/key");
  SAYS(DG_INVALID_ARGUMENT, "DISTGRAD_TLS_CA", dg_worker_create(&options, &worker));
  tls.ca = DG_STR("/no/such/ca");
  SAYS(DG_INVALID_ARGUMENT, "/no/such/cert", dg_worker_create(&options, &worker));
  SAYS(DG_INVALID_ARGUMENT, "tls.cert, or DISTGRAD_TLS_CERT", dg_worker_create(&options, &worker));
  memset(&longer, 0, sizeof(longer));
  longer.known.struct_size = sizeof(longer);
  longer.unknown = 1;
  options.tls = &longer.known;
  FAILS(DG_UNIMPLEMENTED, dg_worker_create(&options, &worker));
  CHECK(worker == NULL);
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
  options.key_file = DG_STR("");
  test_tls_options(options);
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

  OK(dg_worker_leave(jobs[0], DG_FOREVER)); /* nothing is in flight */
  FAILS(DG_FAILED_PRECONDITION, dg_worker_leave(jobs[0], 1));
  OK(dg_context_create(jobs[2], &context));
  FAILS(DG_DEADLINE_EXCEEDED, dg_worker_leave(jobs[2], 1));
  dg_context_destroy(context);
  FAILS(DG_INVALID_ARGUMENT, dg_worker_leave(NULL, 1));
  for (int i = 0; i < 3; ++i) dg_worker_destroy(jobs[i]);
  FAILS(DG_INVALID_ARGUMENT, dg_worker_leave(jobs[0], 1));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_metrics_text(jobs[0], &text));
  CHECK(dg_worker_local_world_size(jobs[0]) == 0 && text == NULL && refused == NULL);
  dg_tensor_destroy(x);
  *strchr(shared, '?') = '\0';
  unlink(shared + strlen("file://"));
}
/* ------------------------------------------------------------------------------------- Calls */

static int handlers_ended;

static dg_error* lie(void* user_data, const dg_request* request, dg_message** reply) {
  (void)user_data;
  if (dg_message_payload(request->message).size > 0) {
    *reply = (dg_message*)(uintptr_t)parameter; /* a handle, but of a tensor */
    return NULL;
  }
  return (dg_error*)(uintptr_t)parameter;
}

static dg_code blocked_code = DG_OK, blocked_again_code = DG_OK;

/* Ends when its worker does, which it asks for more then. */
static dg_error* block(void* user_data, const dg_request* request, dg_message** reply) {
  dg_worker* self = (dg_worker*)user_data;
  dg_error* error =
      dg_worker_call(self, DG_STR("front"), DG_STR("hold"), request->message, NULL, reply);
  blocked_code = dg_error_code(error);
  blocked_again_code = code_of(
      dg_worker_call(self, DG_STR("front"), DG_STR("nothing"), request->message, NULL, reply));
  CHECK(str_is(dg_worker_name(self, 1), "back"));
  return error;
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
  add(0, "hold", hold, NULL);
  add(1, "block", block, workers[1]);
  add(1, "fail", fail, NULL);
  add(1, "lie", lie, NULL);
  add(1, "nothing", nothing, NULL);
  OK(dg_worker_register_responder(w, DG_STR("later"), later, &handlers_ended, count_up));
  FAILS(DG_ALREADY_EXISTS,
        dg_worker_register_responder(w, DG_STR("later"), later, &ended, count_up));
  FAILS(DG_ALREADY_EXISTS, dg_worker_register_responder(w, DG_STR("lie"), later, &ended, count_up));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_register_responder(w, DG_STR(""), later, &ended, count_up));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_register_responder(w, DG_STR("l"), NULL, &ended, count_up));
  FAILS(DG_INVALID_ARGUMENT,
        dg_worker_register_responder(NULL, DG_STR("l"), later, &ended, count_up));
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
  SAYS(DG_INVALID_ARGUMENT, "handler, the function that is to be called, is NULL",
       dg_worker_register(w, DG_STR("null"), NULL, &ended, count_up));
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

/* A handler that returns what another worker's handler gave, as it got it. */
static dg_error* pass_on(void* user_data, const dg_request* request, dg_message** reply) {
  dg_worker* self = (dg_worker*)user_data;
  return dg_worker_call(self, DG_STR("front"), dg_message_payload(request->message),
                        request->message, NULL, reply);
}

/* What a call of the back worker fails with, by whom, and where. */
static void origin_is(const char* function, const char* payload, uint32_t origin, uint32_t rank) {
  dg_message *request = NULL, *reply = NULL;
  dg_str text;
  dg_error* error;
  uint32_t got = 99;
  text.data = function;
  text.size = strlen(function);
  OK(dg_message_create(payload, strlen(payload), NULL, 0, &request));
  error = dg_worker_call(workers[0], DG_STR("back"), text, request, NULL, &reply);
  CHECK(dg_error_origin(error, NULL) == origin);
  CHECK(dg_error_origin(error, &got) == origin && got == rank);
  dg_error_destroy(error);
  dg_message_destroy(request);
}

static void test_origins(void) {
  dg_error* error;
  uint32_t rank = 99;
  add(1, "pass on", pass_on, workers[1]);
  add(0, "fail", fail, NULL);
  origin_is("fail", "", DG_ORIGIN_HANDLER, 1);
  origin_is("no", "", DG_ORIGIN_DISTGRAD, 1);
  origin_is("pass on", "fail", DG_ORIGIN_HANDLER, 0);
  origin_is("pass on", "no", DG_ORIGIN_DISTGRAD, 0);
  origin_is("", "", DG_ORIGIN_DISTGRAD, 0);
  error = dg_error_create_with_origin(DG_ABORTED, DG_STR("text"), DG_ORIGIN_HANDLER, 7);
  CHECK(dg_error_code(error) == DG_ABORTED && str_is(dg_error_message(error), "text"));
  CHECK(dg_error_origin(error, &rank) == DG_ORIGIN_HANDLER && rank == 7);
  dg_error_destroy(error);
  rank = 99;
  CHECK(dg_error_origin(error, &rank) == DG_ORIGIN_NONE); /* none any more */
  CHECK(dg_error_origin(NULL, &rank) == DG_ORIGIN_NONE && rank == 99);
  error = dg_error_create_with_origin(DG_ABORTED, DG_STR("text"), 3, 7);
  CHECK(dg_error_origin(error, &rank) == DG_ORIGIN_NONE && rank == 99);
  dg_error_destroy(error);
  error = dg_error_create_with_origin(DG_ABORTED, DG_STR("text"), DG_ORIGIN_HANDLER, 65536);
  CHECK(dg_error_origin(error, &rank) == DG_ORIGIN_NONE && rank == 99);
  dg_error_destroy(error);
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
  SAYS(DG_NOT_FOUND, "there is multiply",
       dg_worker_call(w, DG_STR("back"), DG_STR("multiplie"), empty, NULL, &reply));
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

/* ----------------------------------------------------------------------------------- The end */

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
  CHECK(blocked_code == DG_CANCELLED && blocked_again_code == DG_CANCELLED);
  OK(dg_future_wait(future, DG_FOREVER, &done));
  CHECK(done && code_of(dg_future_result(future, &reply)) != DG_OK);
  CHECK(sem_post(&released) == 0);
  dg_future_destroy(future);
  dg_message_destroy(empty);
}

int main(void) {
  prepare();
  test_options();
  test_jobs();
  on_both(create);
  test_names();
  test_register();
  on_both(barrier);
  test_calls();
  test_origins();
  test_remote_operators();
  test_wait();
  on_both(shut_down);
  test_end_while_a_handler_waits();
  for (int i = 0; i < 2; ++i) {
    dg_worker* gone = workers[i];
    dg_worker_destroy(gone);
    dg_worker_destroy(gone);
    FAILS(DG_INVALID_ARGUMENT, dg_worker_barrier(gone, 1, 0));
    FAILS(DG_INVALID_ARGUMENT, dg_worker_shutdown(gone, 1, 0));
    FAILS(DG_INVALID_ARGUMENT, dg_worker_serve(gone, 0));
  }
  CHECK(handlers_ended == 3);
  clean_up();
  return 0;
}
