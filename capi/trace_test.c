/* Traces, one message to several workers, and learning rates that change. From plain C. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <unistd.h>

#include "capi/testing/check.h"

static char rendezvous[512];
static dg_worker *front, *back;

static dg_worker* start(dg_str name, uint64_t flags) {
  dg_worker_options options = DG_WORKER_OPTIONS_INIT;
  dg_worker* worker = NULL;
  options.name = name;
  options.rendezvous.data = rendezvous;
  options.rendezvous.size = strlen(rendezvous);
  options.thread_count = 2;
  options.flags = flags;
  options.world_size = flags & DG_WORKER_JOIN ? 0 : 1;
  OK(dg_worker_create(&options, &worker));
  return worker;
}

/* Replies with the payload and, if there is one, twice the tensor; an empty payload is an error. */
static dg_error* twice(void* user_data, const dg_request* request, dg_message** reply) {
  const dg_str payload = dg_message_payload(request->message);
  const dg_tensor* result = NULL;
  dg_tensor *x = NULL, *y = NULL;
  dg_error* error;
  (void)user_data;
  if (payload.size == 0) return dg_error_create(DG_DATA_LOSS, DG_STR("nothing to say"));
  if (dg_message_tensor_count(request->message) == 0)
    return dg_message_create(payload.data, payload.size, NULL, 0, reply);
  OK(dg_message_tensor(request->message, 0, &x));
  result = y = op2("aten::add.Tensor", x, x);
  error = dg_message_create(payload.data, payload.size, &result, 1, reply);
  dg_tensor_destroy(x);
  dg_tensor_destroy(y);
  return error;
}

static int count_of(const dg_message* message, const char* part) {
  const dg_str text = dg_message_payload(message);
  const size_t size = strlen(part);
  int count = 0;
  for (size_t i = 0; i + size <= text.size; ++i) {
    if (memcmp(text.data + i, part, size) == 0) ++count;
  }
  return count;
}

/* ------------------------------------------------------------------------------------ Traces */

static void call(const char* payload) {
  dg_message *request = NULL, *reply = NULL;
  OK(dg_message_create(payload, strlen(payload), NULL, 0, &request));
  if (*payload != '\0')
    OK(dg_worker_call(front, DG_STR("back"), DG_STR("twice"), request, NULL, &reply));
  else
    FAILS(DG_DATA_LOSS,
          dg_worker_call(front, DG_STR("back"), DG_STR("twice"), request, NULL, &reply));
  dg_message_destroy(request);
  dg_message_destroy(reply);
}

static dg_message* stop(dg_worker* worker) {
  dg_message* text = NULL;
  OK(dg_worker_stop_trace(worker, &text));
  CHECK(dg_message_tensor_count(text) == 0);
  return text;
}

static void test_trace(void) {
  struct {
    dg_trace_options known;
    uint64_t unknown;
  } longer = {DG_TRACE_OPTIONS_INIT, 0};
  dg_trace_options options = DG_TRACE_OPTIONS_INIT;
  dg_message *made, *served, *none = NULL;
  FAILS(DG_FAILED_PRECONDITION, dg_worker_stop_trace(front, &none));
  OK(dg_worker_start_trace(front, NULL));
  OK(dg_worker_start_trace(back, &options));
  FAILS(DG_FAILED_PRECONDITION, dg_worker_start_trace(front, &options));
  call("hello");
  call("");
  made = stop(front);
  served = stop(back);
  CHECK(count_of(made, "\"name\":\"twice\"") == 2 && count_of(served, "\"name\":\"twice\"") == 2);
  CHECK(count_of(made, "\"ph\":\"s\"") == 2 && count_of(made, "\"ph\":\"f\"") == 0);
  CHECK(count_of(served, "\"ph\":\"s\"") == 0 && count_of(served, "\"ph\":\"f\"") == 2);
  CHECK(count_of(served, "\"name\":\"handler\"") == 2);
  CHECK(count_of(made, "nothing to say") == 1 && count_of(served, "nothing to say") == 1);
  CHECK(count_of(made, "\"dropped_spans\":0") == 1);
  dg_message_destroy(made);
  dg_message_destroy(served);

  /* What does not fit is said. */
  options.max_bytes = 1;
  OK(dg_worker_start_trace(front, &options));
  call("hello");
  made = stop(front);
  CHECK(count_of(made, "\"dropped_spans\":1") == 1 && count_of(made, "\"name\":\"twice\"") == 0);
  dg_message_destroy(made);

  options.struct_size = 8;
  FAILS(DG_INVALID_ARGUMENT, dg_worker_start_trace(front, &options));
  longer.known.struct_size = sizeof(longer);
  longer.unknown = 1;
  FAILS(DG_UNIMPLEMENTED, dg_worker_start_trace(front, &longer.known));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_start_trace(NULL, NULL));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_stop_trace(NULL, &none));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_stop_trace(front, NULL));
  /* One that runs ends with its worker. */
  OK(dg_worker_start_trace(front, NULL));
  CHECK(none == NULL);
}

/* ---------------------------------------------------------------------------- Several workers */

static void test_call_each(void) {
  const float three = 3;
  const dg_str to[4] = {DG_STR("back"), DG_STR("front"), DG_STR("nobody"), DG_STR("back")};
  dg_tensor *x = floats(&three, 1, 1), *sum = NULL, *gradient = NULL, *outs[2];
  const dg_tensor *tensors[1], *root;
  dg_message *request = NULL, *replies[4] = {NULL, NULL, NULL, NULL};
  dg_error* errors[4] = {NULL, NULL, NULL, NULL};
  dg_context* context = NULL;
  dg_call_options options = DG_CALL_OPTIONS_INIT;
  OK(dg_tensor_require_grad(x));
  OK(dg_context_create(front, &context));
  tensors[0] = x;
  OK(dg_message_create("each", 4, tensors, 1, &request));
  options.context = context;
  OK(dg_worker_call_each(front, to, 4, DG_STR("twice"), request, &options, replies, errors));
  for (int i = 0; i < 4; ++i) {
    CHECK((replies[i] == NULL) != (errors[i] == NULL));
    if (i != 0 && i != 3) continue;
    CHECK(str_is(dg_message_payload(replies[i]), "each"));
    OK(dg_message_tensor(replies[i], 0, &outs[i / 3]));
  }
  SAYS(DG_NOT_FOUND, "front", errors[1]); /* it has not registered it */
  SAYS(DG_NOT_FOUND, "nobody", errors[2]);
  /* Each has an edge of its own. */
  root = sum = op2("aten::add.Tensor", outs[0], outs[1]);
  OK(dg_context_backward(context, &root, 1, NULL));
  OK(dg_context_gradient(context, x, &gradient));
  CHECK(data_of(gradient)[0] == 4);
  for (int i = 0; i < 2; ++i) dg_tensor_destroy(outs[i]);
  for (int i = 0; i < 4; ++i) dg_message_destroy(replies[i]);
  dg_tensor_destroy(gradient);
  dg_tensor_destroy(sum);

  /* Nobody to call is no error; nothing is stored with one. */
  memset(replies, 0, sizeof(replies));
  memset(errors, 0, sizeof(errors));
  OK(dg_worker_call_each(front, NULL, 0, DG_STR("twice"), request, NULL, NULL, NULL));
  FAILS(DG_INVALID_ARGUMENT,
        dg_worker_call_each(NULL, to, 4, DG_STR("twice"), request, NULL, replies, errors));
  FAILS(DG_INVALID_ARGUMENT,
        dg_worker_call_each(front, NULL, 4, DG_STR("twice"), request, NULL, replies, errors));
  FAILS(DG_INVALID_ARGUMENT,
        dg_worker_call_each(front, to, 4, DG_STR("twice"), NULL, NULL, replies, errors));
  FAILS(DG_INVALID_ARGUMENT,
        dg_worker_call_each(front, to, 4, DG_STR("twice"), request, NULL, NULL, errors));
  FAILS(DG_INVALID_ARGUMENT,
        dg_worker_call_each(front, to, 4, DG_STR("twice"), request, NULL, replies, NULL));
  options.struct_size = 1;
  FAILS(DG_INVALID_ARGUMENT,
        dg_worker_call_each(front, to, 4, DG_STR("twice"), request, &options, replies, errors));
  for (int i = 0; i < 4; ++i) CHECK(replies[i] == NULL && errors[i] == NULL);
  dg_message_destroy(request);
  dg_context_destroy(context);
  dg_tensor_destroy(x);
}

static void call_each_in_callback(void* user_data) {
  dg_message* reply = NULL;
  dg_error* error = NULL;
  const dg_str to = DG_STR("back");
  *(dg_code*)user_data =
      code_of(dg_worker_call_each(front, &to, 1, DG_STR("twice"), NULL, NULL, &reply, &error));
}

static void set_rate_in_callback(void* user_data) {
  *(dg_code*)user_data = code_of(dg_optimizer_set_learning_rate(NULL, 1));
}

static void test_waiting_in_callbacks(void) {
  dg_cancellation* cancellation = NULL;
  dg_code codes[2] = {DG_OK, DG_OK};
  OK(dg_cancellation_create(&cancellation));
  OK(dg_cancellation_cancel(cancellation));
  OK(dg_cancellation_on_cancel(cancellation, call_each_in_callback, &codes[0], NULL, NULL));
  OK(dg_cancellation_on_cancel(cancellation, set_rate_in_callback, &codes[1], NULL, NULL));
  CHECK(codes[0] == DG_FAILED_PRECONDITION && codes[1] == DG_FAILED_PRECONDITION);
  dg_cancellation_destroy(cancellation);
}

/* ----------------------------------------------------------------------------- Learning rates */

static float step(dg_optimizer* optimizer, const dg_tensor* parameter) {
  const dg_tensor* root;
  dg_tensor* y = op1("aten::sum", parameter);
  dg_context* context = NULL;
  root = y;
  OK(dg_context_create(front, &context));
  OK(dg_context_backward(context, &root, 1, NULL));
  OK(dg_optimizer_step(optimizer, context));
  dg_context_destroy(context);
  dg_tensor_destroy(y);
  return data_of(parameter)[0];
}

/* The worker "back" has no part, and x is 1. */
static void test_parts_on_some_workers(dg_optimizer* mine, dg_tensor* x) {
  const dg_str front_alone = DG_STR("front"), back_alone = DG_STR("back");
  const dg_str twice[2] = {DG_STR("front"), DG_STR("front")};
  const dg_str both[2] = {DG_STR("front"), DG_STR("back")};
  const dg_str no_text[2] = {DG_STR("front"), {NULL, 1}};
  SAYS(DG_INVALID_ARGUMENT, "lack 'front'", dg_optimizer_set_workers(mine, &back_alone, 1));
  SAYS(DG_INVALID_ARGUMENT, "lack 'front'", dg_optimizer_set_workers(mine, NULL, 0));
  SAYS(DG_INVALID_ARGUMENT, "'front' twice", dg_optimizer_set_workers(mine, twice, 2));
  SAYS(DG_INVALID_ARGUMENT, "workers", dg_optimizer_set_workers(mine, NULL, 1));
  SAYS(DG_INVALID_ARGUMENT, "workers[1]", dg_optimizer_set_workers(mine, no_text, 2));
  FAILS(DG_INVALID_ARGUMENT, dg_optimizer_set_workers(NULL, &front_alone, 1));
  OK(dg_optimizer_set_workers(mine, &front_alone, 1));
  OK(dg_optimizer_set_learning_rate(mine, 0));
  CHECK(step(mine, x) == 1);
  OK(dg_optimizer_set_workers(mine, both, 2));
  SAYS(DG_NOT_FOUND, "back", dg_optimizer_set_learning_rate(mine, 1));
}

static void test_learning_rate(void) {
  const float one = 1;
  dg_tensor* x = floats(&one, 1, 1);
  const dg_tensor* parameters[1];
  dg_optimizer *mine = NULL, *theirs = NULL;
  dg_sgd_options options = DG_SGD_OPTIONS_INIT;
  options.learning_rate = 0.5;
  parameters[0] = x;
  OK(dg_tensor_require_grad(x));
  OK(dg_optimizer_create_sgd(front, DG_STR(""), parameters, 1, &options, &mine));
  SAYS(DG_NOT_FOUND, "back", dg_optimizer_set_learning_rate(mine, 1)); /* it has no part */
  test_parts_on_some_workers(mine, x);
  OK(dg_optimizer_create_adam(back, DG_STR(""), NULL, 0, NULL, &theirs));
  /* Whichever part is asked. */
  OK(dg_optimizer_set_learning_rate(theirs, 0.25));
  CHECK(step(mine, x) == 0.75f);
  OK(dg_optimizer_set_learning_rate(mine, 0));
  CHECK(step(mine, x) == 0.75f);
  FAILS(DG_INVALID_ARGUMENT, dg_optimizer_set_learning_rate(mine, -1));
  FAILS(DG_INVALID_ARGUMENT, dg_optimizer_set_learning_rate(mine, NAN));
  FAILS(DG_INVALID_ARGUMENT, dg_optimizer_set_learning_rate(mine, INFINITY));
  FAILS(DG_INVALID_ARGUMENT, dg_optimizer_set_learning_rate(NULL, 1));
  FAILS(DG_INVALID_ARGUMENT, dg_optimizer_set_learning_rate((dg_optimizer*)(uintptr_t)x, 1));
  CHECK(step(mine, x) == 0.75f);
  dg_optimizer_destroy(theirs);
  FAILS(DG_INVALID_ARGUMENT, dg_optimizer_set_learning_rate(theirs, 1));
  OK(dg_optimizer_set_learning_rate(mine, 0.5)); /* the part lasts as long as the worker */
  CHECK(step(mine, x) == 0.25f);
  dg_worker_destroy(front);
  FAILS(DG_FAILED_PRECONDITION, dg_optimizer_set_learning_rate(mine, 1));
  dg_optimizer_destroy(mine);
  dg_tensor_destroy(x);
}

int main(void) {
  const char* folder = getenv("TEST_TMPDIR");
  dg_message* none = NULL;
  snprintf(rendezvous, sizeof(rendezvous), "file://%s/trace.%d", folder ? folder : "/tmp",
           (int)getpid());
  front = start(DG_STR("front"), 0);
  back = start(DG_STR("back"), DG_WORKER_JOIN);
  OK(dg_worker_register(back, DG_STR("twice"), twice, NULL, NULL));
  OK(dg_worker_update_members(front));
  test_trace();
  test_call_each();
  test_waiting_in_callbacks();
  test_learning_rate();
  FAILS(DG_INVALID_ARGUMENT, dg_worker_start_trace(front, NULL));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_stop_trace(front, &none));
  dg_worker_destroy(back);
  unlink(rendezvous + strlen("file://"));
  return 0;
}
