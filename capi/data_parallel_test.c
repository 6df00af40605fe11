/* Data parallel from plain C: against one device, at its edges, and used wrongly. */
#define _POSIX_C_SOURCE 200809L
#include <unistd.h>

#include "capi/testing/check.h"

static const float weights[6] = {1, 2, 3, 4, 5, 6};
static const float rows[12] = {1, 0, 2, 0, 1, 3, 4, 1, 0, 2, 2, 1};

static dg_str cpus[4]; /* the same device four times */

/* The error names all of `parts`. */
static void check_error(dg_error* error, dg_code code, const char* part, const char* other) {
  const dg_str message = dg_error_message(error);
  char text[1000];
  CHECK(message.size < sizeof(text));
  memcpy(text, message.data, message.size);
  text[message.size] = '\0';
  if (dg_error_code(error) != code || !strstr(text, part) || !strstr(text, other)) {
    fprintf(stderr, "error %d: %s\n", (int)dg_error_code(error), text);
    abort();
  }
  dg_error_destroy(error);
}

/* -------------------------------------------------------------------------------- The function */

typedef struct function {
  int calls, ended;
  bool fail;             /* in replica 1 */
  int outputs;           /* what it stores: 0 as many as asked for, else see below */
  dg_data_parallel* own; /* calls itself */
  dg_code code;
} function;
enum { NOTHING = 1, NONE = 2, TWICE = 3 };

/* tanh(x w); the second output is the sum of all. The buffer counts. */
static dg_error* forward(void* user_data, const dg_replica* replica, dg_tensor** outputs) {
  function* self = (function*)user_data;
  dg_tensor* product;
  CHECK(replica->struct_size >= sizeof(dg_replica));
  CHECK(str_is(replica->device, "cpu"));
  CHECK(replica->parameter_count == 1 && replica->input_count == 2);
  CHECK(replica->inputs[1] == NULL);
  __atomic_add_fetch(&self->calls, 1, __ATOMIC_SEQ_CST);
  if (self->own != NULL && replica->index == 0) {
    self->code = code_of(dg_data_parallel_forward(self->own, replica->inputs, 2, outputs, 1));
  }
  product = op2("aten::matmul", replica->inputs[0], replica->parameters[0]);
  if (replica->buffer_count > 0) {
    dg_value arguments[2];
    arguments[0] = dg_value_tensor(replica->buffers[0]);
    arguments[1] = dg_value_integer(1);
    dg_tensor_destroy(op("aten::add_.Scalar", arguments, 2));
  }
  if (self->outputs != NOTHING) outputs[0] = op1("aten::tanh", product);
  if (self->outputs == TWICE && replica->output_count > 1) outputs[1] = outputs[0];
  if (self->outputs == NONE) outputs[1] = (dg_tensor*)(uintptr_t)self;
  if (self->outputs == 0 && replica->output_count > 1) outputs[1] = op1("aten::sum", product);
  dg_tensor_destroy(product);
  if (self->fail && replica->index == 1) {
    return dg_error_create(DG_DATA_LOSS, DG_STR("the dog ate it"));
  }
  return NULL;
}
static void end(void* user_data) { ++((function*)user_data)->ended; }

static dg_data_parallel* parallel_of(const dg_tensor* weight, const dg_tensor* buffer,
                                     size_t devices, function* self) {
  dg_data_parallel_options options = DG_DATA_PARALLEL_OPTIONS_INIT;
  dg_data_parallel* parallel = NULL;
  options.devices = cpus;
  options.device_count = devices;
  options.output_device = DG_STR("cpu");
  options.buffers = &buffer;
  options.buffer_count = buffer != NULL;
  options.bucket_bytes = 64;
  options.timeout_ms = DG_FOREVER;
  OK(dg_data_parallel_create(&weight, 1, &options, forward, self, end, &parallel));
  return parallel;
}

/* The gradient of the sum of squares of what replicas of `devices` make of the rows. */
static dg_tensor* gradient_on(dg_worker* worker, size_t devices, int64_t row_count) {
  function self = {0};
  dg_tensor *weight = floats(weights, 3, 2), *x = floats(rows, row_count, 3), *buffer = NULL;
  dg_tensor *y = NULL, *square, *loss, *gradient = NULL;
  const dg_tensor *inputs[2], *root;
  const int64_t zero = 0;
  int64_t rows_of_part;
  dg_context* context = NULL;
  dg_data_parallel* parallel;
  void* count = NULL;
  OK(dg_tensor_require_grad(weight));
  OK(dg_tensor_from_data(&zero, DG_INT64, NULL, 0, &buffer));
  parallel = parallel_of(weight, buffer, devices, &self);
  inputs[0] = x;
  inputs[1] = NULL;
  for (int step = 0; step < 3; ++step) {
    dg_tensor_destroy(y);
    OK(dg_data_parallel_forward(parallel, inputs, 2, &y, 1));
  }
  CHECK(size_of(y, 0) == row_count && size_of(y, 1) == 2);
  rows_of_part = (row_count + (int64_t)devices - 1) / (int64_t)devices;
  CHECK(self.calls == 3 * (int)((row_count + rows_of_part - 1) / rows_of_part));
  OK(dg_tensor_data(buffer, &count));
  CHECK(*(int64_t*)count == 3); /* replica 0's */

  OK(dg_context_create(worker, &context));
  square = op2("aten::mul.Tensor", y, y);
  root = loss = op1("aten::sum", square);
  OK(dg_context_backward(context, &root, 1, NULL));
  OK(dg_context_gradient(context, weight, &gradient));
  CHECK(self.ended == 0);
  dg_data_parallel_destroy(parallel);
  dg_context_destroy(context);
  dg_tensor_destroy(loss);
  dg_tensor_destroy(square);
  dg_tensor_destroy(y);
  dg_tensor_destroy(buffer);
  dg_tensor_destroy(x);
  dg_tensor_destroy(weight);
  CHECK(self.ended == 1);
  return gradient;
}

static void test_gradients(void) {
  char rendezvous[512];
  const char* folder = getenv("TEST_TMPDIR");
  dg_worker_options options = DG_WORKER_OPTIONS_INIT;
  dg_worker* worker = NULL;
  snprintf(rendezvous, sizeof(rendezvous), "file://%s/parallel.%d", folder ? folder : "/tmp",
           (int)getpid());
  options.world_size = 1;
  options.rendezvous.data = rendezvous;
  options.rendezvous.size = strlen(rendezvous);
  OK(dg_worker_create(&options, &worker));
  for (int64_t count = 1; count <= 4; ++count) {
    dg_tensor* want = gradient_on(worker, 1, count);
    for (size_t devices = 2; devices <= 4; ++devices) {
      dg_tensor* got = gradient_on(worker, devices, count);
      for (int i = 0; i < 6; ++i) {
        const float difference = data_of(got)[i] - data_of(want)[i];
        CHECK(difference < 1e-5f && difference > -1e-5f);
      }
      dg_tensor_destroy(got);
    }
    dg_tensor_destroy(want);
  }
  dg_worker_destroy(worker);
  unlink(rendezvous + strlen("file://"));
}

static void test_errors_of_the_function(void) {
  function self = {0};
  dg_tensor *weight = floats(weights, 3, 2), *x = floats(rows, 4, 3);
  dg_tensor* outputs[2] = {NULL, NULL};
  const dg_tensor* inputs[2];
  dg_data_parallel *two = parallel_of(weight, NULL, 2, &self),
                   *one = parallel_of(weight, NULL, 1, &self);
  inputs[0] = x;
  inputs[1] = NULL;
  self.fail = true;
  check_error(dg_data_parallel_forward(two, inputs, 2, outputs, 2), DG_DATA_LOSS, "the dog ate it",
              "in replica 1 of 2, on cpu");
  self.fail = false;
  self.outputs = NONE;
  check_error(dg_data_parallel_forward(two, inputs, 2, outputs, 2), DG_INTERNAL,
              "outputs[1] is not a valid dg_tensor", "in replica 0 of 2, on cpu");
  check_error(dg_data_parallel_forward(one, inputs, 2, outputs, 2), DG_INTERNAL,
              "outputs[1] is not a valid dg_tensor", "in replica 0 of 1, on cpu");
  self.outputs = TWICE;
  check_error(dg_data_parallel_forward(two, inputs, 2, outputs, 2), DG_INTERNAL,
              "outputs[1] is not a valid dg_tensor", "in replica 0 of 2, on cpu");
  self.outputs = NOTHING;
  OK(dg_data_parallel_forward(two, inputs, 2, outputs, 2));
  CHECK(outputs[0] == NULL && outputs[1] == NULL);
  OK(dg_data_parallel_forward(two, inputs, 2, NULL, 0));
  self.outputs = 0;
  self.own = two;
  OK(dg_data_parallel_forward(two, inputs, 2, outputs, 2)); /* it can be used again */
  CHECK(self.code == DG_FAILED_PRECONDITION);
  CHECK(size_of(outputs[1], 0) == 2); /* a number of each replica */
  dg_tensor_destroy(outputs[0]);
  dg_tensor_destroy(outputs[1]);
  dg_data_parallel_destroy(one);
  dg_data_parallel_destroy(two);
  CHECK(self.ended == 2);
  dg_tensor_destroy(weight);
  dg_tensor_destroy(x);
}

static void forward_in_destructor(void* user_data) {
  function* self = (function*)user_data;
  dg_tensor* output = NULL;
  self->code = code_of(dg_data_parallel_forward(self->own, NULL, 0, &output, 1));
}

static void test_misuse(void) {
  function self = {0};
  dg_data_parallel_options options = DG_DATA_PARALLEL_OPTIONS_INIT;
  dg_tensor *weight = floats(weights, 3, 2), *x = floats(rows, 4, 3), *row = floats(rows, 1, 3);
  dg_tensor* output = NULL;
  const dg_tensor *parameter = weight, *inputs[2], *wrong;
  dg_data_parallel *parallel = NULL, *none = NULL;
  const dg_str no_device = DG_STR("abacus:1");
  wrong = (const dg_tensor*)(const void*)&self;
  inputs[0] = x;
  inputs[1] = NULL;
  options.devices = cpus;
  options.device_count = 2;
  FAILS(DG_INVALID_ARGUMENT,
        dg_data_parallel_create(&parameter, 1, &options, NULL, &self, end, &none));
  FAILS(DG_INVALID_ARGUMENT,
        dg_data_parallel_create(&parameter, 1, &options, forward, &self, end, NULL));
  FAILS(DG_INVALID_ARGUMENT,
        dg_data_parallel_create(NULL, 1, &options, forward, &self, end, &none));
  FAILS(DG_INVALID_ARGUMENT,
        dg_data_parallel_create(&wrong, 1, &options, forward, &self, end, &none));
  options.struct_size = 8;
  FAILS(DG_INVALID_ARGUMENT,
        dg_data_parallel_create(&parameter, 1, &options, forward, &self, end, &none));
  options.struct_size = sizeof(options);
  options.devices = NULL;
  FAILS(DG_INVALID_ARGUMENT,
        dg_data_parallel_create(&parameter, 1, &options, forward, &self, end, &none));
  options.devices = &no_device;
  options.device_count = 1;
  check_error(dg_data_parallel_create(&parameter, 1, &options, forward, &self, end, &none),
              DG_INVALID_ARGUMENT, "devices[0]", "abacus:1");
  options.devices = cpus;
  options.buffer_count = 1;
  FAILS(DG_INVALID_ARGUMENT,
        dg_data_parallel_create(&parameter, 1, &options, forward, &self, end, &none));
  CHECK(self.ended == 8 && none == NULL); /* taken each time */

  parallel = parallel_of(weight, NULL, 2, &self);
  FAILS(DG_INVALID_ARGUMENT, dg_data_parallel_forward(NULL, inputs, 2, &output, 1));
  FAILS(DG_INVALID_ARGUMENT, dg_data_parallel_forward(parallel, inputs, 2, NULL, 1));
  FAILS(DG_INVALID_ARGUMENT, dg_data_parallel_forward(parallel, NULL, 2, &output, 1));
  FAILS(DG_INVALID_ARGUMENT, dg_data_parallel_forward(parallel, &wrong, 1, &output, 1));
  inputs[1] = row; /* gives one part, and the other input two */
  FAILS(DG_INVALID_ARGUMENT, dg_data_parallel_forward(parallel, inputs, 2, &output, 1));
  FAILS(DG_INVALID_ARGUMENT,
        dg_data_parallel_forward((dg_data_parallel*)(void*)x, inputs, 2, &output, 1));
  self.own = parallel;
  OK(dg_tensor_from_memory(&self, DG_UINT8, NULL, NULL, 0, &self, forward_in_destructor, &output));
  dg_tensor_destroy(output); /* ends user data, where nothing may wait */
  CHECK(self.code == DG_FAILED_PRECONDITION);
  dg_data_parallel_destroy(parallel);
  dg_data_parallel_destroy(parallel);
  FAILS(DG_INVALID_ARGUMENT, dg_data_parallel_forward(parallel, inputs, 2, &output, 1));
  CHECK(self.calls == 0 && self.ended == 9);
  dg_tensor_destroy(row);
  dg_tensor_destroy(weight);
  dg_tensor_destroy(x);
}

/* --------------------------------------------------------------------------------- The pieces */

static void test_scatter_and_gather(void) {
  const int64_t sizes[3] = {1, 0, 3};
  const int64_t too_many[2] = {3, 3};
  dg_tensor *x = floats(rows, 4, 3), *parts[4], *whole = NULL;
  size_t count = 0;
  OK(dg_scatter(x, cpus, 3, 0, NULL, parts, &count));
  CHECK(count == 2 && parts[2] == NULL); /* two and two, as torch has it */
  CHECK(data_of(parts[1])[0] == 4 && size_of(parts[1], 0) == 2);
  OK(dg_gather((const dg_tensor* const*)parts, 2, DG_STR(""), 0, &whole));
  CHECK(memcmp(data_of(whole), rows, sizeof(rows)) == 0);
  dg_tensor_destroy(whole);
  OK(dg_gather((const dg_tensor* const*)parts, 2, DG_STR("cpu"), 1, &whole));
  CHECK(size_of(whole, 1) == 6);
  dg_tensor_destroy(whole);
  for (int i = 0; i < 3; ++i) dg_tensor_destroy(parts[i]);
  OK(dg_scatter(x, cpus, 3, 0, sizes, parts, &count));
  CHECK(count == 3 && size_of(parts[1], 0) == 0 && data_of(parts[2])[2] == 3);
  for (int i = 0; i < 3; ++i) dg_tensor_destroy(parts[i]);
  parts[0] = whole = NULL;
  count = 7;
  FAILS(DG_INVALID_ARGUMENT, dg_scatter(x, cpus, 2, 0, too_many, parts, &count));
  FAILS(DG_INVALID_ARGUMENT, dg_scatter(x, cpus, 2, 5, NULL, parts, &count));
  FAILS(DG_INVALID_ARGUMENT, dg_scatter(x, cpus, 0, 0, NULL, parts, &count));
  FAILS(DG_INVALID_ARGUMENT, dg_scatter(x, NULL, 2, 0, NULL, parts, &count));
  FAILS(DG_INVALID_ARGUMENT, dg_scatter(x, cpus, 2, 0, NULL, NULL, &count));
  FAILS(DG_INVALID_ARGUMENT, dg_scatter(x, cpus, 2, 0, NULL, parts, NULL));
  FAILS(DG_INVALID_ARGUMENT, dg_scatter(NULL, cpus, 2, 0, NULL, parts, &count));
  CHECK(parts[0] == NULL && count == 7);
  FAILS(DG_INVALID_ARGUMENT, dg_gather(NULL, 1, DG_STR(""), 0, &whole));
  FAILS(DG_INVALID_ARGUMENT, dg_gather(NULL, 0, DG_STR(""), 0, &whole));
  FAILS(DG_INVALID_ARGUMENT, dg_gather((const dg_tensor* const*)&x, 1, DG_STR("x"), 0, &whole));
  FAILS(DG_INVALID_ARGUMENT, dg_gather((const dg_tensor* const*)&x, 1, DG_STR(""), 0, NULL));
  CHECK(whole == NULL);
  dg_tensor_destroy(x);
}

static void test_broadcast_and_reduce(void) {
  const dg_tensor* two[2];
  dg_tensor *x = floats(rows, 4, 3), *copies[6], *sums[2] = {NULL, NULL};
  two[0] = x;
  two[1] = NULL;
  OK(dg_broadcast(two, 2, cpus, 3, copies));
  for (int i = 0; i < 6; ++i) CHECK((copies[i] == NULL) == (i % 2 == 1));
  CHECK(memcmp(data_of(copies[4]), rows, sizeof(rows)) == 0);
  OK(dg_reduce_add((const dg_tensor* const*)copies, 3, 2, DG_STR(""), sums));
  CHECK(sums[1] == NULL && data_of(sums[0])[2] == 6);
  dg_tensor_destroy(sums[0]);
  for (int i = 0; i < 6; ++i) dg_tensor_destroy(copies[i]);
  copies[0] = sums[0] = NULL;
  FAILS(DG_INVALID_ARGUMENT, dg_broadcast(two, 2, cpus, 0, copies));
  FAILS(DG_INVALID_ARGUMENT, dg_broadcast(NULL, 2, cpus, 1, copies));
  FAILS(DG_INVALID_ARGUMENT, dg_broadcast(two, 2, cpus, 1, NULL));
  OK(dg_broadcast(NULL, 0, cpus, 2, NULL)); /* no tensors need no room */
  FAILS(DG_INVALID_ARGUMENT, dg_reduce_add(two, 0, 2, DG_STR(""), sums));
  FAILS(DG_INVALID_ARGUMENT, dg_reduce_add(two, (size_t)-1, 2, DG_STR(""), sums));
  FAILS(DG_INVALID_ARGUMENT, dg_reduce_add(NULL, 1, 2, DG_STR(""), sums));
  FAILS(DG_INVALID_ARGUMENT, dg_reduce_add(two, 1, 2, DG_STR("?"), sums));
  FAILS(DG_INVALID_ARGUMENT, dg_reduce_add(two, 1, 2, DG_STR(""), NULL));
  CHECK(copies[0] == NULL && sums[0] == NULL);
  dg_tensor_destroy(x);
}

int main(void) {
  for (int i = 0; i < 4; ++i) cpus[i] = DG_STR("cpu");
  test_gradients();
  test_errors_of_the_function();
  test_misuse();
  test_scatter_and_gather();
  test_broadcast_and_reduce();
  return 0;
}
