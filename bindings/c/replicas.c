/* Trains replicas of a model, one in each of two processes, each with data of its own: gradients
 * are averaged, so that the replicas stay the same. They learn the line y = 3 x - 1. */
#define _DEFAULT_SOURCE
#include "sample.h"

enum { BATCH = 16, STEPS = 200 };

static dg_tensor* combine(dg_str op, const dg_tensor* a, const dg_tensor* b) {
  const dg_value arguments[2] = {dg_value_tensor(a), dg_value_tensor(b)};
  return compute_op(op, arguments, 2);
}

/* Stores random x, and y = 3 x - 1. */
static void new_batch(dg_tensor** x, dg_tensor** y) {
  const int64_t shape = BATCH;
  const dg_value of_x = dg_value_integers(&shape, 1);
  *x = compute_op(DG_STR("aten::randn"), &of_x, 1);
  const dg_value times[2] = {dg_value_tensor(*x), dg_value_integer(3)};
  dg_tensor* product = compute_op(DG_STR("aten::mul.Scalar"), times, 2);
  const dg_value minus[2] = {dg_value_tensor(product), dg_value_integer(1)};
  *y = compute_op(DG_STR("aten::sub.Scalar"), minus, 2);
  dg_tensor_destroy(product);
}

/* [doc: step] */
/* Takes a step with a batch of this process's own; returns its loss. parameters: slope, offset. */
static double step(dg_worker* worker, dg_gradient_averager* averager, dg_optimizer* optimizer,
                   dg_tensor* const* parameters) {
  dg_context* context = NULL;
  dg_tensor *x = NULL, *y = NULL;
  void* data = NULL;
  new_batch(&x, &y);
  must(dg_context_create(worker, &context));
  dg_tensor* product = combine(DG_STR("aten::mul.Tensor"), x, parameters[0]);
  dg_tensor* guess = combine(DG_STR("aten::add.Tensor"), product, parameters[1]);
  dg_tensor* loss = combine(DG_STR("aten::mse_loss"), guess, y);
  const dg_tensor* root = loss;
  must(dg_gradient_averager_average_in_backward(averager, context));
  must(dg_context_backward(context, &root, 1, NULL));
  must(dg_gradient_averager_average(averager, context)); /* of both processes */
  must(dg_optimizer_step(optimizer, context));
  must(dg_tensor_data(loss, &data));
  const double value = *(const float*)data;
  dg_tensor* made[] = {x, y, product, guess, loss};
  for (size_t i = 0; i < sizeof(made) / sizeof(made[0]); ++i) dg_tensor_destroy(made[i]);
  dg_context_destroy(context);
  return value;
}
/* [doc: end] */

static float number(const dg_tensor* tensor) {
  void* data = NULL;
  must(dg_tensor_data(tensor, &data));
  return *(const float*)data;
}

/* [doc: main] */
int main(void) {
  job self = start();
  must(dg_manual_seed((uint64_t)self.rank)); /* data of its own */
  const float zero = 0;
  const int64_t shape = 1;
  dg_tensor* parameters[2] = {NULL, NULL};
  for (int i = 0; i < 2; ++i) {
    must(dg_tensor_from_data(&zero, DG_FLOAT32, &shape, 1, &parameters[i]));
    must(dg_tensor_require_grad(parameters[i]));
  }
  const dg_tensor* const* leaves = (const dg_tensor* const*)parameters;
  dg_sgd_options options = DG_SGD_OPTIONS_INIT;
  options.learning_rate = 0.1;
  dg_optimizer* optimizer = NULL;
  dg_process_group* group = NULL;
  dg_gradient_averager* averager = NULL;
  must(dg_optimizer_create_sgd(self.worker, DG_STR(""), leaves, 2, &options, &optimizer));
  must(dg_process_group_create(self.worker, NULL, &group));
  must(dg_gradient_averager_create(group, leaves, 2, NULL, &averager));
  must(dg_worker_barrier(self.worker, 60000, 0)); /* both have an optimizer */

  double loss = 1;
  for (int i = 0; i < STEPS; ++i) loss = step(self.worker, averager, optimizer, parameters);
  printf("replica %d: y = %g x + %g\n", self.rank, number(parameters[0]), number(parameters[1]));
  const int status = finish(&self);
  dg_gradient_averager_destroy(averager);
  dg_process_group_destroy(group);
  dg_optimizer_destroy(optimizer);
  for (int i = 0; i < 2; ++i) dg_tensor_destroy(parameters[i]);
  return status != 0 || !(loss < 1e-3);
}
/* [doc: end] */
