/* A handler with state of its own, which runs on several threads at once, refuses wrong requests,
 * and takes part in the backward of its caller. */
#define _DEFAULT_SOURCE
#include <pthread.h>

#include "sample.h"

/* A layer y = x * scale, and the number of its runs. Handlers run on many threads. */
typedef struct layer {
  dg_tensor* scale;
  pthread_mutex_t mutex;
  int runs;
} layer;

static dg_error* forward(void* user_data, const dg_request* request, dg_message** reply) {
  layer* self = (layer*)user_data;
  if (dg_message_tensor_count(request->message) != 1) {
    return dg_error_create(DG_INVALID_ARGUMENT, DG_STR("forward takes one tensor"));
  }
  pthread_mutex_lock(&self->mutex);
  ++self->runs;
  pthread_mutex_unlock(&self->mutex);

  dg_tensor *x = NULL, *y = NULL;
  dg_error* error = dg_message_tensor(request->message, 0, &x);
  if (error == NULL) {
    const dg_value arguments[2] = {dg_value_tensor(x), dg_value_tensor(self->scale)};
    error = dg_op_tensors(DG_STR("aten::mul.Tensor"), arguments, 2, &y, 1);
  }
  if (error == NULL) {
    const dg_tensor* result = y;
    error = dg_message_create(NULL, 0, &result, 1, reply);
  }
  dg_tensor_destroy(x); /* NULL is fine */
  dg_tensor_destroy(y);
  return error;
}

/* Destroys user_data: after the last call, when the worker ends. */
static void end(void* user_data) {
  layer* self = (layer*)user_data;
  printf("the layer ran %d times\n", self->runs);
  dg_tensor_destroy(self->scale);
  pthread_mutex_destroy(&self->mutex);
  free(self);
}

static dg_tensor* numbers(const float* data, int64_t count, bool require_grad) {
  dg_tensor* tensor = NULL;
  must(dg_tensor_from_data(data, DG_FLOAT32, &count, 1, &tensor));
  if (require_grad) must(dg_tensor_require_grad(tensor));
  return tensor;
}

static int front(dg_worker* worker) {
  const float data[3] = {1, 2, 3};
  dg_tensor *x = numbers(data, 3, true), *y = NULL, *loss = NULL, *gradient = NULL;
  const dg_tensor* input = x;
  dg_message *request = NULL, *empty = NULL, *reply = NULL;
  must(dg_message_create(NULL, 0, &input, 1, &request));
  must(dg_message_create(NULL, 0, NULL, 0, &empty));

  /* The caller gets the code of a handler's error. */
  dg_error* error = dg_worker_call(worker, DG_STR("back"), DG_STR("forward"), empty, NULL, &reply);
  const bool refused = dg_error_code(error) == DG_INVALID_ARGUMENT;
  printf("refused: %.*s\n", (int)dg_error_message(error).size, dg_error_message(error).data);
  dg_error_destroy(error);

  /* Inside a context, gradients come back through the call. */
  dg_context* context = NULL;
  must(dg_context_create(worker, &context));
  dg_call_options options = DG_CALL_OPTIONS_INIT;
  options.context = context;
  must(dg_worker_call(worker, DG_STR("back"), DG_STR("forward"), request, &options, &reply));
  must(dg_message_tensor(reply, 0, &y));
  const dg_value argument = dg_value_tensor(y);
  must(dg_op_tensors(DG_STR("aten::sum"), &argument, 1, &loss, 1));
  const dg_tensor* root = loss;
  must(dg_context_backward(context, &root, 1, NULL));
  must(dg_context_gradient(context, x, &gradient));
  void* values = NULL;
  must(dg_tensor_data(gradient, &values));
  const float* g = (const float*)values;
  printf("gradient: %g %g %g\n", g[0], g[1], g[2]);
  const bool right = refused && g[0] == 10 && g[1] == 20 && g[2] == 30;

  dg_tensor_destroy(gradient);
  dg_tensor_destroy(loss);
  dg_tensor_destroy(y);
  dg_message_destroy(reply);
  dg_message_destroy(empty);
  dg_message_destroy(request);
  dg_context_destroy(context);
  dg_tensor_destroy(x);
  return right ? 0 : 1;
}

int main(void) {
  job self = start();
  int result = 0;
  if (self.rank == 1) {
    const float scale[3] = {10, 20, 30};
    layer* made = (layer*)calloc(1, sizeof(*made));
    if (made == NULL) return 1;
    made->scale = numbers(scale, 3, true);
    pthread_mutex_init(&made->mutex, NULL);
    must(dg_worker_register(self.worker, DG_STR("forward"), forward, made, end));
  }
  must(dg_worker_barrier(self.worker, 60000, 0)); /* it is registered */
  if (self.rank == 0) result = front(self.worker);
  return finish(&self) != 0 ? 1 : result;
}
