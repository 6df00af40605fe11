/* One call: the front worker sends a greeting to the back worker, which answers. */
#define _DEFAULT_SOURCE
#include "sample.h"

static dg_error* greet(void* user_data, const dg_request* request, dg_message** reply) {
  (void)user_data;
  char answer[128];
  const dg_str who = dg_message_payload(request->message);
  snprintf(answer, sizeof(answer), "Hello %.*s, this is process two", (int)who.size, who.data);
  return dg_message_create(answer, strlen(answer), NULL, 0, reply);
}

int main(void) {
  job self = start();
  must(dg_worker_register(self.worker, DG_STR("greet"), greet, NULL, NULL));
  must(dg_worker_barrier(self.worker, 60000, 0)); /* both have registered */
  if (self.rank == 0) {
    dg_message *request = NULL, *reply = NULL;
    must(dg_message_create("process one", strlen("process one"), NULL, 0, &request));
    must(dg_worker_call(self.worker, DG_STR("back"), DG_STR("greet"), request, NULL, &reply));
    const dg_str answer = dg_message_payload(reply);
    printf("%.*s\n", (int)answer.size, answer.data);
    const bool right = answer.size > 5 && memcmp(answer.data, "Hello", 5) == 0;
    dg_message_destroy(reply);
    dg_message_destroy(request);
    return finish(&self) != 0 || !right;
  }
  return finish(&self);
}
