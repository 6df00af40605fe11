/* What a child that was forked off finds of its parent's handles: none of them is alive in it, none
 * of them makes it wait, and its parent goes on as if nothing had been. */
#define _POSIX_C_SOURCE 200809L
#include <sys/wait.h>

#include "capi/testing/pair.h"

static dg_tensor* inherited_tensor;
static dg_context* inherited_context;
static dg_future* inherited_future;

/* Returns in the parent only, when `child` has returned in the child. */
static void in_child(void (*child)(void)) {
  int status = 0;
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    alarm(60); /* who waits for ever is killed */
    child();
    _exit(0);
  }
  CHECK(waitpid(pid, &status, 0) == pid);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void says_why(dg_error* error) {
  const char word[] = "forked";
  dg_str text;
  bool found = false;
  CHECK(error != NULL && dg_error_code(error) == DG_INVALID_ARGUMENT);
  text = dg_error_message(error);
  for (size_t i = 0; i + strlen(word) <= text.size; ++i) {
    found = found || memcmp(text.data + i, word, strlen(word)) == 0;
  }
  CHECK(found);
  dg_error_destroy(error);
}

static void touch_all(void) {
  dg_message* reply = NULL;
  dg_future* future = NULL;
  dg_context* context = NULL;
  dg_message* message = message_of(NULL);
  bool done = false;
  says_why(dg_worker_call(workers[0], DG_STR("back"), DG_STR("multiply"), message, NULL, &reply));
  says_why(
      dg_worker_call_async(workers[0], DG_STR("back"), DG_STR("multiply"), message, NULL, &future));
  says_why(dg_worker_barrier(workers[0], DG_FOREVER, 0));
  says_why(dg_worker_shutdown(workers[0], DG_FOREVER, 0));
  says_why(dg_context_create(workers[0], &context));
  says_why(dg_future_wait(inherited_future, DG_FOREVER, &done));
  says_why(dg_tensor_require_grad(inherited_tensor));
  dg_message_destroy(message);
  dg_future_destroy(inherited_future);
  dg_context_destroy(inherited_context);
  dg_tensor_destroy(inherited_tensor);
  dg_worker_destroy(workers[0]);
  dg_worker_destroy(workers[1]);
}

/* What it makes itself, it can use. */
static void work_alone(void) {
  const float two = 2;
  dg_worker_options options = DG_WORKER_OPTIONS_INIT;
  dg_worker* worker = NULL;
  dg_tensor *x, *y;
  char alone[600];
  snprintf(alone, sizeof(alone), "%s.child", rendezvous);
  touch_all();
  options.name = DG_STR("alone");
  options.world_size = 1;
  options.rendezvous.data = alone;
  options.rendezvous.size = strlen(alone);
  OK(dg_worker_create(&options, &worker));
  x = floats(&two, 1, 1);
  y = op2("aten::mul.Tensor", x, x);
  CHECK(x != inherited_tensor && workers[0] != worker && workers[1] != worker);
  dg_tensor_destroy(x);
  dg_tensor_destroy(y);
  OK(dg_worker_shutdown(worker, DG_FOREVER, 0));
  dg_worker_destroy(worker);
  unlink(alone + strlen("file://"));
  in_child(touch_all); /* and its own child has none of either's */
}

static void end_at_once(void) {}

/* Takes and gives back handles all of the time: some forks come while it is inside. */
static volatile int over;
static void* churn(void* argument) {
  const float one = 1;
  while (!over) dg_tensor_destroy(floats(&one, 1, 1));
  return argument;
}

/* The child returns from it, into a function that still uses a handle of its parent's. */
static pid_t forked_by_callback;
static void fork_and_return(void* user_data) {
  (void)user_data;
  forked_by_callback = fork();
  CHECK(forked_by_callback >= 0);
}

static dg_error* fork_inside(void* user_data, const dg_request* request, dg_message** reply) {
  (void)user_data, (void)request;
  in_child(end_at_once);
  return dg_message_create(NULL, 0, NULL, 0, reply);
}

int main(void) {
#ifdef __SANITIZE_THREAD__
  puts("skipped: ThreadSanitizer has no threads in a child that was forked off");
  return 0;
#endif
  const float five = 5;
  pthread_t thread;
  dg_message *message, *reply = NULL;
  dg_cancellation* cancellation = NULL;
  bool done = false;
  int status = 0;
  prepare();
  on_both(create);
  add(1, "multiply", multiply, NULL);
  add(1, "hold", hold, NULL);
  add(1, "fork", fork_inside, NULL);
  on_both(barrier);
  inherited_tensor = floats(&five, 1, 1);
  OK(dg_context_create(workers[0], &inherited_context));
  message = message_of(NULL);
  OK(dg_worker_call_async(workers[0], DG_STR("back"), DG_STR("hold"), message, NULL,
                          &inherited_future));
  CHECK(sem_wait(&entered) == 0);

  in_child(touch_all);
  in_child(work_alone);
  CHECK(pthread_create(&thread, NULL, churn, NULL) == 0);
#ifndef __SANITIZE_ADDRESS__
  /* A child inherits the locks of AddressSanitizer's allocator, which that thread may hold. */
  for (int i = 0; i < 50; ++i) in_child(touch_all);
#endif
  over = 1;
  CHECK(pthread_join(thread, NULL) == 0);
  OK(dg_worker_call(workers[0], DG_STR("back"), DG_STR("fork"), message, NULL, &reply));
  dg_message_destroy(reply);
  OK(dg_cancellation_create(&cancellation));
  OK(dg_cancellation_on_cancel(cancellation, fork_and_return, NULL, NULL, NULL));
  OK(dg_cancellation_cancel(cancellation));
  if (forked_by_callback == 0) _exit(0);
  CHECK(waitpid(forked_by_callback, &status, 0) == forked_by_callback);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  dg_cancellation_destroy(cancellation);

  /* The parent noticed nothing. */
  CHECK(sem_post(&released) == 0);
  OK(dg_future_wait(inherited_future, DG_FOREVER, &done));
  CHECK(done);
  dg_message_destroy(message);
  message = message_of(inherited_tensor);
  OK(dg_worker_call(workers[0], DG_STR("back"), DG_STR("multiply"), message, NULL, &reply));
  dg_message_destroy(reply);
  dg_message_destroy(message);
  dg_future_destroy(inherited_future);
  dg_context_destroy(inherited_context);
  dg_tensor_destroy(inherited_tensor);
  on_both(shut_down);
  dg_worker_destroy(workers[0]);
  dg_worker_destroy(workers[1]);
  clean_up();
  return 0;
}
