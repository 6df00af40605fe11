/* Calls of a program whose event loop is libuv's: the loop tells it of the timer, and of the calls
 * that are done. No thread waits for a call, and none is needed to answer them. */
#define _DEFAULT_SOURCE
#include <uv.h>

#include "squares.h"

/* What the callbacks of the loop share; all of them run on its thread. */
typedef struct program {
  dg_worker* worker;
  dg_completions* completions;
  dg_future* futures[CALLS];
  int made, answered, sum;
  uv_timer_t timer;
  uv_poll_t done;
} program;

static void must_uv(int result) {
  if (result >= 0) return;
  fprintf(stderr, "libuv: %s\n", uv_strerror(result));
  exit(1);
}

/* Makes a call at each tick. */
static void on_tick(uv_timer_t* timer) {
  program* self = timer->data;
  self->futures[self->made] = call(self->worker, self->made);
  must(dg_completions_watch(self->completions, self->futures[self->made], (uint64_t)self->made));
  if (++self->made == CALLS) uv_close((uv_handle_t*)timer, NULL);
}

/* Takes the answers as they come. What is left behind is told of again at once. */
static void on_done(uv_poll_t* done, int status, int events) {
  program* self = done->data;
  uint64_t tags[LATEST];
  size_t taken = 0;
  (void)events;
  must_uv(status);
  must(dg_completions_take(self->completions, tags, LATEST, &taken));
  for (size_t t = 0; t < taken; ++t, ++self->answered) self->sum += answer(self->futures[tags[t]]);
  if (self->answered == CALLS) uv_close((uv_handle_t*)done, NULL);
}

static int run_loop(dg_worker* worker) {
  program self = {0};
  uv_loop_t loop;
  self.worker = worker;
  must(dg_completions_create(&self.completions));
  must_uv(uv_loop_init(&loop));
  must_uv(uv_timer_init(&loop, &self.timer));
  must_uv(uv_poll_init(&loop, &self.done, dg_completions_descriptor(self.completions)));
  self.timer.data = self.done.data = &self;
  must_uv(uv_timer_start(&self.timer, on_tick, 1, 1));
  must_uv(uv_poll_start(&self.done, UV_READABLE, on_done));
  must_uv(uv_run(&loop, UV_RUN_DEFAULT)); /* until both are closed */
  must_uv(uv_loop_close(&loop));
  dg_completions_destroy(self.completions);
  return self.sum;
}

int main(void) { return add_squares(run_loop); }
