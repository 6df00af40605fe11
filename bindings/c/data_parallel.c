/* Trains a model on several devices: each has a part of every batch, and backward adds up their
 * gradients. Here the CPU is in the list twice; "cuda:0", "cuda:1" and so on need no other change.
 * Each step is the same as on one device. */
#define _DEFAULT_SOURCE
#include "sample.h"

enum { BATCH = 10, INPUTS = 4, HIDDEN = 8, STEPS = 60 };

/* Returns different numbers in [-range, range], the same ones at each call. */
static dg_tensor* numbers(int64_t rows, int64_t columns, float range) {
  const int64_t shape[2] = {rows, columns};
  float* data = (float*)malloc((size_t)(rows * columns) * sizeof(float));
  if (data == NULL) exit(1);
  for (int64_t i = 0; i < rows * columns; ++i)
    data[i] = range * (float)((i * i + rows) % 13 - 6) / 6;
  dg_tensor* tensor = NULL;
  must(dg_tensor_from_data(data, DG_FLOAT32, shape, 2, &tensor));
  free(data);
  return tensor;
}

static dg_tensor* compute(const char* op, const dg_tensor* a, const dg_tensor* b) {
  const dg_value arguments[2] = {dg_value_tensor(a), dg_value_tensor(b)};
  dg_tensor* out = NULL;
  must(dg_op_tensors((dg_str){op, strlen(op)}, arguments, b == NULL ? 1 : 2, &out, 1));
  return out;
}

/* The model, for one device: its copies of the parameters and its part of the batch. */
static dg_error* forward(void* user_data, const dg_replica* replica, dg_tensor** outputs) {
  (void)user_data;
  if (replica->input_count != 1) {
    return dg_error_create(DG_INVALID_ARGUMENT, DG_STR("the model has one input"));
  }
  dg_tensor* sums = compute("aten::matmul", replica->inputs[0], replica->parameters[0]);
  dg_tensor* hidden = compute("aten::tanh", sums, NULL);
  outputs[0] = compute("aten::matmul", hidden, replica->parameters[1]);
  dg_tensor_destroy(hidden);
  dg_tensor_destroy(sums);
  return NULL;
}

/* Learns the sum of each row's squares; stores the loss of each step. */
static void train(size_t device_count, double* losses) {
  const dg_str devices[2] = {DG_STR("cpu"), DG_STR("cpu")};
  dg_tensor *x = numbers(BATCH, INPUTS, 1), *squares = compute("aten::mul.Tensor", x, x);
  dg_tensor *zeros = numbers(INPUTS, 1, 0), *ones = compute("aten::exp", zeros, NULL);
  dg_tensor* target = compute("aten::matmul", squares, ones);
  dg_tensor *first = numbers(INPUTS, HIDDEN, 1), *last = numbers(HIDDEN, 1, 1);
  must(dg_tensor_require_grad(first));
  must(dg_tensor_require_grad(last));

  /* A job of one worker: for a context to go backward in, and an optimizer. */
  dg_worker* worker = NULL;
  dg_optimizer* optimizer = NULL;
  dg_sgd_options sgd = DG_SGD_OPTIONS_INIT;
  sgd.learning_rate = 0.1;
  const dg_tensor* leaves[2] = {first, last};
  must(dg_worker_create(NULL, &worker));
  must(dg_optimizer_create_sgd(worker, DG_STR(""), leaves, 2, &sgd, &optimizer));

  dg_data_parallel* parallel = NULL;
  dg_data_parallel_options options = DG_DATA_PARALLEL_OPTIONS_INIT;
  options.devices = devices;
  options.device_count = device_count;
  must(dg_data_parallel_create(leaves, 2, &options, forward, NULL, NULL, &parallel));
  for (int step = 0; step < STEPS; ++step) {
    const dg_tensor *input = x, *root;
    dg_tensor *y = NULL, *loss;
    dg_context* context = NULL;
    must(dg_context_create(worker, &context));
    must(dg_data_parallel_forward(parallel, &input, 1, &y, 1));
    root = loss = compute("aten::mse_loss", y, target);
    must(dg_context_backward(context, &root, 1, NULL));
    must(dg_optimizer_step(optimizer, context));
    void* data = NULL;
    must(dg_tensor_data(loss, &data));
    losses[step] = *(const float*)data;
    dg_context_destroy(context);
    dg_tensor_destroy(loss);
    dg_tensor_destroy(y);
  }
  dg_data_parallel_destroy(parallel);
  dg_optimizer_destroy(optimizer);
  dg_worker_destroy(worker);
  dg_tensor* made[] = {x, squares, zeros, ones, target, first, last};
  for (size_t i = 0; i < sizeof(made) / sizeof(made[0]); ++i) dg_tensor_destroy(made[i]);
}

int main(void) {
  double one[STEPS], two[STEPS];
  train(1, one);
  train(2, two);
  bool same = true;
  for (int step = 0; step < STEPS; ++step) {
    if (step % 20 == 0 || step == STEPS - 1) {
      printf("step %2d: loss %.5f on one device, %.5f on two\n", step, one[step], two[step]);
    }
    const double difference = one[step] - two[step];
    same = same && difference < 1e-4 && difference > -1e-4;
  }
  return same && two[STEPS - 1] < two[0] / 2 ? 0 : 1;
}
