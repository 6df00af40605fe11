/* The calls of the samples that have an event loop of their own: one worker asks the other for the
 * squares of numbers. */
#ifndef DISTGRAD_BINDINGS_C_SQUARES_H_
#define DISTGRAD_BINDINGS_C_SQUARES_H_

#include "sample.h"

enum { CALLS = 20, LATEST = 10 };

/* Answers with the square of the number that it gets. */
static dg_error* square(void* user_data, const dg_request* request, dg_message** reply) {
  (void)user_data;
  int number = 0;
  const dg_str payload = dg_message_payload(request->message);
  if (payload.size != sizeof(number)) {
    return dg_error_create(DG_INVALID_ARGUMENT, DG_STR("the payload is to be one int"));
  }
  memcpy(&number, payload.data, sizeof(number));
  number *= number;
  return dg_message_create(&number, sizeof(number), NULL, 0, reply);
}

static dg_future* call(dg_worker* worker, int number) {
  dg_message* request = NULL;
  dg_future* future = NULL;
  must(dg_message_create(&number, sizeof(number), NULL, 0, &request));
  must(dg_worker_call_async(worker, DG_STR("back"), DG_STR("square"), request, NULL, &future));
  dg_message_destroy(request);
  return future;
}

/* The result of a future that is done. Destroys it. */
static int answer(dg_future* future) {
  dg_message* reply = NULL;
  int number = 0;
  must(dg_future_result(future, &reply));
  memcpy(&number, dg_message_payload(reply).data, sizeof(number));
  dg_message_destroy(reply);
  dg_future_destroy(future);
  return number;
}

/* Both processes: the front one runs its loop, which makes CALLS calls and returns the sum of their
 * answers. Returns the exit status. */
static int add_squares(int (*run_loop)(dg_worker* worker)) {
  job self = start();
  must(dg_worker_register(self.worker, DG_STR("square"), square, NULL, NULL));
  must(dg_worker_barrier(self.worker, 60000, 0)); /* both have registered */
  if (self.rank == 0) {
    int expected = 0;
    for (int i = 0; i < CALLS; ++i) expected += i * i;
    const int sum = run_loop(self.worker);
    printf("the squares add up to %d\n", sum);
    return finish(&self) != 0 || sum != expected;
  }
  return finish(&self);
}

#endif /* DISTGRAD_BINDINGS_C_SQUARES_H_ */
