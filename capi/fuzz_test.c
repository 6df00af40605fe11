/* Random calls of every function on random handles: alive, destroyed, of another kind, and with a
 * bit turned over. Nothing may crash, hang or leak, whatever the calls return.
 *
 *   fuzz_test [SEED [CALLS]]
 *
 * First on one thread, then on three that destroy each other's handles. Handlers and callbacks
 * destroy some too: what the call uses that they belong to, as like as not. What torch itself
 * leaves to the caller is left out with several threads: to change one tensor on two threads at
 * once. There in-place operators run on a thread's own tensors, of which others only destroy the
 * handles. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <unistd.h>

#include "capi/testing/check.h"

enum kind {
  ERROR,
  TENSOR,
  VALUES,
  MESSAGE,
  FUTURE,
  WORKER,
  CONTEXT,
  OPTIMIZER,
  PARALLEL,
  CANCELLATION,
  RESPONDER,
  GROUP,
  AVERAGER,
  TENSOR_FILE,
  PART,
  MANAGER,
  LOADED,
  SCHEDULE,
  STAGES,
  PIPELINE,
  RESULT,
  STEP,
  COMPLETIONS,
  KINDS
};
enum { SLOTS = 12, THREADS = 3, MOST_WORKERS = 20 };

static void* pool[KINDS][SLOTS];
/* Tensors that one thread alone reads and writes. */
static dg_tensor* own[THREADS][SLOTS];
static pthread_mutex_t pool_mutex = PTHREAD_MUTEX_INITIALIZER;
static dg_worker* workers[MOST_WORKERS + THREADS + 1]; /* all that there ever were */
static int workers_made;

typedef struct state {
  uint64_t random;
  int calls;
  bool alone;
  int thread;
  int failures, successes;
} state;

static uint64_t next(state* s) { /* xorshift */
  s->random ^= s->random << 13;
  s->random ^= s->random >> 7;
  s->random ^= s->random << 17;
  return s->random >> 16;
}

/* Far apart for seeds that are near to each other; not 0. */
static uint64_t start(uint64_t seed, int stream) {
  uint64_t x = (seed * 8 + (uint64_t)stream + 1) * UINT64_C(0x9e3779b97f4a7c15);
  x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
  return (x ^ x >> 31) | 1;
}

static void destroy(enum kind kind, void* handle) {
  switch (kind) {
    case ERROR:
      dg_error_destroy((dg_error*)handle);
      break;
    case TENSOR:
      dg_tensor_destroy((dg_tensor*)handle);
      break;
    case VALUES:
      dg_values_destroy((dg_values*)handle);
      break;
    case MESSAGE:
      dg_message_destroy((dg_message*)handle);
      break;
    case FUTURE:
      dg_future_destroy((dg_future*)handle);
      break;
    case WORKER:
      dg_worker_destroy((dg_worker*)handle);
      break;
    case CONTEXT:
      dg_context_destroy((dg_context*)handle);
      break;
    case OPTIMIZER:
      dg_optimizer_destroy((dg_optimizer*)handle);
      break;
    case PARALLEL:
      dg_data_parallel_destroy((dg_data_parallel*)handle);
      break;
    case CANCELLATION:
      dg_cancellation_destroy((dg_cancellation*)handle);
      break;
    case RESPONDER:
      dg_responder_destroy((dg_responder*)handle);
      break;
    case GROUP:
      dg_process_group_destroy((dg_process_group*)handle);
      break;
    case AVERAGER:
      dg_gradient_averager_destroy((dg_gradient_averager*)handle);
      break;
    case TENSOR_FILE:
      dg_safetensors_file_destroy((dg_safetensors_file*)handle);
      break;
    case PART:
      dg_checkpoint_part_destroy((dg_checkpoint_part*)handle);
      break;
    case MANAGER:
      dg_checkpoint_manager_destroy((dg_checkpoint_manager*)handle);
      break;
    case LOADED:
      dg_loaded_checkpoint_destroy((dg_loaded_checkpoint*)handle);
      break;
    case SCHEDULE:
      dg_schedule_destroy((dg_schedule*)handle);
      break;
    case STAGES:
      dg_pipeline_stages_destroy((dg_pipeline_stages*)handle);
      break;
    case PIPELINE:
      dg_pipeline_destroy((dg_pipeline*)handle);
      break;
    case RESULT:
      dg_pipeline_result_destroy((dg_pipeline_result*)handle);
      break;
    case STEP:
      dg_pipeline_step_destroy((dg_pipeline_step*)handle);
      break;
    case COMPLETIONS:
      dg_completions_destroy((dg_completions*)handle);
      break;
    case KINDS:
      break;
  }
}

/* Mostly one of that kind, dead or alive. */
static void* pick(state* s, enum kind kind) {
  const uint64_t dice = next(s) % 16;
  void* handle;
  if (dice == 0) return NULL;
  if (dice == 1) kind = (enum kind)(next(s) % KINDS);
  pthread_mutex_lock(&pool_mutex);
  handle = pool[kind][next(s) % SLOTS];
  pthread_mutex_unlock(&pool_mutex);
  /* A guess: a bit turned over, or what may be the next handle of the slot, which a call of another
   * thread may be about to give. Not of a tensor, which could be another thread's own. */
  if (dice == 2 && (s->alone || kind != TENSOR)) {
    uintptr_t guess = (uintptr_t)handle;
    if (next(s) % 2)
      guess ^= (uintptr_t)1 << next(s) % 64;
    else
      guess += (uintptr_t)1 << 24;
    handle = (void*)guess;
  }
  return handle;
}

static void keep(state* s, enum kind kind, void* handle) {
  void* old;
  if (handle == NULL) return;
  pthread_mutex_lock(&pool_mutex);
  {
    void** slot = &pool[kind][next(s) % SLOTS];
    old = *slot;
    *slot = handle;
  }
  pthread_mutex_unlock(&pool_mutex);
  destroy(kind, old);
}

/* Errors are kept too, half of them. */
static void ran(state* s, dg_error* error) {
  if (error == NULL) {
    ++s->successes;
    return;
  }
  ++s->failures;
  CHECK(dg_error_code(error) != DG_OK);
  if (next(s) % 2 == 0)
    keep(s, ERROR, error);
  else
    dg_error_destroy(error);
}

/* What runs in the middle of other calls has no random numbers of its own, but one more stream. */
static state of_callback(void) {
  static uint64_t callbacks;
  return (state){.random = start(__atomic_add_fetch(&callbacks, 1, __ATOMIC_SEQ_CST), 7)};
}

/* In the middle of a call of this thread or another. A worker and stages only where nothing may
 * wait for them: handlers of two workers that destroyed each other's would, until the bound. */
static void destroy_some(bool workers_too) {
  state of = of_callback();
  state* s = &of;
  const enum kind kind = (enum kind)(next(s) % KINDS);
  if (next(s) % 2) return;
  if (kind == WORKER && (!workers_too || next(s) % 16)) return;
  if (kind == STAGES && !workers_too) return;
  if (kind == TENSOR && next(s) % 2) {
    dg_tensor* tensor;
    pthread_mutex_lock(&pool_mutex);
    tensor = own[next(s) % THREADS][next(s) % SLOTS];
    pthread_mutex_unlock(&pool_mutex);
    dg_tensor_destroy(tensor);
    return;
  }
  destroy(kind, pick(s, kind));
}

static dg_error* handle_call(void* user_data, const dg_request* request, dg_message** reply) {
  dg_tensor *x = NULL, *y = NULL;
  dg_value argument;
  dg_error* error = dg_message_tensor(request->message, 0, &x);
  (void)user_data;
  destroy_some(false);
  argument = dg_value_tensor(x);
  if (error == NULL) error = dg_op_tensors(DG_STR("aten::sin"), &argument, 1, &y, 1);
  if (error == NULL) {
    const dg_tensor* result = y;
    error = dg_message_create("ok", 2, &result, 1, reply);
  }
  dg_tensor_destroy(x);
  dg_tensor_destroy(y);
  return error;
}

/* Some calls are left to be answered by whoever picks them up, the others are answered at once. */
static void handle_later(void* user_data, const dg_request* request, dg_responder* responder) {
  state of = of_callback();
  dg_message* reply = NULL;
  dg_error* error;
  if (next(&of) % 3 == 0) {
    keep(&of, RESPONDER, responder);
    return;
  }
  error = handle_call(user_data, request, &reply);
  dg_error_destroy(dg_responder_answer(responder, reply, error));
}

/* Of whatever it has at its first places. */
static dg_error* run_replica(void* user_data, const dg_replica* replica, dg_tensor** outputs) {
  dg_value values[2];
  (void)user_data;
  destroy_some(false);
  if (replica->input_count == 0) return dg_error_create(DG_INVALID_ARGUMENT, DG_STR("no input"));
  values[0] = dg_value_tensor(replica->inputs[0]);
  values[1] = replica->parameter_count > 0 ? dg_value_tensor(replica->parameters[0])
                                           : dg_value_real((double)replica->index);
  return dg_op_tensors(DG_STR("aten::mul.Tensor"), values, 2, outputs, replica->output_count);
}

static dg_tensor* stage_parameter; /* of all stages */

static dg_error* run_stage(void* user_data, const dg_micro_batch* batch, dg_message** outputs) {
  dg_value values[2];
  dg_tensor* y = NULL;
  dg_error* error;
  (void)user_data;
  destroy_some(false);
  if (batch->input_count == 0) return NULL;
  values[0] = dg_value_tensor(batch->inputs[0]);
  values[1] = dg_value_tensor(stage_parameter);
  error = dg_op_tensors(DG_STR("aten::mul.Tensor"), values, 2, &y, 1);
  if (error == NULL) {
    const dg_tensor* result = y;
    error = dg_message_create("x", batch->input_count == 2, &result, 1, outputs);
  }
  dg_tensor_destroy(y);
  return error;
}
static dg_error* run_loss(void* user_data, const dg_micro_batch* batch, dg_tensor** loss) {
  dg_value value;
  (void)user_data;
  destroy_some(false);
  if (batch->output_count == 0) return NULL;
  value = dg_value_tensor(batch->outputs[0]);
  return dg_op_tensors(DG_STR("aten::sum"), &value, 1, loss, 1);
}
static dg_error* run_step(void* user_data, const dg_context* context) {
  dg_tensor* gradient = NULL;
  dg_error* error;
  (void)user_data;
  destroy_some(false);
  error = dg_context_gradient(context, stage_parameter, &gradient);
  dg_tensor_destroy(gradient);
  return error;
}
static dg_error* on_action(void* user_data, const dg_stage_span* span) {
  (void)user_data;
  destroy_some(false);
  return span->step % 8 ? NULL : dg_error_create(DG_ABORTED, DG_STR("no more"));
}
static double time_action(void* user_data, const dg_action* action) {
  (void)user_data;
  destroy_some(false);
  return action->kind;
}

static void nothing(void* user_data) { (void)user_data; }
/* On whichever thread completes, cancels or ends something; it may not wait. */
static void callback(void* user_data) {
  (void)user_data;
  destroy_some(true);
}
static void see_member(void* user_data, const dg_member* member) {
  (void)user_data;
  destroy_some(false);
  CHECK(member->name.size > 0);
}
static void see_event(void* user_data, const dg_member_event* event) {
  (void)user_data;
  destroy_some(false);
  CHECK(event->kind != 0);
}
static void see_context(void* user_data, const dg_context_state* context) {
  (void)user_data;
  destroy_some(false);
  CHECK(context->id != 0);
}
static void visit(void* user_data, const dg_tensor* leaf, const dg_tensor* gradient) {
  (void)user_data;
  destroy_some(false);
  CHECK(dg_tensor_dtype(leaf) >= 0 && dg_tensor_dtype(gradient) >= 0);
}

static dg_checkpoint_values* any_values; /* of the last save, or of a random one */
static dg_error* save_values(void* user_data, dg_checkpoint_values* values) {
  (void)user_data;
  destroy_some(false);
  __atomic_store_n(&any_values, values, __ATOMIC_SEQ_CST);
  return dg_checkpoint_values_set(values, DG_STR("a"), DG_STR("b"));
}
static dg_error* load_values(void* user_data, const dg_loaded_values* loaded) {
  (void)user_data;
  destroy_some(false);
  CHECK(loaded->step >= 0);
  return NULL;
}
static void see_info(void* user_data, const dg_safetensors_info* info) {
  (void)user_data;
  destroy_some(false);
  CHECK(info->dtype >= 0);
}
static void see_entry(void* user_data, const dg_entry* entry) {
  (void)user_data;
  destroy_some(false);
  CHECK(entry->name.size > 0);
}
static void see_loaded(void* user_data, dg_str name, const dg_tensor* tensor) {
  (void)user_data;
  destroy_some(false);
  CHECK(name.size > 0 && dg_tensor_dtype(tensor) >= 0);
}

/* One of a few, in the test's folder. */
static dg_str pick_path(state* s, char* room, size_t size, const char* what) {
  const char* parent = getenv("TEST_TMPDIR");
  dg_str path;
  snprintf(room, size, "%s/fuzz.%s.%d.%d", parent ? parent : "/tmp", what, (int)getpid(),
           (int)(next(s) % 3));
  path.data = room;
  path.size = strlen(room);
  return path;
}

static dg_worker* new_worker(void) {
  char path[512];
  dg_worker_options options = DG_WORKER_OPTIONS_INIT;
  dg_worker* worker = NULL;
  const char* folder = getenv("TEST_TMPDIR");
  const int index = __atomic_fetch_add(&workers_made, 1, __ATOMIC_SEQ_CST);
  snprintf(path, sizeof(path), "file://%s/fuzz.%d.%d", folder ? folder : "/tmp", (int)getpid(),
           index);
  options.world_size = 1;
  options.rendezvous.data = path;
  options.rendezvous.size = strlen(path);
  options.thread_count = 2;
  options.timeout_ms = 20000;
  OK(dg_worker_create(&options, &worker));
  OK(dg_worker_register(worker, DG_STR("sin"), handle_call, NULL, NULL));
  OK(dg_worker_register_responder(worker, DG_STR("later"), handle_later, NULL, NULL));
  workers[index] = worker;
  return worker;
}

/* Whatever is left of it runs on. */
static void await_end(dg_worker* worker) {
  dg_worker_destroy(worker);
  while (code_of(dg_worker_close(worker, DG_FOREVER)) != DG_INVALID_ARGUMENT) continue;
}

static dg_tensor* pick_own(state* s) {
  dg_tensor* tensor;
  pthread_mutex_lock(&pool_mutex);
  tensor = own[s->thread][next(s) % SLOTS];
  pthread_mutex_unlock(&pool_mutex);
  return tensor;
}

static void keep_own(state* s, dg_tensor* tensor) {
  dg_tensor** slot = &own[s->thread][next(s) % SLOTS];
  dg_tensor* old;
  if (tensor == NULL) return;
  pthread_mutex_lock(&pool_mutex);
  old = *slot;
  *slot = tensor;
  pthread_mutex_unlock(&pool_mutex);
  dg_tensor_destroy(old);
}

/* A tensor of this thread alone, or one that shares its memory or its shape. */
static void make_own(state* s) {
  static const float zeros[64];
  const int64_t shape[2] = {(int64_t)(next(s) % 3), 2};
  dg_value arguments[2];
  dg_tensor* out = NULL;
  switch (next(s) % 4) {
    case 0:
      ran(s, dg_tensor_from_data(zeros, DG_FLOAT32, shape, next(s) % 3, &out));
      break;
    case 1:
      ran(s, dg_tensor_detach(pick_own(s), &out));
      break;
    case 2:
      ran(s, dg_tensor_clone(pick_own(s), &out));
      break;
    default:
      arguments[0] = dg_value_tensor(pick_own(s));
      arguments[1] = dg_value_integer(0);
      ran(s, dg_op_tensors(DG_STR("aten::unsqueeze"), arguments, 2, &out, 1));
      break;
  }
  keep_own(s, out);
}

static void change_own(state* s) {
  const int64_t sizes[3] = {(int64_t)(next(s) % 5), 2, (int64_t)(next(s) % 3)};
  dg_tensor *const x = pick_own(s), *out = NULL;
  dg_value arguments[3];
  int64_t shape[4], strides[4];
  size_t dims = 0;
  arguments[0] = dg_value_tensor(x);
  arguments[1] = next(s) % 2 ? dg_value_tensor(pick_own(s)) : dg_value_real(2);
  switch (next(s) % 9) {
    case 0:
      ran(s, dg_op_tensors(DG_STR("aten::add_.Tensor"), arguments, 2, &out, 1));
      break;
    case 1:
      ran(s, dg_op_tensors(DG_STR("aten::mul_.Tensor"), arguments, 2, &out, 1));
      break;
    case 2:
      arguments[1] = dg_value_integer(0);
      ran(s, dg_op_tensors(DG_STR("aten::unsqueeze_"), arguments, 2, &out, 1));
      break;
    case 3:
      ran(s, dg_op_tensors(DG_STR("aten::squeeze_"), arguments, 1, &out, 1));
      break;
    case 4:
      ran(s, dg_op_tensors(DG_STR("aten::t_"), arguments, 1, &out, 1));
      break;
    case 5:
    case 6:
      arguments[1] = dg_value_integers(sizes, next(s) % 4);
      ran(s, dg_op_tensors(DG_STR("aten::resize_"), arguments, 2, &out, 1));
      break;
    case 7:
      ran(s, dg_op_tensors(DG_STR("aten::copy_"), arguments, 2, &out, 1));
      break;
    default:
      ran(s, dg_op_tensors(DG_STR("aten::zero_"), arguments, 1, &out, 1));
      break;
  }
  ran(s, dg_tensor_layout(x, shape, strides, 4, &dims));
  (void)dg_tensor_element_count(x);
  if (next(s) % 2) {
    dg_tensor* sum = NULL;
    ran(s, dg_op_tensors(DG_STR("aten::sum"), arguments, 1, &sum, 1));
    dg_tensor_destroy(sum);
  }
  keep_own(s, out); /* the same tensor */
}

#define T ((dg_tensor*)pick(s, TENSOR))
#define V ((dg_values*)pick(s, VALUES))
#define M ((dg_message*)pick(s, MESSAGE))
#define F ((dg_future*)pick(s, FUTURE))
#define W ((dg_worker*)pick(s, WORKER))
#define C ((dg_context*)pick(s, CONTEXT))
#define O ((dg_optimizer*)pick(s, OPTIMIZER))
#define X ((dg_cancellation*)pick(s, CANCELLATION))
#define R ((dg_responder*)pick(s, RESPONDER))
#define G ((dg_process_group*)pick(s, GROUP))
#define A ((dg_gradient_averager*)pick(s, AVERAGER))
#define P ((dg_data_parallel*)pick(s, PARALLEL))
#define E ((dg_error*)pick(s, ERROR))
#define FILE_ ((dg_safetensors_file*)pick(s, TENSOR_FILE))
#define PART_ ((dg_checkpoint_part*)pick(s, PART))
#define MANAGER_ ((dg_checkpoint_manager*)pick(s, MANAGER))
#define LOADED_ ((dg_loaded_checkpoint*)pick(s, LOADED))
#define S ((dg_schedule*)pick(s, SCHEDULE))
#define L ((dg_pipeline*)pick(s, PIPELINE))
#define COMPLETIONS_ ((dg_completions*)pick(s, COMPLETIONS))
#define Q ((dg_pipeline_result*)pick(s, RESULT))
#define STEP_ ((dg_pipeline_step*)pick(s, STEP))
#define MAKE(kind, type, call) \
  do {                         \
    type* out = NULL;          \
    ran(s, call);              \
    keep(s, kind, out);        \
  } while (0)

static void make_schedule(state* s) {
  dg_action actions[4];
  dg_action_list list;
  uint32_t ranks[2] = {0, 0}, most = (uint32_t)(next(s) % 3);
  dg_schedule_data data = DG_SCHEDULE_DATA_INIT;
  for (int i = 0; i < 4; ++i) { /* two forwards and backwards, mostly */
    actions[i].kind = next(s) % 16 ? (uint32_t)(i >= 2) : (uint32_t)next(s);
    actions[i].stage = next(s) % 16 ? 0 : (uint32_t)next(s);
    actions[i].micro_batch = next(s) % 16 ? (uint32_t)(i % 2) : (uint32_t)next(s);
  }
  list.data = actions;
  list.size = 4;
  data.micro_batches = 2;
  data.rank_of_stage = ranks;
  data.stage_count = 1;
  data.lists = &list;
  data.rank_count = 1;
  if (next(s) % 2) data.max_activations = &most;
  switch (next(s) % 6) {
    case 0:
      MAKE(SCHEDULE, dg_schedule, dg_schedule_create_gpipe(next(s) % 3, next(s) % 4, &out));
      break;
    case 1:
      MAKE(SCHEDULE, dg_schedule,
           dg_schedule_create_one_forward_one_backward(1, next(s) % 8, &out));
      break;
    case 2:
      MAKE(SCHEDULE, dg_schedule,
           dg_schedule_create_interleaved_one_forward_one_backward(1, next(s) % 3, 2, &out));
      break;
    case 3:
      MAKE(SCHEDULE, dg_schedule,
           next(s) % 2 ? dg_schedule_create_zero_bubble_h1(next(s) % 4 ? 1 : next(s), 2, &out)
                       : dg_schedule_create_zero_bubble_h2(next(s) % 4 ? 1 : next(s), 2, &out));
      break;
    case 4:
      MAKE(SCHEDULE, dg_schedule,
           dg_schedule_create_zero_bubble(1, 2, next(s) % 4 ? 1 : next(s), &out));
      break;
    default:
      MAKE(SCHEDULE, dg_schedule, dg_schedule_create(&data, next(s) % 3, &out));
      break;
  }
}

static void make_stages(state* s) {
  dg_pipeline_stage made[2] = {DG_PIPELINE_STAGE_INIT, DG_PIPELINE_STAGE_INIT};
  const dg_pipeline_stage* list[2];
  dg_pipeline_stages_options options = DG_PIPELINE_STAGES_OPTIONS_INIT;
  const uint64_t skip = next(s) % 4 ? next(s) % 4 : next(s);
  for (int i = 0; i < 2; ++i) {
    made[i].number = next(s) % 8 ? (uint64_t)i : next(s);
    made[i].forward = next(s) % 8 ? run_stage : NULL;
    made[i].loss = next(s) % 8 ? run_loss : NULL;
    made[i].step = next(s) % 2 ? run_step : NULL;
    made[i].destroy = callback;
    made[i].inputs = next(s) % 8 ? 1 : (int64_t)(next(s) % 4) - 2;
    made[i].targets = next(s) % 8 ? DG_ANY_COUNT : (int64_t)(next(s) % 4);
    made[i].flags = next(s) % 4 == 0;
    made[i].skips = next(s) % 2 ? &skip : NULL;
    made[i].skip_count = next(s) % 8 == 0;
    made[i].on_action = next(s) % 4 == 0 ? on_action : NULL;
    list[i] = next(s) % 16 ? &made[i] : NULL;
  }
  options.num_threads = next(s) % 3;
  MAKE(STAGES, dg_pipeline_stages,
       dg_pipeline_stages_create(W, next(s) % 8 ? DG_STR("p") : DG_STR("::"), list, next(s) % 3,
                                 next(s) % 2 ? &options : NULL, &out));
}

static void run_pipeline(state* s) {
  const dg_str self = next(s) % 16 ? DG_STR("worker0") : DG_STR("nobody");
  const dg_str twice[2] = {DG_STR("worker0"), DG_STR("worker0")};
  dg_pipeline_options options = DG_PIPELINE_OPTIONS_INIT;
  dg_pipeline_run_options run = DG_PIPELINE_RUN_OPTIONS_INIT;
  const dg_tensor* two[2];
  size_t index = next(s) % 3;
  options.reduction = next(s) % 3;
  if (next(s) % 16 == 0) run.timeout_ms = 1;
  two[0] = T;
  two[1] = T;
  switch (next(s) % 6) {
    case 0:
      MAKE(PIPELINE, dg_pipeline, dg_pipeline_create(W, DG_STR("p"), S, &self, 1, &options, &out));
      MAKE(PIPELINE, dg_pipeline, dg_pipeline_create(W, DG_STR("p"), S, twice, 2, NULL, &out));
      break;
    case 1:
      MAKE(RESULT, dg_pipeline_result,
           dg_pipeline_train(L, C, two, next(s) % 8 ? 1 : next(s) % 3, two + 1, next(s) % 2, &run,
                             &out));
      break;
    case 2:
      MAKE(STEP, dg_pipeline_step,
           dg_pipeline_start(L, C, two, next(s) % 8 ? 1 : next(s) % 3, two + 1, next(s) % 2, &run,
                             &out));
      break;
    case 3:
      MAKE(RESULT, dg_pipeline_result, dg_pipeline_step_wait(STEP_, &out));
      if (next(s) % 2 == 0) dg_pipeline_step_destroy(STEP_);
      break;
    case 4:
      MAKE(RESULT, dg_pipeline_result,
           dg_pipeline_evaluate(L, two, next(s) % 8 ? 1 : next(s) % 3, two + 1, next(s) % 2, &run,
                                &out));
      break;
    default:
      MAKE(TENSOR, dg_tensor, dg_pipeline_result_loss(Q, &out));
      MAKE(MESSAGE, dg_message, dg_pipeline_result_losses(Q, &out));
      MAKE(MESSAGE, dg_message, dg_pipeline_result_outputs(Q, index, &out));
      (void)dg_pipeline_result_output_count(Q);
      if (next(s) % 4 == 0) dg_pipeline_result_destroy(Q);
      if (next(s) % 8 == 0) dg_pipeline_destroy(L);
      break;
  }
}

static void call(state* s) {
  static float memory[64]; /* enough for the largest dtype */
  const dg_str self = next(s) % 8 ? DG_STR("worker0") : DG_STR("nobody");
  const dg_str function = next(s) % 8 ? DG_STR("sin") : DG_STR("no");
  const bool later = next(s) % 4 == 0;
  const int64_t shape[2] = {2, next(s) % 16 ? (int64_t)(next(s) % 4) : -1};
  const size_t dims = next(s) % 3;
  const dg_dtype dtype = next(s) % 4 ? DG_FLOAT32 : (dg_dtype)(next(s) % 32);
  const dg_tensor* two[2];
  dg_value values[2], value;
  dg_call_options options = DG_CALL_OPTIONS_INIT;
  bool done = false;
  void* data = NULL;
  int64_t numbers[4];
  size_t dim_count = 0;
  double norm = 0;
  two[0] = T;
  two[1] = T;
  values[0] = next(s) % 8 ? dg_value_tensor(T) : dg_value_tensors(two, 2);
  values[1] = next(s) % 2 ? dg_value_tensor(T) : dg_value_real(3);
  if (next(s) % 16 == 0) values[1].kind = next(s) % 7; /* of those without a pointer */
  if (values[1].kind == DG_VALUE_STRING) values[1].kind = DG_VALUE_REAL;
  if (next(s) % 2) options.context = C;
  if (next(s) % 8 == 0) options.cancellation = X;
  if (next(s) % 16 == 0) options.struct_size = next(s) % 64;
  if (options.struct_size > sizeof(options)) options.struct_size = 1;

  switch (next(s) % 77) {
    case 0:
      (void)dg_error_code(E);
      break;
    case 1:
      (void)dg_error_message(E);
      break;
    case 2:
      ran(s, dg_report_failure(dtype, function)); /* to nobody */
      ran(s, dg_manual_seed(next(s)));
      keep(s, ERROR, dg_error_create((dg_code)(next(s) % 20), DG_STR("made")));
      break;
    case 3:
      dg_error_destroy(E);
      break;
    case 4:
    case 5:
      MAKE(TENSOR, dg_tensor, dg_tensor_from_data(memory, dtype, shape, dims, &out));
      break;
    case 6:
      MAKE(TENSOR, dg_tensor,
           dg_tensor_from_memory(memory, DG_FLOAT32, shape, NULL, dims, NULL, callback, &out));
      break;
    case 7: { /* round trip through DLPack, if that much is to be had */
      struct DLManagedTensorVersioned* managed = NULL;
      ran(s, dg_tensor_to_dlpack(T, &managed));
      if (managed != NULL) MAKE(TENSOR, dg_tensor, dg_tensor_from_dlpack(managed, &out));
      break;
    }
    case 8:
      MAKE(TENSOR, dg_tensor, dg_tensor_clone(T, &out));
      break;
    case 9:
      MAKE(TENSOR, dg_tensor, dg_tensor_detach(T, &out));
      break;
    case 10:
      dg_tensor_destroy(T);
      break;
    case 11:
      (void)dg_tensor_dtype(T);
      break;
    case 12:
      (void)dg_tensor_dim_count(T);
      break;
    case 13:
      ran(s, dg_tensor_layout(T, numbers, NULL, next(s) % 5, &dim_count));
      break;
    case 14:
      ran(s, dg_tensor_layout(T, NULL, numbers, next(s) % 5, &dim_count));
      ran(s, dg_op_check_functional(function));
      break;
    case 15:
      (void)dg_tensor_element_count(T);
      break;
    case 16:
      (void)dg_tensor_device(T);
      break;
    case 17:
      ran(s, dg_tensor_data(T, &data));
      break;
    case 18:
      (void)dg_tensor_requires_grad(T);
      break;
    case 19:
      (void)dg_tensor_torch(T);
      break;
    case 20:
    case 21: { /* a leaf, that no other thread knows yet */
      dg_tensor* leaf = NULL;
      const int64_t some[2] = {1, 3};
      OK(dg_tensor_from_data(memory, DG_FLOAT32, some, 2, &leaf));
      OK(dg_tensor_require_grad(leaf));
      keep(s, TENSOR, leaf);
      if (s->alone) ran(s, dg_tensor_require_grad(T));
      break;
    }
    case 22:
      (void)dg_values_count(V);
      break;
    case 23:
      ran(s, dg_values_get(V, next(s) % 3, &value));
      break;
    case 24:
      dg_values_destroy(V);
      break;
    case 25:
    case 26:
      MAKE(VALUES, dg_values, dg_op_call(DG_STR("aten::add.Tensor"), values, 2, &out));
      break;
    case 27:
    case 28:
      MAKE(TENSOR, dg_tensor, dg_op_tensors(DG_STR("aten::mul.Tensor"), values, 2, &out, 1));
      break;
    case 29:
      MAKE(TENSOR, dg_tensor, dg_op_tensors(DG_STR("aten::sum"), values, 1, &out, 1));
      break;
    case 30:
    case 31:
      MAKE(MESSAGE, dg_message, dg_message_create("abc", 3, two, next(s) % 3, &out));
      break;
    case 32:
      dg_message_destroy(M);
      break;
    case 33:
      (void)dg_message_payload(M);
      break;
    case 34:
      (void)dg_message_tensor_count(M);
      break;
    case 35:
      MAKE(TENSOR, dg_tensor, dg_message_tensor(M, next(s) % 3, &out));
      break;
    case 36:
      ran(s, dg_future_wait(F, (int64_t)(next(s) % 2) * DG_FOREVER, &done));
      break;
    case 37:
      MAKE(MESSAGE, dg_message, dg_future_result(F, &out));
      break;
    case 38:
      MAKE(VALUES, dg_values, dg_future_values(F, &out));
      break;
    case 39:
      ran(s, dg_future_then(F, callback, NULL, next(s) % 2 ? callback : NULL));
      break;
    case 40:
      if (next(s) % 2) ran(s, dg_future_cancel(F));
      dg_future_destroy(F);
      break;
    case 41:
      if (next(s) % 16 == 0) dg_worker_destroy(W);
      if (next(s) % 8 == 0 && __atomic_load_n(&workers_made, __ATOMIC_SEQ_CST) < MOST_WORKERS - 1)
        keep(s, WORKER, new_worker());
      break;
    case 42:
      ran(s, dg_worker_barrier(W, 20000, next(s) % 4));
      if (next(s) % 32 == 0) ran(s, dg_worker_shutdown(W, 20000, next(s) % 4));
      /* With good flags it would wait for a responder that nobody answers. */
      ran(s, dg_worker_serve(W, 2));
      if (next(s) % 64 == 0) ran(s, dg_worker_leave(W, 1));
      ran(s, dg_wait(next(s) % 2 == 0 ? nothing : NULL, NULL));
      break;
    case 43:
      (void)dg_worker_rank(W);
      (void)dg_worker_world_size(W);
      (void)dg_worker_name(W, (uint32_t)(next(s) % 3));
      (void)dg_worker_local_rank(W);
      (void)dg_worker_local_world_size(W);
      (void)dg_worker_context_count(W);
      ran(s, dg_worker_members(W, next(s) % 8 ? see_member : NULL, NULL));
      ran(s, dg_worker_on_member(W, next(s) % 4 ? see_event : NULL, NULL, NULL));
      ran(s, dg_worker_contexts(W, next(s) % 8 ? see_context : NULL, NULL));
      if (next(s) % 4 == 0) ran(s, dg_worker_update_members(W));
      MAKE(MESSAGE, dg_message, dg_worker_metrics_text(W, &out));
      {
        dg_trace_options trace = DG_TRACE_OPTIONS_INIT;
        trace.max_bytes = next(s) % 2 ? 0 : next(s) % 10000;
        ran(s, dg_worker_start_trace(W, next(s) % 8 ? &trace : NULL));
        if (next(s) % 4 == 0) MAKE(MESSAGE, dg_message, dg_worker_stop_trace(W, &out));
      }
      break;
    case 44:
      ran(s, dg_worker_register(W, function, next(s) % 8 ? handle_call : NULL, NULL, callback));
      break;
    case 45:
      MAKE(MESSAGE, dg_message, dg_worker_call(W, self, function, M, &options, &out));
      {
        dg_message* replies[3] = {NULL, NULL, NULL};
        dg_error* errors[3] = {NULL, NULL, NULL};
        dg_str to[3] = {DG_STR("nobody"), DG_STR("")};
        to[2] = self;
        ran(s, dg_worker_call_each(W, to, next(s) % 4, function, M, &options, replies,
                                   next(s) % 8 ? errors : NULL));
        for (int i = 0; i < 3; ++i) {
          keep(s, MESSAGE, replies[i]);
          if (errors[i] != NULL) keep(s, ERROR, errors[i]);
        }
      }
      break;
    case 46:
      if (later) options.timeout_ms = 20; /* nobody may ever answer */
      MAKE(FUTURE, dg_future,
           dg_worker_call_async(W, self, later ? DG_STR("later") : function, M, &options, &out));
      break;
    case 47:
      MAKE(VALUES, dg_values,
           dg_worker_call_op(W, self, DG_STR("aten::add.Tensor"), values, 2, &options, &out));
      break;
    case 48:
      MAKE(FUTURE, dg_future,
           dg_worker_call_op_async(W, self, DG_STR("aten::max"), values, 1, &options, &out));
      break;
    case 49:
      MAKE(CONTEXT, dg_context, dg_context_create(W, &out));
      break;
    case 50:
      if (next(s) % 2) ran(s, dg_context_release(C));
      dg_context_destroy(C);
      (void)dg_context_id(C);
      break;
    case 51: {
      dg_backward_options backward = DG_BACKWARD_OPTIONS_INIT;
      backward.flags = next(s) % 3;
      if (next(s) % 4 == 0) backward.root_gradients = two;
      ran(s, dg_context_backward(C, two, next(s) % 3, &backward));
      MAKE(FUTURE, dg_future, dg_context_backward_async(C, two, 1, &backward, &out));
      break;
    }
    case 52:
      MAKE(TENSOR, dg_tensor, dg_context_gradient(C, T, &out));
      ran(s, dg_context_set_gradient(C, two[0], two[1]));
      ran(s, dg_context_gradients(C, visit, NULL));
      {
        const dg_context* contexts[2];
        contexts[0] = C;
        contexts[1] = C;
        ran(s, dg_worker_sum_gradients(W, contexts, next(s) % 3));
      }
      break;
    case 53: {
      dg_optimizer* optimizer = NULL;
      dg_tensor* leaf = NULL;
      const dg_tensor* leaves[1];
      const dg_str name = next(s) % 2 ? DG_STR("a") : DG_STR("b");
      dg_worker* const of = next(s) % 3 ? W : NULL; /* a local one */
      OK(dg_tensor_from_data(memory, DG_FLOAT32, NULL, 0, &leaf));
      OK(dg_tensor_require_grad(leaf));
      leaves[0] = leaf;
      switch (next(s) % 3) {
        case 0:
          ran(s, dg_optimizer_create_sgd(of, name, leaves, 1, NULL, &optimizer));
          break;
        case 1:
          ran(s, dg_optimizer_create_adam(of, name, leaves, 1, NULL, &optimizer));
          break;
        default:
          ran(s, dg_optimizer_create_adamw(of, name, leaves, 1, NULL, &optimizer));
          break;
      }
      keep(s, OPTIMIZER, optimizer);
      dg_tensor_destroy(leaf);
      ran(s, dg_optimizer_clip_gradients(O, C, (double)(next(s) % 3) - 0.5, &norm));
      ran(s, dg_optimizer_set_learning_rate(O, (double)(next(s) % 3) - 0.5));
      ran(s, dg_optimizer_set_workers(O, &name, next(s) % 2));
      ran(s, dg_optimizer_step(O, C));
      if (next(s) % 4 == 0) dg_optimizer_destroy(O);
      break;
    }
    case 54:
    case 55: {
      const dg_str devices[3] = {DG_STR("cpu"), next(s) % 8 ? DG_STR("cpu") : DG_STR("no"),
                                 DG_STR("cpu")};
      dg_data_parallel_options parallel = DG_DATA_PARALLEL_OPTIONS_INIT;
      parallel.devices = devices;
      parallel.device_count = next(s) % 4;
      parallel.dim = next(s) % 4 == 0;
      if (next(s) % 4 == 0) {
        parallel.buffers = two;
        parallel.buffer_count = next(s) % 3;
      }
      MAKE(PARALLEL, dg_data_parallel,
           dg_data_parallel_create(two + 1, next(s) % 2, &parallel,
                                   next(s) % 8 ? run_replica : NULL, NULL, callback, &out));
      if (next(s) % 4 == 0) dg_data_parallel_destroy(P);
      break;
    }
    case 56:
      MAKE(TENSOR, dg_tensor, dg_data_parallel_forward(P, two, next(s) % 3, &out, 1));
      break;
    case 57: {
      const dg_str devices[2] = {DG_STR("cpu"), next(s) % 8 ? DG_STR("cpu") : DG_STR("no")};
      const size_t device_count = next(s) % 3;
      dg_tensor* outs[4] = {NULL, NULL, NULL, NULL};
      size_t count = 0;
      switch (next(s) % 4) {
        case 0:
          ran(s, dg_scatter(T, devices, device_count, (int64_t)(next(s) % 3) - 1,
                            next(s) % 4 ? NULL : shape, outs, &count));
          break;
        case 1:
          ran(s, dg_gather(two, next(s) % 3, devices[1], 0, outs));
          break;
        case 2:
          ran(s, dg_broadcast(two, next(s) % 3, devices, device_count, outs));
          break;
        default:
          ran(s, dg_reduce_add(two, 2, next(s) % 2, devices[1], outs));
          break;
      }
      for (int i = 0; i < 4; ++i) keep(s, TENSOR, outs[i]);
      break;
    }
    case 58:
      ran(s, dg_worker_register_responder(W, next(s) % 2 ? DG_STR("later") : DG_STR("last"),
                                          next(s) % 8 ? handle_later : NULL, NULL, callback));
      MAKE(CANCELLATION, dg_cancellation, dg_cancellation_create(&out));
      break;
    case 59:
      if (next(s) % 4 == 0) ran(s, dg_cancellation_cancel(X));
      ran(s, dg_cancellation_check(X));
      {
        uint64_t id = next(s) % 4;
        ran(s, dg_cancellation_on_cancel(X, next(s) % 8 ? callback : NULL, NULL, callback, &id));
        if (next(s) % 2) ran(s, dg_cancellation_forget(X, id));
      }
      if (next(s) % 4 == 0) dg_cancellation_destroy(X);
      break;
    case 60:
      if (next(s) % 2) {
        dg_responder_destroy(R);
      } else {
        ran(s, dg_responder_answer(R, M, next(s) % 2 ? NULL : E));
      }
      break;
    case 61: { /* of one rank: it waits for nobody */
      dg_process_group_options group = DG_PROCESS_GROUP_OPTIONS_INIT;
      if (next(s) % 8) break; /* each has threads of its own */
      group.name = next(s) % 2 ? DG_STR("a") : DG_STR("b");
      group.size = 1;
      group.rank = next(s) % 8 == 0;
      MAKE(GROUP, dg_process_group, dg_process_group_create(W, &group, &out));
      break;
    }
    case 62: {
      dg_gradient_averager_options averager = DG_GRADIENT_AVERAGER_OPTIONS_INIT;
      dg_tensor* leaf = NULL;
      OK(dg_tensor_from_data(memory, DG_FLOAT32, NULL, 0, &leaf));
      OK(dg_tensor_require_grad(leaf));
      if (!s->alone || next(s) % 2) two[0] = leaf; /* it is written to */
      averager.flags = next(s) % 3;
      MAKE(AVERAGER, dg_gradient_averager,
           dg_gradient_averager_create(G, two, s->alone ? next(s) % 3 : 1, &averager, &out));
      dg_tensor_destroy(leaf);
      if (next(s) % 4 == 0) dg_gradient_averager_destroy(A);
      if (next(s) % 16 == 0) dg_process_group_destroy(G);
      break;
    }
    case 63:
      (void)dg_process_group_rank(G);
      (void)dg_process_group_size(G);
      ran(s, dg_gradient_averager_average(A, C));
      if (next(s) % 4 == 0) {
        bool others;
        ran(s, dg_gradient_averager_join(A, C, next(s) % 3, &others));
      }
      if (next(s) % 4 == 0) ran(s, dg_gradient_averager_average_in_backward(A, C));
      if (next(s) % 16 == 0) ran(s, dg_process_group_fail(G, dtype, function));
      if (!s->alone) break;
      ran(s, dg_process_group_average(G, two, next(s) % 3));
      ran(s, dg_process_group_broadcast(G, two, next(s) % 3, (uint32_t)(next(s) % 2)));
      break;
    case 64:
      make_own(s);
      break;
    case 68: { /* files; tensors that are read into are this thread's own */
      char room[512];
      const dg_str path = pick_path(s, room, sizeof(room), "tensors");
      const dg_str names[2] = {DG_STR("a"), next(s) % 8 ? DG_STR("b") : DG_STR("a")};
      const dg_tensor* mine[2];
      const dg_entry entry = {DG_STR("key"), next(s) % 8 ? DG_STR("value") : DG_STR("\xff")};
      mine[0] = pick_own(s);
      mine[1] = pick_own(s);
      if (next(s) % 4 == 0) {
        ran(s, dg_safetensors_save(path, names, mine, next(s) % 3, &entry, next(s) % 2));
      }
      ran(s, dg_safetensors_load(path, next(s) % 8 ? see_loaded : NULL, NULL));
      ran(s, dg_safetensors_load_into(path, names, mine, next(s) % 3));
      MAKE(TENSOR_FILE, dg_safetensors_file, dg_safetensors_file_open(path, &out));
      ran(s, dg_safetensors_file_tensors(FILE_, next(s) % 8 ? see_info : NULL, NULL));
      ran(s, dg_safetensors_file_metadata(FILE_, next(s) % 8 ? see_entry : NULL, NULL));
      MAKE(TENSOR, dg_tensor, dg_safetensors_file_read(FILE_, names[1], &out));
      ran(s, dg_safetensors_file_read_into(FILE_, names[0], mine[0]));
      if (next(s) % 4 == 0) dg_safetensors_file_destroy(FILE_);
      if (next(s) % 4 == 0) ran(s, dg_optimizer_save(O, names, two, next(s) % 3, path));
      if (next(s) % 4 == 0) ran(s, dg_optimizer_load(O, names, two, next(s) % 3, path));
      break;
    }
    case 69: { /* a part with a tensor that nobody else knows */
      const dg_str name = DG_STR("w"), optimizer = next(s) % 8 ? DG_STR("o") : DG_STR("/");
      dg_optimizer* optimizers[1];
      dg_checkpoint_contents contents = DG_CHECKPOINT_CONTENTS_INIT;
      dg_tensor* leaf = NULL;
      const dg_tensor* leaves[1];
      OK(dg_tensor_from_data(memory, DG_FLOAT32, NULL, 0, &leaf));
      leaves[0] = leaf;
      contents.tensor_names = &name;
      contents.tensors = leaves;
      contents.tensor_count = 1;
      if (next(s) % 8 == 0) { /* its parameters have no names here */
        optimizers[0] = O;
        contents.optimizer_names = &optimizer;
        contents.optimizers = optimizers;
        contents.optimizer_count = 1;
      }
      if (next(s) % 4) contents.save_values = save_values;
      if (next(s) % 4) contents.load_values = load_values;
      if (next(s) % 16 == 0) contents.struct_size = 1;
      MAKE(PART, dg_checkpoint_part,
           dg_checkpoint_part_create(W, next(s) % 2 ? DG_STR("") : DG_STR("a"), &contents, NULL,
                                     callback, &out));
      dg_tensor_destroy(leaf);
      if (next(s) % 4 == 0) ran(s, dg_checkpoint_part_remove(PART_));
      if (next(s) % 4 == 0) dg_checkpoint_part_destroy(PART_);
      ran(s,
          dg_checkpoint_values_set(__atomic_load_n(&any_values, __ATOMIC_SEQ_CST), function, self));
      break;
    }
    case 70: {
      char room[512];
      const dg_str path = pick_path(s, room, sizeof(room), "job");
      dg_checkpoint_manager_options manager = DG_CHECKPOINT_MANAGER_OPTIONS_INIT;
      dg_checkpoint_load_options load = DG_CHECKPOINT_LOAD_OPTIONS_INIT;
      if (next(s) % 2) break; /* a save waits for the disk many times */
      manager.flags = next(s) % 3;
      manager.keep = 1 + next(s) % 2;
      if (next(s) % 2) manager.name = DG_STR("a");
      load.step = (int64_t)(next(s) % 4) - 1;
      load.flags = next(s) % 5;
      load.timeout_ms = 20000;
      MAKE(MANAGER, dg_checkpoint_manager, dg_checkpoint_manager_create(W, path, &manager, &out));
      ran(s, dg_checkpoint_manager_save(MANAGER_, (int64_t)(next(s) % 4) - 1, 20000));
      MAKE(FUTURE, dg_future,
           dg_checkpoint_manager_save_async(MANAGER_, (int64_t)(next(s) % 4), 20000, &out));
      MAKE(LOADED, dg_loaded_checkpoint, dg_checkpoint_manager_load(MANAGER_, &load, &out));
      MAKE(LOADED, dg_loaded_checkpoint, dg_checkpoint_load(W, path, &load, &manager, &out));
      (void)dg_loaded_checkpoint_step(LOADED_);
      (void)dg_loaded_checkpoint_folder(LOADED_);
      (void)dg_loaded_checkpoint_count(LOADED_, next(s) % 5);
      (void)dg_loaded_checkpoint_item(LOADED_, next(s) % 5, next(s) % 2);
      if (next(s) % 4 == 0) dg_checkpoint_manager_destroy(MANAGER_);
      break;
    }
    case 65:
    case 66:
    case 67:
      change_own(s);
      break;
    case 71: {
      double end = 0;
      make_schedule(s);
      ran(s,
          dg_schedule_simulate(S, next(s) % 8 ? time_action : NULL, NULL, &end, NULL, NULL, NULL));
      (void)dg_schedule_get(S); /* what it points to may end at any time */
      if (next(s) % 4 == 0) dg_schedule_destroy(S);
      break;
    }
    case 72:
      make_stages(s);
      if (next(s) % 4 == 0) dg_pipeline_stages_destroy((dg_pipeline_stages*)pick(s, STAGES));
      break;
    case 73:
    case 74:
    case 75:
      run_pipeline(s);
      break;
    case 76: {
      uint64_t tags[3];
      size_t count = 0;
      MAKE(COMPLETIONS, dg_completions, dg_completions_create(&out));
      ran(s, dg_completions_watch(COMPLETIONS_, F, next(s)));
      (void)dg_completions_descriptor(COMPLETIONS_);
      ran(s, dg_completions_take(COMPLETIONS_, tags, next(s) % 4, &count));
      if (next(s) % 4 == 0) dg_completions_destroy(COMPLETIONS_);
      break;
    }
    default:
      break;
  }
}

static void* run(void* argument) {
  state* s = (state*)argument;
  for (int i = 0; i < s->calls; ++i) call(s);
  return NULL;
}

int main(int argc, char** argv) {
  const uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 20240229;
  const int calls = argc > 2 ? atoi(argv[2]) : 30000;
  state states[THREADS];
  pthread_t threads[THREADS];
  printf("seed %llu\n", (unsigned long long)seed);
  {
    const float one = 1;
    OK(dg_tensor_from_data(&one, DG_FLOAT32, NULL, 0, &stage_parameter));
    OK(dg_tensor_require_grad(stage_parameter));
  }
  for (int threaded = 0; threaded < 2; ++threaded) {
    const int count = threaded ? THREADS : 1;
    keep(&(state){.random = seed | 1}, WORKER, new_worker());
    for (int i = 0; i < count; ++i) {
      states[i] = (state){.random = start(seed, threaded * THREADS + i),
                          .calls = calls / count,
                          .alone = !threaded,
                          .thread = i};
      CHECK(pthread_create(&threads[i], NULL, run, &states[i]) == 0);
    }
    for (int i = 0; i < count; ++i) {
      CHECK(pthread_join(threads[i], NULL) == 0);
      printf("%d calls gave results, %d errors\n", states[i].successes, states[i].failures);
      CHECK(states[i].successes > states[i].calls / 20); /* it does not only fail */
    }
  }
  for (int kind = 0; kind < KINDS; ++kind) {
    for (int i = 0; i < SLOTS; ++i) destroy((enum kind)kind, pool[kind][i]);
  }
  for (int i = 0; i < THREADS * SLOTS; ++i) dg_tensor_destroy(own[i / SLOTS][i % SLOTS]);
  for (int i = 0; i < workers_made; ++i) await_end(workers[i]);
  dg_tensor_destroy(stage_parameter);
  return 0;
}
