/* Futures, handlers that answer later, and cancellations, between two workers in this process; and
 * what becomes of wrong use, in callbacks too. From plain C. */
#define _POSIX_C_SOURCE 200809L
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
  dg_future_destroy(future);
  FAILS(DG_INVALID_ARGUMENT, dg_future_cancel(future));
  FAILS(DG_INVALID_ARGUMENT, dg_future_cancel(NULL));
  FAILS(DG_INVALID_ARGUMENT, dg_future_cancel((const dg_future*)(const void*)empty));
  CHECK(reply == NULL);
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
  test_answers_later();
  test_cancelled_handlers();
  test_cancellations();
  on_both(shut_down);
  for (int i = 0; i < 2; ++i) dg_worker_destroy(workers[i]);
  clean_up();
  return 0;
}
