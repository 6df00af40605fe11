/* Trains a model whose two layers are in two processes, as a pipeline: each batch is cut into
 * micro-batches, and while one process computes one of them, the other computes another. */
#define _DEFAULT_SOURCE
#include "sample.h"

enum { WIDTH = 16, BATCH = 64, MICRO_BATCHES = 4, STEPS = 300 };

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

/* -------------------------------------------------------------------------------------- Stages */

/* What this process has of the model: tanh(x * weight). */
static dg_error* forward(void* user_data, const dg_micro_batch* micro_batch, dg_message** outputs) {
  const dg_tensor* weight = (const dg_tensor*)user_data;
  const dg_value arguments[2] = {dg_value_tensor(micro_batch->inputs[0]), dg_value_tensor(weight)};
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

/* Lets the pipeline "model" use this process's stage: the front one has stage 0, the back one 1. */
static dg_pipeline_stages* add_stage(const job* self, dg_tensor* weight) {
  dg_pipeline_stage stage = DG_PIPELINE_STAGE_INIT;
  stage.number = (uint64_t)self->rank;
  stage.forward = forward;
  stage.loss = loss;
  stage.user_data = weight;
  const dg_pipeline_stage* list[1] = {&stage};
  dg_pipeline_stages* stages = NULL;
  must(dg_pipeline_stages_create(self->worker, DG_STR("model"), list, 1, NULL, &stages));
  return stages;
}

/* ------------------------------------------------------------------------------------ Training */

/* Takes one step, and returns the loss of the batch. */
static double step(dg_worker* worker, const dg_pipeline* pipeline, dg_optimizer* optimizer,
                   const dg_tensor* x, const dg_tensor* y) {
  dg_context* context = NULL;
  dg_pipeline_result* result = NULL;
  dg_tensor* loss = NULL;
  void* data = NULL;
  must(dg_context_create(worker, &context));
  must(dg_pipeline_train(pipeline, context, &x, 1, &y, 1, NULL, &result));
  must(dg_optimizer_step(optimizer, context)); /* on both processes */
  must(dg_pipeline_result_loss(result, &loss));
  must(dg_tensor_data(loss, &data));
  const double value = *(const float*)data;
  dg_tensor_destroy(loss);
  dg_pipeline_result_destroy(result);
  dg_context_destroy(context);
  return value;
}

/* Returns whether the model has learnt what it is shown. */
static bool train(dg_worker* worker, dg_optimizer* optimizer) {
  dg_schedule* schedule = NULL;
  must(dg_schedule_create_one_forward_one_backward(2, MICRO_BATCHES, &schedule));
  const dg_str workers[2] = {DG_STR("front"), DG_STR("back")};
  dg_pipeline* pipeline = NULL;
  must(dg_pipeline_create(worker, DG_STR("model"), schedule, workers, 2, NULL, &pipeline));
  dg_tensor *x = random_numbers(1, BATCH, WIDTH), *y = random_numbers(2, BATCH, WIDTH);
  double first = 0, last = 0;
  for (int i = 0; i < STEPS; ++i) {
    last = step(worker, pipeline, optimizer, x, y);
    if (i == 0) first = last;
  }
  printf("the loss was %.4f, and is %.4f\n", first, last);
  dg_tensor_destroy(x);
  dg_tensor_destroy(y);
  dg_pipeline_destroy(pipeline);
  dg_schedule_destroy(schedule);
  return last < first * 0.8;
}

int main(void) {
  job self = start();
  dg_tensor* weight = random_numbers((uint32_t)(3 + self.rank), WIDTH, WIDTH);
  must(dg_tensor_require_grad(weight));
  const dg_tensor* parameter = weight;
  dg_adam_options options = DG_ADAM_OPTIONS_INIT;
  options.learning_rate = 0.01;
  dg_optimizer* optimizer = NULL;
  must(dg_optimizer_create_adam(self.worker, DG_STR(""), &parameter, 1, &options, &optimizer));
  dg_pipeline_stages* stages = add_stage(&self, weight);
  must(dg_worker_barrier(self.worker, 60000, 0)); /* both have their stages */
  const bool right = self.rank == 1 || train(self.worker, optimizer);
  const int status = finish(&self);
  dg_pipeline_stages_destroy(stages);
  dg_optimizer_destroy(optimizer);
  dg_tensor_destroy(weight);
  return status != 0 || !right;
}
