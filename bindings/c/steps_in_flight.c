/* Trains the model of pipeline.c with steps in flight: a process that is through with one batch
 * begins the next one, while the other is still at the end of the first. So each takes the
 * optimizer's step of its own stage, as the schedule says. */
#define _DEFAULT_SOURCE
#include "sample.h"

enum { WIDTH = 16, BATCH = 64, MICRO_BATCHES = 4, STEPS = 300, IN_FLIGHT = 2 };

static dg_tensor* random_numbers(uint32_t seed, int64_t rows, int64_t columns) {
  const int64_t shape[2] = {rows, columns};
  float data[BATCH * WIDTH];
  dg_tensor* tensor = NULL;
  for (int64_t i = 0; i < rows * columns; ++i) {
    seed = seed * 1664525u + 1013904223u;
    data[i] = (float)(seed >> 8) / (float)(1 << 24) - 0.5f;
  }
  must(dg_tensor_from_data(data, DG_FLOAT32, shape, 2, &tensor));
  return tensor;
}

/* --------------------------------------------------------------------------------------- Stage */

/* What this process has of the model, tanh(x * weight), with its own optimizer. */
typedef struct layer {
  dg_tensor* weight;
  dg_optimizer* optimizer;
} layer;

static dg_error* forward(void* user_data, const dg_micro_batch* micro_batch, dg_message** outputs) {
  const layer* self = (const layer*)user_data;
  const dg_value arguments[2] = {dg_value_tensor(micro_batch->inputs[0]),
                                 dg_value_tensor(self->weight)};
  dg_tensor *product = NULL, *y = NULL;
  dg_error* error = dg_op_tensors(DG_STR("aten::matmul"), arguments, 2, &product, 1);
  if (error == NULL) {
    const dg_value argument = dg_value_tensor(product);
    error = dg_op_tensors(DG_STR("aten::tanh"), &argument, 1, &y, 1);
  }
  if (error == NULL) {
    const dg_tensor* output = y;
    error = dg_message_create(NULL, 0, &output, 1, outputs);
  }
  dg_tensor_destroy(product);
  dg_tensor_destroy(y);
  return error;
}

/* Of the last stage. */
static dg_error* loss(void* user_data, const dg_micro_batch* micro_batch, dg_tensor** loss) {
  (void)user_data;
  const dg_value arguments[2] = {dg_value_tensor(micro_batch->outputs[0]),
                                 dg_value_tensor(micro_batch->targets[0])};
  return dg_op_tensors(DG_STR("aten::mse_loss"), arguments, 2, loss, 1);
}

/* [doc: stage] */
/* Takes the optimizer's step of this stage. */
static dg_error* step(void* user_data, const dg_context* context) {
  const layer* self = (const layer*)user_data;
  return dg_optimizer_step(self->optimizer, context);
}

static layer create_layer(int rank) {
  layer made = {random_numbers((uint32_t)(3 + rank), WIDTH, WIDTH), NULL};
  must(dg_tensor_require_grad(made.weight));
  const dg_tensor* parameter = made.weight;
  dg_adam_options options = DG_ADAM_OPTIONS_INIT;
  options.learning_rate = 0.01;
  /* Without a worker: this optimizer has no part in another process. */
  must(dg_optimizer_create_adam(NULL, DG_STR(""), &parameter, 1, &options, &made.optimizer));
  return made;
}
/* [doc: end] */

/* Lets the pipeline "model" use this process's stage: the front one has stage 0, the back one 1. */
static dg_pipeline_stages* add_stage(const job* self, layer* of) {
  dg_pipeline_stage stage = DG_PIPELINE_STAGE_INIT;
  stage.number = (uint64_t)self->rank;
  stage.forward = forward;
  stage.loss = loss;
  stage.step = step;
  stage.user_data = of;
  const dg_pipeline_stage* list[1] = {&stage};
  dg_pipeline_stages* stages = NULL;
  must(dg_pipeline_stages_create(self->worker, DG_STR("model"), list, 1, NULL, &stages));
  return stages;
}

/* ------------------------------------------------------------------------------------ Training */

/* [doc: steps] */
/* ZB-H2 for two stages, each with its optimizer's step behind all else. */
static dg_schedule* create_schedule(void) {
  dg_schedule *schedule = NULL, *with_steps = NULL;
  must(dg_schedule_create_zero_bubble_h2(2, MICRO_BATCHES, &schedule));
  must(dg_schedule_create(dg_schedule_get(schedule), DG_SCHEDULE_ADD_STEPS, &with_steps));
  dg_schedule_destroy(schedule);
  return with_steps;
}

/* A step that was started. */
typedef struct in_flight {
  dg_context* context; /* lasts until somebody has waited for the step */
  dg_pipeline_step* step;
} in_flight;

static in_flight start_step(dg_worker* worker, const dg_pipeline* pipeline, const dg_tensor* x,
                            const dg_tensor* y) {
  in_flight started = {NULL, NULL};
  must(dg_context_create(worker, &started.context));
  must(dg_pipeline_start(pipeline, started.context, &x, 1, &y, 1, NULL, &started.step));
  return started;
}

/* Waits for the step's end, and returns the loss of its batch. */
static double finish_step(in_flight* started) {
  dg_pipeline_result* result = NULL;
  dg_tensor* loss = NULL;
  void* data = NULL;
  must(dg_pipeline_step_wait(started->step, &result));
  must(dg_pipeline_result_loss(result, &loss));
  must(dg_tensor_data(loss, &data));
  const double value = *(const float*)data;
  dg_tensor_destroy(loss);
  dg_pipeline_result_destroy(result);
  dg_pipeline_step_destroy(started->step);
  dg_context_destroy(started->context);
  return value;
}

/* Returns whether the model has learnt what it is shown. */
static bool train(dg_worker* worker) {
  dg_schedule* schedule = create_schedule();
  const dg_str workers[2] = {DG_STR("front"), DG_STR("back")};
  dg_pipeline* pipeline = NULL;
  must(dg_pipeline_create(worker, DG_STR("model"), schedule, workers, 2, NULL, &pipeline));
  dg_tensor *x = random_numbers(1, BATCH, WIDTH), *y = random_numbers(2, BATCH, WIDTH);
  in_flight started[IN_FLIGHT];
  double first = 0, last = 0;
  for (int i = 0; i < STEPS + IN_FLIGHT; ++i) {
    in_flight* slot = &started[i % IN_FLIGHT];
    if (i >= IN_FLIGHT) last = finish_step(slot);
    if (i == IN_FLIGHT) first = last;
    if (i < STEPS) *slot = start_step(worker, pipeline, x, y);
  }
  printf("the loss was %.4f, and is %.4f\n", first, last);
  dg_tensor_destroy(x);
  dg_tensor_destroy(y);
  dg_pipeline_destroy(pipeline);
  dg_schedule_destroy(schedule);
  return last < first * 0.8;
}
/* [doc: end] */

int main(void) {
  job self = start();
  layer own = create_layer(self.rank);
  dg_pipeline_stages* stages = add_stage(&self, &own);
  must(dg_worker_barrier(self.worker, 60000, 0)); /* both have their stages */
  const bool right = self.rank == 1 || train(self.worker);
  const int status = finish(&self);
  dg_pipeline_stages_destroy(stages);
  dg_optimizer_destroy(own.optimizer);
  dg_tensor_destroy(own.weight);
  return status != 0 || !right;
}
