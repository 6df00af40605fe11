/* The worker "c" of cross_language_test: has a parameter, and passes on to the worker "cc".
 *
 *   worker_c RENDEZVOUS */
#include <distgrad/distgrad.h>
#include <stdio.h>
#include <stdlib.h>

static dg_tensor* weight;
static dg_worker* worker;

static void must(dg_error* error) {
  if (error == NULL) return;
  const dg_str message = dg_error_message(error);
  fprintf(stderr, "worker c: error %d: %.*s\n", (int)dg_error_code(error), (int)message.size,
          message.data);
  exit(1);
}

static dg_error* reply_with(dg_tensor* tensor, dg_message** reply) {
  const dg_tensor* borrowed = tensor;
  dg_error* error = dg_message_create(NULL, 0, &borrowed, 1, reply);
  dg_tensor_destroy(tensor);
  return error;
}

/* x * weight, through the next worker. */
static dg_error* forward(void* user_data, const dg_request* request, dg_message** reply) {
  (void)user_data;
  dg_tensor *x = NULL, *product = NULL;
  dg_error* error = dg_message_tensor(request->message, 0, &x);
  if (error == NULL) {
    const dg_value arguments[2] = {dg_value_tensor(x), dg_value_tensor(weight)};
    error = dg_op_tensors(DG_STR("aten::mul.Tensor"), arguments, 2, &product, 1);
  }
  dg_message* next = NULL;
  if (error == NULL) error = reply_with(product, &next);
  if (error == NULL) {
    dg_call_options options = DG_CALL_OPTIONS_INIT;
    options.context = request->context;
    options.timeout_ms = request->timeout_ms;
    error = dg_worker_call(worker, DG_STR("cc"), DG_STR("forward"), next, &options, reply);
  }
  dg_message_destroy(next);
  dg_tensor_destroy(x);
  return error;
}

static dg_error* gradient(void* user_data, const dg_request* request, dg_message** reply) {
  (void)user_data;
  dg_tensor* tensor = NULL;
  dg_error* error = dg_context_gradient(request->context, weight, &tensor);
  return error != NULL ? error : reply_with(tensor, reply);
}

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const float data[2] = {3, 4};
  const int64_t size = 2;
  must(dg_tensor_from_data(data, DG_FLOAT32, &size, 1, &weight));
  must(dg_tensor_require_grad(weight));

  dg_worker_options options = DG_WORKER_OPTIONS_INIT;
  options.name = DG_STR("c");
  options.rank = 1;
  options.world_size = 3;
  options.rendezvous.data = argv[1];
  while (argv[1][options.rendezvous.size] != 0) ++options.rendezvous.size;
  must(dg_worker_create(&options, &worker));
  must(dg_worker_register(worker, DG_STR("forward"), forward, NULL, NULL));
  must(dg_worker_register(worker, DG_STR("gradient"), gradient, NULL, NULL));
  must(dg_worker_barrier(worker, 60000, 0));
  must(dg_worker_shutdown(worker, DG_FOREVER, 0));
  dg_worker_destroy(worker);
  dg_tensor_destroy(weight);
  return 0;
}
