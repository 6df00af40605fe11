/* Calls of a program that has an event loop of its own: epoll tells it of the timer, and of the
 * calls that are done. No thread waits for a call, and none is needed to answer them. */
#define _DEFAULT_SOURCE
#include <sys/epoll.h>
#include <sys/timerfd.h>

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

static void add(int loop, int descriptor) {
  struct epoll_event event = {0};
  event.events = EPOLLIN;
  event.data.fd = descriptor;
  if (epoll_ctl(loop, EPOLL_CTL_ADD, descriptor, &event) != 0) {
    perror("epoll_ctl");
    exit(1);
  }
}

/* Makes a call at each tick of the timer, and takes the answers as they come. Returns their sum. */
static int run_loop(dg_worker* worker) {
  const struct itimerspec millisecond = {{0, 1000000}, {0, 1000000}};
  dg_future* futures[CALLS];
  dg_completions* completions = NULL;
  int made = 0, answered = 0, sum = 0;
  const int loop = epoll_create1(EPOLL_CLOEXEC);
  const int timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
  if (loop < 0 || timer < 0 || timerfd_settime(timer, 0, &millisecond, NULL) != 0) {
    perror("epoll, or timerfd");
    exit(1);
  }
  must(dg_completions_create(&completions));
  const int done = dg_completions_descriptor(completions);
  add(loop, timer);
  add(loop, done);
  while (answered < CALLS) {
    struct epoll_event events[2];
    const int count = epoll_wait(loop, events, 2, -1);
    for (int i = 0; i < count; ++i) {
      if (events[i].data.fd == done) {
        uint64_t tags[LATEST];
        size_t taken = 0;
        must(dg_completions_take(completions, tags, LATEST, &taken));
        for (size_t t = 0; t < taken; ++t, ++answered) sum += answer(futures[tags[t]]);
      } else {
        uint64_t ticks = 0;
        if (read(timer, &ticks, sizeof(ticks)) < 0 || made == CALLS) continue;
        futures[made] = call(worker, made);
        must(dg_completions_watch(completions, futures[made], (uint64_t)made));
        ++made;
      }
    }
  }
  dg_completions_destroy(completions);
  close(timer);
  close(loop);
  return sum;
}

int main(void) {
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
