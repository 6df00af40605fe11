/* Calls of a program that has an event loop of its own: epoll tells it of the timer, and of the
 * calls that are done. No thread waits for a call, and none is needed to answer them. */
#define _DEFAULT_SOURCE
#include <sys/epoll.h>
#include <sys/timerfd.h>

#include "squares.h"

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

int main(void) { return add_squares(run_loop); }
