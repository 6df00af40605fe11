/* Workers that join a running job, leave it and come back; limits and device pairs; what a worker
 * says of itself, and its process to torchrun. From plain C. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <semaphore.h>
#include <unistd.h>

#include "capi/testing/check.h"

static char rendezvous[512];

static dg_worker_options options_of(dg_str name, uint64_t flags) {
  dg_worker_options options = DG_WORKER_OPTIONS_INIT;
  options.name = name;
  options.rendezvous.data = rendezvous;
  options.rendezvous.size = strlen(rendezvous);
  options.thread_count = 2;
  options.flags = flags;
  options.world_size = flags & DG_WORKER_JOIN ? 0 : 1;
  return options;
}

static dg_worker* start(const dg_worker_options* options) {
  dg_worker* worker = NULL;
  OK(dg_worker_create(options, &worker));
  return worker;
}

/* ----------------------------------------------------------------------------------- Members */

typedef struct seen {
  int count;
  uint64_t ranks[4], incarnations[4];
  char names[4][16];
} seen;

static void see(void* user_data, const dg_member* member) {
  seen* all = (seen*)user_data;
  CHECK(all->count < 4 && member->struct_size >= sizeof(dg_member) && member->name.size < 16);
  all->ranks[all->count] = member->rank;
  all->incarnations[all->count] = member->incarnation;
  memcpy(all->names[all->count], member->name.data, member->name.size);
  all->names[all->count++][member->name.size] = '\0';
}

static seen members(const dg_worker* worker) {
  seen all;
  memset(&all, 0, sizeof(all));
  OK(dg_worker_members(worker, see, &all));
  return all;
}

static dg_error* echo(void* user_data, const dg_request* request, dg_message** reply) {
  const dg_str payload = dg_message_payload(request->message);
  (void)user_data;
  return dg_message_create(payload.data, payload.size, NULL, 0, reply);
}

static void call(dg_worker* worker, dg_str to) {
  dg_message *request = NULL, *reply = NULL;
  OK(dg_message_create("hello", 5, NULL, 0, &request));
  OK(dg_worker_call(worker, to, DG_STR("echo"), request, NULL, &reply));
  CHECK(str_is(dg_message_payload(reply), "hello"));
  dg_message_destroy(request);
  dg_message_destroy(reply);
}

static void test_members(void) {
  dg_worker_options options = options_of(DG_STR("first"), 0);
  dg_worker *first = start(&options), *late, *none = NULL;
  seen of_first, of_late, later;
  dg_str name;
  OK(dg_worker_register(first, DG_STR("echo"), echo, NULL, NULL));
  CHECK(dg_worker_world_size(first) == 1 && members(first).count == 1);
  options = options_of(DG_STR("late"), DG_WORKER_JOIN);
  options.rank = 77; /* not looked at */
  late = start(&options);
  CHECK(dg_worker_rank(late) == 1 && dg_worker_world_size(late) == 2);
  OK(dg_worker_register(late, DG_STR("echo"), echo, NULL, NULL));
  call(late, DG_STR("first"));
  OK(dg_worker_update_members(first));
  call(first, DG_STR("late"));
  of_first = members(first);
  of_late = members(late);
  CHECK(of_first.count == 2 && memcmp(&of_first, &of_late, sizeof(seen)) == 0);
  CHECK(of_first.ranks[1] == 1 && strcmp(of_first.names[1], "late") == 0);
  CHECK(of_first.incarnations[1] != 0);
  name = dg_worker_name(first, 1);
  CHECK(str_is(name, "late") && dg_worker_name(first, 2).size == 0);

  /* A third one is one too many for it. */
  options = options_of(DG_STR("third"), DG_WORKER_JOIN);
  options.max_workers = 2;
  FAILS(DG_RESOURCE_EXHAUSTED, dg_worker_create(&options, &none));
  options.max_workers = UINT64_C(1) << 40;
  FAILS(DG_INVALID_ARGUMENT, dg_worker_create(&options, &none));

  /* It leaves, and comes back under its name. */
  OK(dg_worker_leave(late, DG_FOREVER));
  dg_worker_destroy(late);
  OK(dg_worker_update_members(first));
  CHECK(members(first).count == 1 && dg_worker_world_size(first) == 1);
  CHECK(dg_worker_name(first, 1).size == 0);
  CHECK(str_is(name, "late")); /* lives as long as the worker */
  options = options_of(DG_STR("late"), DG_WORKER_JOIN);
  late = start(&options);
  CHECK(dg_worker_rank(late) == 1);
  OK(dg_worker_update_members(first));
  later = members(first);
  CHECK(later.count == 2 && later.incarnations[1] > of_first.incarnations[1]);
  CHECK(later.incarnations[0] == of_first.incarnations[0]);

  FAILS(DG_INVALID_ARGUMENT, dg_worker_members(first, NULL, NULL));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_members(NULL, see, &later));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_update_members(NULL));
  dg_worker_destroy(late);
  FAILS(DG_INVALID_ARGUMENT, dg_worker_members(late, see, &later));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_update_members(late));
  CHECK(dg_worker_world_size(late) == 0 && dg_worker_name(late, 0).size == 0 && none == NULL);
  dg_worker_destroy(first);
  unlink(rendezvous + strlen("file://"));
}

/* ------------------------------------------------------------------- Events, and the end of a job
 */

typedef struct told {
  dg_worker* worker; /* of the callback */
  sem_t one_more;
  int count, ended;
  uint64_t kinds[8], ranks[8], incarnations[8];
  bool has_reason[8];
} told;

static void tell(void* user_data, const dg_member_event* event) {
  told* all = (told*)user_data;
  CHECK(all->count < 8 && event->struct_size >= sizeof(dg_member_event));
  CHECK(str_is(event->name, "late"));
  FAILS(DG_FAILED_PRECONDITION, dg_worker_close(all->worker, DG_FOREVER));
  CHECK(dg_worker_world_size(all->worker) > 0);
  all->kinds[all->count] = event->kind;
  all->ranks[all->count] = event->rank;
  all->has_reason[all->count] = event->reason.size > 0;
  all->incarnations[all->count++] = event->incarnation;
  CHECK(sem_post(&all->one_more) == 0);
}

static void tell_once(void* user_data, const dg_member_event* event) {
  tell(user_data, event);
  OK(dg_worker_on_member(((told*)user_data)->worker, NULL, NULL,
                         NULL)); /* does not wait for itself */
}

static void end_told(void* user_data) { count_up(&((told*)user_data)->ended); }

static void await_event(told* all) {
  while (sem_wait(&all->one_more) != 0) continue;
}

static void test_events(void) {
  dg_worker_options options = options_of(DG_STR("first"), 0);
  dg_worker *first = start(&options), *late;
  told all, once;
  memset(&all, 0, sizeof(all));
  memset(&once, 0, sizeof(once));
  all.worker = once.worker = first;
  CHECK(sem_init(&all.one_more, 0, 0) == 0 && sem_init(&once.one_more, 0, 0) == 0);
  OK(dg_worker_on_member(first, tell, &all, end_told));
  options = options_of(DG_STR("late"), DG_WORKER_JOIN);
  late = start(&options);
  await_event(&all);
  CHECK(all.kinds[0] == DG_MEMBER_JOINED && all.ranks[0] == 1 && !all.has_reason[0]);
  OK(dg_worker_leave(late, DG_FOREVER));
  dg_worker_destroy(late);
  await_event(&all);
  CHECK(all.kinds[1] == DG_MEMBER_LEFT && all.incarnations[1] == all.incarnations[0]);
  late = start(&options);
  await_event(&all);
  CHECK(all.kinds[2] == DG_MEMBER_JOINED && all.incarnations[2] > all.incarnations[0]);
  dg_worker_destroy(late); /* without a word */
  await_event(&all);
  CHECK(all.kinds[3] == DG_MEMBER_LOST && all.has_reason[3]);
  CHECK(all.incarnations[3] == all.incarnations[2] && all.ended == 0);
  OK(dg_worker_on_member(first, tell_once, &once, end_told));
  late = start(&options);
  await_event(&once);
  OK(dg_worker_leave(late, DG_FOREVER));
  dg_worker_destroy(late);
  FAILS(DG_INVALID_ARGUMENT, dg_worker_on_member(NULL, tell, &all, end_told));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_on_member(late, tell, &all, end_told));
  OK(dg_worker_on_member(first, NULL, &all, end_told));
  dg_worker_destroy(first);
  CHECK(all.count == 4 && once.count == 1);
  CHECK(all.ended == 4 && once.ended == 1);
  unlink(rendezvous + strlen("file://"));
}

typedef struct serving {
  dg_worker* worker;
  uint64_t flags;
  pthread_t thread;
  dg_error* error;
} serving;

static void* run_serve(void* argument) {
  serving* self = (serving*)argument;
  self->error = dg_worker_serve(self->worker, self->flags);
  return NULL;
}

static dg_error* end_of(serving* self) {
  CHECK(pthread_join(self->thread, NULL) == 0);
  return self->error;
}

static dg_error* serve_in_handler(void* user_data, const dg_request* request, dg_message** reply) {
  dg_worker* self = ((serving*)user_data)->worker;
  (void)request, (void)reply;
  FAILS(DG_FAILED_PRECONDITION, dg_worker_shutdown(self, DG_FOREVER, 0));
  return dg_worker_serve(self, 0);
}

static void test_serve(void) {
  dg_worker_options options = options_of(DG_STR("first"), 0);
  dg_worker* late;
  dg_message *request = NULL, *reply = NULL;
  serving first;
  memset(&first, 0, sizeof(first));
  first.worker = start(&options);
  OK(dg_worker_register(first.worker, DG_STR("echo"), echo, NULL, NULL));
  OK(dg_worker_register(first.worker, DG_STR("serve"), serve_in_handler, &first, NULL));
  FAILS(DG_UNIMPLEMENTED, dg_worker_serve(first.worker, 2));
  FAILS(DG_UNIMPLEMENTED, dg_worker_shutdown(first.worker, DG_FOREVER, 2));
  of_unknown_flags(dg_worker_barrier(first.worker, DG_FOREVER, 2));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_serve(NULL, 0));
  options = options_of(DG_STR("late"), DG_WORKER_JOIN);

  /* One dies that it waits for. */
  late = start(&options);
  CHECK(pthread_create(&first.thread, NULL, run_serve, &first) == 0);
  dg_worker_destroy(late);
  SAYS(DG_UNAVAILABLE, "'late' (1) is lost", end_of(&first));
  OK(dg_worker_barrier(first.worker, DG_FOREVER, DG_GO_ON_WITHOUT_LOST));

  /* It serves while another is at work, and no longer. */
  late = start(&options);
  first.flags = DG_GO_ON_WITHOUT_LOST;
  CHECK(pthread_create(&first.thread, NULL, run_serve, &first) == 0);
  call(late, DG_STR("first"));
  OK(dg_message_create(NULL, 0, NULL, 0, &request));
  FAILS(DG_FAILED_PRECONDITION,
        dg_worker_call(late, DG_STR("first"), DG_STR("serve"), request, NULL, &reply));
  dg_message_destroy(request);
  OK(dg_worker_serve(late, 0));
  OK(end_of(&first));
  dg_worker_destroy(late);
  dg_worker_destroy(first.worker);
  unlink(rendezvous + strlen("file://"));
}

/* --------------------------------------------------------------------- Limits and device pairs */

static void test_limits(void) {
  struct {
    dg_limits known;
    uint64_t unknown;
  } longer;
  dg_limits limits = DG_LIMITS_INIT;
  dg_worker_options options = options_of(DG_STR("small"), 0);
  dg_worker* worker = NULL;
  dg_message *long_one = NULL, *two = NULL, *reply = NULL;
  const dg_tensor* tensors[2] = {NULL, NULL};
  char bytes[2000] = {0};
  options.limits = &limits;
  limits.struct_size = 8;
  FAILS(DG_INVALID_ARGUMENT, dg_worker_create(&options, &worker));
  limits.struct_size = sizeof(limits);
  limits.tensors_per_message = UINT64_C(1) << 32;
  FAILS(DG_INVALID_ARGUMENT, dg_worker_create(&options, &worker));
  memset(&longer, 0, sizeof(longer));
  longer.known.struct_size = sizeof(longer);
  longer.unknown = 1;
  options.limits = &longer.known;
  FAILS(DG_UNIMPLEMENTED, dg_worker_create(&options, &worker));
  CHECK(worker == NULL);
  options.limits = &limits;
  limits.message_bytes = 1000;
  limits.tensors_per_message = 1;
  limits.calls_per_peer = limits.calls = 10;
  limits.bytes_per_peer = 100000;
  limits.contexts_per_peer = limits.unauthenticated_connections = 1;
  limits.handshake_timeout_ms = 1000;
  worker = start(&options);
  OK(dg_worker_register(worker, DG_STR("echo"), echo, NULL, NULL));
  call(worker, DG_STR("small"));
  OK(dg_message_create(bytes, sizeof(bytes), NULL, 0, &long_one));
  SAYS(DG_RESOURCE_EXHAUSTED, "message_bytes",
       dg_worker_call(worker, DG_STR("small"), DG_STR("echo"), long_one, NULL, &reply));
  OK(dg_message_create(NULL, 0, tensors, 2, &two));
  SAYS(DG_RESOURCE_EXHAUSTED, "tensors_per_message",
       dg_worker_call(worker, DG_STR("small"), DG_STR("echo"), two, NULL, &reply));
  CHECK(reply == NULL);
  dg_message_destroy(long_one);
  dg_message_destroy(two);
  dg_worker_destroy(worker);
  unlink(rendezvous + strlen("file://"));
}

/* There is no device but the CPU where tests run, or not so many. */
static void test_device_pairs(void) {
  struct {
    dg_device_pair pair;
    uint64_t later; /* of a header of tomorrow */
  } longer = {DG_DEVICE_PAIR_INIT, 0};
  dg_device_pair pair = DG_DEVICE_PAIR_INIT;
  const dg_device_pair* pairs[2];
  dg_worker_options options = options_of(DG_STR("with devices"), DG_WORKER_NO_GPU_CHANNEL);
  dg_worker* worker = NULL;
  pair.peer = longer.pair.peer = DG_STR("peer");
  pair.local = longer.pair.remote = DG_STR("cuda:0");
  pair.remote = longer.pair.local = DG_STR("cuda:1");
  longer.pair.struct_size = sizeof(longer);
  pairs[0] = &longer.pair;
  pairs[1] = &pair;
  options.device_pair_count = 2;
  FAILS(DG_INVALID_ARGUMENT, dg_worker_create(&options, &worker));
  options.device_pairs = pairs;
  longer.later = 1;
  SAYS(DG_UNIMPLEMENTED, "dg_device_pair", dg_worker_create(&options, &worker));
  longer.later = 0;
  pair.struct_size = 0;
  SAYS(DG_INVALID_ARGUMENT, "dg_device_pair.struct_size", dg_worker_create(&options, &worker));
  pair.struct_size = sizeof(pair);
  pairs[1] = NULL;
  SAYS(DG_INVALID_ARGUMENT, "device_pairs[1] is NULL", dg_worker_create(&options, &worker));
  pairs[1] = &pair;
  worker = start(&options); /* of a peer that may come yet */
  dg_worker_destroy(worker);
  unlink(rendezvous + strlen("file://"));
  worker = NULL;
  pair.remote = DG_STR("cuda:0");
  SAYS(DG_INVALID_ARGUMENT, "one to one", dg_worker_create(&options, &worker));
  unlink(rendezvous + strlen("file://"));
  pair.remote = DG_STR("cpu");
  SAYS(DG_INVALID_ARGUMENT, "with the CPU", dg_worker_create(&options, &worker));
  unlink(rendezvous + strlen("file://"));
  pair.remote = DG_STR("abacus");
  SAYS(DG_INVALID_ARGUMENT, "device pair 1", dg_worker_create(&options, &worker));
  pair.remote = DG_STR("cuda:1");
  pair.peer.data = NULL;
  SAYS(DG_INVALID_ARGUMENT, "device pair 1", dg_worker_create(&options, &worker));
  CHECK(worker == NULL);
}

/* A pair with a worker that is there, where one of the two lacks the device. */
static void test_device_that_is_not_there(void) {
  dg_device_pair pair = DG_DEVICE_PAIR_INIT;
  const dg_device_pair* const pairs = &pair;
  dg_worker_options options = options_of(DG_STR("first"), 0);
  dg_worker *first = start(&options), *late = NULL;
  options = options_of(DG_STR("late"), DG_WORKER_JOIN);
  pair.peer = DG_STR("first");
  pair.local = pair.remote = DG_STR("cuda:99");
  options.device_pairs = &pairs;
  options.device_pair_count = 1;
  SAYS(DG_INVALID_ARGUMENT, "'late' has no cuda:99", dg_worker_create(&options, &late));
  CHECK(late == NULL);
  dg_worker_destroy(first);
  unlink(rendezvous + strlen("file://"));
}

/* ------------------------------------------------------------------------------------ Contexts */

typedef struct states {
  int contexts, passes;
  uint64_t id, sends, receives, gradients, peers;
} states;

static void look(void* user_data, const dg_context_state* context) {
  states* all = (states*)user_data;
  CHECK(context->struct_size >= sizeof(dg_context_state));
  ++all->contexts;
  all->id = context->id;
  all->sends += context->sends;
  all->receives += context->receives;
  all->gradients += context->gradients;
  for (size_t i = 0; i < context->peer_count; ++i) CHECK(context->peers[i] < 2);
  all->peers += context->peer_count;
  for (size_t i = 0; i < context->pass_count; ++i) {
    const dg_pass_state* pass = context->passes[i];
    CHECK(pass->struct_size >= sizeof(dg_pass_state) && pass->id != 0);
    CHECK((pass->flags & ~DG_BACKWARD_RETAIN_GRAPH) == 0);
    CHECK(pass->awaited_count == 0 || pass->awaited[0] < 2);
    CHECK(pass->unacknowledged_count == 0 || pass->unacknowledged[0] < 2);
    ++all->passes;
  }
}

static states contexts_of(const dg_worker* worker) {
  states all;
  memset(&all, 0, sizeof(all));
  OK(dg_worker_contexts(worker, look, &all));
  return all;
}

static dg_worker* looked_at;
static dg_code code;
static void look_in_callback(void* user_data) {
  code = code_of(dg_worker_contexts(looked_at, look, user_data));
}

static void test_contexts(void) {
  const float two = 2;
  dg_worker_options options = options_of(DG_STR("first"), 0);
  dg_worker *first = start(&options), *late;
  dg_tensor *x = floats(&two, 1, 1), *y;
  const dg_tensor* root;
  dg_context* context = NULL;
  dg_call_options in_context = DG_CALL_OPTIONS_INIT;
  dg_value argument;
  dg_values* values = NULL;
  dg_future* future = NULL;
  bool done = false;
  states seen_here, seen_there;
  options = options_of(DG_STR("late"), DG_WORKER_JOIN);
  late = start(&options);
  OK(dg_worker_update_members(first));
  CHECK(contexts_of(first).contexts == 0);
  OK(dg_tensor_require_grad(x));
  OK(dg_context_create(first, &context));
  in_context.context = context;
  argument = dg_value_tensor(x);
  OK(dg_worker_call_op(first, DG_STR("late"), DG_STR("aten::exp"), &argument, 1, &in_context,
                       &values));
  OK(dg_values_get(values, 0, &argument));
  seen_here = contexts_of(first);
  seen_there = contexts_of(late);
  CHECK(seen_here.contexts == 1 && seen_there.contexts == 1 && seen_here.passes == 0);
  CHECK(seen_here.id == dg_context_id(context) && seen_there.id == seen_here.id);
  CHECK(seen_here.sends == 1 && seen_here.receives == 1 && seen_here.peers == 1);
  CHECK(seen_there.sends == 1 && seen_there.receives == 1 && seen_there.peers == 1);
  root = y = op1("aten::sum", argument.as.tensor);
  OK(dg_context_backward_async(context, &root, 1, NULL, &future));
  CHECK(contexts_of(first).passes <= 1); /* over, or not */
  OK(dg_future_wait(future, DG_FOREVER, &done));
  CHECK(contexts_of(first).gradients == 1 && contexts_of(late).gradients == 0);
  looked_at = first;
  OK(dg_future_then(future, look_in_callback, &seen_here, NULL));
  CHECK(code == DG_FAILED_PRECONDITION);
  dg_future_destroy(future);
  dg_context_destroy(context);
  CHECK(contexts_of(first).contexts == 0);
  FAILS(DG_INVALID_ARGUMENT, dg_worker_contexts(first, NULL, NULL));
  FAILS(DG_INVALID_ARGUMENT, dg_worker_contexts(NULL, look, &seen_here));
  dg_worker_destroy(late);
  FAILS(DG_INVALID_ARGUMENT, dg_worker_contexts(late, look, &seen_here));
  dg_worker_destroy(first);
  dg_values_destroy(values);
  dg_tensor_destroy(y);
  dg_tensor_destroy(x);
  unlink(rendezvous + strlen("file://"));
}

/* ------------------------------------------------------------------------------------- Failure */

/* As torchrun has it. */
static void test_report_failure(void) {
  const char* folder = getenv("TEST_TMPDIR");
  char path[512], report[500] = {0};
  FILE* file;
  dg_str bad;
  bad.data = NULL;
  bad.size = 3;
  OK(dg_report_failure(DG_DATA_LOSS, DG_STR("to nobody")));
  snprintf(path, sizeof(path), "%s/error.%d", folder ? folder : "/tmp", (int)getpid());
  CHECK(setenv("TORCHELASTIC_ERROR_FILE", path, 1) == 0);
  FAILS(DG_INVALID_ARGUMENT, dg_report_failure(DG_DATA_LOSS, bad));
  OK(dg_report_failure(DG_OK, DG_STR("the disk is full")));
  OK(dg_report_failure(DG_UNAVAILABLE, DG_STR("a consequence")));
  file = fopen(path, "r");
  CHECK(file != NULL && fread(report, 1, sizeof(report) - 1, file) > 0);
  CHECK(strstr(report, "UNKNOWN: the disk is full") != NULL);
  fclose(file);
  unlink(path);
  CHECK(setenv("TORCHELASTIC_ERROR_FILE", "/no/such/folder/error", 1) == 0);
  SAYS(DG_NOT_FOUND, "/no/such/folder/error", dg_report_failure(DG_DATA_LOSS, DG_STR("why")));
  CHECK(unsetenv("TORCHELASTIC_ERROR_FILE") == 0);
}

int main(void) {
  const char* folder = getenv("TEST_TMPDIR");
  snprintf(rendezvous, sizeof(rendezvous), "file://%s/members.%d", folder ? folder : "/tmp",
           (int)getpid());
  test_members();
  test_events();
  test_serve();
  test_limits();
  test_device_pairs();
  test_device_that_is_not_there();
  test_contexts();
  test_report_failure();
  return 0;
}
