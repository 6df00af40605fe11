/* Process groups from plain C. The ranks are threads of this process, each with its own worker. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <unistd.h>

#include "capi/testing/check.h"

enum { RANKS = 2 };

static dg_worker* workers[RANKS];
static dg_process_group* groups[RANKS];
static char rendezvous[512];

typedef struct part {
  void (*run)(int rank);
  int rank;
} part;
static void* run_part(void* argument) {
  part* self = (part*)argument;
  self->run(self->rank);
  return NULL;
}
static void on_all(void (*run)(int rank)) {
  part parts[RANKS];
  pthread_t threads[RANKS];
  for (int i = 0; i < RANKS; ++i) {
    parts[i].run = run;
    parts[i].rank = i;
    CHECK(pthread_create(&threads[i], NULL, run_part, &parts[i]) == 0);
  }
  for (int i = 0; i < RANKS; ++i) CHECK(pthread_join(threads[i], NULL) == 0);
}

static void start(int rank) {
  dg_worker_options options = DG_WORKER_OPTIONS_INIT;
  options.rank = (uint32_t)rank;
  options.world_size = RANKS;
  options.rendezvous.data = rendezvous;
  options.rendezvous.size = strlen(rendezvous);
  options.thread_count = 2;
  OK(dg_worker_create(&options, &workers[rank]));
}

static void make_group(int rank) {
  dg_process_group_options options = DG_PROCESS_GROUP_OPTIONS_INIT;
  options.name = DG_STR("all");
  OK(dg_process_group_create(workers[rank], &options, &groups[rank]));
  CHECK(dg_process_group_rank(groups[rank]) == (uint32_t)rank);
  CHECK(dg_process_group_size(groups[rank]) == RANKS);
}

/* --------------------------------------------------------------------------------- Collectives */

static void collectives(int rank) {
  const float one[2] = {(float)rank, 10}, other[1] = {(float)(rank * 4)};
  const int64_t number = 1;
  dg_tensor *x = floats(one, 1, 2), *y = floats(other, 1, 1), *whole = NULL;
  const dg_tensor* both[2];
  OK(dg_tensor_from_data(&number, DG_INT64, NULL, 0, &whole));
  both[0] = x;
  both[1] = y;
  OK(dg_process_group_average(groups[rank], both, 2));
  CHECK(data_of(x)[0] == 0.5f && data_of(x)[1] == 10 && data_of(y)[0] == 2);
  data_of(y)[0] = (float)rank;
  OK(dg_process_group_broadcast(groups[rank], both, 2, 1));
  CHECK(data_of(y)[0] == 1);
  FAILS(DG_INVALID_ARGUMENT, dg_process_group_broadcast(groups[rank], both, 2, RANKS));
  FAILS(DG_INVALID_ARGUMENT, dg_process_group_broadcast(groups[rank], both, 2, ~UINT32_C(0)));
  FAILS(DG_INVALID_ARGUMENT, dg_process_group_average(groups[rank], NULL, 1));
  both[1] = whole;
  SAYS(DG_INVALID_ARGUMENT, "tensor 1", dg_process_group_average(groups[rank], both, 2));
  dg_tensor_destroy(whole);
  FAILS(DG_INVALID_ARGUMENT, dg_process_group_average(NULL, both, 2));
  FAILS(DG_INVALID_ARGUMENT, dg_process_group_average((dg_process_group*)(void*)x, both, 2));
  FAILS(DG_INVALID_ARGUMENT, dg_process_group_broadcast(NULL, both, 2, 0));
  dg_tensor_destroy(x);
  dg_tensor_destroy(y);
}

/* ------------------------------------------------------------------------------------ Averager */

/* The gradient of the sum of w * scale, averaged. */
static float average_of(dg_worker* worker, dg_gradient_averager* averager, const dg_tensor* w,
                        float scale) {
  dg_context* context = NULL;
  dg_tensor *x = floats(&scale, 1, 1), *y = op2("aten::mul.Tensor", w, x), *gradient = NULL;
  const dg_tensor* root = y;
  float value;
  OK(dg_context_create(worker, &context));
  OK(dg_context_backward(context, &root, 1, NULL));
  OK(dg_gradient_averager_average(averager, context));
  OK(dg_context_gradient(context, w, &gradient));
  value = data_of(gradient)[0];
  dg_tensor_destroy(gradient);
  dg_tensor_destroy(y);
  dg_tensor_destroy(x);
  dg_context_destroy(context);
  return value;
}

/* What a rank without data does. An average of 0: there is none any more. */
static void join(int rank, dg_gradient_averager* averager, const dg_tensor* w, float average) {
  dg_context* context = NULL;
  dg_tensor* gradient = NULL;
  bool others = average == 0;
  OK(dg_context_create(workers[rank], &context));
  OK(dg_gradient_averager_join(averager, context, 0, &others));
  CHECK(others == (average != 0));
  if (average != 0) {
    OK(dg_context_gradient(context, w, &gradient));
    CHECK(data_of(gradient)[0] == average);
    dg_tensor_destroy(gradient);
    SAYS(DG_FAILED_PRECONDITION, "has a gradient of",
         dg_gradient_averager_join(averager, context, 0, &others));
  }
  dg_context_destroy(context);
}

static void averages(int rank) {
  const float start_value = 5 + (float)rank;
  dg_tensor *w = floats(&start_value, 1, 1), *buffer = floats(&start_value, 1, 1);
  const dg_tensor *parameter = w, *of_model = buffer;
  dg_gradient_averager* averager = NULL;
  dg_gradient_averager_options options = DG_GRADIENT_AVERAGER_OPTIONS_INIT;
  options.buffers = &of_model;
  options.buffer_count = 1;
  options.bucket_bytes = 1000;
  options.flags = DG_GRADIENT_AVERAGER_DIVIDE_BY_ACTIVE;
  OK(dg_tensor_require_grad(w));
  OK(dg_gradient_averager_create(groups[rank], &parameter, 1, &options, &averager));
  CHECK(data_of(w)[0] == 5 && data_of(buffer)[0] == 5); /* rank 0's */
  CHECK(average_of(workers[rank], averager, w, (float)(2 + 4 * rank)) == 4);
  if (rank == 1) {
    /* More data than the other has: alone among those that are active. */
    data_of(buffer)[0] = 9;
    CHECK(average_of(workers[rank], averager, w, 7) == 7);
    CHECK(average_of(workers[rank], averager, w, 3) == 3);
    join(rank, averager, w, 0);
  } else {
    join(rank, averager, w, 7);
    CHECK(data_of(buffer)[0] == 9);
    join(rank, averager, w, 3);
    join(rank, averager, w, 0);
  }
  dg_gradient_averager_destroy(averager);
  dg_tensor_destroy(buffer);
  dg_tensor_destroy(w);
}

/* ----------------------------------------------------------------------- Replicas of pipelines */

/* x * w of one number each; the user data is w. */
static dg_error* multiply(void* user_data, const dg_micro_batch* batch, dg_message** outputs) {
  dg_tensor* y = op2("aten::mul.Tensor", batch->inputs[0], (const dg_tensor*)user_data);
  const dg_tensor* output = y;
  OK(dg_message_create(NULL, 0, &output, 1, outputs));
  dg_tensor_destroy(y);
  return NULL;
}

static dg_error* sum(void* user_data, const dg_micro_batch* batch, dg_tensor** loss) {
  dg_value of;
  (void)user_data;
  of = dg_value_tensor(batch->outputs[0]);
  *loss = op("aten::sum", &of, 1);
  return NULL;
}

typedef struct last_handles {
  dg_process_group* group;
  dg_gradient_averager* averager;
  dg_pipeline_stages* stages; /* or NULL; they keep the averager, and that the group */
} last_handles;

/* The destructor of user data, where nothing may wait. */
static void destroy_handles(void* user_data) {
  const last_handles* last = (const last_handles*)user_data;
  dg_process_group_destroy(last->group);
  dg_gradient_averager_destroy(last->averager);
  dg_pipeline_stages_destroy(last->stages);
}

/* Which thread has ended what has the memory. */
typedef struct ended {
  pthread_mutex_t mu;
  pthread_cond_t cv;
  int is_over;
  pthread_t thread;
} ended;

static void note_end(void* user_data) {
  ended* self = (ended*)user_data;
  CHECK(pthread_mutex_lock(&self->mu) == 0);
  self->is_over = 1;
  self->thread = pthread_self();
  CHECK(pthread_cond_signal(&self->cv) == 0);
  CHECK(pthread_mutex_unlock(&self->mu) == 0);
}

/* A thread of the library ends the group, whoever had it last, and another one may have its name.
 */
static void ends_where_nothing_may_wait(int rank) {
  float one = 1;
  const int64_t size = 1;
  dg_process_group_options options = DG_PROCESS_GROUP_OPTIONS_INIT;
  options.name = DG_STR("again");
  for (int i = 0; i < 2; ++i) {
    ended end = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, pthread_self()};
    last_handles last = {NULL, NULL, NULL};
    dg_tensor *w = NULL, *owner = NULL;
    const dg_tensor* parameter = NULL;
    OK(dg_tensor_from_memory(&one, DG_FLOAT32, &size, NULL, 1, &end, note_end, &w));
    OK(dg_tensor_require_grad(w));
    parameter = w;
    OK(dg_process_group_create(workers[rank], &options, &last.group));
    OK(dg_gradient_averager_create(last.group, &parameter, 1, NULL, &last.averager));
    if (i == 1) {
      dg_pipeline_stages_options of_stages = DG_PIPELINE_STAGES_OPTIONS_INIT;
      dg_pipeline_stage stage = DG_PIPELINE_STAGE_INIT;
      const dg_pipeline_stage* list = &stage;
      stage.forward = multiply;
      of_stages.averager = last.averager;
      OK(dg_pipeline_stages_create(workers[rank], DG_STR("last"), &list, 1, &of_stages,
                                   &last.stages));
    }
    dg_tensor_destroy(w); /* the averager has it */
    OK(dg_tensor_from_memory(&last, DG_UINT8, NULL, NULL, 0, &last, destroy_handles, &owner));
    dg_tensor_destroy(owner);
    CHECK(pthread_mutex_lock(&end.mu) == 0);
    while (!end.is_over) CHECK(pthread_cond_wait(&end.cv, &end.mu) == 0);
    CHECK(!pthread_equal(end.thread, pthread_self()));
    CHECK(pthread_mutex_unlock(&end.mu) == 0);
    FAILS(DG_INVALID_ARGUMENT, dg_process_group_average(last.group, &parameter, 1));
  }
}

/* Each rank has a pipeline of one stage, which averages by itself over those of both. */
static void replicas_of_pipeline(int rank) {
  const float start_value = 5 + (float)rank, of_batch[2] = {1 + (float)rank, 2};
  const dg_str name = DG_STR("replica"), self = dg_worker_name(workers[rank], (uint32_t)rank);
  dg_tensor *w = floats(&start_value, 1, 1), *x = floats(of_batch, 2, 1), *gradient = NULL;
  const dg_tensor *parameter = w, *input = x;
  dg_gradient_averager* averager = NULL;
  dg_pipeline_stages_options options = DG_PIPELINE_STAGES_OPTIONS_INIT;
  dg_pipeline_options of_pipeline = DG_PIPELINE_OPTIONS_INIT;
  dg_pipeline_stage stage = DG_PIPELINE_STAGE_INIT;
  const dg_pipeline_stage* list = &stage;
  dg_pipeline_stages* stages = NULL;
  dg_schedule* schedule = NULL;
  dg_pipeline* pipeline = NULL;
  dg_pipeline_result* result = NULL;
  dg_context* context = NULL;
  OK(dg_tensor_require_grad(w));
  OK(dg_gradient_averager_create(groups[rank], &parameter, 1, NULL, &averager));
  CHECK(data_of(w)[0] == 5); /* rank 0's */
  stage.forward = multiply;
  stage.loss = sum;
  stage.targets = 0;
  stage.user_data = w;
  options.averager = (dg_gradient_averager*)(void*)w;
  FAILS(DG_INVALID_ARGUMENT,
        dg_pipeline_stages_create(workers[rank], name, &list, 1, &options, &stages));
  options.averager = averager;
  OK(dg_pipeline_stages_create(workers[rank], name, &list, 1, &options, &stages));
  dg_gradient_averager_destroy(averager); /* the stages keep it */
  OK(dg_schedule_create_gpipe(1, 2, &schedule));
  of_pipeline.reduction = DG_REDUCTION_SUM;
  OK(dg_pipeline_create(workers[rank], name, schedule, &self, 1, &of_pipeline, &pipeline));
  OK(dg_context_create(workers[rank], &context));
  OK(dg_pipeline_train(pipeline, context, &input, 1, NULL, 0, NULL, &result));
  OK(dg_context_gradient(context, w, &gradient));
  CHECK(data_of(gradient)[0] == 3.5f); /* of 1 + 2, and of 2 + 2 */
  dg_tensor_destroy(gradient);
  dg_pipeline_result_destroy(result);
  dg_context_destroy(context);
  dg_pipeline_destroy(pipeline);
  dg_schedule_destroy(schedule);
  dg_pipeline_stages_destroy(stages);
  dg_tensor_destroy(x);
  dg_tensor_destroy(w);
}

/* Two stages of one worker, each with a copy of the same parameter: x * w * w. */
static void test_tied(void) {
  const float start_value = 2, of_batch[2] = {1, 2};
  const dg_str name = DG_STR("tied"), self = dg_worker_name(workers[0], 0);
  const dg_str both[2] = {self, self}, names[2] = {DG_STR("w"), DG_STR("w")};
  dg_tensor *w[2], *x = floats(of_batch, 2, 1), *gradient = NULL;
  const dg_tensor *input = x, *twice[2];
  dg_pipeline_stage made[2] = {DG_PIPELINE_STAGE_INIT, DG_PIPELINE_STAGE_INIT};
  const dg_pipeline_stage* list[2] = {&made[0], &made[1]};
  dg_pipeline_options options = DG_PIPELINE_OPTIONS_INIT;
  dg_pipeline_stages* stages = NULL;
  dg_schedule* schedule = NULL;
  dg_pipeline* pipeline = NULL;
  dg_pipeline_result* result = NULL;
  dg_context* context = NULL;
  for (int i = 0; i < 2; ++i) {
    w[i] = floats(&start_value, 1, 1);
    OK(dg_tensor_require_grad(w[i]));
    made[i].number = (uint64_t)i;
    made[i].forward = multiply;
    made[i].loss = sum;
    made[i].targets = 0;
    made[i].user_data = w[i];
    made[i].tied_names = names;
    made[i].tied = (const dg_tensor* const*)&w[i];
    made[i].tied_count = 1;
  }
  twice[0] = twice[1] = w[0];
  made[0].tied = twice;
  made[0].tied_count = 2;
  SAYS(DG_INVALID_ARGUMENT, "tied_names has 'w' twice",
       dg_pipeline_stages_create(workers[0], name, list, 2, NULL, &stages));
  made[0].tied_count = 1;
  made[0].tied = &input;
  SAYS(DG_INVALID_ARGUMENT, "requires grad",
       dg_pipeline_stages_create(workers[0], name, list, 2, NULL, &stages));
  made[0].tied = NULL;
  FAILS(DG_INVALID_ARGUMENT, dg_pipeline_stages_create(workers[0], name, list, 2, NULL, &stages));
  made[0].tied = (const dg_tensor* const*)&w[0];
  OK(dg_pipeline_stages_create(workers[0], name, list, 2, NULL, &stages));
  OK(dg_schedule_create_gpipe(2, 2, &schedule));
  options.reduction = DG_REDUCTION_SUM;
  OK(dg_pipeline_create(workers[0], name, schedule, both, 2, &options, &pipeline));
  OK(dg_context_create(workers[0], &context));
  OK(dg_pipeline_train(pipeline, context, &input, 1, NULL, 0, NULL, &result));
  for (int i = 0; i < 2; ++i) {
    OK(dg_context_gradient(context, w[i], &gradient));
    CHECK(data_of(gradient)[0] == 12); /* of either stage (1 + 2) * 2 */
    dg_tensor_destroy(gradient);
  }
  dg_pipeline_result_destroy(result);
  dg_context_destroy(context);
  dg_pipeline_destroy(pipeline);
  dg_schedule_destroy(schedule);
  dg_pipeline_stages_destroy(stages);
  dg_tensor_destroy(x);
  for (int i = 0; i < 2; ++i) dg_tensor_destroy(w[i]);
}

/* One of them gives up, and the other hears why. */
static void fail(int rank) {
  const float one = 1;
  dg_process_group_options options = DG_PROCESS_GROUP_OPTIONS_INIT;
  dg_process_group* group = NULL;
  dg_tensor* x = floats(&one, 1, 1);
  const dg_tensor* values = x;
  dg_str bad;
  bad.data = NULL;
  bad.size = 3;
  options.name = DG_STR("fails");
  OK(dg_process_group_create(workers[rank], &options, &group));
  OK(dg_worker_barrier(workers[rank], 60000, 0)); /* both have it */
  FAILS(DG_INVALID_ARGUMENT, dg_process_group_fail(NULL, DG_ABORTED, DG_STR("no")));
  FAILS(DG_INVALID_ARGUMENT, dg_process_group_fail(group, DG_ABORTED, bad));
  if (rank == 0) OK(dg_process_group_fail(group, DG_DATA_LOSS, DG_STR("the disk is full")));
  SAYS(rank == 0 ? DG_DATA_LOSS : DG_UNAVAILABLE, "the disk is full",
       dg_process_group_average(group, &values, 1));
  OK(dg_process_group_fail(group, DG_OK, DG_STR("too late")));
  SAYS(rank == 0 ? DG_DATA_LOSS : DG_UNAVAILABLE, "the disk is full",
       dg_process_group_average(group, &values, 1));
  dg_process_group_destroy(group);
  FAILS(DG_INVALID_ARGUMENT, dg_process_group_fail(group, DG_ABORTED, DG_STR("gone")));
  dg_tensor_destroy(x);
}

/* Both ranks are told of parameters that differ. */
static void differ(int rank) {
  const float values[2] = {1, 2};
  dg_process_group_options options = DG_PROCESS_GROUP_OPTIONS_INIT;
  dg_process_group* group = NULL;
  dg_gradient_averager* averager = NULL;
  dg_tensor* w = floats(values, 1, 1 + rank);
  const dg_tensor* parameter = w;
  options.name = DG_STR("differ");
  options.size = RANKS;
  options.rank = (uint32_t)(1 - rank); /* of its own ranks */
  OK(dg_tensor_require_grad(w));
  OK(dg_process_group_create(workers[rank], &options, &group));
  CHECK(dg_process_group_rank(group) == (uint32_t)(1 - rank));
  SAYS(DG_INVALID_ARGUMENT, "parameter 0",
       dg_gradient_averager_create(group, &parameter, 1, NULL, &averager));
  CHECK(averager == NULL);
  dg_process_group_destroy(group);
  dg_tensor_destroy(w);
}

/* ---------------------------------------------------------------------------------- Wrong use */

static dg_tensor* tensor;
static dg_code codes[7];
static void in_destructor(void* user_data) {
  const dg_tensor* one = tensor;
  dg_process_group* group = NULL;
  dg_gradient_averager* averager = NULL;
  bool others;
  (void)user_data;
  codes[0] = code_of(dg_process_group_create(workers[0], NULL, &group));
  codes[1] = code_of(dg_process_group_average(groups[0], &one, 1));
  codes[2] = code_of(dg_process_group_broadcast(groups[0], &one, 1, 0));
  codes[3] = code_of(dg_gradient_averager_create(groups[0], &one, 1, NULL, &averager));
  codes[4] = code_of(dg_gradient_averager_join(averager, NULL, 0, &others));
  codes[5] = code_of(dg_gradient_averager_average_in_backward(averager, NULL));
  codes[6] = code_of(dg_process_group_fail(groups[0], DG_ABORTED, DG_STR("not here")));
}

/* Of one rank. A second backward would change what is being averaged. */
static void average_in_backward(dg_gradient_averager* averager, dg_context* context,
                                const dg_tensor* w) {
  dg_backward_options options = DG_BACKWARD_OPTIONS_INIT;
  dg_tensor *y = op2("aten::mul.Tensor", w, w), *gradient = NULL;
  const dg_tensor* root = y;
  options.flags = DG_BACKWARD_RETAIN_GRAPH;
  OK(dg_gradient_averager_average_in_backward(averager, context));
  OK(dg_context_backward(context, &root, 1, &options));
  OK(dg_gradient_averager_average(averager, context));
  OK(dg_context_gradient(context, w, &gradient));
  CHECK(data_of(gradient)[0] == 2);
  dg_tensor_destroy(gradient);
  OK(dg_gradient_averager_average_in_backward(averager, context));
  OK(dg_context_backward(context, &root, 1, &options));
  SAYS(DG_FAILED_PRECONDITION, "one backward", dg_context_backward(context, &root, 1, &options));
  dg_tensor_destroy(y);
}

static void test_misuse(void) {
  const float one = 1;
  dg_process_group_options options = DG_PROCESS_GROUP_OPTIONS_INIT;
  dg_gradient_averager_options of_averager = DG_GRADIENT_AVERAGER_OPTIONS_INIT;
  dg_process_group* group = NULL;
  dg_gradient_averager* averager = NULL;
  dg_context* context = NULL;
  bool others = false;
  dg_tensor* w = floats(&one, 1, 1);
  const dg_tensor* parameter = w;
  FAILS(DG_INVALID_ARGUMENT, dg_process_group_create(NULL, &options, &group));
  FAILS(DG_INVALID_ARGUMENT, dg_process_group_create(workers[0], &options, NULL));
  options.struct_size = 8;
  FAILS(DG_INVALID_ARGUMENT, dg_process_group_create(workers[0], &options, &group));
  options.struct_size = sizeof(options);
  options.rank = 1;
  FAILS(DG_INVALID_ARGUMENT, dg_process_group_create(workers[0], &options, &group));
  options.size = 1;
  FAILS(DG_INVALID_ARGUMENT, dg_process_group_create(workers[0], &options, &group));
  options.size = ~UINT32_C(0);
  FAILS(DG_INVALID_ARGUMENT, dg_process_group_create(workers[0], &options, &group));
  options.rank = 0;
  options.size = 1;
  options.backend = DG_STR("drums");
  FAILS(DG_INVALID_ARGUMENT, dg_process_group_create(workers[0], &options, &group));
  options.backend.size = 0;
  options.name = DG_STR("a/b");
  FAILS(DG_INVALID_ARGUMENT, dg_process_group_create(workers[0], &options, &group));
  options.name = DG_STR("lonely");
  options.size = 2;
  options.timeout_ms = DG_FOREVER;
  options.join_timeout_ms = 1;
  FAILS(DG_DEADLINE_EXCEEDED, dg_process_group_create(workers[0], &options, &group));
  options.join_timeout_ms = 0;
  CHECK(group == NULL);

  options.name = DG_STR("one");
  options.size = 1;
  options.timeout_ms = DG_FOREVER;
  /* A program of before has a shorter struct. */
  options.struct_size = offsetof(dg_process_group_options, join_timeout_ms);
  OK(dg_process_group_create(workers[0], &options, &group));
  FAILS(DG_INVALID_ARGUMENT, dg_gradient_averager_create(NULL, &parameter, 1, NULL, &averager));
  FAILS(DG_INVALID_ARGUMENT, dg_gradient_averager_create(group, NULL, 1, NULL, &averager));
  FAILS(DG_INVALID_ARGUMENT, dg_gradient_averager_create(group, &parameter, 1, NULL, NULL));
  of_averager.flags = 2;
  FAILS(DG_UNIMPLEMENTED,
        dg_gradient_averager_create(group, &parameter, 1, &of_averager, &averager));
  of_averager.flags = 0;
  of_averager.buffer_count = 1;
  FAILS(DG_INVALID_ARGUMENT,
        dg_gradient_averager_create(group, &parameter, 1, &of_averager, &averager));
  CHECK(averager == NULL);
  OK(dg_tensor_require_grad(w));
  OK(dg_gradient_averager_create(group, &parameter, 1, NULL, &averager));
  FAILS(DG_INVALID_ARGUMENT, dg_gradient_averager_average(averager, NULL));
  OK(dg_context_create(workers[0], &context));
  FAILS(DG_INVALID_ARGUMENT, dg_gradient_averager_average(NULL, context));
  FAILS(DG_INVALID_ARGUMENT, dg_gradient_averager_join(NULL, context, 0, &others));
  FAILS(DG_INVALID_ARGUMENT, dg_gradient_averager_join(averager, NULL, 0, &others));
  FAILS(DG_INVALID_ARGUMENT, dg_gradient_averager_join(averager, context, 0, NULL));
  of_unknown_flags(dg_gradient_averager_join(averager, context, 2, &others));
  FAILS(DG_INVALID_ARGUMENT, dg_gradient_averager_average_in_backward(NULL, context));
  FAILS(DG_INVALID_ARGUMENT, dg_gradient_averager_average_in_backward(averager, NULL));
  dg_process_group_destroy(group); /* the averager keeps it */
  FAILS(DG_INVALID_ARGUMENT, dg_process_group_average(group, &parameter, 1));
  CHECK(dg_process_group_rank(group) == 0 && dg_process_group_size(group) == 0);
  CHECK(average_of(workers[0], averager, w, 7) == 7);
  average_in_backward(averager, context, w);
  dg_gradient_averager_destroy(averager);
  dg_gradient_averager_destroy(averager);
  FAILS(DG_INVALID_ARGUMENT, dg_gradient_averager_join(averager, context, 0, &others));
  dg_context_destroy(context);

  tensor = w;
  {
    dg_tensor* ends = NULL;
    OK(dg_tensor_from_memory(&options, DG_UINT8, NULL, NULL, 0, &options, in_destructor, &ends));
    dg_tensor_destroy(ends);
  }
  for (int i = 0; i < 7; ++i) CHECK(codes[i] == DG_FAILED_PRECONDITION);
  dg_tensor_destroy(w);
}

int main(void) {
  const char* folder = getenv("TEST_TMPDIR");
  snprintf(rendezvous, sizeof(rendezvous), "file://%s/group.%d", folder ? folder : "/tmp",
           (int)getpid());
  on_all(start);
  on_all(make_group);
  on_all(collectives);
  on_all(averages);
  on_all(ends_where_nothing_may_wait);
  on_all(replicas_of_pipeline);
  test_tied();
  on_all(differ);
  on_all(fail);
  test_misuse();
  for (int i = 0; i < RANKS; ++i) dg_worker_destroy(workers[i]);
  on_all(collectives); /* they need the workers no more */
  for (int i = 0; i < RANKS; ++i) dg_process_group_destroy(groups[i]);
  unlink(rendezvous + strlen("file://"));
  return 0;
}
