/* Futures, handlers that answer later, and cancellations, between two workers in this process; and
 * what becomes of wrong use, in callbacks too. From plain C. */
#define _POSIX_C_SOURCE 200809L
#include <fcntl.h>
#include <poll.h>

#include "capi/testing/pair.h"

static sem_t watched;

/* Waits until its caller has gone. */
static dg_error* watch(void* user_data, const dg_request* request, dg_message** reply) {
  (void)user_data, (void)reply;
  OK(dg_cancellation_check(request->cancellation));
  OK(dg_cancellation_on_cancel(request->cancellation, post, &watched, NULL, NULL));
  CHECK(sem_post(&asked) == 0);
  OK(dg_wait(wait_at_gate, &watched));
  FAILS(DG_CANCELLED, dg_cancellation_check(request->cancellation));
  CHECK(sem_post(&asked) == 0);
  return dg_cancellation_check(request->cancellation);
}

/* ----------------------------------------------------------------------------------- Futures */

static sem_t ended;
static dg_code codes[9];
static dg_future* waited_for;

/* Everything that waits fails, and nothing hangs. */
static void when_done(void* user_data) {
  bool done = false;
  dg_message* reply = NULL;
  dg_values* values = NULL;
  dg_worker* worker = NULL;
  double norm = 0;
  (void)user_data;
  codes[0] = code_of(dg_future_wait(waited_for, 1000, &done));
  codes[1] =
      code_of(dg_worker_call(workers[0], DG_STR("back"), DG_STR("fail"), NULL, NULL, &reply));
  codes[2] = code_of(
      dg_worker_call_op(workers[0], DG_STR("back"), DG_STR("aten::exp"), NULL, 0, NULL, &values));
  codes[3] = code_of(dg_worker_create(NULL, &worker));
  codes[4] = code_of(dg_worker_barrier(workers[0], DG_FOREVER, 0));
  codes[5] = code_of(dg_context_backward(NULL, NULL, 0, NULL));
  codes[6] = code_of(dg_optimizer_step(NULL, NULL));
  codes[7] = code_of(dg_optimizer_clip_gradients(NULL, NULL, 1, &norm));
  codes[8] = code_of(dg_worker_leave(workers[0], 1));
  FAILS(DG_FAILED_PRECONDITION, dg_worker_close(workers[0], DG_FOREVER));
  OK(dg_future_wait(waited_for, 0, &done)); /* to poll is no wait */
  dg_grad_set_enabled(false);               /* undone behind us */
}

static void nothing_done(void* user_data) { (void)user_data; }

static void test_futures(void) {
  dg_message *empty = message_of(NULL), *reply = NULL;
  dg_values* values = NULL;
  bool done = false;
  int count = 0;
  CHECK(sem_init(&ended, 0, 0) == 0);
  for (int i = 0; i < 2; ++i) {
    OK(dg_worker_call_async(workers[0], DG_STR("back"), i == 0 ? DG_STR("nothing") : DG_STR("fail"),
                            empty, NULL, &waited_for));
    OK(dg_future_then(waited_for, when_done, &ended, post));
    while (sem_wait(&ended) != 0) continue;
    for (int c = 0; c < 9; ++c) CHECK(codes[c] == DG_FAILED_PRECONDITION);
    CHECK(dg_worker_world_size(workers[0]) == 2);
    OK(dg_future_then(waited_for, count_up, &count, NULL)); /* done: at once */
    CHECK(count == 2 * i + 1);
    CHECK(dg_grad_set_enabled(true));
    FAILS(DG_INVALID_ARGUMENT, dg_future_then(waited_for, NULL, &ended, post));
    while (sem_wait(&ended) != 0) continue;
    if (i == 0) {
      FAILS(DG_FAILED_PRECONDITION, dg_future_values(waited_for, &values));
      for (int twice = 0; twice < 2; ++twice) {
        OK(dg_future_cancel(waited_for)); /* too late */
        OK(dg_future_result(waited_for, &reply));
        dg_message_destroy(reply);
      }
    } else {
      FAILS(DG_DATA_LOSS, dg_future_result(waited_for, &reply));
      FAILS(DG_DATA_LOSS, dg_future_values(waited_for, &values));
    }
    dg_future_destroy(waited_for);
    FAILS(DG_INVALID_ARGUMENT, dg_future_wait(waited_for, 1, &done));
    FAILS(DG_INVALID_ARGUMENT, dg_future_result(waited_for, &reply));
    FAILS(DG_INVALID_ARGUMENT, dg_future_then(waited_for, nothing_done, &count, count_up));
    CHECK(count == 2 * i + 2); /* taken */
  }
  dg_message_destroy(empty);
}

/* The caller waits no longer, though the handler does. */
static void test_cancel(void) {
  dg_message *empty = message_of(NULL), *reply = NULL;
  dg_future* future = NULL;
  bool done = false;
  int count = 0;
  OK(dg_worker_call_async(workers[1], DG_STR("front"), DG_STR("hold"), empty, NULL, &future));
  OK(dg_future_then(future, nothing_done, &count, count_up));
  while (sem_wait(&entered) != 0) continue;
  OK(dg_future_wait(future, 0, &done));
  CHECK(!done);
  OK(dg_future_cancel(future));
  OK(dg_future_wait(future, DG_FOREVER, &done));
  CHECK(done && count == 1);
  FAILS(DG_CANCELLED, dg_future_result(future, &reply));
  CHECK(sem_post(&released) == 0);
  while (sem_wait(&left) != 0) continue; /* or the next one might be released in its place */
  dg_future_destroy(future);
  FAILS(DG_INVALID_ARGUMENT, dg_future_cancel(future));
  FAILS(DG_INVALID_ARGUMENT, dg_future_cancel(NULL));
  FAILS(DG_INVALID_ARGUMENT, dg_future_cancel((const dg_future*)(const void*)empty));
  CHECK(reply == NULL);
  dg_message_destroy(empty);
}

/* --------------------------------------------------------------------------- Completion queues */

static bool readable(const dg_completions* completions, int timeout_ms) {
  struct pollfd poll_for;
  poll_for.fd = dg_completions_descriptor(completions);
  poll_for.events = POLLIN;
  CHECK(poll_for.fd >= 0);
  CHECK(poll(&poll_for, 1, timeout_ms) >= 0);
  return (poll_for.revents & POLLIN) != 0;
}

static uint64_t take_one(dg_completions* completions) {
  uint64_t tag = 0;
  size_t count = 0;
  CHECK(readable(completions, -1));
  OK(dg_completions_take(completions, &tag, 1, &count));
  CHECK(count == 1);
  return tag;
}

static void test_completions(void) {
  dg_message *empty = message_of(NULL), *reply = NULL;
  dg_completions *queue = NULL, *other = NULL;
  dg_future *done = NULL, *open = NULL, *op = NULL, *backward = NULL;
  dg_context* context = NULL;
  const float one = 1;
  dg_tensor *x = floats(&one, 1, 1), *y = NULL;
  const dg_tensor* root;
  dg_value argument = dg_value_tensor(x);
  uint64_t tags[4] = {0};
  size_t count = 7;
  OK(dg_completions_create(&queue));
  OK(dg_completions_create(&other));
  CHECK(dg_completions_descriptor(queue) != dg_completions_descriptor(other));
  CHECK((fcntl(dg_completions_descriptor(queue), F_GETFD) & FD_CLOEXEC) != 0);
  CHECK(!readable(queue, 0));
  OK(dg_completions_take(queue, tags, 4, &count));
  CHECK(count == 0);

  /* One that is held on the other side, and others, which overtake it; watched twice, too. */
  OK(dg_worker_call_async(workers[1], DG_STR("front"), DG_STR("hold"), empty, NULL, &open));
  OK(dg_completions_watch(queue, open, 1));
  while (sem_wait(&entered) != 0) continue;
  OK(dg_worker_call_async(workers[0], DG_STR("back"), DG_STR("fail"), empty, NULL, &done));
  OK(dg_completions_watch(queue, done, UINT64_MAX));
  CHECK(take_one(queue) == UINT64_MAX);
  CHECK(!readable(queue, 0));
  FAILS(DG_DATA_LOSS, dg_future_result(done, &reply));
  OK(dg_completions_watch(queue, done, 3)); /* done: at once */
  OK(dg_completions_watch(queue, done, 4));
  OK(dg_completions_watch(other, done, 5));
  CHECK(readable(queue, 0) && readable(other, 0));
  OK(dg_completions_take(queue, tags, 0, &count));
  CHECK(count == 0);
  OK(dg_completions_take(queue, NULL, 0, &count));
  OK(dg_completions_take(queue, tags, 1, &count));
  CHECK(count == 1 && tags[0] == 3);
  CHECK(readable(queue, 0)); /* there is one more */
  OK(dg_completions_take(queue, tags, 4, &count));
  CHECK(count == 1 && tags[0] == 4);
  CHECK(!readable(queue, 0) && readable(other, 0));

  /* An operator elsewhere, and a backward. */
  OK(dg_tensor_require_grad(x));
  OK(dg_context_create(workers[0], &context));
  {
    dg_call_options options = DG_CALL_OPTIONS_INIT;
    dg_values* values = NULL;
    dg_value value;
    options.context = context;
    OK(dg_worker_call_op_async(workers[0], DG_STR("back"), DG_STR("aten::sum"), &argument, 1,
                               &options, &op));
    OK(dg_completions_watch(queue, op, 6));
    CHECK(take_one(queue) == 6);
    OK(dg_future_values(op, &values));
    OK(dg_values_get(values, 0, &value));
    root = value.as.tensor;
    OK(dg_context_backward_async(context, &root, 1, NULL, &backward));
    OK(dg_completions_watch(queue, backward, 7));
    dg_values_destroy(values);
  }
  CHECK(take_one(queue) == 7);
  OK(dg_future_result(backward, &reply));
  OK(dg_context_gradient(context, x, &y));

  /* Its handle may go before the future is done; and the queue before the future. */
  OK(dg_completions_watch(other, open, 8));
  dg_completions_destroy(other);
  dg_future_destroy(open);
  CHECK(sem_post(&released) == 0);
  CHECK(take_one(queue) == 1);

  FAILS(DG_INVALID_ARGUMENT, dg_completions_watch(other, done, 1));
  FAILS(DG_INVALID_ARGUMENT, dg_completions_watch(queue, open, 1));
  SAYS(DG_INVALID_ARGUMENT, "future is NULL", dg_completions_watch(queue, NULL, 1));
  SAYS(DG_INVALID_ARGUMENT, "completions is NULL", dg_completions_watch(NULL, done, 1));
  FAILS(DG_INVALID_ARGUMENT, dg_completions_take(other, tags, 4, &count));
  SAYS(DG_INVALID_ARGUMENT, "tags is NULL", dg_completions_take(queue, NULL, 4, &count));
  SAYS(DG_INVALID_ARGUMENT, "count, where", dg_completions_take(queue, tags, 4, NULL));
  SAYS(DG_INVALID_ARGUMENT, "out, where", dg_completions_create(NULL));
  CHECK(dg_completions_descriptor(other) == -1 && dg_completions_descriptor(NULL) == -1);
  dg_completions_destroy(NULL);
  dg_completions_destroy(queue);
  dg_future_destroy(done);
  dg_future_destroy(op);
  dg_future_destroy(backward);
  dg_context_destroy(context);
  dg_tensor_destroy(y);
  dg_tensor_destroy(x);
  dg_message_destroy(empty);
}

/* ------------------------------------------------------------------------------- Answers later */

static void test_answers_later(void) {
  dg_future* future = begin(workers[0], DG_STR("later"), NULL);
  dg_message *answer = NULL, *reply = NULL;
  dg_responder* gone = later_responder;
  bool done = true;
  OK(dg_future_wait(future, 0, &done));
  CHECK(!done);
  /* All of the request is still there. */
  CHECK(str_is(dg_message_payload(later_request->message), "ask") && later_request->from == 0);
  CHECK(str_is(later_request->function, "later") && later_request->context == NULL);
  OK(dg_cancellation_check(later_request->cancellation));
  OK(dg_message_create("at last", 7, NULL, 0, &answer));
  OK(dg_responder_answer(later_responder, answer, NULL));
  CHECK(end(future, &reply) == DG_OK && str_is(dg_message_payload(reply), "at last"));
  dg_message_destroy(reply);
  reply = NULL;
  /* Once; and what was taken is gone. */
  OK(dg_message_create("again", 5, NULL, 0, &answer));
  FAILS(DG_INVALID_ARGUMENT, dg_responder_answer(gone, answer, NULL));
  CHECK(dg_message_payload(answer).size == 0);
  FAILS(DG_INVALID_ARGUMENT,
        dg_responder_answer(NULL, NULL, dg_error_create(DG_ABORTED, DG_STR(""))));
  dg_responder_destroy(gone);
  dg_responder_destroy(NULL);

  future = begin(workers[0], DG_STR("later"), NULL);
  OK(dg_responder_answer(later_responder, NULL, NULL));
  CHECK(end(future, &reply) == DG_OK && dg_message_payload(reply).size == 0);
  dg_message_destroy(reply);
  reply = NULL;
  future = begin(workers[0], DG_STR("later"), NULL);
  OK(dg_message_create("not this", 8, NULL, 0, &answer));
  OK(dg_responder_answer(later_responder, answer,
                         dg_error_create(DG_DATA_LOSS, DG_STR("the dog"))));
  CHECK(end(future, &reply) == DG_DATA_LOSS);
  future = begin(workers[0], DG_STR("later"), NULL);
  FAILS(DG_INVALID_ARGUMENT,
        dg_responder_answer(later_responder, (dg_message*)(uintptr_t)parameter, NULL));
  CHECK(end(future, &reply) == DG_INTERNAL);
  future = begin(workers[0], DG_STR("later"), NULL);
  OK(dg_responder_answer(later_responder, NULL, (dg_error*)(uintptr_t)parameter));
  CHECK(end(future, &reply) == DG_INTERNAL);
  future = begin(workers[0], DG_STR("later"), NULL);
  dg_responder_destroy(later_responder);
  CHECK(end(future, &reply) == DG_INTERNAL && reply == NULL);
}

/* Handlers of both kinds see that their caller has given up. */
static void test_cancelled_handlers(void) {
  dg_message* reply = NULL;
  dg_future* future = begin(workers[0], DG_STR("later"), NULL);
  OK(dg_future_cancel(future));
  CHECK(end(future, &reply) == DG_CANCELLED);
  wait_at_gate(&seen);
  FAILS(DG_CANCELLED, dg_cancellation_check(later_request->cancellation));
  OK(dg_responder_answer(later_responder, NULL, NULL)); /* dropped */
  future = begin(workers[0], DG_STR("watch"), NULL);
  OK(dg_future_cancel(future));
  CHECK(end(future, &reply) == DG_CANCELLED);
  wait_at_gate(&asked); /* it has seen it */
  CHECK(reply == NULL);
}

static void test_cancellations(void) {
  dg_cancellation *cancellation = NULL, *unused = NULL;
  dg_call_options options = DG_CALL_OPTIONS_INIT;
  dg_message *reply = NULL, *empty = message_of(NULL);
  dg_future* futures[2];
  int count = 0, ended = 0, forgotten = 0;
  uint64_t id = 1;
  FAILS(DG_INVALID_ARGUMENT, dg_cancellation_create(NULL));
  OK(dg_cancellation_create(&cancellation));
  OK(dg_cancellation_check(cancellation));
  OK(dg_cancellation_on_cancel(cancellation, count_up, &count, NULL, NULL));
  futures[0] = begin(workers[0], DG_STR("watch"), cancellation);
  futures[1] = begin(workers[0], DG_STR("later"), cancellation);
  CHECK(count == 0);
  OK(dg_cancellation_cancel(cancellation));
  OK(dg_cancellation_cancel(cancellation));
  CHECK(count == 1);
  for (int i = 0; i < 2; ++i) CHECK(end(futures[i], &reply) == DG_CANCELLED);
  wait_at_gate(&asked); /* the one has seen it, */
  wait_at_gate(&seen);  /* and the other */
  dg_responder_destroy(later_responder);
  FAILS(DG_CANCELLED, dg_cancellation_check(cancellation));
  OK(dg_cancellation_on_cancel(cancellation, count_up, &count, NULL, &id)); /* at once */
  CHECK(count == 2 && id == 0);
  options.cancellation = cancellation;
  FAILS(DG_CANCELLED,
        dg_worker_call(workers[0], DG_STR("back"), DG_STR("nothing"), empty, &options, &reply));
  dg_cancellation_destroy(cancellation);
  FAILS(DG_INVALID_ARGUMENT,
        dg_worker_call(workers[0], DG_STR("back"), DG_STR("nothing"), empty, &options, &reply));
  /* A program of before has a shorter struct. */
  options.struct_size = offsetof(dg_call_options, cancellation);
  OK(dg_worker_call(workers[0], DG_STR("back"), DG_STR("nothing"), empty, &options, &reply));
  dg_message_destroy(reply);

  OK(dg_cancellation_create(&unused));
  OK(dg_cancellation_on_cancel(unused, count_up, &ended, count_up, NULL));
  CHECK(ended == 0);
  OK(dg_cancellation_on_cancel(unused, count_up, &forgotten, count_up, &id));
  CHECK(id != 0 && forgotten == 0);
  OK(dg_cancellation_forget(unused, id));
  CHECK(forgotten == 1); /* ended, and not called */
  OK(dg_cancellation_forget(unused, id));
  OK(dg_cancellation_forget(unused, 0));
  FAILS(DG_INVALID_ARGUMENT, dg_cancellation_forget(NULL, id));
  FAILS(DG_INVALID_ARGUMENT, dg_cancellation_on_cancel(unused, NULL, &ended, count_up, NULL));
  dg_cancellation_destroy(unused);
  CHECK(ended == 2); /* never called, but ended */
  FAILS(DG_INVALID_ARGUMENT, dg_cancellation_cancel(unused));
  FAILS(DG_INVALID_ARGUMENT, dg_cancellation_cancel(NULL));
  FAILS(DG_INVALID_ARGUMENT, dg_cancellation_check(unused));
  FAILS(DG_INVALID_ARGUMENT, dg_cancellation_check((dg_cancellation*)(uintptr_t)empty));
  FAILS(DG_INVALID_ARGUMENT, dg_cancellation_on_cancel(unused, count_up, &ended, count_up, NULL));
  CHECK(ended == 3);
  dg_message_destroy(empty);
}

int main(void) {
  prepare();
  CHECK(sem_init(&watched, 0, 0) == 0);
  on_both(create);
  add(0, "hold", hold, NULL);
  add(1, "fail", fail, NULL);
  add(1, "nothing", nothing, NULL);
  add(1, "watch", watch, NULL);
  OK(dg_worker_register_responder(workers[1], DG_STR("later"), later, NULL, NULL));
  on_both(barrier);
  test_futures();
  test_cancel();
  test_completions();
  test_answers_later();
  test_cancelled_handlers();
  test_cancellations();
  on_both(shut_down);
  for (int i = 0; i < 2; ++i) dg_worker_destroy(workers[i]);
  clean_up();
  return 0;
}
