/* Trains a model that is split over two processes: its first layer is in the front process, with
 * the data, and its second one in the back process. It learns which points of a square lie within a
 * circle. */
#define _DEFAULT_SOURCE
#include "sample.h"

enum { POINTS = 100, HIDDEN = 32, STEPS = 300 };

/* -------------------------------------------------------------------------------------- Model */

typedef struct linear {
  dg_tensor *weight, *bias;
} linear;

static linear create_linear(int64_t inputs, int64_t outputs) {
  const int64_t shape[2] = {outputs, inputs};
  const dg_value of_weight = dg_value_integers(shape, 2), of_bias = dg_value_integers(shape, 1);
  linear layer;
  layer.weight = compute_op(DG_STR("aten::randn"), &of_weight, 1);
  layer.bias = compute_op(DG_STR("aten::zeros"), &of_bias, 1);
  must(dg_tensor_require_grad(layer.weight));
  must(dg_tensor_require_grad(layer.bias));
  return layer;
}

static dg_error* apply(const linear* layer, const dg_tensor* x, dg_tensor** y) {
  const dg_value arguments[3] = {dg_value_tensor(x), dg_value_tensor(layer->weight),
                                 dg_value_tensor(layer->bias)};
  return dg_op_tensors(DG_STR("aten::linear"), arguments, 3, y, 1);
}

/* [doc: classify] */
/* The back process's handler: hidden values in, a score for each class out. */
static dg_error* classify(void* user_data, const dg_request* request, dg_message** reply) {
  dg_tensor *x = NULL, *y = NULL;
  dg_error* error = dg_message_tensor(request->message, 0, &x);
  if (error == NULL) error = apply((const linear*)user_data, x, &y);
  if (error == NULL) {
    const dg_tensor* result = y;
    error = dg_message_create(NULL, 0, &result, 1, reply);
  }
  dg_tensor_destroy(x);
  dg_tensor_destroy(y);
  return error;
}
/* [doc: end] */

/* ----------------------------------------------------------------------------------- Training */

/* Stores points of the square [-1, 1) x [-1, 1), and 1 for those within the circle. */
static void new_batch(dg_tensor** points, dg_tensor** labels) {
  static uint32_t random = 12345;
  const int64_t shape[2] = {POINTS, 2};
  float coordinates[POINTS][2];
  int64_t classes[POINTS];
  for (int i = 0; i < POINTS; ++i) {
    for (int j = 0; j < 2; ++j) {
      random = random * 1664525u + 1013904223u;
      coordinates[i][j] = (float)(random >> 8) / (float)(1 << 23) - 1;
    }
    const float x = coordinates[i][0], y = coordinates[i][1];
    classes[i] = x * x + y * y < 0.64f;
  }
  must(dg_tensor_from_data(coordinates, DG_FLOAT32, shape, 2, points));
  must(dg_tensor_from_data(classes, DG_INT64, shape, 1, labels));
}

/* [doc: step] */
/* One step: forward through both processes, backward through both, an optimizer step on both.
 * Returns the loss. */
static double step(dg_worker* worker, const linear* layer, dg_optimizer* optimizer) {
  dg_context* context = NULL;
  dg_message *request = NULL, *reply = NULL;
  dg_tensor *points = NULL, *labels = NULL, *sums = NULL, *scores = NULL;
  void* data = NULL;
  new_batch(&points, &labels);
  must(dg_context_create(worker, &context));

  must(apply(layer, points, &sums));
  const dg_value argument = dg_value_tensor(sums);
  dg_tensor* hidden = compute_op(DG_STR("aten::tanh"), &argument, 1);
  const dg_tensor* sent = hidden;
  must(dg_message_create(NULL, 0, &sent, 1, &request));
  dg_call_options options = DG_CALL_OPTIONS_INIT;
  options.context = context;
  must(dg_worker_call(worker, DG_STR("back"), DG_STR("classify"), request, &options, &reply));
  must(dg_message_tensor(reply, 0, &scores));

  const dg_value arguments[2] = {dg_value_tensor(scores), dg_value_tensor(labels)};
  dg_tensor* loss = compute_op(DG_STR("aten::cross_entropy_loss"), arguments, 2);
  const dg_tensor* root = loss;
  must(dg_context_backward(context, &root, 1, NULL));
  must(dg_optimizer_step(optimizer, context));
  must(dg_tensor_data(loss, &data));
  const double value = *(const float*)data;

  dg_tensor* made[] = {points, labels, sums, hidden, scores, loss};
  for (size_t i = 0; i < sizeof(made) / sizeof(made[0]); ++i) dg_tensor_destroy(made[i]);
  dg_message_destroy(request);
  dg_message_destroy(reply);
  dg_context_destroy(context);
  return value;
}
/* [doc: end] */

/* [doc: main] */
int main(void) {
  job self = start();
  must(dg_manual_seed((uint64_t)self.rank));
  linear layer = self.rank == 0 ? create_linear(2, HIDDEN) : create_linear(HIDDEN, 2);
  must(dg_worker_register(self.worker, DG_STR("classify"), classify, &layer, NULL));
  const dg_tensor* parameters[2] = {layer.weight, layer.bias};
  dg_adam_options options = DG_ADAM_OPTIONS_INIT;
  options.learning_rate = 0.02;
  dg_optimizer* optimizer = NULL;
  must(dg_optimizer_create_adam(self.worker, DG_STR(""), parameters, 2, &options, &optimizer));
  must(dg_worker_barrier(self.worker, 60000, 0)); /* both are ready */

  double mean = 0; /* of the latest losses */
  for (int i = 0; i < STEPS && self.rank == 0; ++i) {
    const double loss = step(self.worker, &layer, optimizer);
    mean = i == 0 ? loss : 0.95 * mean + 0.05 * loss;
    if (i % 50 == 49) printf("step %d: loss %.3f\n", i + 1, mean);
  }
  const int status = finish(&self); /* the back process answers until then */
  dg_optimizer_destroy(optimizer);
  dg_tensor_destroy(layer.weight);
  dg_tensor_destroy(layer.bias);
  return status != 0 || !(mean < 0.2);
}
/* [doc: end] */
