/* Pipelines from plain C: steps against one process, to the last bit; what goes wrong in a stage,
 * on a worker and with arguments; and ends in every order. */
#define _POSIX_C_SOURCE 200809L
#include <sched.h>

#include "capi/testing/pair.h"
#include "capi/testing/replica.h"

enum { WIDTH = 16, BATCH = 10, STEPS = 10, MOST_STAGES = 4, LISTS = 16 };

/* What the function of a stage does besides, once: in its call number `at`. */
enum fault {
  NONE,
  FAIL,       /* returns an error, with outputs */
  PAYLOAD,    /* returns a message with a payload */
  NO_OUTPUTS, /* stores none */
  GARBAGE,    /* stores what is not a message, or a tensor */
  HOLD,       /* posts `entered`, and waits for `released` */
  MISUSE,     /* tries what would wait for itself; and makes a call, which it may */
  END_OWN,    /* destroys its own stages */
  WAIT_STEP,  /* waits for `released`, and tries to wait for its own step */
  END_STEP,   /* waits for `released`, and destroys its own step */
  AHEAD       /* in its step: waits for `entered`, and posts `released` */
};

/* A layer, with what its functions count. */
typedef struct layer {
  dg_tensor *weight, *bias;
  dg_optimizer* optimizer; /* a local one, for its step; or NULL */
  enum fault fault;
  int at;
  int forwards, losses, steps, ended;
  int actions[DG_ACTION_STEP + 1]; /* of on_action, by kind */
  uint64_t of_step;                /* the last one */
  int64_t until_ns;
} layer;

static layer layers[MOST_STAGES];
static dg_pipeline_stages* own_stages; /* of END_OWN */
static dg_pipeline_step* own_step;     /* of WAIT_STEP and END_STEP */
static bool within_replica; /* END_OWN, WAIT_STEP and END_STEP call it on another thread */
static const char* const names[2] = {"front", "back"};

static dg_tensor* numbers(uint64_t seed, int64_t rows, int64_t columns) {
  float* data = (float*)malloc(sizeof(float) * (size_t)(rows * columns));
  dg_tensor* tensor;
  CHECK(data != NULL);
  for (int64_t i = 0; i < rows * columns; ++i) {
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    data[i] = (float)(seed >> 40) / (float)(1 << 24) - 0.5f;
  }
  tensor = floats(data, rows, columns);
  free(data);
  return tensor;
}

static void make_layers(layer* of, int count) {
  memset(of, 0, sizeof(layer) * (size_t)count);
  for (int i = 0; i < count; ++i) {
    of[i].weight = numbers((uint64_t)(10 + i), WIDTH, WIDTH);
    of[i].bias = numbers((uint64_t)(20 + i), 1, WIDTH);
    OK(dg_tensor_require_grad(of[i].weight));
    OK(dg_tensor_require_grad(of[i].bias));
  }
}
static void end_layers(layer* of, int count) {
  for (int i = 0; i < count; ++i) {
    dg_tensor_destroy(of[i].weight);
    dg_tensor_destroy(of[i].bias);
    dg_optimizer_destroy(of[i].optimizer);
  }
}

/* tanh(x w + b) */
static dg_tensor* run_layer(const layer* of, const dg_tensor* x) {
  dg_tensor* product = op2("aten::matmul", x, of->weight);
  dg_tensor* sum = op2("aten::add.Tensor", product, of->bias);
  dg_tensor* y = op1("aten::tanh", sum);
  dg_tensor_destroy(product);
  dg_tensor_destroy(sum);
  return y;
}

static dg_message* message_with(const dg_tensor* tensor, const char* payload) {
  dg_message* message = NULL;
  OK(dg_message_create(payload, strlen(payload), &tensor, 1, &message));
  return message;
}

static dg_error* answer(void* user_data, const dg_request* request, dg_message** reply) {
  (void)user_data, (void)request;
  OK(dg_message_create("42", 2, NULL, 0, reply));
  return NULL;
}

/* On a thread of the library that the worker's end waits for. */
static void misuse(dg_worker* worker) {
  dg_message *request = NULL, *reply = NULL;
  FAILS(DG_FAILED_PRECONDITION, dg_worker_close(worker, DG_FOREVER));
  FAILS(DG_FAILED_PRECONDITION, dg_worker_shutdown(worker, DG_FOREVER, 0));
  FAILS(DG_FAILED_PRECONDITION, dg_worker_serve(worker, 0));
  FAILS(DG_FAILED_PRECONDITION, dg_worker_leave(worker, DG_FOREVER));
  OK(dg_message_create(NULL, 0, NULL, 0, &request));
  OK(dg_worker_call(worker, DG_STR("front"), DG_STR("answer"), request, NULL, &reply));
  CHECK(str_is(dg_message_payload(reply), "42"));
  dg_message_destroy(request);
  dg_message_destroy(reply);
  dg_grad_set_enabled(!dg_grad_enabled()); /* is put back */
}

static void end_own_stages(void) { dg_pipeline_stages_destroy(own_stages); }
static void wait_own_step(void) {
  dg_pipeline_result* result = NULL;
  SAYS(DG_FAILED_PRECONDITION, "in a function of one of its stages",
       dg_pipeline_step_wait(own_step, &result));
  CHECK(result == NULL);
}
static void end_own_step(void) { dg_pipeline_step_destroy(own_step); }
/* Here, or on a thread that the function waits for. */
static void call(void (*function)(void)) {
  if (within_replica) {
    on_replica(function);
  } else {
    function();
  }
}

static dg_error* forward(void* user_data, const dg_micro_batch* batch, dg_message** outputs) {
  layer* self = (layer*)user_data;
  const bool now = self->forwards++ == self->at;
  const enum fault fault = now ? self->fault : NONE;
  dg_tensor* y;
  CHECK(batch->struct_size >= sizeof(dg_micro_batch));
  CHECK(&layers[batch->stage] == self);
  CHECK(batch->input_count == 1 && batch->output_count == 0 && batch->target_count == 0);
  if (fault == NO_OUTPUTS) return NULL;
  y = run_layer(self, batch->inputs[0]);
  *outputs = message_with(y, fault == PAYLOAD ? "a note" : "");
  dg_tensor_destroy(y);
  if (fault == FAIL) return dg_error_create(DG_DATA_LOSS, DG_STR("the dog ate it"));
  if (fault == GARBAGE) {
    dg_message_destroy(*outputs);
    *outputs = (dg_message*)(void*)self->weight;
  }
  if (fault == HOLD) {
    post(&entered);
    wait_at_gate(&released);
  }
  if (fault == MISUSE) misuse(workers[batch->stage % 2]);
  if (fault == END_OWN) {
    call(end_own_stages);
    CHECK(self->ended == 0);
  }
  if (fault == WAIT_STEP) {
    wait_at_gate(&released);
    call(wait_own_step);
  }
  if (fault == END_STEP) {
    wait_at_gate(&released);
    call(end_own_step);
  }
  return NULL;
}

static dg_error* loss(void* user_data, const dg_micro_batch* batch, dg_tensor** out) {
  layer* self = (layer*)user_data;
  CHECK(batch->input_count == 0 && batch->output_count == 1 && batch->target_count == 1);
  if (self->losses++ == self->at && self->fault == FAIL) {
    *out = (dg_tensor*)(void*)self; /* is not one, and need not be with an error */
    return dg_error_create(DG_OUT_OF_RANGE, DG_STR("it is lost"));
  }
  if (self->fault == GARBAGE) return NULL;
  *out = op2("aten::mse_loss", batch->outputs[0], batch->targets[0]);
  return NULL;
}

/* A learning rate for each step. */
static double rate_of(int steps) { return 0.05 / steps; }

/* That of the optimizer; or w -= gradient. */
static dg_error* step(void* user_data, const dg_context* context) {
  layer* self = (layer*)user_data;
  dg_tensor* const parameters[2] = {self->weight, self->bias};
  ++self->steps;
  if (self->optimizer != NULL) {
    OK(dg_optimizer_set_learning_rate(self->optimizer, rate_of(self->steps)));
    return dg_optimizer_step(self->optimizer, context);
  }
  if (self->fault == AHEAD && self->steps == 1) {
    wait_at_gate(&entered);
    post(&released);
  }
  dg_grad_set_enabled(false);
  for (int i = 0; i < 2; ++i) {
    dg_tensor* gradient = NULL;
    dg_error* error = dg_context_gradient(context, parameters[i], &gradient);
    if (error != NULL) return error;
    dg_tensor_destroy(op2("aten::sub_.Tensor", parameters[i], gradient));
    dg_tensor_destroy(gradient);
  }
  dg_grad_set_enabled(true);
  return NULL;
}

/* Counts, and fails behind a step if there is a fault. */
static dg_error* on_action(void* user_data, const dg_stage_span* span) {
  layer* self = (layer*)user_data;
  CHECK(span->struct_size >= sizeof(dg_stage_span));
  CHECK(&layers[span->action->stage] == self && span->rank == span->action->stage % 2);
  CHECK(span->begin_ns >= self->until_ns && span->end_ns >= span->begin_ns);
  self->until_ns = span->end_ns;
  self->of_step = span->step;
  ++self->actions[span->action->kind];
  if (self->fault != FAIL || span->action->kind != DG_ACTION_STEP) return NULL;
  return dg_error_create(DG_RESOURCE_EXHAUSTED, DG_STR("the disk is full"));
}

static void end_layer(void* user_data) { count_up(&((layer*)user_data)->ended); }

static dg_pipeline_stage stage_of(uint64_t number) {
  dg_pipeline_stage stage = DG_PIPELINE_STAGE_INIT;
  stage.number = number;
  stage.forward = forward;
  stage.loss = loss;
  stage.step = step;
  stage.user_data = &layers[number];
  stage.destroy = end_layer;
  return stage;
}

/* Stage s is on worker s % 2. */
static dg_pipeline_stages* make_stages(int rank, int stage_count, uint64_t flags) {
  dg_pipeline_stage made[MOST_STAGES];
  const dg_pipeline_stage* list[MOST_STAGES];
  dg_pipeline_stages_options options = DG_PIPELINE_STAGES_OPTIONS_INIT;
  dg_pipeline_stages* stages = NULL;
  size_t count = 0;
  for (int s = rank; s < stage_count; s += 2) {
    made[count] = stage_of((uint64_t)s);
    made[count].flags = flags;
    list[count] = &made[count];
    ++count;
  }
  options.num_threads = 1;
  OK(dg_pipeline_stages_create(workers[rank], DG_STR("model"), list, count, &options, &stages));
  return stages;
}

static dg_pipeline* make_pipeline(const dg_schedule* schedule, uint64_t reduction) {
  dg_pipeline_options options = DG_PIPELINE_OPTIONS_INIT;
  dg_pipeline* pipeline = NULL;
  dg_str of_ranks[2];
  for (int i = 0; i < 2; ++i) {
    of_ranks[i].data = names[i];
    of_ranks[i].size = strlen(names[i]);
  }
  options.reduction = reduction;
  OK(dg_pipeline_create(workers[0], DG_STR("model"), schedule, of_ranks,
                        dg_schedule_get(schedule)->rank_count, &options, &pipeline));
  return pipeline;
}

/* Two workers, which may make what they like. */
static void begin_job(void) {
  prepare();
  on_both(create);
  add(0, "answer", answer, NULL);
  on_both(barrier);
}
static void end_job(void) {
  on_both(shut_down);
  for (int i = 0; i < 2; ++i) dg_worker_destroy(workers[i]);
  clean_up();
}

static dg_error* train(const dg_pipeline* pipeline, dg_context* context, const dg_tensor* x,
                       const dg_tensor* y, int64_t timeout_ms, dg_pipeline_result** result) {
  dg_pipeline_run_options options = DG_PIPELINE_RUN_OPTIONS_INIT;
  options.timeout_ms = timeout_ms;
  return dg_pipeline_train(pipeline, context, &x, 1, &y, 1, &options, result);
}

/* A step whose result nobody wants, in a context of its own. */
static dg_error* try_step(const dg_pipeline* pipeline, int64_t timeout_ms) {
  dg_tensor *x = numbers(1, BATCH, WIDTH), *y = numbers(2, BATCH, WIDTH);
  dg_context* context = NULL;
  dg_pipeline_result* result = NULL;
  dg_error* error;
  OK(dg_context_create(workers[0], &context));
  error = train(pipeline, context, x, y, timeout_ms, &result);
  CHECK((error == NULL) == (result != NULL));
  dg_pipeline_result_destroy(result);
  dg_context_destroy(context);
  dg_tensor_destroy(x);
  dg_tensor_destroy(y);
  return error;
}

static bool same(const dg_tensor* a, const dg_tensor* b) {
  return dg_tensor_element_count(a) == dg_tensor_element_count(b) &&
         memcmp(data_of(a), data_of(b), sizeof(float) * (size_t)dg_tensor_element_count(a)) == 0;
}

/* -------------------------------------------------------------------------------- One process */

static dg_tensor* part_of(const dg_tensor* tensor, int64_t begin, int64_t size) {
  dg_value arguments[4];
  arguments[0] = dg_value_tensor(tensor);
  arguments[1] = dg_value_integer(0);
  arguments[2] = dg_value_integer(begin);
  arguments[3] = dg_value_integer(size);
  return op("aten::narrow", arguments, 4);
}

static dg_tensor* run_layers(const layer* of, int count, const dg_tensor* x) {
  dg_tensor* at = NULL;
  OK(dg_tensor_clone(x, &at));
  for (int s = 0; s < count; ++s) {
    dg_tensor* next = run_layer(&of[s], at);
    dg_tensor_destroy(at);
    at = next;
  }
  return at;
}

/* The same micro-batches, one after the other, in one context. */
static void step_alone(const layer* of, int stage_count, int64_t count, bool mean,
                       dg_context* context, const dg_tensor* x, const dg_tensor* y,
                       dg_tensor** losses) {
  int64_t begin = 0;
  for (int64_t m = 0; m < count; ++m) {
    const int64_t size = BATCH / count + (m < BATCH % count);
    const float weight = mean ? (float)((double)size / BATCH) : 1;
    dg_backward_options options = DG_BACKWARD_OPTIONS_INIT;
    dg_tensor *in = part_of(x, begin, size), *want = part_of(y, begin, size), *out,
              *gradient = NULL;
    const dg_tensor *root, *of_root;
    out = run_layers(of, stage_count, in);
    losses[m] = op2("aten::mse_loss", out, want);
    OK(dg_tensor_from_data(&weight, DG_FLOAT32, NULL, 0, &gradient));
    root = losses[m];
    of_root = gradient;
    options.flags = DG_BACKWARD_RETAIN_GRAPH; /* others follow, over other graphs */
    options.root_gradients = &of_root;
    OK(dg_context_backward(context, &root, 1, &options));
    dg_tensor_destroy(gradient);
    dg_tensor_destroy(out);
    dg_tensor_destroy(in);
    dg_tensor_destroy(want);
    begin += size;
  }
}

enum kind { PLAIN, SGD, ADAM, ADAMW };

/* Of the worker, or a local one (NULL). */
static dg_optimizer* make_optimizer(dg_worker* worker, dg_str name, enum kind kind, const layer* of,
                                    int stage_count, int first, int every) {
  const dg_tensor* parameters[2 * MOST_STAGES];
  dg_sgd_options options = DG_SGD_OPTIONS_INIT;
  dg_optimizer* optimizer = NULL;
  size_t count = 0;
  for (int s = first; s < stage_count; s += every) {
    parameters[count++] = of[s].weight;
    parameters[count++] = of[s].bias;
  }
  options.learning_rate = 0.05;
  options.momentum = 0.9;
  if (kind == SGD) {
    OK(dg_optimizer_create_sgd(worker, name, parameters, count, &options, &optimizer));
  } else if (kind == ADAM) {
    OK(dg_optimizer_create_adam(worker, name, parameters, count, NULL, &optimizer));
  } else if (kind == ADAMW) {
    OK(dg_optimizer_create_adamw(worker, name, parameters, count, NULL, &optimizer));
  }
  return optimizer;
}
static dg_optimizer* optimizer_of(int rank, dg_str name, const layer* of, int stage_count,
                                  int first, int every) {
  return make_optimizer(workers[rank], name, SGD, of, stage_count, first, every);
}

static void compare(dg_schedule* schedule, bool mean, uint64_t flags) {
  const dg_schedule_data* data = dg_schedule_get(schedule);
  const int stage_count = (int)data->stage_count;
  const int64_t count = (int64_t)data->micro_batches;
  layer alone[MOST_STAGES];
  dg_pipeline_stages* stages[2];
  dg_optimizer *of_pipeline[2], *of_alone[2];
  dg_pipeline* pipeline;
  begin_job();
  make_layers(layers, stage_count);
  make_layers(alone, stage_count);
  for (int i = 0; i < 2; ++i) {
    stages[i] = make_stages(i, stage_count, flags);
    of_pipeline[i] = optimizer_of(i, DG_STR("pipeline"), layers, stage_count, i, 2);
    of_alone[i] = optimizer_of(i, DG_STR("alone"), alone, i == 0 ? stage_count : 0, 0, 1);
  }
  pipeline = make_pipeline(schedule, mean ? DG_REDUCTION_MEAN : DG_REDUCTION_SUM);
  dg_schedule_destroy(schedule); /* the pipeline has its own */
  for (int step_number = 0; step_number < STEPS; ++step_number) {
    dg_tensor* x = numbers((uint64_t)(100 + step_number), BATCH, WIDTH);
    dg_tensor* y = numbers((uint64_t)(200 + step_number), BATCH, WIDTH);
    dg_context *context = NULL, *context_alone = NULL;
    dg_pipeline_result* result = NULL;
    dg_message* losses = NULL;
    dg_tensor *of_batch = NULL, *expected[BATCH];
    float sum = 0;
    OK(dg_context_create(workers[0], &context));
    OK(train(pipeline, context, x, y, 0, &result));
    OK(dg_context_create(workers[0], &context_alone));
    step_alone(alone, stage_count, count, mean, context_alone, x, y, expected);
    OK(dg_pipeline_result_losses(result, &losses));
    CHECK(dg_message_tensor_count(losses) == (size_t)count);
    for (int64_t m = 0; m < count; ++m) {
      dg_tensor* one = NULL;
      OK(dg_message_tensor(losses, (size_t)m, &one));
      CHECK(same(one, expected[m]));
      sum += *data_of(one) * (mean ? (float)(BATCH / count + (m < BATCH % count)) / BATCH : 1);
      dg_tensor_destroy(one);
      dg_tensor_destroy(expected[m]);
    }
    OK(dg_pipeline_result_loss(result, &of_batch));
    CHECK(*data_of(of_batch) > sum - 1e-4f && *data_of(of_batch) < sum + 1e-4f);
    CHECK(dg_pipeline_result_output_count(result) == 0);
    dg_tensor_destroy(of_batch);
    dg_message_destroy(losses);
    dg_pipeline_result_destroy(result);
    OK(dg_optimizer_step(of_pipeline[0], context));
    OK(dg_optimizer_step(of_alone[0], context_alone));
    dg_context_destroy(context);
    dg_context_destroy(context_alone);
    dg_tensor_destroy(x);
    dg_tensor_destroy(y);
  }
  for (int s = 0; s < stage_count; ++s) {
    const bool twice = (flags & DG_PIPELINE_STAGE_RECOMPUTE) != 0;
    CHECK(same(layers[s].weight, alone[s].weight) && same(layers[s].bias, alone[s].bias));
    CHECK(layers[s].forwards == STEPS * (int)count * (twice ? 2 : 1));
    CHECK(layers[s].losses == (s == stage_count - 1 ? layers[s].forwards : 0));
    CHECK(layers[s].ended == 0);
  }
  dg_pipeline_destroy(pipeline);
  for (int i = 0; i < 2; ++i) {
    dg_pipeline_stages_destroy(stages[i]);
    dg_optimizer_destroy(of_pipeline[i]);
    dg_optimizer_destroy(of_alone[i]);
  }
  for (int s = 0; s < stage_count; ++s) CHECK(layers[s].ended == 1);
  end_job();
  end_layers(layers, stage_count);
  end_layers(alone, stage_count);
}

static void test_steps(void) {
  dg_schedule* schedule = NULL;
  OK(dg_schedule_create_gpipe(2, 4, &schedule));
  compare(schedule, true, 0);
  OK(dg_schedule_create_one_forward_one_backward(2, 4, &schedule));
  compare(schedule, false, 0);
  OK(dg_schedule_create_one_forward_one_backward(2, 3, &schedule));
  compare(schedule, true, DG_PIPELINE_STAGE_RECOMPUTE);
  OK(dg_schedule_create_interleaved_one_forward_one_backward(2, 2, 4, &schedule));
  compare(schedule, true, 0);
  OK(dg_schedule_create_zero_bubble_h1(2, 4, &schedule));
  compare(schedule, true, 0);
  OK(dg_schedule_create_zero_bubble_h2(2, 4, &schedule));
  compare(schedule, true, 0);
  OK(dg_schedule_create_zero_bubble(2, 4, 3, &schedule));
  compare(schedule, true, 0);
}

static void test_evaluation(void) {
  dg_schedule* schedule = NULL;
  dg_pipeline_stages* stages[2];
  dg_pipeline* pipeline;
  dg_tensor *x = numbers(1, BATCH, WIDTH), *y = numbers(2, BATCH, WIDTH);
  const dg_tensor *inputs = x, *targets = y;
  begin_job();
  make_layers(layers, 2);
  for (int i = 0; i < 2; ++i) stages[i] = make_stages(i, 2, 0);
  OK(dg_schedule_create_gpipe(2, 3, &schedule));
  pipeline = make_pipeline(schedule, DG_REDUCTION_MEAN);
  for (size_t target_count = 0; target_count < 2; ++target_count) {
    dg_pipeline_result* result = NULL;
    dg_message *losses = NULL, *outputs = NULL;
    dg_tensor* of_batch = NULL;
    int64_t begin = 0;
    OK(dg_pipeline_evaluate(pipeline, &inputs, 1, &targets, target_count, NULL, &result));
    CHECK(dg_pipeline_result_output_count(result) == 3);
    for (size_t m = 0; m < 3; ++m) {
      dg_tensor *out = NULL, *part, *expected;
      OK(dg_pipeline_result_outputs(result, m, &outputs));
      CHECK(dg_message_tensor_count(outputs) == 1);
      OK(dg_message_tensor(outputs, 0, &out));
      CHECK(!dg_tensor_requires_grad(out));
      part = part_of(x, begin, size_of(out, 0));
      expected = run_layers(layers, 2, part);
      begin += size_of(out, 0);
      CHECK(same(out, expected));
      dg_tensor_destroy(part);
      dg_tensor_destroy(expected);
      dg_tensor_destroy(out);
      dg_message_destroy(outputs);
    }
    CHECK(begin == BATCH);
    FAILS(DG_INVALID_ARGUMENT, dg_pipeline_result_outputs(result, 3, &outputs));
    OK(dg_pipeline_result_losses(result, &losses));
    CHECK(dg_message_tensor_count(losses) == (target_count == 0 ? 0 : 3));
    OK(dg_pipeline_result_loss(result, &of_batch));
    CHECK((of_batch != NULL) == (target_count == 1));
    dg_tensor_destroy(of_batch);
    dg_message_destroy(losses);
    dg_pipeline_result_destroy(result);
    FAILS(DG_INVALID_ARGUMENT, dg_pipeline_result_losses(result, &losses));
    FAILS(DG_INVALID_ARGUMENT, dg_pipeline_result_loss(result, &of_batch));
    FAILS(DG_INVALID_ARGUMENT, dg_pipeline_result_outputs(result, 0, &outputs));
    CHECK(dg_pipeline_result_output_count(result) == 0);
  }
  {
    dg_pipeline_result* result = NULL;
    SAYS(DG_INVALID_ARGUMENT, "at least one input",
         dg_pipeline_evaluate(pipeline, NULL, 0, NULL, 0, NULL, &result));
    FAILS(DG_INVALID_ARGUMENT, dg_pipeline_evaluate(pipeline, NULL, 1, NULL, 0, NULL, &result));
    FAILS(DG_INVALID_ARGUMENT, dg_pipeline_evaluate(pipeline, &inputs, 1, NULL, 0, NULL, NULL));
    FAILS(DG_INVALID_ARGUMENT, dg_pipeline_evaluate(NULL, &inputs, 1, NULL, 0, NULL, &result));
    FAILS(DG_INVALID_ARGUMENT,
          dg_pipeline_train(pipeline, NULL, &inputs, 1, NULL, 0, NULL, &result));
    CHECK(result == NULL);
  }
  dg_pipeline_destroy(pipeline);
  dg_schedule_destroy(schedule);
  for (int i = 0; i < 2; ++i) dg_pipeline_stages_destroy(stages[i]);
  end_job();
  end_layers(layers, 2);
  dg_tensor_destroy(x);
  dg_tensor_destroy(y);
}

/* ----------------------------------------------------------------------------------- Schedules */

static double time_of(void* user_data, const dg_action* action) {
  ++*(int*)user_data;
  return action->kind == DG_ACTION_FORWARD ? 1 : action->kind == DG_ACTION_BACKWARD ? 2 : 0;
}

static void test_schedules(void) {
  dg_schedule *schedule = NULL, *copy = NULL;
  const dg_schedule_data* data;
  dg_schedule_data own = DG_SCHEDULE_DATA_INIT;
  dg_action_list lists[2];
  dg_action actions[2][4] = {{{DG_ACTION_FORWARD, 0, 0}, {DG_ACTION_BACKWARD, 0, 0}},
                             {{DG_ACTION_FORWARD, 1, 0}, {DG_ACTION_BACKWARD, 1, 0}}};
  const uint32_t rank_of_stage[2] = {0, 1}, most[2] = {1, 1};
  uint32_t held[2];
  double end = 0, busy[2], starts_of_first[LISTS], *starts[2];
  int asked_times = 0;

  /* What is generated can be taken apart, and put together again. */
  OK(dg_schedule_create_one_forward_one_backward(2, 3, &schedule));
  data = dg_schedule_get(schedule);
  CHECK(data->struct_size >= sizeof(*data) && data->micro_batches == 3);
  CHECK(data->stage_count == 2 && data->rank_count == 2);
  CHECK(data->rank_of_stage[0] == 0 && data->rank_of_stage[1] == 1);
  CHECK(data->max_activations[0] == 2 && data->max_activations[1] == 1);
  CHECK(data->lists[0].size == 12 && data->lists[0].size <= LISTS);
  CHECK(data->lists[0].data[0].kind == DG_ACTION_FORWARD);
  CHECK(data->lists[0].data[1].kind == DG_ACTION_SEND_ACTIVATION);
  CHECK(data->lists[1].data[0].kind == DG_ACTION_RECEIVE_ACTIVATION);
  OK(dg_schedule_create(data, 0, &copy));
  starts[0] = starts_of_first;
  starts[1] = NULL;
  OK(dg_schedule_simulate(copy, time_of, &asked_times, &end, busy, held, starts));
  CHECK(asked_times == (int)(data->lists[0].size + data->lists[1].size));
  CHECK(end == 12 && busy[0] == 9 && busy[1] == 9 && held[0] == 2 && held[1] == 1);
  CHECK(starts_of_first[0] == 0 && starts_of_first[data->lists[0].size - 1] == 10);
  OK(dg_schedule_simulate(copy, time_of, &asked_times, NULL, NULL, NULL, NULL));
  FAILS(DG_INVALID_ARGUMENT, dg_schedule_simulate(copy, NULL, NULL, NULL, NULL, NULL, NULL));
  dg_schedule_destroy(copy);
  FAILS(DG_INVALID_ARGUMENT,
        dg_schedule_simulate(copy, time_of, &asked_times, NULL, NULL, NULL, NULL));
  CHECK(dg_schedule_get(copy) == NULL && dg_schedule_get(NULL) == NULL);
  dg_schedule_destroy(schedule);

  /* Lists of one's own. */
  for (int i = 0; i < 2; ++i) {
    lists[i].data = actions[i];
    lists[i].size = 2;
  }
  own.micro_batches = 1;
  own.rank_of_stage = rank_of_stage;
  own.stage_count = 2;
  own.lists = lists;
  own.rank_count = 2;
  SAYS(DG_INVALID_ARGUMENT, "send of activations of stage 0, micro-batch 0 is missing",
       dg_schedule_create(&own, 0, &schedule));
  own.max_activations = most;
  OK(dg_schedule_create(&own, DG_SCHEDULE_ADD_TRANSFERS, &schedule));
  data = dg_schedule_get(schedule);
  CHECK(data->lists[0].size == 4 && data->max_activations[1] == 1);
  CHECK(data->lists[0].data[2].kind == DG_ACTION_RECEIVE_GRADIENT);
  dg_schedule_destroy(schedule);

  /* Those that are wrong. */
  actions[1][0].kind = DG_ACTION_BACKWARD;
  actions[1][1].kind = DG_ACTION_FORWARD;
  SAYS(DG_INVALID_ARGUMENT, "waits for ever",
       dg_schedule_create(&own, DG_SCHEDULE_ADD_TRANSFERS, &schedule));
  actions[1][0].kind = 256;
  SAYS(DG_INVALID_ARGUMENT, "the list of rank 1: action 0 is of an unknown kind, 256",
       dg_schedule_create(&own, 0, &schedule));
  actions[1][0].kind = DG_ACTION_FORWARD;
  actions[1][0].stage = UINT32_MAX;
  FAILS(DG_INVALID_ARGUMENT, dg_schedule_create(&own, 0, &schedule));
  actions[1][0].stage = 2;
  FAILS(DG_INVALID_ARGUMENT, dg_schedule_create(&own, DG_SCHEDULE_ADD_TRANSFERS, &schedule));
  own.micro_batches = UINT64_MAX;
  FAILS(DG_INVALID_ARGUMENT, dg_schedule_create(&own, 0, &schedule));
  own.lists = NULL;
  FAILS(DG_INVALID_ARGUMENT, dg_schedule_create(&own, 0, &schedule));
  FAILS(DG_INVALID_ARGUMENT, dg_schedule_create(NULL, 0, &schedule));
  of_unknown_flags(dg_schedule_create(&own, 4, &schedule));
  FAILS(DG_INVALID_ARGUMENT, dg_schedule_create(&own, 0, NULL));
  FAILS(DG_INVALID_ARGUMENT, dg_schedule_create_gpipe(0, 1, &schedule));
  FAILS(DG_INVALID_ARGUMENT, dg_schedule_create_gpipe(1, UINT64_MAX, &schedule));
  FAILS(DG_INVALID_ARGUMENT, dg_schedule_create_gpipe(1, 1, NULL));
  FAILS(DG_INVALID_ARGUMENT, dg_schedule_create_one_forward_one_backward(2, 1 << 20, &schedule));
  FAILS(DG_INVALID_ARGUMENT, dg_schedule_create_zero_bubble_h1(UINT64_MAX, 1, &schedule));
  FAILS(DG_INVALID_ARGUMENT, dg_schedule_create_zero_bubble_h2(1, 0, &schedule));
  FAILS(DG_INVALID_ARGUMENT, dg_schedule_create_zero_bubble(2, 2, 0, &schedule));
  SAYS(DG_INVALID_ARGUMENT, "the number of forwards ahead",
       dg_schedule_create_zero_bubble(2, 2, UINT64_MAX, &schedule));
  FAILS(DG_INVALID_ARGUMENT, dg_schedule_create_zero_bubble(2, 2, 1, NULL));
  FAILS(DG_INVALID_ARGUMENT,
        dg_schedule_create_interleaved_one_forward_one_backward(1, 0, 1, &schedule));
  FAILS(DG_INVALID_ARGUMENT,
        dg_schedule_create_interleaved_one_forward_one_backward(1, 1, 1, NULL));
}

/* The same with the optimizer's step of each stage. Destroys that. */
static dg_schedule* with_steps(dg_schedule* schedule) {
  dg_schedule *made = NULL, *twice = NULL;
  OK(dg_schedule_create(dg_schedule_get(schedule), DG_SCHEDULE_ADD_STEPS, &made));
  FAILS(DG_INVALID_ARGUMENT,
        dg_schedule_create(dg_schedule_get(made), DG_SCHEDULE_ADD_STEPS, &twice));
  for (uint32_t i = 0; i < 2; ++i) {
    const dg_action_list *before = &dg_schedule_get(schedule)->lists[i],
                         *after = &dg_schedule_get(made)->lists[i];
    CHECK(after->size == before->size + 1);
    CHECK(memcmp(after->data, before->data, sizeof(dg_action) * before->size) == 0);
    CHECK(after->data[before->size].kind == DG_ACTION_STEP);
    CHECK(after->data[before->size].stage == i);
  }
  dg_schedule_destroy(schedule);
  return made;
}

/* The optimizer's step in the schedule. */
static void test_step_of_the_schedule(void) {
  dg_schedule* schedule = NULL;
  dg_pipeline_stages* stages[2];
  dg_pipeline* pipeline;
  layer alone[2];
  dg_context *context = NULL, *context_alone = NULL;
  dg_tensor *x = numbers(1, BATCH, WIDTH), *y = numbers(2, BATCH, WIDTH), *losses[3];
  dg_pipeline_result* result = NULL;
  OK(dg_schedule_create_zero_bubble_h1(2, 3, &schedule));
  schedule = with_steps(schedule);
  begin_job();
  make_layers(layers, 2);
  make_layers(alone, 2);
  for (int i = 0; i < 2; ++i) stages[i] = make_stages(i, 2, 0);
  pipeline = make_pipeline(schedule, DG_REDUCTION_MEAN);
  OK(dg_context_create(workers[0], &context));
  OK(train(pipeline, context, x, y, 0, &result));
  OK(dg_context_create(workers[0], &context_alone));
  step_alone(alone, 2, 3, true, context_alone, x, y, losses);
  for (int i = 0; i < 3; ++i) dg_tensor_destroy(losses[i]);
  for (int i = 0; i < 2; ++i) {
    CHECK(layers[i].steps == 1);
    OK(step(&alone[i], context_alone));
    CHECK(same(layers[i].weight, alone[i].weight) && same(layers[i].bias, alone[i].bias));
  }
  dg_pipeline_result_destroy(result);
  dg_context_destroy(context);
  dg_context_destroy(context_alone);
  dg_pipeline_destroy(pipeline);
  dg_schedule_destroy(schedule);
  for (int i = 0; i < 2; ++i) dg_pipeline_stages_destroy(stages[i]);
  end_job();
  end_layers(layers, 2);
  end_layers(alone, 2);
  dg_tensor_destroy(x);
  dg_tensor_destroy(y);
}

/* ----------------------------------------------------------------------------- What goes wrong */

static void set_fault(int stage, enum fault fault, int at) {
  for (int i = 0; i < 2; ++i) {
    layers[i].fault = i == stage ? fault : NONE;
    layers[i].forwards = layers[i].losses = 0;
    layers[i].at = i == stage ? at : 0;
  }
}

static dg_pipeline* pipeline_of_two(dg_pipeline_stages** stages) {
  dg_schedule* schedule = NULL;
  dg_pipeline* pipeline;
  make_layers(layers, 2);
  for (int i = 0; i < 2; ++i) stages[i] = make_stages(i, 2, 0);
  OK(dg_schedule_create_one_forward_one_backward(2, 4, &schedule));
  pipeline = make_pipeline(schedule, DG_REDUCTION_MEAN);
  dg_schedule_destroy(schedule);
  return pipeline;
}

static void test_faults(void) {
  dg_pipeline_stages* stages[2];
  dg_pipeline* pipeline;
  dg_error* error;
  uint32_t rank = 7;
  begin_job();
  pipeline = pipeline_of_two(stages);
  OK(try_step(pipeline, 0));
  set_fault(1, FAIL, 2);
  error = try_step(pipeline, 0);
  CHECK(dg_error_origin(error, &rank) == DG_ORIGIN_HANDLER && rank == 1);
  SAYS(DG_DATA_LOSS, "forward of stage 1, micro-batch 2 on worker 'back': the dog ate it", error);
  set_fault(1, NONE, 0);
  OK(try_step(pipeline, 0));
  /* Of the same layer the loss fails now: its forward has come to its end that often before. */
  set_fault(1, FAIL, 1);
  layers[1].forwards = 100;
  SAYS(DG_OUT_OF_RANGE, "forward of stage 1, micro-batch 1 on worker 'back': it is lost",
       try_step(pipeline, 0));
  set_fault(0, PAYLOAD, 1);
  SAYS(DG_INVALID_ARGUMENT, "forward of stage 0, micro-batch 1 on worker 'front': its outputs are",
       try_step(pipeline, 0));
  set_fault(0, NO_OUTPUTS, 0);
  SAYS(DG_INTERNAL, ": *outputs is NULL, and has to be a valid dg_message", try_step(pipeline, 0));
  set_fault(0, GARBAGE, 3);
  SAYS(DG_INTERNAL, ": *outputs is not a valid dg_message: it was destroyed",
       try_step(pipeline, 0));
  set_fault(1, GARBAGE, -1);
  SAYS(DG_INTERNAL, ": *loss is NULL, and has to be a valid dg_tensor", try_step(pipeline, 0));
  for (int stage = 0; stage < 2; ++stage) {
    set_fault(stage, MISUSE, 1);
    OK(try_step(pipeline, 0));
  }
  set_fault(0, NONE, 0);
  {
    dg_tensor* x = numbers(1, BATCH, WIDTH);
    const dg_tensor* inputs[2];
    dg_pipeline_result* result = NULL;
    inputs[0] = inputs[1] = x;
    SAYS(DG_INVALID_ARGUMENT,
         "forward takes 1 inputs, and is given 2 (PipelineStage::inputs; in C inputs of "
         "dg_pipeline_stage)",
         dg_pipeline_evaluate(pipeline, inputs, 2, NULL, 0, NULL, &result));
    dg_tensor_destroy(x);
  }
  OK(try_step(pipeline, 0));
  dg_pipeline_destroy(pipeline);
  FAILS(DG_INVALID_ARGUMENT, try_step(pipeline, 0));
  for (int i = 0; i < 2; ++i) dg_pipeline_stages_destroy(stages[i]);
  end_job();
  end_layers(layers, 2);
}

static void test_deadline(void) {
  dg_pipeline_stages* stages[2];
  dg_pipeline* pipeline;
  begin_job();
  pipeline = pipeline_of_two(stages);
  set_fault(1, HOLD, 0);
  SAYS(DG_DEADLINE_EXCEEDED, "worker 'back' is in the forward of stage 1, micro-batch 0",
       try_step(pipeline, 3000));
  post(&released);
  OK(try_step(pipeline, 0)); /* waits for the function that ran */
  dg_pipeline_destroy(pipeline);
  for (int i = 0; i < 2; ++i) dg_pipeline_stages_destroy(stages[i]);
  end_job();
  end_layers(layers, 2);
}

static void* end_back_when_held(void* unused) {
  (void)unused;
  wait_at_gate(&entered);
  FAILS(DG_DEADLINE_EXCEEDED, dg_worker_close(workers[1], 1));
  SAYS(DG_DEADLINE_EXCEEDED, "stages of pipeline 'model' still runs",
       dg_worker_close(workers[1], 1));
  return NULL;
}

/* A worker ends in the middle of a step; its stages' handle lasts longer. */
static void test_lost_worker(void) {
  dg_pipeline_stages* stages[2];
  dg_pipeline *pipeline, *after = NULL;
  dg_schedule* schedule = NULL;
  dg_str of_ranks[1];
  pthread_t thread;
  begin_job();
  pipeline = pipeline_of_two(stages);
  set_fault(1, HOLD, 1);
  CHECK(pthread_create(&thread, NULL, end_back_when_held, NULL) == 0);
  {
    dg_error* error = try_step(pipeline, 0);
    const dg_code code = dg_error_code(error);
    CHECK(code == DG_CANCELLED || code == DG_UNAVAILABLE);
    SAYS(code, "back", error);
  }
  CHECK(pthread_join(thread, NULL) == 0);
  /* The function still runs, and has its user data. */
  CHECK(layers[1].ended == 0);
  post(&released);
  OK(dg_worker_close(workers[1], DG_FOREVER));
  CHECK(layers[1].ended == 1);
  dg_pipeline_stages_destroy(stages[1]);
  dg_worker_destroy(workers[1]);
  /* The other worker has no stage that is missing for a pipeline of its own alone. */
  OK(dg_schedule_create_gpipe(1, 2, &schedule));
  of_ranks[0] = DG_STR("front");
  OK(dg_pipeline_create(workers[0], DG_STR("model"), schedule, of_ranks, 1, NULL, &after));
  OK(try_step(after, 0));
  dg_schedule_destroy(schedule);
  /* The worker first, then what belonged to it. */
  dg_worker_destroy(workers[0]);
  CHECK(layers[0].ended == 1);
  {
    dg_tensor* x = numbers(1, BATCH, WIDTH);
    const dg_tensor* input = x;
    dg_pipeline_result* result = NULL;
    FAILS(DG_FAILED_PRECONDITION,
          dg_pipeline_evaluate(pipeline, &input, 1, NULL, 0, NULL, &result));
    dg_tensor_destroy(x);
  }
  dg_pipeline_stages_destroy(stages[0]);
  dg_pipeline_stages_destroy(stages[0]);
  dg_pipeline_destroy(pipeline);
  dg_pipeline_destroy(after);
  clean_up();
  end_layers(layers, 2);
}

/* A step on a thread of its own, which the end of stages ends. */
typedef struct doomed {
  dg_pipeline* pipeline;
  bool releases; /* the function that is held, behind that */
} doomed;
static void* run_doomed(void* argument) {
  const doomed* self = (const doomed*)argument;
  dg_error* error = try_step(self->pipeline, 0);
  /* Who sends to a stage that is no more may be the first to say so. */
  const dg_code code = dg_error_code(error);
  CHECK(code == DG_CANCELLED || code == DG_NOT_FOUND);
  SAYS(code, "on worker 'back'", error);
  if (self->releases) post(&released);
  return NULL;
}

static void destroy_stages(void* user_data) {
  dg_pipeline_stages_destroy((dg_pipeline_stages*)user_data);
  post(&seen);
}

static void test_ends_of_stages(void) {
  dg_pipeline_stages* stages[2];
  pthread_t thread;
  doomed step_of = {NULL, true};
  begin_job();
  step_of.pipeline = pipeline_of_two(stages);
  /* While a function runs, which is waited for: but the step ends before that. */
  set_fault(1, HOLD, 1);
  CHECK(pthread_create(&thread, NULL, run_doomed, &step_of) == 0);
  wait_at_gate(&entered);
  CHECK(layers[1].ended == 0);
  dg_pipeline_stages_destroy(stages[1]);
  CHECK(layers[1].ended == 1);
  CHECK(pthread_join(thread, NULL) == 0);
  SAYS(DG_NOT_FOUND, "back", try_step(step_of.pipeline, 0));

  /* In a function of their own: it goes on, with its user data. */
  layers[1].ended = 0;
  set_fault(1, END_OWN, 1);
  own_stages = stages[1] = make_stages(1, 2, 0);
  step_of.releases = false;
  run_doomed(&step_of);
  while (__atomic_load_n(&layers[1].ended, __ATOMIC_SEQ_CST) == 0) sched_yield();
  dg_pipeline_stages_destroy(stages[1]);

  /* Others take their place. */
  layers[1].ended = 0;
  set_fault(1, NONE, 0);
  stages[1] = make_stages(1, 2, 0);
  OK(try_step(step_of.pipeline, 0));

  /* Where nothing may wait: in the callback of a future. */
  set_fault(1, HOLD, 0);
  CHECK(pthread_create(&thread, NULL, run_doomed, &step_of) == 0);
  wait_at_gate(&entered);
  {
    dg_message *request = NULL, *reply = NULL;
    dg_future* future = NULL;
    bool done = false;
    OK(dg_message_create(NULL, 0, NULL, 0, &request));
    OK(dg_worker_call_async(workers[1], DG_STR("front"), DG_STR("answer"), request, NULL, &future));
    OK(dg_future_then(future, destroy_stages, stages[1], NULL));
    wait_at_gate(&seen);
    OK(dg_future_wait(future, DG_FOREVER, &done));
    OK(dg_future_result(future, &reply));
    dg_message_destroy(request);
    dg_message_destroy(reply);
    dg_future_destroy(future);
  }
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK(layers[1].ended == 0);
  post(&released);
  /* The workers' end waits for the function. */
  dg_pipeline_destroy(step_of.pipeline);
  dg_pipeline_stages_destroy(stages[0]);
  end_job();
  CHECK(layers[0].ended == 1 && layers[1].ended == 1);
  end_layers(layers, 2);
}

/* ------------------------------------------------------------------------------ Steps in flight */

/* A step that was started, with its context. */
typedef struct flight {
  dg_context* context;
  dg_pipeline_step* step;
} flight;

static dg_error* start(const dg_pipeline* pipeline, flight* out, const dg_tensor* x,
                       const dg_tensor* y) {
  out->context = NULL;
  out->step = NULL;
  OK(dg_context_create(workers[0], &out->context));
  return dg_pipeline_start(pipeline, out->context, &x, 1, &y, 1, NULL, &out->step);
}
static flight start_one(const dg_pipeline* pipeline) {
  dg_tensor *x = numbers(1, BATCH, WIDTH), *y = numbers(2, BATCH, WIDTH);
  flight made;
  OK(start(pipeline, &made, x, y));
  dg_tensor_destroy(x);
  dg_tensor_destroy(y);
  return made;
}
static void land(flight* of) {
  dg_pipeline_step_destroy(of->step);
  dg_context_destroy(of->context);
}
static dg_error* wait_and_land(flight* of) {
  dg_pipeline_result* result = NULL;
  dg_error* error = dg_pipeline_step_wait(of->step, &result);
  CHECK((error == NULL) == (result != NULL));
  dg_pipeline_result_destroy(result);
  land(of);
  return error;
}
/* With a code that depends on which of its calls hears of that first. */
static void has_failed(dg_error* error) {
  CHECK(error != NULL);
  dg_error_destroy(error);
}

/* Several at once, against one process, to the last bit. Each stage has an optimizer of its own,
 * and one process one for all. */
static void compare_in_flight(dg_schedule* schedule, enum kind kind) {
  const int64_t count = (int64_t)dg_schedule_get(schedule)->micro_batches;
  enum { MOST = 3 };
  layer alone[2];
  flight flights[MOST];
  dg_tensor* expected[MOST][BATCH];
  dg_pipeline_stages* stages[2];
  dg_pipeline* pipeline;
  dg_optimizer* of_alone;
  const dg_str front = DG_STR("front");
  begin_job();
  make_layers(layers, 2);
  make_layers(alone, 2);
  for (int i = 0; i < 2; ++i) {
    layers[i].optimizer = make_optimizer(NULL, DG_STR(""), kind, layers, 2, i, 2);
    stages[i] = make_stages(i, 2, 0);
  }
  of_alone = make_optimizer(workers[0], DG_STR("alone"), kind, alone, 2, 0, 1);
  if (of_alone != NULL) OK(dg_optimizer_set_workers(of_alone, &front, 1));
  schedule = with_steps(schedule);
  pipeline = make_pipeline(schedule, DG_REDUCTION_MEAN);
  dg_schedule_destroy(schedule);
  for (int number = 0; number < STEPS + MOST - 1; ++number) {
    const int first = number - (MOST - 1);
    if (number < STEPS) {
      dg_tensor* x = numbers((uint64_t)(100 + number), BATCH, WIDTH);
      dg_tensor* y = numbers((uint64_t)(200 + number), BATCH, WIDTH);
      dg_context* context_alone = NULL;
      OK(start(pipeline, &flights[number % MOST], x, y));
      OK(dg_context_create(workers[0], &context_alone));
      step_alone(alone, 2, count, true, context_alone, x, y, expected[number % MOST]);
      if (of_alone != NULL) {
        OK(dg_optimizer_set_learning_rate(of_alone, rate_of(number + 1)));
        OK(dg_optimizer_step(of_alone, context_alone));
      } else {
        for (int i = 0; i < 2; ++i) OK(step(&alone[i], context_alone));
      }
      dg_context_destroy(context_alone);
      dg_tensor_destroy(x);
      dg_tensor_destroy(y);
    }
    if (first >= 0) {
      flight* const done = &flights[first % MOST];
      dg_pipeline_result *result = NULL, *again = NULL;
      dg_message* losses = NULL;
      OK(dg_pipeline_step_wait(done->step, &result));
      SAYS(DG_FAILED_PRECONDITION, "somebody has waited for this dg_pipeline_step already",
           dg_pipeline_step_wait(done->step, &again));
      CHECK(again == NULL);
      OK(dg_pipeline_result_losses(result, &losses));
      CHECK(dg_message_tensor_count(losses) == (size_t)count);
      for (int64_t m = 0; m < count; ++m) {
        dg_tensor* one = NULL;
        OK(dg_message_tensor(losses, (size_t)m, &one));
        CHECK(same(one, expected[first % MOST][m]));
        dg_tensor_destroy(one);
        dg_tensor_destroy(expected[first % MOST][m]);
      }
      dg_message_destroy(losses);
      dg_pipeline_result_destroy(result);
      land(done);
    }
  }
  for (int s = 0; s < 2; ++s) {
    CHECK(layers[s].steps == STEPS);
    CHECK(same(layers[s].weight, alone[s].weight) && same(layers[s].bias, alone[s].bias));
  }
  dg_pipeline_destroy(pipeline);
  for (int i = 0; i < 2; ++i) dg_pipeline_stages_destroy(stages[i]);
  dg_optimizer_destroy(of_alone);
  end_job();
  end_layers(layers, 2);
  end_layers(alone, 2);
}

/* Each rank waits in one step for what the other does in the other step: one step after the other
 * would not come to its end. */
static void test_overlap(void) {
  dg_schedule* schedule = NULL;
  dg_pipeline_stages* stages[2];
  dg_pipeline* pipeline;
  flight first, second;
  begin_job();
  make_layers(layers, 2);
  layers[0].fault = HOLD;
  layers[0].at = 2; /* the first of the second step */
  layers[1].fault = AHEAD;
  for (int i = 0; i < 2; ++i) stages[i] = make_stages(i, 2, 0);
  OK(dg_schedule_create_zero_bubble_h2(2, 2, &schedule));
  schedule = with_steps(schedule);
  pipeline = make_pipeline(schedule, DG_REDUCTION_MEAN);
  dg_schedule_destroy(schedule);
  first = start_one(pipeline);
  second = start_one(pipeline);
  OK(wait_and_land(&first));
  OK(wait_and_land(&second));

  /* One whose context ends has no gradients for its optimizer. */
  set_fault(1, HOLD, 0);
  first = start_one(pipeline);
  second = start_one(pipeline);
  wait_at_gate(&entered);
  dg_context_destroy(first.context);
  post(&released);
  has_failed(wait_and_land(&first));
  has_failed(wait_and_land(&second));
  dg_pipeline_destroy(pipeline);
  for (int i = 0; i < 2; ++i) dg_pipeline_stages_destroy(stages[i]);
  end_job();
  end_layers(layers, 2);
}

static void test_steps_in_flight(void) {
  dg_schedule* schedule = NULL;
  OK(dg_schedule_create_one_forward_one_backward(2, 4, &schedule));
  compare_in_flight(schedule, PLAIN);
  OK(dg_schedule_create_gpipe(2, 2, &schedule));
  compare_in_flight(schedule, SGD);
  OK(dg_schedule_create_zero_bubble_h2(2, 3, &schedule));
  compare_in_flight(schedule, ADAM);
  OK(dg_schedule_create_zero_bubble(2, 5, 4, &schedule));
  compare_in_flight(schedule, ADAMW);
  test_overlap();
}

/* In the callback of a future, where nothing may wait. */
static void wait_for_own_step(void* unused) {
  dg_pipeline_result* result = NULL;
  (void)unused;
  FAILS(DG_FAILED_PRECONDITION, dg_pipeline_step_wait(own_step, &result));
  CHECK(result == NULL);
  post(&seen);
}
static void destroy_own_step(void* unused) {
  (void)unused;
  dg_pipeline_step_destroy(own_step);
  post(&seen);
}
static void in_callback(void (*function)(void* user_data)) {
  dg_message *request = NULL, *reply = NULL;
  dg_future* future = NULL;
  bool done = false;
  OK(dg_message_create(NULL, 0, NULL, 0, &request));
  OK(dg_worker_call_async(workers[1], DG_STR("front"), DG_STR("answer"), request, NULL, &future));
  OK(dg_future_then(future, function, NULL, NULL));
  wait_at_gate(&seen);
  OK(dg_future_wait(future, DG_FOREVER, &done));
  OK(dg_future_result(future, &reply));
  dg_message_destroy(request);
  dg_message_destroy(reply);
  dg_future_destroy(future);
}
/* When what was destroyed in the background has ended. */
static void try_until_ended(const dg_pipeline* pipeline) {
  dg_error* error;
  while ((error = try_step(pipeline, 0)) != NULL) {
    SAYS(DG_FAILED_PRECONDITION, "", error);
    sched_yield();
  }
}

static void test_ends_of_steps(void) {
  dg_pipeline_stages* stages[2];
  dg_pipeline* pipeline;
  dg_pipeline_result* result = NULL;
  flight flights[8], refused;
  dg_tensor *x = numbers(1, BATCH, WIDTH), *y = numbers(2, BATCH, WIDTH);
  begin_job();
  pipeline = pipeline_of_two(stages);

  /* One after the other where the last is waited for first; and no more than eight. */
  set_fault(1, HOLD, 0);
  for (int i = 0; i < 8; ++i) flights[i] = start_one(pipeline);
  SAYS(DG_FAILED_PRECONDITION, "in C dg_pipeline_step_wait", start(pipeline, &refused, x, y));
  land(&refused); /* there is none */
  SAYS(DG_FAILED_PRECONDITION, "runs already", try_step(pipeline, 0));
  wait_at_gate(&entered);
  post(&released);
  for (int i = 7; i >= 0; --i) OK(wait_and_land(&flights[i]));

  /* Destroyed while a function of it runs, it ends those behind it. */
  set_fault(1, HOLD, 0);
  for (int i = 0; i < 4; ++i) flights[i] = start_one(pipeline);
  wait_at_gate(&entered);
  land(&flights[1]);
  SAYS(DG_FAILED_PRECONDITION, "has failed behind which this one would come",
       start(pipeline, &refused, x, y));
  land(&refused);
  dg_context_destroy(flights[2].context);
  dg_pipeline_step_destroy(flights[2].step);
  post(&released);
  OK(wait_and_land(&flights[0]));
  has_failed(wait_and_land(&flights[3]));
  OK(try_step(pipeline, 0));

  /* Where nothing may wait: in a callback, and in a function of its own. */
  set_fault(1, HOLD, 0);
  flights[0] = start_one(pipeline);
  own_step = flights[0].step;
  wait_at_gate(&entered);
  in_callback(wait_for_own_step);
  in_callback(destroy_own_step);
  FAILS(DG_INVALID_ARGUMENT, dg_pipeline_step_wait(own_step, &result));
  dg_context_destroy(flights[0].context);
  post(&released);
  try_until_ended(pipeline);
  for (int i = 0; i < 2; ++i) {
    within_replica = i == 1;
    set_fault(1, WAIT_STEP, 0);
    flights[0] = start_one(pipeline);
    own_step = flights[0].step;
    post(&released);
    OK(wait_and_land(&flights[0])); /* whom it was not taken from */
    set_fault(1, END_STEP, 0);
    flights[0] = start_one(pipeline);
    own_step = flights[0].step;
    post(&released);
    try_until_ended(pipeline);
    dg_context_destroy(flights[0].context);
    dg_pipeline_step_destroy(own_step);
    set_fault(1, NONE, 0);
  }
  within_replica = false;

  /* What is wrong. */
  {
    const dg_tensor *input = x, *target = y;
    flights[0] = start_one(pipeline);
    FAILS(DG_INVALID_ARGUMENT, dg_pipeline_step_wait(flights[0].step, NULL));
    OK(dg_pipeline_step_wait(flights[0].step, &result));
    dg_pipeline_result_destroy(result);
    result = NULL;
    land(&flights[0]);
    FAILS(DG_INVALID_ARGUMENT, dg_pipeline_step_wait(flights[0].step, &result));
    FAILS(DG_INVALID_ARGUMENT, dg_pipeline_step_wait(NULL, &result));
    FAILS(DG_INVALID_ARGUMENT, dg_pipeline_step_wait((dg_pipeline_step*)(void*)pipeline, &result));
    dg_pipeline_step_destroy(flights[0].step);
    dg_pipeline_step_destroy((dg_pipeline_step*)(void*)pipeline);
    dg_pipeline_step_destroy(NULL);
    OK(dg_context_create(workers[0], &refused.context));
    refused.step = NULL;
    FAILS(DG_INVALID_ARGUMENT,
          dg_pipeline_start(NULL, refused.context, &input, 1, &target, 1, NULL, &refused.step));
    FAILS(DG_INVALID_ARGUMENT,
          dg_pipeline_start(pipeline, NULL, &input, 1, &target, 1, NULL, &refused.step));
    FAILS(DG_INVALID_ARGUMENT,
          dg_pipeline_start(pipeline, refused.context, NULL, 1, &target, 1, NULL, &refused.step));
    FAILS(DG_INVALID_ARGUMENT,
          dg_pipeline_start(pipeline, refused.context, &input, 1, &target, 1, NULL, NULL));
    SAYS(DG_INVALID_ARGUMENT, "at least one input",
         dg_pipeline_start(pipeline, refused.context, NULL, 0, NULL, 0, NULL, &refused.step));
    CHECK(refused.step == NULL && result == NULL);
    dg_context_destroy(refused.context);
  }

  /* The pipeline before its step, which goes on. */
  set_fault(1, HOLD, 0);
  flights[0] = start_one(pipeline);
  dg_pipeline_destroy(pipeline);
  FAILS(DG_INVALID_ARGUMENT, start(pipeline, &refused, x, y));
  land(&refused);
  post(&released);
  wait_at_gate(&entered);
  OK(wait_and_land(&flights[0]));
  for (int i = 0; i < 2; ++i) dg_pipeline_stages_destroy(stages[i]);
  end_job();
  end_layers(layers, 2);

  /* The worker before its steps, which it ends; and before it, or behind it, all else. */
  for (int order = 0; order < 2; ++order) {
    begin_job();
    pipeline = pipeline_of_two(stages);
    set_fault(1, HOLD, 0);
    for (int i = 0; i < 2; ++i) flights[i] = start_one(pipeline);
    wait_at_gate(&entered);
    post(&released);
    if (order == 0) dg_pipeline_destroy(pipeline);
    dg_worker_destroy(workers[0]);
    for (int i = 0; i < 2; ++i) {
      FAILS(DG_FAILED_PRECONDITION, dg_pipeline_step_wait(flights[i].step, &result));
      CHECK(result == NULL);
      land(&flights[i]);
    }
    if (order == 1) dg_pipeline_destroy(pipeline);
    dg_worker_destroy(workers[1]);
    for (int i = 0; i < 2; ++i) dg_pipeline_stages_destroy(stages[i]);
    clean_up();
    end_layers(layers, 2);
  }
  dg_tensor_destroy(x);
  dg_tensor_destroy(y);
}

static void test_wrong_arguments(void) {
  dg_pipeline_stage good, other, bad;
  const dg_pipeline_stage* list[3];
  dg_pipeline_stages_options options = DG_PIPELINE_STAGES_OPTIONS_INIT;
  dg_pipeline_options of_pipeline = DG_PIPELINE_OPTIONS_INIT;
  dg_pipeline_stages *stages = NULL, *second = NULL;
  dg_pipeline* pipeline = NULL;
  dg_schedule* schedule = NULL;
  const dg_str of_ranks[2] = {DG_STR("front"), DG_STR("back")};
  const dg_str model = DG_STR("model");
  const uint64_t too_far = UINT64_MAX;
  int expected = 0;
  begin_job();
  make_layers(layers, 2);
  good = stage_of(0);
  other = stage_of(1);
  list[0] = &good;
  list[1] = &other;
  list[2] = NULL;
  /* Whatever is wrong, the user data is taken. */
#define REFUSED(code, part, call)                         \
  do {                                                    \
    SAYS(code, part, call);                               \
    ++expected;                                           \
    CHECK(layers[0].ended == expected && stages == NULL); \
  } while (0)
  REFUSED(DG_INVALID_ARGUMENT, "stages[2] is NULL",
          dg_pipeline_stages_create(workers[0], model, list, 3, NULL, &stages));
  CHECK(layers[1].ended == 1);
  REFUSED(DG_INVALID_ARGUMENT, "", dg_pipeline_stages_create(NULL, model, list, 1, NULL, &stages));
  REFUSED(DG_INVALID_ARGUMENT, "",
          dg_pipeline_stages_create(workers[0], model, list, 1, NULL, NULL));
  REFUSED(DG_INVALID_ARGUMENT, "'::'",
          dg_pipeline_stages_create(workers[0], DG_STR("a::b"), list, 1, NULL, &stages));
  options.num_threads = UINT64_MAX;
  REFUSED(DG_INVALID_ARGUMENT, "num_threads",
          dg_pipeline_stages_create(workers[0], model, list, 1, &options, &stages));
  options.struct_size = 1;
  REFUSED(DG_INVALID_ARGUMENT, "dg_pipeline_stages_options",
          dg_pipeline_stages_create(workers[0], model, list, 1, &options, &stages));
  bad = good;
  list[0] = &bad;
  bad.forward = NULL;
  REFUSED(DG_INVALID_ARGUMENT, "no forward",
          dg_pipeline_stages_create(workers[0], model, list, 1, NULL, &stages));
  bad = good;
  bad.flags = 6;
  REFUSED(DG_UNIMPLEMENTED, "",
          dg_pipeline_stages_create(workers[0], model, list, 1, NULL, &stages));
  bad = good;
  bad.inputs = -2;
  REFUSED(DG_INVALID_ARGUMENT, "a stage takes -2 inputs",
          dg_pipeline_stages_create(workers[0], model, list, 1, NULL, &stages));
  bad = good;
  bad.targets = INT64_MAX;
  REFUSED(DG_INVALID_ARGUMENT, "targets",
          dg_pipeline_stages_create(workers[0], model, list, 1, NULL, &stages));
  bad = good;
  bad.skip_count = 1;
  REFUSED(DG_INVALID_ARGUMENT, "skips",
          dg_pipeline_stages_create(workers[0], model, list, 1, NULL, &stages));
  bad.skips = &too_far;
  REFUSED(DG_INVALID_ARGUMENT, "a stage of skips",
          dg_pipeline_stages_create(workers[0], model, list, 1, NULL, &stages));
  bad = good;
  bad.number = UINT64_MAX;
  REFUSED(DG_INVALID_ARGUMENT, "the number of a stage",
          dg_pipeline_stages_create(workers[0], model, list, 1, NULL, &stages));
  bad = good;
  bad.number = 1;
  REFUSED(DG_INVALID_ARGUMENT, "two stages 1",
          dg_pipeline_stages_create(workers[0], model, list, 2, NULL, &stages));
#undef REFUSED
  /* But of what is no stage at all. */
  bad.struct_size = 8;
  FAILS(DG_INVALID_ARGUMENT, dg_pipeline_stages_create(workers[0], model, list, 1, NULL, &stages));
  FAILS(DG_INVALID_ARGUMENT, dg_pipeline_stages_create(workers[0], model, NULL, 1, NULL, &stages));
  CHECK(layers[0].ended == expected);
  list[0] = &good;
  OK(dg_pipeline_stages_create(workers[0], model, list, 1, NULL, &stages));
  SAYS(DG_ALREADY_EXISTS, "worker 'front' has stages of a pipeline 'model' already",
       dg_pipeline_stages_create(workers[0], model, list + 1, 1, NULL, &second));
  CHECK(layers[0].ended == expected);
  OK(dg_pipeline_stages_create(workers[1], model, list, 0, NULL, &second)); /* none */

  OK(dg_schedule_create_gpipe(2, 2, &schedule));
  SAYS(DG_INVALID_ARGUMENT, "1 workers for 2 ranks",
       dg_pipeline_create(workers[0], model, schedule, of_ranks, 1, NULL, &pipeline));
  FAILS(DG_INVALID_ARGUMENT,
        dg_pipeline_create(workers[0], model, NULL, of_ranks, 2, NULL, &pipeline));
  FAILS(DG_INVALID_ARGUMENT,
        dg_pipeline_create(workers[0], model, schedule, NULL, 2, NULL, &pipeline));
  FAILS(DG_INVALID_ARGUMENT,
        dg_pipeline_create(workers[0], model, schedule, of_ranks, 2, NULL, NULL));
  FAILS(DG_INVALID_ARGUMENT, dg_pipeline_create((dg_worker*)(void*)stages, model, schedule,
                                                of_ranks, 2, NULL, &pipeline));
  of_pipeline.reduction = 2;
  SAYS(DG_INVALID_ARGUMENT, "reduction is 2",
       dg_pipeline_create(workers[0], model, schedule, of_ranks, 2, &of_pipeline, &pipeline));
  OK(dg_pipeline_create(workers[0], model, schedule, of_ranks, 2, NULL, &pipeline));
  SAYS(DG_NOT_FOUND, "worker 'back' has no stage 1 of pipeline 'model'", try_step(pipeline, 0));
  dg_schedule_destroy(schedule);
  dg_pipeline_destroy(pipeline);
  dg_pipeline_destroy(NULL);
  dg_pipeline_stages_destroy(NULL);
  dg_pipeline_stages_destroy((dg_pipeline_stages*)(void*)pipeline);
  dg_pipeline_result_destroy(NULL);
  dg_schedule_destroy(NULL);
  dg_pipeline_stages_destroy(second);
  dg_pipeline_stages_destroy(stages);
  CHECK(layers[0].ended == expected + 1);
  end_job();
  end_layers(layers, 2);
}

/* Of three stages: x w, which skips to the last one as well; twice that; and their sum. */
static dg_error* forward_skipping(void* user_data, const dg_micro_batch* batch,
                                  dg_message** outputs) {
  const dg_tensor* given[2];
  dg_tensor* y;
  CHECK(batch->input_count == (batch->stage == 2 ? 2 : 1));
  if (batch->stage == 0) {
    y = op2("aten::mul.Tensor", batch->inputs[0], (const dg_tensor*)user_data);
  } else {
    y = op2("aten::add.Tensor", batch->inputs[0], batch->inputs[batch->input_count - 1]);
  }
  given[0] = given[1] = y;
  OK(dg_message_create(NULL, 0, given, batch->stage == 0 ? 2 : 1, outputs));
  dg_tensor_destroy(y);
  return NULL;
}
static dg_error* sum_of_outputs(void* user_data, const dg_micro_batch* batch, dg_tensor** out) {
  (void)user_data;
  *out = op1("aten::sum", batch->outputs[0]);
  return NULL;
}

static void test_skips(void) {
  const dg_str of_ranks[3] = {DG_STR("front"), DG_STR("back"), DG_STR("front")};
  const float start_value = 2, of_batch[2] = {1, 2};
  const uint64_t last = 2, next = 1;
  dg_pipeline_stage made[3] = {DG_PIPELINE_STAGE_INIT, DG_PIPELINE_STAGE_INIT,
                               DG_PIPELINE_STAGE_INIT};
  const dg_pipeline_stage* of_front[2] = {&made[0], &made[2]};
  const dg_pipeline_stage* of_back[1] = {&made[1]};
  dg_pipeline_options options = DG_PIPELINE_OPTIONS_INIT;
  dg_pipeline_stages *front = NULL, *back = NULL;
  dg_schedule* schedule = NULL;
  dg_pipeline* pipeline = NULL;
  dg_pipeline_result* result = NULL;
  dg_context* context = NULL;
  dg_tensor *w, *x, *gradient = NULL;
  const dg_tensor* input;
  begin_job();
  w = floats(&start_value, 1, 1);
  input = x = floats(of_batch, 2, 1);
  OK(dg_tensor_require_grad(w));
  for (int i = 0; i < 3; ++i) {
    made[i].number = (uint64_t)i;
    made[i].forward = forward_skipping;
    made[i].loss = sum_of_outputs;
    made[i].inputs = i == 2 ? 2 : 1;
    made[i].targets = 0;
    made[i].user_data = w;
  }
  made[0].skips = &last;
  made[0].skip_count = 1;
  OK(dg_pipeline_stages_create(workers[0], DG_STR("skips"), of_front, 2, NULL, &front));
  OK(dg_pipeline_stages_create(workers[1], DG_STR("skips"), of_back, 1, NULL, &back));
  OK(dg_schedule_create_gpipe(3, 2, &schedule));
  options.reduction = DG_REDUCTION_SUM;
  OK(dg_pipeline_create(workers[0], DG_STR("skips"), schedule, of_ranks, 3, &options, &pipeline));
  OK(dg_context_create(workers[0], &context));
  OK(dg_pipeline_train(pipeline, context, &input, 1, NULL, 0, NULL, &result));
  OK(dg_context_gradient(context, w, &gradient));
  CHECK(data_of(gradient)[0] == 9); /* 2 x + x, of 1 and 2 */
  dg_tensor_destroy(gradient);
  dg_pipeline_result_destroy(result);
  dg_context_destroy(context);
  dg_pipeline_stages_destroy(front);
  made[0].skips = &next;
  OK(dg_pipeline_stages_create(workers[0], DG_STR("skips"), of_front, 2, NULL, &front));
  OK(dg_context_create(workers[0], &context));
  SAYS(DG_INVALID_ARGUMENT, "stage 0 on worker 'front' skips to stage 1",
       dg_pipeline_train(pipeline, context, &input, 1, NULL, 0, NULL, &result));
  dg_context_destroy(context);
  dg_pipeline_destroy(pipeline);
  dg_schedule_destroy(schedule);
  dg_pipeline_stages_destroy(front);
  dg_pipeline_stages_destroy(back);
  end_job();
  dg_tensor_destroy(w);
  dg_tensor_destroy(x);
}

/* How often a text has another one. */
static int count_of(const dg_message* message, const char* what) {
  const dg_str text = dg_message_payload(message);
  int count = 0;
  for (size_t i = 0; i + strlen(what) <= text.size; ++i) {
    count += memcmp(text.data + i, what, strlen(what)) == 0;
  }
  return count;
}

/* A step of two micro-batches: what the functions are told, and what a trace has. */
static void test_actions(void) {
  dg_schedule *schedule = NULL, *own = NULL;
  dg_schedule_data data;
  dg_action_list lists[2];
  dg_action actions[2][LISTS];
  dg_pipeline_stages* stages[2];
  dg_pipeline* pipeline;
  dg_message* trace = NULL;
  begin_job();
  make_layers(layers, 2);
  for (int i = 0; i < 2; ++i) {
    dg_pipeline_stage stage = stage_of((uint64_t)i);
    const dg_pipeline_stage* list[1] = {&stage};
    stage.on_action = on_action;
    stages[i] = NULL;
    OK(dg_pipeline_stages_create(workers[i], DG_STR("model"), list, 1, NULL, &stages[i]));
  }
  OK(dg_schedule_create_gpipe(2, 2, &schedule));
  data = *dg_schedule_get(schedule);
  for (int i = 0; i < 2; ++i) {
    CHECK(data.lists[i].size < LISTS);
    memcpy(actions[i], data.lists[i].data, data.lists[i].size * sizeof(dg_action));
    actions[i][data.lists[i].size].kind = DG_ACTION_STEP;
    actions[i][data.lists[i].size].stage = (uint32_t)i;
    actions[i][data.lists[i].size].micro_batch = 0;
    lists[i].data = actions[i];
    lists[i].size = data.lists[i].size + 1;
  }
  data.lists = lists;
  OK(dg_schedule_create(&data, 0, &own));
  pipeline = make_pipeline(own, DG_REDUCTION_MEAN);
  dg_schedule_destroy(own);
  dg_schedule_destroy(schedule);

  OK(try_step(pipeline, 0));
  OK(dg_worker_start_trace(workers[1], NULL));
  OK(try_step(pipeline, 0));
  OK(dg_worker_stop_trace(workers[1], &trace));
  CHECK(layers[0].of_step == layers[1].of_step && layers[0].of_step != 0);
  for (int i = 0; i < 2; ++i) {
    CHECK(layers[i].actions[DG_ACTION_FORWARD] == 4 && layers[i].actions[DG_ACTION_BACKWARD] == 4);
    CHECK(layers[i].actions[DG_ACTION_STEP] == 2);
  }
  CHECK(layers[0].actions[DG_ACTION_SEND_ACTIVATION] == 4);
  CHECK(layers[1].actions[DG_ACTION_RECEIVE_ACTIVATION] == 4);
  /* Of the second step, and of this worker alone. */
  CHECK(count_of(trace, "\"name\":\"forward 1\"") == 1);
  CHECK(count_of(trace, "\"name\":\"step\"") == 1);
  CHECK(count_of(trace, "\"pipeline, rank 1\"") > 0);
  CHECK(count_of(trace, "\"pipeline, rank 0\"") == 0);
  CHECK(count_of(trace, "\"dropped_spans\":0") == 1);
  dg_message_destroy(trace);
  {
    dg_trace_options options = DG_TRACE_OPTIONS_INIT;
    options.max_bytes = 1;
    OK(dg_worker_start_trace(workers[1], &options));
    OK(try_step(pipeline, 0));
    OK(dg_worker_stop_trace(workers[1], &trace));
    CHECK(count_of(trace, "\"name\":\"forward 1\"") == 0);
    CHECK(count_of(trace, "\"dropped_spans\":0") == 0);
    dg_message_destroy(trace);
  }

  layers[1].fault = FAIL;
  layers[1].at = -1; /* of no other function */
  SAYS(DG_RESOURCE_EXHAUSTED, "stage 1 on worker 'back' has stepped: ", try_step(pipeline, 0));
  SAYS(DG_RESOURCE_EXHAUSTED, "step of stage 1 on worker 'back': the disk is full",
       try_step(pipeline, 0));
  dg_pipeline_destroy(pipeline);
  for (int i = 0; i < 2; ++i) dg_pipeline_stages_destroy(stages[i]);
  end_job();
  end_layers(layers, 2);
}

int main(void) {
  test_schedules();
  test_steps();
  test_evaluation();
  test_step_of_the_schedule();
  test_faults();
  test_deadline();
  test_lost_worker();
  test_ends_of_stages();
  test_steps_in_flight();
  test_ends_of_steps();
  test_wrong_arguments();
  test_skips();
  test_actions();
  return 0;
}
