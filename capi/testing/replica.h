/* A thread of the library that runs a replica for the thread that calls forward. */
#ifndef DISTGRAD_CAPI_TESTING_REPLICA_H_
#define DISTGRAD_CAPI_TESTING_REPLICA_H_

#include "capi/testing/check.h"

typedef struct on_second {
  void (*call)(void);
  int calls;
} on_second;

static inline dg_error* run_on_second(void* user_data, const dg_replica* replica,
                                      dg_tensor** outputs) {
  on_second* self = (on_second*)user_data;
  (void)outputs;
  if (replica->index != 1) return NULL;
  self->call();
  ++self->calls;
  return NULL;
}

/* Calls it on the thread of the second of two replicas, and waits for it. */
static inline void on_replica(void (*call)(void)) {
  const dg_str cpus[2] = {DG_STR("cpu"), DG_STR("cpu")};
  const float rows[2] = {1, 2};
  dg_data_parallel_options options = DG_DATA_PARALLEL_OPTIONS_INIT;
  dg_data_parallel* parallel = NULL;
  dg_tensor* x = floats(rows, 2, 1);
  const dg_tensor* input = x;
  on_second self = {NULL, 0};
  self.call = call;
  options.devices = cpus;
  options.device_count = 2;
  OK(dg_data_parallel_create(NULL, 0, &options, run_on_second, &self, NULL, &parallel));
  OK(dg_data_parallel_forward(parallel, &input, 1, NULL, 0));
  CHECK(self.calls == 1);
  dg_data_parallel_destroy(parallel);
  dg_tensor_destroy(x);
}

#endif /* DISTGRAD_CAPI_TESTING_REPLICA_H_ */
