/* A whole program, without the samples' common file: a worker that calls a function of its own.
 * Where a launcher starts it in several processes, each of them calls the last one. */
#include <distgrad/distgrad.h>
#include <stdio.h>
#include <stdlib.h>

/* Takes the result of a function; prints an error, and ends the program. */
static void must(dg_error* error) {
  if (error == NULL) return;
  const dg_str message = dg_error_message(error);
  fprintf(stderr, "error %d: %.*s\n", (int)dg_error_code(error), (int)message.size, message.data);
  exit(1);
}

/* Gives the sum of the tensor that is sent. */
static dg_error* sum(void* user_data, const dg_request* request, dg_message** reply) {
  (void)user_data;
  dg_tensor *numbers = NULL, *result = NULL;
  dg_error* error = dg_message_tensor(request->message, 0, &numbers);
  if (error != NULL) return error;
  const dg_value argument = dg_value_tensor(numbers);
  error = dg_op_tensors(DG_STR("aten::sum"), &argument, 1, &result, 1);
  if (error == NULL) {
    const dg_tensor* sent = result;
    error = dg_message_create(NULL, 0, &sent, 1, reply);
  }
  dg_tensor_destroy(result);
  dg_tensor_destroy(numbers);
  return error;
}

int main(void) {
  dg_worker_options options = DG_WORKER_OPTIONS_INIT; /* alone, or as the launcher says */
  dg_worker* worker = NULL;
  must(dg_worker_create(&options, &worker));
  must(dg_worker_register(worker, DG_STR("sum"), sum, NULL, NULL));
  must(dg_worker_barrier(worker, DG_FOREVER, 0)); /* all have registered */

  const float data[3] = {1, 2, 3};
  const int64_t shape[1] = {3};
  dg_tensor *numbers = NULL, *answer = NULL;
  dg_message *request = NULL, *reply = NULL;
  must(dg_tensor_from_data(data, DG_FLOAT32, shape, 1, &numbers));
  const dg_tensor* sent = numbers;
  must(dg_message_create(NULL, 0, &sent, 1, &request));
  const dg_str last = dg_worker_name(worker, dg_worker_world_size(worker) - 1);
  must(dg_worker_call(worker, last, DG_STR("sum"), request, NULL, &reply));
  must(dg_message_tensor(reply, 0, &answer));
  void* value = NULL;
  must(dg_tensor_data(answer, &value));
  const float said = *(const float*)value;
  printf("%.*s says %g\n", (int)last.size, last.data, said);

  must(dg_worker_shutdown(worker, DG_FOREVER, 0)); /* waits for the others */
  dg_tensor_destroy(answer);
  dg_message_destroy(reply);
  dg_message_destroy(request);
  dg_tensor_destroy(numbers);
  dg_worker_destroy(worker);
  return said == 6 ? 0 : 1;
}
