/* NULL in the place of each handle that a function takes, while all else that it takes is valid:
 * the error begins with the name that the header gives to the parameter, and says what belongs
 * there. null_calls.py makes the calls, from the header. */
#define _POSIX_C_SOURCE 200809L
#include <unistd.h>

#include "capi/testing/check.h"

/* One of each kind that a function takes beside another handle. */
static struct {
  dg_tensor* tensor;
  dg_message* message;
  dg_future* future;
  dg_completions* completions;
  dg_worker* worker;
  dg_context* context;
  dg_optimizer* optimizer;
  dg_safetensors_file* safetensors_file;
  dg_schedule* schedule;
  dg_pipeline* pipeline;
  dg_data_parallel* data_parallel;
  dg_process_group* process_group;
  dg_gradient_averager* gradient_averager;
  dg_pipeline_stage stage; /* without user data, so that it may be given often */
} valid;
static char rendezvous[512], file[512];

/* A callback; no call comes so far. */
static void never(void) { abort(); }
static dg_error* never_forward(void* user_data, const dg_micro_batch* batch, dg_message** outputs) {
  (void)user_data, (void)batch, (void)outputs;
  abort();
}
static dg_error* never_replica(void* user_data, const dg_replica* replica, dg_tensor** outputs) {
  (void)user_data, (void)replica, (void)outputs;
  abort();
}
static dg_error* answer(void* user_data, const dg_request* request, dg_message** reply) {
  (void)user_data, (void)request, (void)reply;
  return NULL;
}

static void make_valid(void) {
  const float data[1] = {1};
  const char* folder = getenv("TEST_TMPDIR");
  const dg_tensor* tensors[1];
  const dg_str device = DG_STR("cpu"), name = DG_STR("weight");
  dg_str path = {file, 0}, alone;
  dg_worker_options worker = DG_WORKER_OPTIONS_INIT;
  dg_sgd_options sgd = DG_SGD_OPTIONS_INIT;
  dg_data_parallel_options parallel = DG_DATA_PARALLEL_OPTIONS_INIT;
  const dg_pipeline_stage stage = DG_PIPELINE_STAGE_INIT;
  const int process = (int)getpid();
  snprintf(rendezvous, sizeof(rendezvous), "file://%s/null.%d", folder ? folder : "/tmp", process);
  snprintf(file, sizeof(file), "%s/null.%d.safetensors", folder ? folder : "/tmp", process);
  path.size = strlen(file);

  valid.tensor = floats(data, 1, 1);
  OK(dg_tensor_require_grad(valid.tensor));
  tensors[0] = valid.tensor;
  OK(dg_message_create(NULL, 0, NULL, 0, &valid.message));
  OK(dg_completions_create(&valid.completions));
  worker.world_size = 1;
  worker.rendezvous.data = rendezvous;
  worker.rendezvous.size = strlen(rendezvous);
  OK(dg_worker_create(&worker, &valid.worker));
  OK(dg_worker_register(valid.worker, DG_STR("answer"), answer, NULL, NULL));
  alone = dg_worker_name(valid.worker, 0);
  OK(dg_worker_call_async(valid.worker, alone, DG_STR("answer"), valid.message, NULL,
                          &valid.future));
  OK(dg_context_create(valid.worker, &valid.context));
  OK(dg_optimizer_create_sgd(valid.worker, DG_STR("sgd"), tensors, 1, &sgd, &valid.optimizer));
  OK(dg_safetensors_save(path, &name, tensors, 1, NULL, 0));
  OK(dg_safetensors_file_open(path, &valid.safetensors_file));
  OK(dg_schedule_create_gpipe(1, 1, &valid.schedule));
  OK(dg_pipeline_create(valid.worker, DG_STR("model"), valid.schedule, &alone, 1, NULL,
                        &valid.pipeline));
  parallel.devices = &device;
  parallel.device_count = 1;
  OK(dg_data_parallel_create(tensors, 1, &parallel, never_replica, NULL, NULL,
                             &valid.data_parallel));
  OK(dg_process_group_create(valid.worker, NULL, &valid.process_group));
  OK(dg_gradient_averager_create(valid.process_group, tensors, 1, NULL, &valid.gradient_averager));
  valid.stage = stage;
  valid.stage.forward = never_forward;
}

static void destroy_valid(void) {
  bool done = false;
  OK(dg_future_wait(valid.future, DG_FOREVER, &done));
  dg_gradient_averager_destroy(valid.gradient_averager);
  dg_process_group_destroy(valid.process_group);
  dg_data_parallel_destroy(valid.data_parallel);
  dg_pipeline_destroy(valid.pipeline);
  dg_schedule_destroy(valid.schedule);
  dg_safetensors_file_destroy(valid.safetensors_file);
  dg_optimizer_destroy(valid.optimizer);
  dg_context_destroy(valid.context);
  dg_future_destroy(valid.future);
  dg_worker_destroy(valid.worker);
  dg_completions_destroy(valid.completions);
  dg_message_destroy(valid.message);
  dg_tensor_destroy(valid.tensor);
  unlink(file);
  unlink(rendezvous + strlen("file://"));
}

static int wrong;
static int refusals;

/* Reports all, for they are many. */
static void check_refused(const char* text, dg_error* error, const char* call) {
  const dg_code code = dg_error_code(error);
  const dg_str message = dg_error_message(error);
  ++refusals;
  if (code != DG_INVALID_ARGUMENT || message.size < strlen(text) ||
      memcmp(message.data, text, strlen(text)) != 0) {
    fprintf(stderr, "%s\n  code %d, '%.*s', and not: %s\n", call, (int)code, (int)message.size,
            message.size > 0 ? message.data : "", text);
    ++wrong;
  }
  dg_error_destroy(error);
}
#define REFUSED(text, call) check_refused((text), (call), #call)

/* The parameters of all functions. */
static void test_parameters(void) {
#include "capi/null_calls.h"
  CHECK(refusals == REFUSALS && refusals > 100);
  printf("%d handles that are NULL\n", refusals);
}

/* The fields that null_calls.py lists as tested here. */
static void test_fields(void) {
  const dg_str names[2] = {DG_STR("one"), DG_STR("two")};
  const dg_tensor* tensors[2];
  dg_optimizer* optimizers[2];
  const dg_tensor* const* const parameters = tensors;
  const dg_pipeline_stage* stages[1];
  dg_checkpoint_contents contents = DG_CHECKPOINT_CONTENTS_INIT;
  dg_data_parallel_options parallel = DG_DATA_PARALLEL_OPTIONS_INIT;
  dg_gradient_averager_options averager = DG_GRADIENT_AVERAGER_OPTIONS_INIT;
  dg_checkpoint_part* part = NULL;
  dg_data_parallel* data_parallel = NULL;
  dg_gradient_averager* made = NULL;
  dg_pipeline_stages* made_stages = NULL;
  tensors[0] = valid.tensor;
  tensors[1] = NULL;
  optimizers[0] = valid.optimizer;
  optimizers[1] = NULL;

  contents.tensor_names = names;
  contents.tensors = tensors;
  contents.tensor_count = 2;
  REFUSED("tensors[1] is NULL, and has to be a valid dg_tensor",
          dg_checkpoint_part_create(valid.worker, DG_STR(""), &contents, NULL, NULL, &part));
  contents.tensor_names = NULL;
  REFUSED("tensor_names is NULL, and its size is 2",
          dg_checkpoint_part_create(valid.worker, DG_STR(""), &contents, NULL, NULL, &part));
  contents.tensor_names = names;
  contents.tensor_count = 1;
  contents.optimizer_names = names;
  contents.optimizers = optimizers;
  contents.optimizer_count = 2;
  REFUSED("optimizers[1] is NULL, and has to be a valid dg_optimizer",
          dg_checkpoint_part_create(valid.worker, DG_STR(""), &contents, NULL, NULL, &part));

  parallel.buffers = tensors;
  parallel.buffer_count = 2;
  REFUSED(
      "buffers[1] is NULL, and has to be a valid dg_tensor",
      dg_data_parallel_create(parameters, 1, &parallel, never_replica, NULL, NULL, &data_parallel));
  averager.buffers = tensors;
  averager.buffer_count = 2;
  REFUSED("buffers[1] is NULL, and has to be a valid dg_tensor",
          dg_gradient_averager_create(valid.process_group, parameters, 1, &averager, &made));

  valid.stage.tied_names = names;
  valid.stage.tied = tensors;
  valid.stage.tied_count = 2;
  stages[0] = &valid.stage;
  REFUSED("tied[1] is NULL, and has to be a valid dg_tensor",
          dg_pipeline_stages_create(valid.worker, DG_STR("model"), stages, 1, NULL, &made_stages));
  CHECK(part == NULL && data_parallel == NULL && made == NULL && made_stages == NULL);
}

int main(void) {
  make_valid();
  test_parameters();
  test_fields();
  destroy_valid();
  return wrong == 0 ? 0 : 1;
}
