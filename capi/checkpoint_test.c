/* Files of tensors, and checkpoints of a job of two workers, from plain C. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <semaphore.h>
#include <sys/stat.h>
#include <unistd.h>

#include "capi/testing/check.h"
#include "capi/testing/pair.h"
#include "capi/testing/replica.h"

static char folder[512];

static dg_str str_of(const char* text) {
  dg_str str;
  str.data = text;
  str.size = strlen(text);
  return str;
}

/* A path in the test's folder. It lives until the next ones are asked for. */
static dg_str in_folder(const char* name) {
  static char paths[4][700];
  static int next;
  char* path = paths[next++ % 4];
  snprintf(path, sizeof(paths[0]), "%s/%s", folder, name);
  return str_of(path);
}

static void write_bytes(dg_str path, const void* bytes, size_t size) {
  FILE* file = fopen(path.data, "wb");
  CHECK(file != NULL && fwrite(bytes, 1, size, file) == size);
  CHECK(fclose(file) == 0);
}

/* ------------------------------------------------------------------------------ Files of tensors
 */

typedef struct loaded_tensors {
  int count;
  char names[4][32];
  float first[4];
} loaded_tensors;

static void see_tensor(void* user_data, dg_str name, const dg_tensor* tensor) {
  loaded_tensors* all = (loaded_tensors*)user_data;
  CHECK(all->count < 4 && name.size < 32);
  memcpy(all->names[all->count], name.data, name.size);
  all->names[all->count][name.size] = '\0';
  all->first[all->count++] = data_of(tensor)[0];
}

static void see_info(void* user_data, const dg_safetensors_info* info) {
  CHECK(info->struct_size >= sizeof(dg_safetensors_info) && info->dtype == DG_FLOAT32);
  CHECK(info->dim_count == 2 && info->shape[0] == 1);
  CHECK(info->bytes == (uint64_t)info->shape[1] * 4);
  CHECK(str_is(info->name, *(int*)user_data == 0 ? "a" : "b"));
  ++*(int*)user_data;
}

static void see_entry(void* user_data, const dg_entry* entry) {
  CHECK(str_is(entry->name, "made by") && str_is(entry->value, "C"));
  ++*(int*)user_data;
}

static void files(void) {
  const float one[2] = {1, 2}, two = 3, zeros[2] = {0, 0};
  dg_tensor *a = floats(one, 1, 2), *b = floats(&two, 1, 1), *to = floats(zeros, 1, 2);
  dg_tensor* read = NULL;
  const dg_str names[2] = {DG_STR("a"), DG_STR("b")}, twice[2] = {DG_STR("a"), DG_STR("a")};
  const dg_tensor *tensors[2], *wrong[2];
  const dg_str path = in_folder("some.safetensors"), missing = in_folder("none");
  dg_entry metadata[2];
  loaded_tensors seen;
  dg_safetensors_file* file = NULL;
  int count = 0;
  tensors[0] = a;
  tensors[1] = b;
  metadata[0].name = DG_STR("made by");
  metadata[0].value = DG_STR("C");
  metadata[1] = metadata[0];
  OK(dg_safetensors_save(path, names, tensors, 2, metadata, 1));
  memset(&seen, 0, sizeof(seen));
  OK(dg_safetensors_load(path, see_tensor, &seen));
  CHECK(seen.count == 2 && strcmp(seen.names[1], "b") == 0);
  CHECK(seen.first[0] == 1 && seen.first[1] == 3);

  OK(dg_safetensors_file_open(path, &file));
  OK(dg_safetensors_file_tensors(file, see_info, &count));
  CHECK(count == 2);
  count = 0;
  OK(dg_safetensors_file_metadata(file, see_entry, &count));
  CHECK(count == 1);
  OK(dg_safetensors_file_read(file, DG_STR("a"), &read));
  CHECK(data_of(read)[1] == 2);
  OK(dg_safetensors_file_read_into(file, DG_STR("a"), to));
  CHECK(data_of(to)[1] == 2);
  FAILS(DG_NOT_FOUND, dg_safetensors_file_read(file, DG_STR("c"), &read));
  FAILS(DG_INVALID_ARGUMENT, dg_safetensors_file_read(file, DG_STR("a"), NULL));
  SAYS(DG_INVALID_ARGUMENT, "shape", dg_safetensors_file_read_into(file, DG_STR("b"), to));
  FAILS(DG_INVALID_ARGUMENT, dg_safetensors_file_tensors(file, NULL, NULL));
  FAILS(DG_INVALID_ARGUMENT, dg_safetensors_file_metadata(file, NULL, NULL));
  dg_safetensors_file_destroy(file);
  FAILS(DG_INVALID_ARGUMENT, dg_safetensors_file_tensors(file, see_info, &count));
  dg_safetensors_file_destroy(NULL);

  data_of(a)[0] = 7;
  OK(dg_safetensors_load_into(path, names, tensors, 2));
  CHECK(data_of(a)[0] == 1);
  wrong[0] = b; /* of another shape */
  wrong[1] = b;
  SAYS(DG_INVALID_ARGUMENT, "shape", dg_safetensors_load_into(path, names, wrong, 2));
  SAYS(DG_INVALID_ARGUMENT, "unexpected", dg_safetensors_load_into(path, names, tensors, 1));
  SAYS(DG_INVALID_ARGUMENT, "twice", dg_safetensors_load_into(path, twice, tensors, 2));
  SAYS(DG_INVALID_ARGUMENT, "twice", dg_safetensors_save(path, twice, tensors, 2, NULL, 0));
  SAYS(DG_INVALID_ARGUMENT, "twice", dg_safetensors_save(path, names, tensors, 2, metadata, 2));
  FAILS(DG_INVALID_ARGUMENT, dg_safetensors_save(path, NULL, tensors, 2, NULL, 0));
  FAILS(DG_INVALID_ARGUMENT, dg_safetensors_save(path, names, tensors, 2, NULL, 1));
  FAILS(DG_INVALID_ARGUMENT, dg_safetensors_load(path, NULL, NULL));
  FAILS(DG_NOT_FOUND, dg_safetensors_load(missing, see_tensor, &seen));
  FAILS(DG_NOT_FOUND, dg_safetensors_file_open(missing, &file));
  FAILS(DG_NOT_FOUND, dg_safetensors_save(in_folder("no/folder"), names, tensors, 2, NULL, 0));

  /* From anybody: a header that is said to be huge, one that is cut, and one that is no JSON. */
  write_bytes(missing, "\xff\xff\xff\xff\xff\xff\xff\x7f{}", 10);
  FAILS(DG_INVALID_ARGUMENT, dg_safetensors_file_open(missing, &file));
  write_bytes(missing, "\x08\0\0\0\0\0\0\0{\"a\":", 13);
  FAILS(DG_INVALID_ARGUMENT, dg_safetensors_load(missing, see_tensor, &seen));
  write_bytes(missing, "\x02\0\0\0\0\0\0\0no", 10);
  FAILS(DG_INVALID_ARGUMENT, dg_safetensors_load_into(missing, names, tensors, 2));

  dg_tensor_destroy(read);
  dg_tensor_destroy(to);
  dg_tensor_destroy(a);
  dg_tensor_destroy(b);
}

/* ------------------------------------------------------------------------------------ The model */

/* What each of the two workers has. */
static dg_tensor* weights[2];
static dg_optimizer* optimizers[2];
static dg_checkpoint_part* parts[2];
/* What its functions have seen, and what they are to return. */
static int64_t position, loaded_step;
static dg_code save_fails, load_fails;
static int parts_ended;

static dg_error* scale(void* user_data, const dg_request* request, dg_message** reply) {
  dg_tensor *x = NULL, *y;
  const dg_tensor* result;
  OK(dg_message_tensor(request->message, 0, &x));
  y = op2("aten::mul.Tensor", x, (dg_tensor*)user_data);
  result = y;
  OK(dg_message_create(NULL, 0, &result, 1, reply));
  dg_tensor_destroy(x);
  dg_tensor_destroy(y);
  return NULL;
}

/* One step over both workers, on the data that is next. */
static void train(void) {
  const float data[3] = {0.5f + (float)position, 0.25f, -1.5f};
  dg_tensor *x = floats(data, 1, 3), *hidden = op2("aten::mul.Tensor", x, weights[0]), *y = NULL;
  dg_tensor *square, *loss;
  dg_context* context = NULL;
  dg_message *request = message_of(hidden), *reply = NULL;
  dg_call_options options = DG_CALL_OPTIONS_INIT;
  const dg_tensor* root;
  OK(dg_context_create(workers[0], &context));
  options.context = context;
  OK(dg_worker_call(workers[0], DG_STR("back"), DG_STR("scale"), request, &options, &reply));
  OK(dg_message_tensor(reply, 0, &y));
  square = op2("aten::mul.Tensor", y, y);
  loss = op1("aten::sum", square);
  root = loss;
  OK(dg_context_backward(context, &root, 1, NULL));
  OK(dg_optimizer_step(optimizers[0], context));
  ++position;
  dg_tensor_destroy(loss);
  dg_tensor_destroy(square);
  dg_tensor_destroy(y);
  dg_tensor_destroy(hidden);
  dg_tensor_destroy(x);
  dg_message_destroy(reply);
  dg_message_destroy(request);
  dg_context_destroy(context);
}

/* What a worker's save_values calls in its place, once. */
static dg_error* (*instead[2])(void);

static dg_error* save_values(void* user_data, dg_checkpoint_values* values) {
  const int rank = (int)(intptr_t)user_data;
  if (instead[rank] != NULL) {
    dg_error* (*const call)(void) = instead[rank];
    instead[rank] = NULL;
    return call();
  }
  if (save_fails != DG_OK && rank == 1) return dg_error_create(save_fails, DG_STR("no values"));
  OK(dg_checkpoint_values_set(values, DG_STR("position"), DG_STR("soon another")));
  { /* It would wait for itself. */
    dg_loaded_checkpoint* loaded = NULL;
    FAILS(DG_FAILED_PRECONDITION,
          dg_checkpoint_load(workers[rank], DG_STR("folder"), NULL, NULL, &loaded));
  }
  {
    dg_str bytes;
    bytes.data = (const char*)&position;
    bytes.size = sizeof(position);
    OK(dg_checkpoint_values_set(values, DG_STR("position"), bytes));
  }
  FAILS(DG_INVALID_ARGUMENT,
        dg_checkpoint_values_set((dg_checkpoint_values*)workers[0], DG_STR("a"), DG_STR("")));
  SAYS(DG_INVALID_ARGUMENT, "UTF-8", dg_checkpoint_values_set(values, DG_STR("\xe9"), DG_STR("")));
  return NULL;
}

static dg_error* load_values(void* user_data, const dg_loaded_values* loaded) {
  const int rank = (int)(intptr_t)user_data;
  CHECK(loaded->struct_size >= sizeof(dg_loaded_values));
  CHECK(loaded->worker_count == 2 && str_is(loaded->workers[0]->worker, "back"));
  CHECK(str_is(loaded->workers[1]->worker, "front") && loaded->workers[1]->value_count == 1);
  CHECK(loaded->value_count == 1 && str_is(loaded->values[0].name, "position"));
  CHECK(loaded->values[0].value.size == sizeof(position));
  /* It would wait for itself. */
  if (parts[rank] != NULL) {
    FAILS(DG_FAILED_PRECONDITION, dg_checkpoint_part_remove(parts[rank]));
  }
  FAILS(DG_FAILED_PRECONDITION, dg_worker_close(workers[rank], DG_FOREVER));
  if (rank == 1) return load_fails == DG_OK ? NULL : dg_error_create(load_fails, DG_STR("no"));
  memcpy(&position, loaded->values[0].value.data, sizeof(position));
  loaded_step = loaded->step;
  return NULL;
}

static void part_ended(void* user_data) {
  (void)user_data;
  count_up(&parts_ended);
}

static dg_error* create_part(int rank, const dg_str* names, const dg_tensor* const* tensors,
                             size_t count, bool with_optimizer, dg_checkpoint_part** out) {
  const dg_str optimizer_name = DG_STR("adam");
  dg_checkpoint_contents contents = DG_CHECKPOINT_CONTENTS_INIT;
  contents.tensor_names = names;
  contents.tensors = tensors;
  contents.tensor_count = count;
  if (with_optimizer) {
    contents.optimizer_names = &optimizer_name;
    contents.optimizers = &optimizers[rank];
    contents.optimizer_count = 1;
  }
  contents.save_values = save_values;
  contents.load_values = load_values;
  return dg_checkpoint_part_create(workers[rank], DG_STR("job"), &contents, (void*)(intptr_t)rank,
                                   part_ended, out);
}

static void create_model(int rank) {
  const float data[3] = {1, 0.5f + (float)rank, 2};
  const dg_tensor* leaf;
  dg_str name = rank == 0 ? DG_STR("front.weight") : DG_STR("back.weight");
  weights[rank] = floats(data, 1, 3);
  OK(dg_tensor_require_grad(weights[rank]));
  leaf = weights[rank];
  OK(dg_optimizer_create_adam(workers[rank], DG_STR(""), &leaf, 1, NULL, &optimizers[rank]));
  add(rank, "scale", scale, weights[rank]);
  OK(create_part(rank, &name, &leaf, 1, true, &parts[rank]));
  barrier(rank);
}

typedef struct bits {
  float weights[2][3];
  int64_t position;
} bits;
static bits now(void) {
  bits are;
  memset(&are, 0, sizeof(are));
  for (int i = 0; i < 2; ++i) memcpy(are.weights[i], data_of(weights[i]), sizeof(are.weights[i]));
  are.position = position;
  return are;
}
static bool same(bits a, bits b) { return memcmp(&a, &b, sizeof(a)) == 0; }

static dg_checkpoint_manager_options manager_options(void) {
  dg_checkpoint_manager_options options = DG_CHECKPOINT_MANAGER_OPTIONS_INIT;
  options.name = DG_STR("job");
  return options;
}

/* An error that a function of the program gave, on the worker of that rank. */
static void is_of_handler(uint32_t rank, dg_error* error) {
  uint32_t on = 7;
  CHECK(error != NULL && dg_error_origin(error, &on) == DG_ORIGIN_HANDLER && on == rank);
  dg_error_destroy(error);
}

/* ------------------------------------------------------------------------------------- Managers */

static void save_and_resume(void) {
  dg_checkpoint_manager_options options = manager_options();
  dg_checkpoint_manager *manager = NULL, *other = NULL;
  dg_loaded_checkpoint* loaded = NULL;
  dg_checkpoint_load_options load = DG_CHECKPOINT_LOAD_OPTIONS_INIT;
  const dg_str path = in_folder("job");
  dg_future* written = NULL;
  dg_message* reply = (dg_message*)workers[0]; /* until it is stored to */
  bool done = false;
  bits at_two, at_three, at_five;
  OK(dg_checkpoint_manager_create(workers[0], path, &options, &manager));
  SAYS(DG_ABORTED, "process", dg_checkpoint_manager_create(workers[0], path, &options, &other));
  FAILS(DG_NOT_FOUND, dg_checkpoint_manager_load(manager, NULL, &loaded));
  train();
  train();
  at_two = now();
  OK(dg_checkpoint_manager_save(manager, 2, DG_FOREVER));
  train();
  at_three = now();
  OK(dg_checkpoint_manager_save_async(manager, 3, DG_FOREVER, &written));
  train(); /* while that is written */
  train();
  at_five = now();
  OK(dg_future_wait(written, DG_FOREVER, &done));
  OK(dg_future_result(written, &reply));
  CHECK(reply == NULL);
  dg_future_destroy(written);

  /* The same bits, and the same steps from there on. */
  OK(dg_checkpoint_manager_load(manager, NULL, &loaded));
  CHECK(dg_loaded_checkpoint_step(loaded) == 3 && loaded_step == 3 && same(now(), at_three));
  CHECK(dg_loaded_checkpoint_folder(loaded).size > path.size);
  for (uint64_t list = 0; list < 5; ++list) CHECK(dg_loaded_checkpoint_count(loaded, list) == 0);
  CHECK(dg_loaded_checkpoint_item(loaded, DG_LOADED_MISSING, 0).size == 0);
  dg_loaded_checkpoint_destroy(loaded);
  CHECK(dg_loaded_checkpoint_step(loaded) == -1 && dg_loaded_checkpoint_folder(loaded).size == 0);
  CHECK(dg_loaded_checkpoint_count(loaded, DG_LOADED_MISSING) == 0);
  train();
  train();
  CHECK(same(now(), at_five));

  load.step = 2;
  OK(dg_checkpoint_load(workers[1], path, &load, &options, &loaded));
  CHECK(dg_loaded_checkpoint_step(loaded) == 2 && same(now(), at_two));
  dg_loaded_checkpoint_destroy(loaded);
  load.step = 4;
  FAILS(DG_NOT_FOUND, dg_checkpoint_manager_load(manager, &load, &loaded));
  FAILS(DG_NOT_FOUND,
        dg_checkpoint_load(workers[0], in_folder("nothing"), NULL, &options, &loaded));
  FAILS(DG_FAILED_PRECONDITION, dg_checkpoint_load(workers[0], path, NULL, NULL, &loaded));

  /* The errors of a program's functions. */
  save_fails = DG_OUT_OF_RANGE;
  SAYS(DG_OUT_OF_RANGE, "no values", dg_checkpoint_manager_save(manager, 6, DG_FOREVER));
  SAYS(DG_OUT_OF_RANGE, "back", dg_checkpoint_manager_save_async(manager, 6, DG_FOREVER, &written));
  is_of_handler(1, dg_checkpoint_manager_save(manager, 6, DG_FOREVER));
  save_fails = DG_OK;
  load_fails = DG_ABORTED;
  SAYS(DG_ABORTED, "back", dg_checkpoint_manager_load(manager, NULL, &loaded));
  is_of_handler(1, dg_checkpoint_manager_load(manager, NULL, &loaded));
  load_fails = DG_OK;

  /* Mistakes. */
  FAILS(DG_INVALID_ARGUMENT, dg_checkpoint_manager_save(manager, -1, DG_FOREVER));
  FAILS(DG_DEADLINE_EXCEEDED, dg_checkpoint_manager_save(manager, 7, 0));
  FAILS(DG_DEADLINE_EXCEEDED, dg_checkpoint_manager_save_async(manager, 7, 0, &written));
  FAILS(DG_INVALID_ARGUMENT, dg_checkpoint_manager_save_async(manager, 7, DG_FOREVER, NULL));
  FAILS(DG_INVALID_ARGUMENT, dg_checkpoint_manager_load(manager, NULL, NULL));
  load.flags = 4;
  FAILS(DG_UNIMPLEMENTED, dg_checkpoint_manager_load(manager, &load, &loaded));
  options.flags = 2;
  FAILS(DG_UNIMPLEMENTED, dg_checkpoint_manager_create(workers[0], path, &options, &other));
  options = manager_options();
  options.keep = UINT64_C(1) << 40;
  FAILS(DG_INVALID_ARGUMENT, dg_checkpoint_manager_create(workers[0], path, &options, &other));
  options = manager_options();
  options.struct_size = 8;
  FAILS(DG_INVALID_ARGUMENT, dg_checkpoint_manager_create(workers[0], path, &options, &other));
  dg_checkpoint_manager_destroy(manager);
  FAILS(DG_INVALID_ARGUMENT, dg_checkpoint_manager_save(manager, 8, DG_FOREVER));
  dg_checkpoint_manager_destroy(NULL);

  /* It is unlocked, and a worker that is asked for by name may be alone. */
  options = manager_options();
  options.keep = 1;
  options.flags = DG_CHECKPOINT_ALLOW_DROPPING;
  {
    const dg_str front = DG_STR("front");
    options.workers = &front;
    options.worker_count = 1;
    OK(dg_checkpoint_manager_create(workers[1], path, &options, &manager));
    OK(dg_checkpoint_manager_save(manager, 9, 60000));
    dg_checkpoint_manager_destroy(manager);
  }
}

static void what_does_not_fit(void) {
  const float data[2] = {1, 2};
  const dg_str names[2] = {DG_STR("front.weight"), DG_STR("more")};
  dg_checkpoint_manager_options options = manager_options();
  dg_checkpoint_manager* manager = NULL;
  dg_checkpoint_load_options load = DG_CHECKPOINT_LOAD_OPTIONS_INIT;
  dg_loaded_checkpoint* loaded = NULL;
  dg_checkpoint_part* other = NULL;
  dg_tensor* small = floats(data, 1, 2);
  const dg_tensor* tensors[2];
  const dg_str path = in_folder("fits");
  bits before;
  tensors[0] = small;
  tensors[1] = small;
  OK(dg_checkpoint_manager_create(workers[0], path, &options, &manager));
  OK(dg_checkpoint_manager_save(manager, 1, DG_FOREVER));
  FAILS(DG_ALREADY_EXISTS, create_part(0, names, tensors, 2, false, &other));
  CHECK(parts_ended == 1); /* that one's user data */
  OK(dg_checkpoint_part_remove(parts[0]));
  OK(dg_checkpoint_part_remove(parts[0]));
  CHECK(parts_ended == 2);
  dg_checkpoint_part_destroy(parts[0]);
  FAILS(DG_INVALID_ARGUMENT, dg_checkpoint_part_remove(parts[0]));
  parts[0] = NULL;
  FAILS(DG_FAILED_PRECONDITION, dg_checkpoint_manager_save(manager, 2, DG_FOREVER));

  SAYS(DG_INVALID_ARGUMENT, "adam", create_part(0, &names[1], &tensors[1], 1, true, &other));
  OK(create_part(0, names, tensors, 2, false, &other));
  before = now();
  SAYS(DG_INVALID_ARGUMENT, "more", dg_checkpoint_manager_load(manager, NULL, &loaded));
  CHECK(same(now(), before) && data_of(small)[1] == 2);
  load.flags = DG_CHECKPOINT_LOAD_NOT_STRICT;
  OK(dg_checkpoint_manager_load(manager, &load, &loaded));
  CHECK(dg_loaded_checkpoint_count(loaded, DG_LOADED_MISSING) == 1);
  CHECK(dg_loaded_checkpoint_item(loaded, DG_LOADED_MISSING, 0).size > strlen("more"));
  CHECK(dg_loaded_checkpoint_count(loaded, DG_LOADED_MISMATCHED) == 1);
  CHECK(dg_loaded_checkpoint_count(loaded, DG_LOADED_UNEXPECTED) >= 1);
  CHECK(dg_loaded_checkpoint_item(loaded, DG_LOADED_MISSING, 1).size == 0);
  CHECK(dg_loaded_checkpoint_item(loaded, 9, 0).size == 0);
  dg_loaded_checkpoint_destroy(loaded);
  SAYS(DG_FAILED_PRECONDITION, "newest", dg_checkpoint_manager_save(manager, 2, DG_FOREVER));

  /* A damaged byte is found, and the checkpoint before it can be had instead. */
  OK(dg_checkpoint_part_remove(other));
  dg_checkpoint_part_destroy(other);
  tensors[0] = weights[0];
  OK(create_part(0, names, tensors, 1, true, &parts[0]));
  OK(dg_checkpoint_manager_save(manager, 2, DG_FOREVER));
  {
    const dg_str shard = in_folder("fits/step-000002/model-00001-of-00002.safetensors");
    FILE* file = fopen(shard.data, "r+b");
    CHECK(file != NULL && fseek(file, -1, SEEK_END) == 0 && fputc(0x55, file) == 0x55);
    CHECK(fclose(file) == 0);
  }
  load.flags = 0;
  SAYS(DG_DATA_LOSS, "step 1", dg_checkpoint_manager_load(manager, &load, &loaded));
  load.flags = DG_CHECKPOINT_LOAD_FALL_BACK;
  OK(dg_checkpoint_manager_load(manager, &load, &loaded));
  CHECK(dg_loaded_checkpoint_step(loaded) == 1);
  dg_loaded_checkpoint_destroy(loaded);
  dg_checkpoint_manager_destroy(manager);
  dg_tensor_destroy(small);

  FAILS(DG_INVALID_ARGUMENT,
        dg_checkpoint_part_create(workers[0], DG_STR("a::b"), NULL, NULL, part_ended, &other));
  {
    const dg_str no_name = DG_STR("__metadata__");
    dg_checkpoint_contents contents = DG_CHECKPOINT_CONTENTS_INIT;
    contents.tensor_names = &no_name;
    contents.tensors = tensors;
    contents.tensor_count = 1;
    SAYS(DG_INVALID_ARGUMENT, "metadata",
         dg_checkpoint_part_create(workers[0], DG_STR("a"), &contents, NULL, NULL, &other));
  }
  FAILS(DG_INVALID_ARGUMENT,
        dg_checkpoint_part_create(NULL, DG_STR("a"), NULL, NULL, part_ended, &other));
  CHECK(parts_ended == 6);
}

/* ----------------------------------------------------------------------------------- Optimizers */

static void optimizer_files(void) {
  const dg_str path = in_folder("adam.safetensors"), name = DG_STR("weight");
  const dg_tensor* leaf = weights[0];
  bits before, after;
  OK(dg_optimizer_save(optimizers[0], &name, &leaf, 1, path));
  OK(dg_optimizer_save(optimizers[1], &name, (const dg_tensor* const*)&weights[1], 1,
                       in_folder("back.safetensors")));
  before = now();
  train();
  after = now();
  OK(dg_optimizer_load(optimizers[0], &name, &leaf, 1, path));
  OK(dg_optimizer_load(optimizers[1], &name, (const dg_tensor* const*)&weights[1], 1,
                       in_folder("back.safetensors")));
  for (int i = 0; i < 2; ++i) {
    memcpy(data_of(weights[i]), before.weights[i], sizeof(before.weights[i]));
  }
  position = before.position;
  train();
  CHECK(same(now(), after));
  FAILS(DG_INVALID_ARGUMENT, dg_optimizer_save(optimizers[0], NULL, NULL, 0, path));
  FAILS(DG_INVALID_ARGUMENT, dg_optimizer_load(optimizers[0], NULL, NULL, 0, path));
  FAILS(DG_NOT_FOUND, dg_optimizer_load(optimizers[0], &name, &leaf, 1, in_folder("not")));
  FAILS(DG_INVALID_ARGUMENT, dg_optimizer_save(NULL, &name, &leaf, 1, path));
}

/* ------------------------------------------------------------------------------------ Lifetimes */

static dg_checkpoint_manager* last_manager;
static sem_t called_back;

/* What would wait for the save_values that waits for this thread. */
static void of_replica(void) {
  FAILS(DG_FAILED_PRECONDITION, dg_checkpoint_manager_save(last_manager, 5, DG_FOREVER));
  SAYS(DG_FAILED_PRECONDITION, "its own save_values", dg_checkpoint_part_remove(parts[0]));
}
static dg_error* run_replica(void) {
  on_replica(of_replica);
  return NULL;
}

static void in_replica(void) {
  dg_checkpoint_manager_options options = manager_options();
  OK(dg_checkpoint_manager_create(workers[0], in_folder("replica"), &options, &last_manager));
  instead[0] = run_replica;
  OK(dg_checkpoint_manager_save(last_manager, 1, DG_FOREVER));
  CHECK(instead[0] == NULL);
  dg_checkpoint_manager_destroy(last_manager);
}

/* The part of the back worker: it has what the first save writes; a second one keeps it busy. */
static sem_t back_copied, back_is_busy, back_goes_on;

static dg_error* keep_busy(void) {
  post(&back_is_busy);
  wait_at_gate(&back_goes_on);
  return NULL;
}
static dg_error* copied(void) {
  post(&back_copied);
  instead[1] = keep_busy;
  return NULL;
}
static dg_error* await_busy(void) {
  wait_at_gate(&back_is_busy);
  return NULL;
}
static dg_error* destroy_last_manager(void) {
  dg_checkpoint_manager_destroy(last_manager);
  return NULL;
}
static void* save_when_copied(void* manager) {
  wait_at_gate(&back_copied);
  OK(dg_checkpoint_manager_save((dg_checkpoint_manager*)manager, 1, DG_FOREVER));
  return NULL;
}

/* A manager that writes is destroyed in save_values: what it writes may wait for that very part. */
static void destroyed_in_save_values(void) {
  dg_checkpoint_manager_options options = manager_options();
  dg_checkpoint_manager* of_one[2] = {NULL, NULL};
  const dg_str names[2] = {DG_STR("front"), DG_STR("back")};
  const dg_str folders[2] = {in_folder("of_front"), in_folder("of_back")};
  dg_future* written = NULL;
  bool done = false;
  pthread_t thread;
  OK(dg_checkpoint_manager_create(workers[0], in_folder("of_both"), &options, &last_manager));
  options.worker_count = 1;
  for (int i = 0; i < 2; ++i) {
    options.workers = &names[i];
    OK(dg_checkpoint_manager_create(workers[0], folders[i], &options, &of_one[i]));
  }
  instead[0] = await_busy;
  instead[1] = copied;
  CHECK(pthread_create(&thread, NULL, save_when_copied, of_one[1]) == 0);
  OK(dg_checkpoint_manager_save_async(last_manager, 1, DG_FOREVER, &written));
  instead[0] = destroy_last_manager;
  OK(dg_checkpoint_manager_save(of_one[0], 1, DG_FOREVER));
  OK(dg_future_wait(written, 0, &done));
  CHECK(!done);
  post(&back_goes_on);
  CHECK(pthread_join(thread, NULL) == 0);
  OK(dg_future_wait(written, DG_FOREVER, &done));
  dg_future_destroy(written);
  for (int i = 0; i < 2; ++i) dg_checkpoint_manager_destroy(of_one[i]);
}

/* Where nothing may wait. */
static void in_callback(void* user_data) {
  dg_loaded_checkpoint* loaded = NULL;
  (void)user_data;
  FAILS(DG_FAILED_PRECONDITION, dg_checkpoint_manager_save(last_manager, 5, DG_FOREVER));
  FAILS(DG_FAILED_PRECONDITION, dg_checkpoint_manager_load(last_manager, NULL, &loaded));
  FAILS(DG_FAILED_PRECONDITION, dg_checkpoint_part_remove(parts[0]));
  FAILS(DG_FAILED_PRECONDITION, dg_safetensors_save(in_folder("no"), NULL, NULL, 0, NULL, 0));
  dg_checkpoint_manager_destroy(last_manager);
  CHECK(sem_post(&called_back) == 0);
}

/* A part of the front worker would have an optimizer that ends with the back worker. */
static void refuses_of_back(dg_optimizer* optimizer) {
  const dg_str weight_name = DG_STR("w"), sgd = DG_STR("sgd");
  dg_checkpoint_contents contents = DG_CHECKPOINT_CONTENTS_INIT;
  dg_checkpoint_part* part = NULL;
  const dg_tensor* weight = weights[1];
  contents.tensor_names = &weight_name;
  contents.tensors = &weight;
  contents.tensor_count = 1;
  contents.optimizer_names = &sgd;
  contents.optimizers = &optimizer;
  contents.optimizer_count = 1;
  SAYS(DG_INVALID_ARGUMENT, "optimizers[0] is a part of worker 'back'",
       dg_checkpoint_part_create(workers[0], DG_STR("other"), &contents, NULL, NULL, &part));
}

static void lifetimes(void) {
  dg_checkpoint_manager_options options = manager_options();
  const dg_str path = in_folder("lives");
  dg_checkpoint_manager* manager = NULL;
  dg_optimizer* of_back = NULL;
  const dg_tensor* leaf = weights[1];
  dg_future* written = NULL;
  dg_message* reply = NULL;
  bool done = false;
  dg_code code;
  /* A manager that is destroyed in the callback of its own save. */
  OK(dg_checkpoint_manager_create(workers[0], path, &options, &last_manager));
  OK(dg_checkpoint_manager_save_async(last_manager, 1, DG_FOREVER, &written));
  OK(dg_future_then(written, in_callback, NULL, NULL));
  wait_at_gate(&called_back);
  OK(dg_future_wait(written, DG_FOREVER, &done));
  OK(dg_future_cancel(written)); /* has no effect */
  OK(dg_future_result(written, &reply));
  dg_future_destroy(written);
  /* A thread of the library unlocks the folder. */
  do {
    code = code_of(dg_checkpoint_manager_create(workers[0], path, &options, &manager));
  } while (code == DG_ABORTED);
  CHECK(code == DG_OK);

  /* Parts go on without their handles; a removed optimizer makes a save fail. */
  dg_checkpoint_part_destroy(parts[0]);
  dg_checkpoint_part_destroy(parts[1]);
  dg_optimizer_destroy(optimizers[1]);
  OK(dg_checkpoint_manager_save(manager, 2, DG_FOREVER));
  OK(dg_optimizer_remove(optimizers[0]));
  SAYS(DG_FAILED_PRECONDITION, "optimizer 'adam': it was removed",
       dg_checkpoint_manager_save(manager, 3, DG_FOREVER));
  SAYS(DG_NOT_FOUND, "the optimizer '' of worker 'front' was removed",
       dg_optimizer_save(optimizers[0], NULL, NULL, 0, in_folder("removed")));
  CHECK(parts_ended == 6);

  OK(dg_optimizer_create_sgd(workers[1], DG_STR("sgd"), &leaf, 1, NULL, &of_back));
  refuses_of_back(of_back);
  OK(dg_optimizer_remove(of_back));

  /* The end of a worker while a save is written: it is written, or fails, and then all ends. */
  dg_checkpoint_manager_destroy(manager);
  options.name = DG_STR("back");
  {
    const dg_str name = DG_STR("w"), back = DG_STR("back");
    dg_checkpoint_contents contents = DG_CHECKPOINT_CONTENTS_INIT;
    dg_checkpoint_part* part = NULL;
    const dg_tensor* tensor = weights[1];
    contents.tensor_names = &name;
    contents.tensors = &tensor;
    contents.tensor_count = 1;
    OK(dg_checkpoint_part_create(workers[1], DG_STR("back"), &contents, NULL, part_ended, &part));
    options.workers = &back;
    options.worker_count = 1;
    options.flags = DG_CHECKPOINT_ALLOW_DROPPING;
    OK(dg_checkpoint_manager_create(workers[1], path, &options, &manager));
    OK(dg_checkpoint_manager_save_async(manager, 4, DG_FOREVER, &written));
    OK(dg_worker_close(workers[1], DG_FOREVER));
    CHECK(parts_ended == 8);
    OK(dg_future_wait(written, 0, &done));
    CHECK(done);
    code = code_of(dg_future_result(written, &reply));
    printf("a save at the end of its worker: code %d\n", (int)code);
    FAILS(DG_FAILED_PRECONDITION, dg_checkpoint_manager_save(manager, 5, DG_FOREVER));
    FAILS(DG_FAILED_PRECONDITION, dg_checkpoint_part_remove(part));
    dg_checkpoint_part_destroy(part);
    dg_checkpoint_manager_destroy(manager);
    dg_future_destroy(written);
  }
  refuses_of_back(of_back);
  dg_optimizer_destroy(of_back);
  OK(dg_worker_close(workers[0], DG_FOREVER));
  CHECK(parts_ended == 9);
}

static void step_back(dg_optimizer* optimizer, const dg_tensor* weight) {
  dg_tensor *square = op2("aten::mul.Tensor", weight, weight), *sum = op1("aten::sum", square);
  const dg_tensor* root = sum;
  dg_context* context = NULL;
  OK(dg_context_create(workers[1], &context));
  OK(dg_context_backward(context, &root, 1, NULL));
  OK(dg_optimizer_step(optimizer, context));
  dg_context_destroy(context);
  dg_tensor_destroy(square);
  dg_tensor_destroy(sum);
}

/* The part keeps it, too. */
static void local_optimizer(void) {
  const float data[3] = {1, 2, 3};
  const dg_str back = DG_STR("back"), weight_name = DG_STR("weight"), adam = DG_STR("adam");
  dg_checkpoint_contents contents = DG_CHECKPOINT_CONTENTS_INIT;
  dg_checkpoint_manager_options options = DG_CHECKPOINT_MANAGER_OPTIONS_INIT;
  dg_checkpoint_part* part = NULL;
  dg_checkpoint_manager* manager = NULL;
  dg_loaded_checkpoint* loaded = NULL;
  dg_optimizer* optimizer = NULL;
  dg_tensor* weight = floats(data, 1, 3);
  const dg_tensor* leaf = weight;
  float after[2][3];
  OK(dg_tensor_require_grad(weight));
  OK(dg_optimizer_create_adam(NULL, DG_STR(""), &leaf, 1, NULL, &optimizer));
  contents.tensor_names = &weight_name;
  contents.tensors = &leaf;
  contents.tensor_count = 1;
  contents.optimizer_names = &adam;
  contents.optimizers = &optimizer;
  contents.optimizer_count = 1;
  OK(dg_checkpoint_part_create(workers[1], DG_STR("local"), &contents, NULL, NULL, &part));
  options.name = DG_STR("local");
  options.workers = &back;
  options.worker_count = 1;
  OK(dg_checkpoint_manager_create(workers[1], in_folder("local"), &options, &manager));
  step_back(optimizer, weight);
  OK(dg_checkpoint_manager_save(manager, 1, DG_FOREVER));
  step_back(optimizer, weight);
  memcpy(after[0], data_of(weight), sizeof(after[0]));
  /* With its moments: the same step once more. */
  OK(dg_checkpoint_manager_load(manager, NULL, &loaded));
  dg_loaded_checkpoint_destroy(loaded);
  step_back(optimizer, weight);
  memcpy(after[1], data_of(weight), sizeof(after[1]));
  CHECK(memcmp(after[0], after[1], sizeof(after[0])) == 0);
  dg_optimizer_destroy(optimizer);
  OK(dg_checkpoint_manager_save(manager, 2, DG_FOREVER));
  dg_checkpoint_manager_destroy(manager);
  OK(dg_checkpoint_part_remove(part));
  dg_checkpoint_part_destroy(part);
  dg_tensor_destroy(weight);
}

int main(void) {
  const char* parent = getenv("TEST_TMPDIR");
  prepare();
  CHECK(sem_init(&called_back, 0, 0) == 0 && sem_init(&back_copied, 0, 0) == 0);
  CHECK(sem_init(&back_is_busy, 0, 0) == 0 && sem_init(&back_goes_on, 0, 0) == 0);
  snprintf(folder, sizeof(folder), "%s/checkpoint.%d", parent ? parent : "/tmp", (int)getpid());
  CHECK(mkdir(folder, 0700) == 0);
  files();
  on_both(create);
  on_both(create_model);
  save_and_resume();
  what_does_not_fit();
  optimizer_files();
  local_optimizer();
  in_replica();
  destroyed_in_save_values();
  lifetimes();
  for (int i = 0; i < 2; ++i) {
    dg_worker_destroy(workers[i]);
    dg_optimizer_destroy(optimizers[i]);
    dg_tensor_destroy(weights[i]);
  }
  clean_up();
  printf("ok\n");
  return 0;
}
