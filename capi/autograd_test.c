/* Contexts, backward and optimizers over two workers in this process, from plain C; and what
 * becomes of them after the workers' end. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>

#include "capi/testing/pair.h"

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
  sum = 0;
  FAILS(DG_FAILED_PRECONDITION, dg_context_gradients(context, visit, &sum));
  CHECK(sum == 0);
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

/* A visitor that counts, and keeps one tensor and the names. */
typedef struct state_of {
  int count;
  const char* wanted;
  dg_tensor* tensors[16];
  char texts[16][64];
  dg_str names[16];
} state_of;
static void visit_state(void* user_data, dg_str name, const dg_tensor* tensor) {
  state_of* state = (state_of*)user_data;
  CHECK(state->count < 16 && name.size < 64);
  memcpy(state->texts[state->count], name.data, name.size);
  state->names[state->count].data = state->texts[state->count];
  state->names[state->count].size = name.size;
  OK(dg_tensor_clone(tensor, &state->tensors[state->count]));
  ++state->count;
}
static const dg_tensor* find_state(const state_of* state, const char* name) {
  for (int i = 0; i < state->count; ++i) {
    if (str_is(state->names[i], name)) return state->tensors[i];
  }
  CHECK(!"the name is there");
  return NULL;
}

/* Of the part of an Adam that has taken one step with the gradient 3. */
static void test_state(dg_optimizer* optimizer, const dg_context* context) {
  state_of state = {0}, again = {0};
  void* number = NULL;
  OK(dg_optimizer_state(optimizer, visit_state, &state));
  CHECK(state.count == 8 && str_is(state.names[0], "param_groups.0.lr"));
  OK(dg_tensor_data(find_state(&state, "param_groups.0.lr"), &number));
  CHECK(*(double*)number == 0.25);
  OK(dg_tensor_data(find_state(&state, "state.0.step"), &number));
  CHECK(*(int64_t*)number == 1);
  CHECK(data_of(find_state(&state, "state.0.exp_avg"))[0] > 0.299f);
  OK(dg_optimizer_step(optimizer, context));
  OK(dg_optimizer_load_state(optimizer, state.names, (const dg_tensor* const*)state.tensors,
                             (size_t)state.count));
  OK(dg_optimizer_state(optimizer, visit_state, &again));
  OK(dg_tensor_data(find_state(&again, "state.0.step"), &number));
  CHECK(again.count == 8 && *(int64_t*)number == 1);
  SAYS(DG_INVALID_ARGUMENT, "'state.0.exp_avg_sq' is missing",
       dg_optimizer_load_state(optimizer, state.names, (const dg_tensor* const*)state.tensors, 7));
  FAILS(DG_INVALID_ARGUMENT,
        dg_optimizer_load_state(optimizer, NULL, (const dg_tensor* const*)state.tensors, 8));
  FAILS(DG_INVALID_ARGUMENT, dg_optimizer_load_state(optimizer, state.names, NULL, 8));
  FAILS(DG_INVALID_ARGUMENT, dg_optimizer_load_state(NULL, NULL, NULL, 0));
  FAILS(DG_INVALID_ARGUMENT, dg_optimizer_state(optimizer, NULL, &state));
  FAILS(DG_INVALID_ARGUMENT, dg_optimizer_state(NULL, visit_state, &state));
  CHECK(state.count == 8);
  for (int i = 0; i < 8; ++i) {
    dg_tensor_destroy(state.tensors[i]);
    dg_tensor_destroy(again.tensors[i]);
  }
}

/* Both workers have parts of that name. */
static void test_remove(dg_optimizer* front, dg_optimizer* back, const dg_context* context) {
  state_of state = {0};
  dg_optimizer* again = NULL;
  dg_context* of_back = NULL;
  OK(dg_optimizer_remove(front));
  OK(dg_optimizer_remove(front));
  FAILS(DG_INVALID_ARGUMENT, dg_optimizer_remove(NULL));
  FAILS(DG_NOT_FOUND, dg_optimizer_step(front, context));
  FAILS(DG_INVALID_ARGUMENT, dg_optimizer_step(back, context)); /* which is of the other worker */
  OK(dg_context_create(workers[1], &of_back));
  FAILS(DG_NOT_FOUND, dg_optimizer_step(back, of_back));
  dg_context_destroy(of_back);
  FAILS(DG_NOT_FOUND, dg_optimizer_state(front, visit_state, &state));
  OK(dg_optimizer_create_sgd(workers[0], DG_STR("s"), NULL, 0, NULL, &again));
  OK(dg_optimizer_step(again, context));
  OK(dg_optimizer_remove(front)); /* not the other one of its name */
  FAILS(DG_NOT_FOUND, dg_optimizer_step(front, context));
  OK(dg_optimizer_step(again, context));
  dg_optimizer_destroy(again);
  CHECK(state.count == 0);
}

/* Accumulation over contexts, against three backwards of one process. */
static void test_sums(void) {
  const float one = 1;
  const dg_tensor* parameters[1];
  dg_tensor* mine = floats(&one, 1, 1);
  dg_optimizer *front = NULL, *back = NULL;
  dg_context* contexts[3] = {NULL, NULL, NULL};
  dg_tensor* gradient = NULL;
  dg_sgd_options sgd = DG_SGD_OPTIONS_INIT;
  float sum = 0, sum_there = 0, before_there;
  sgd.learning_rate = 0.25;
  OK(dg_tensor_require_grad(mine));
  parameters[0] = mine;
  OK(dg_optimizer_create_sgd(workers[0], DG_STR("sum"), parameters, 1, &sgd, &front));
  parameters[0] = parameter;
  OK(dg_optimizer_create_sgd(workers[1], DG_STR("sum"), parameters, 1, &sgd, &back));
  before_there = data_of(parameter)[0];
  for (int i = 0; i < 3; ++i) {
    dg_tensor* y;
    const dg_tensor* root;
    data_of(mine)[0] = 1.1f + (float)i; /* the gradient over there */
    OK(dg_context_create(workers[0], &contexts[i]));
    root = y = remote(contexts[i], mine, DG_STR("multiply"));
    OK(dg_context_backward(contexts[i], &root, 1, NULL));
    dg_tensor_destroy(y);
    sum += before_there;
    sum_there += 1.1f + (float)i;
  }
  data_of(mine)[0] = 1;
  OK(dg_worker_sum_gradients(workers[0], (const dg_context* const*)contexts, 3));
  OK(dg_context_gradient(contexts[0], mine, &gradient));
  CHECK(data_of(gradient)[0] == sum);
  dg_tensor_destroy(gradient);
  FAILS(DG_NOT_FOUND, dg_context_gradient(contexts[1], mine, &gradient));
  OK(dg_optimizer_step(front, contexts[0]));
  CHECK(data_of(mine)[0] == 1 - 0.25f * sum);
  CHECK(data_of(parameter)[0] == before_there - 0.25f * sum_there);
  data_of(parameter)[0] = before_there;

  FAILS(DG_INVALID_ARGUMENT, dg_worker_sum_gradients(workers[0], NULL, 0));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_sum_gradients(workers[0], NULL, 2));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_sum_gradients(NULL, (const dg_context* const*)contexts, 3));
  OK(dg_context_release(contexts[2]));
  FAILS(DG_FAILED_PRECONDITION,
        dg_worker_sum_gradients(workers[0], (const dg_context* const*)contexts, 3));
  dg_context_destroy(contexts[2]);
  SAYS(DG_INVALID_ARGUMENT, "contexts[2]",
       dg_worker_sum_gradients(workers[0], (const dg_context* const*)contexts, 3));
  contexts[2] = contexts[0];
  SAYS(DG_INVALID_ARGUMENT, "twice",
       dg_worker_sum_gradients(workers[0], (const dg_context* const*)contexts, 3));
  OK(dg_optimizer_remove(front));
  OK(dg_optimizer_remove(back));
  dg_optimizer_destroy(front);
  dg_optimizer_destroy(back);
  dg_context_destroy(contexts[0]);
  dg_context_destroy(contexts[1]);
  dg_tensor_destroy(mine);
}

static void test_optimizers(void) {
  const float one = 1;
  const dg_tensor* parameters[1];
  dg_tensor *mine = floats(&one, 1, 1), *plain = floats(&one, 1, 1), *y;
  const dg_tensor *root, *no_leaf = plain;
  dg_optimizer *fronts[3], *back[3], *none = NULL;
  dg_context* context = NULL;
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
  test_state(fronts[1], context);
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
  test_remove(fronts[0], back[0], context);
  for (int i = 0; i < 3; ++i) {
    dg_optimizer_destroy(back[i]);
    dg_optimizer_destroy(fronts[i]);
  }
  dg_context_destroy(context);
  dg_tensor_destroy(y);
  dg_tensor_destroy(mine);
  dg_tensor_destroy(plain);
}

/* Of contexts of any worker of the process; and once all of them have ended. */
static void test_local(dg_optimizer* local, const dg_tensor* leaf) {
  double norm = -1;
  state_of state = {0};
  const dg_str name = DG_STR("front");
  for (int rank = 0; rank < 2; ++rank) {
    const float before = data_of(leaf)[0];
    dg_context* context = NULL;
    dg_tensor* y = op1("aten::exp", leaf);
    const dg_tensor* root = y;
    OK(dg_context_create(workers[rank], &context));
    OK(dg_context_backward(context, &root, 1, NULL));
    OK(dg_optimizer_set_learning_rate(local, 0.5 / (rank + 1)));
    OK(dg_optimizer_clip_gradients(local, context, 0.25, &norm));
    CHECK(norm > data_of(y)[0] - 1e-4f && norm < data_of(y)[0] + 1e-4f);
    OK(dg_optimizer_step(local, context));
    CHECK(data_of(leaf)[0] < before);
    dg_context_destroy(context);
    FAILS(DG_INVALID_ARGUMENT, dg_optimizer_step(local, context));
    dg_tensor_destroy(y);
  }
  FAILS(DG_FAILED_PRECONDITION, dg_optimizer_set_workers(local, &name, 1));
  OK(dg_optimizer_state(local, visit_state, &state));
  CHECK(*(const double*)(const void*)data_of(find_state(&state, "param_groups.0.lr")) == 0.25);
  OK(dg_optimizer_load_state(local, state.names, (const dg_tensor* const*)state.tensors,
                             (size_t)state.count));
  for (int i = 0; i < state.count; ++i) dg_tensor_destroy(state.tensors[i]);
}

static void test_locals(void) {
  const float one = 1;
  const dg_tensor* parameters[1];
  dg_tensor *sgd_leaf = floats(&one, 1, 1), *adam_leaf = floats(&one, 1, 1);
  dg_optimizer *sgd = NULL, *adam = NULL, *adamw = NULL, *none = NULL;
  OK(dg_tensor_require_grad(sgd_leaf));
  OK(dg_tensor_require_grad(adam_leaf));
  parameters[0] = sgd_leaf;
  /* Names of several are theirs alone. */
  OK(dg_optimizer_create_sgd(NULL, DG_STR("s"), parameters, 1, NULL, &sgd));
  parameters[0] = adam_leaf;
  OK(dg_optimizer_create_adam(NULL, DG_STR("s"), parameters, 1, NULL, &adam));
  OK(dg_optimizer_create_adamw(NULL, DG_STR("s"), parameters, 1, NULL, &adamw));
  test_local(sgd, sgd_leaf);
  test_local(adam, adam_leaf);
  test_local(adamw, adam_leaf);
  OK(dg_optimizer_remove(sgd));
  SAYS(DG_NOT_FOUND, "the optimizer 's' was removed", dg_optimizer_set_learning_rate(sgd, 1));
  SAYS(
      DG_INVALID_ARGUMENT, "parameters[0] is NULL",
      dg_optimizer_create_sgd(NULL, DG_STR("s"), (const dg_tensor* const[]){NULL}, 1, NULL, &none));
  CHECK(none == NULL);
  dg_optimizer_destroy(sgd);
  dg_optimizer_destroy(adam);
  dg_optimizer_destroy(adamw);
  dg_tensor_destroy(sgd_leaf);
  dg_tensor_destroy(adam_leaf);
}

/* Contexts, optimizers, futures and responders give errors; a local optimizer goes on. */
static void test_what_outlives_its_worker(void) {
  const float one = 1;
  dg_tensor *mine = floats(&one, 1, 1), *y;
  const dg_tensor* root;
  dg_optimizer *optimizer = NULL, *local = NULL;
  dg_context* context = NULL;
  dg_future* outliving[2];
  dg_responder* responders[2];
  dg_message* reply = NULL;
  double norm = -1;
  OK(dg_tensor_require_grad(mine));
  OK(dg_optimizer_create_sgd(workers[0], DG_STR("last"), NULL, 0, NULL, &optimizer));
  OK(dg_optimizer_create_sgd(NULL, DG_STR(""), NULL, 0, NULL, &local));
  OK(dg_context_create(workers[0], &context));
  root = y = remote(context, mine, DG_STR("multiply"));
  for (int i = 0; i < 2; ++i) {
    outliving[i] = begin(workers[i], DG_STR("later"), NULL);
    responders[i] = later_responder;
  }
  for (int i = 1; i >= 0; --i) dg_worker_destroy(workers[i]);
  for (int i = 0; i < 2; ++i) CHECK(end(outliving[i], &reply) != DG_OK);
  OK(dg_responder_answer(responders[0], NULL, NULL)); /* to nobody */
  dg_responder_destroy(responders[1]);
  FAILS(DG_CANCELLED, dg_context_backward(context, &root, 1, NULL));
  FAILS(DG_FAILED_PRECONDITION, dg_optimizer_step(optimizer, context));
  FAILS(DG_FAILED_PRECONDITION, dg_optimizer_clip_gradients(optimizer, context, 1, &norm));
  OK(dg_optimizer_set_learning_rate(local, 1));
  dg_optimizer_destroy(local);
  dg_optimizer_destroy(optimizer);
  FAILS(DG_INVALID_ARGUMENT, dg_optimizer_clip_gradients(optimizer, context, 1, &norm));
  OK(dg_context_release(context));
  dg_context_destroy(context);
  dg_tensor_destroy(y);
  dg_tensor_destroy(mine);
}

static void count_context(void* count, const dg_context_state* context) {
  (void)context;
  ++*(size_t*)count;
}

typedef struct held_call {
  dg_context* context;
  dg_message* request;
  dg_code code;
} held_call;
static void* call_held(void* argument) {
  held_call* held = (held_call*)argument;
  dg_call_options options = DG_CALL_OPTIONS_INIT;
  dg_message* reply = NULL;
  options.context = held->context;
  held->code = code_of(
      dg_worker_call(workers[0], DG_STR("back"), DG_STR("hold"), held->request, &options, &reply));
  dg_message_destroy(reply);
  return NULL;
}

/* To destroy a context ends it on all workers at once, whatever a thread waits for in it. */
static void test_destroy_under_a_call(void) {
  held_call held = {NULL, NULL, DG_OK};
  const float one = 1;
  dg_tensor *leaf = floats(&one, 1, 1), *sent;
  pthread_t thread;
  size_t known = 1;
  OK(dg_tensor_require_grad(leaf));
  sent = op1("aten::exp", leaf);
  held.request = message_of(sent);
  OK(dg_context_create(workers[0], &held.context));
  CHECK(pthread_create(&thread, NULL, call_held, &held) == 0);
  while (sem_wait(&entered) != 0) continue;
  OK(dg_worker_contexts(workers[1], count_context, &known));
  CHECK(known == 2);
  dg_context_destroy(held.context);
  while (known > 0) { /* the test's time is the limit */
    known = 0;
    OK(dg_worker_contexts(workers[1], count_context, &known));
  }
  CHECK(sem_post(&released) == 0);
  CHECK(pthread_join(thread, NULL) == 0);
  dg_message_destroy(held.request);
  dg_tensor_destroy(sent);
  dg_tensor_destroy(leaf);
}

int main(void) {
  prepare();
  on_both(create);
  for (int rank = 0; rank < 2; ++rank) {
    add(rank, "multiply", multiply, NULL);
    add(rank, "relay", relay, workers[rank]);
    add(rank, "hold", hold, NULL);
  }
  OK(dg_worker_register_responder(workers[1], DG_STR("later"), later, NULL, NULL));
  on_both(barrier);
  test_backward();
  test_destroy_under_a_call();
  on_both(shut_down);
  test_optimizers();
  test_sums();
  test_locals();
  test_what_outlives_its_worker();
  clean_up();
  return 0;
}
