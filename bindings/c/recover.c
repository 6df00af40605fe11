/* A job that saves checkpoints, goes on from the last one, and survives the loss of a process.
 *
 *   recover FOLDER [KILL_AT]
 *
 * It learns the line y = 3 x - 1 in 100 steps: the front process has the slope, and the back
 * process the offset. At step KILL_AT the back process is killed. A second run with the same FOLDER
 * goes on from the first. */
#define _DEFAULT_SOURCE
#include <signal.h>
#include <time.h>

#include "sample.h"

enum { BATCH = 16, STEPS = 100, EVERY = 20 };

static dg_tensor* combine(dg_str op, dg_value a, dg_value b) {
  const dg_value arguments[2] = {a, b};
  return compute_op(op, arguments, 2);
}

/* ----------------------------------------------------------------------------------- Handlers */

/* Adds the offset. */
static dg_error* add(void* user_data, const dg_request* request, dg_message** reply) {
  dg_tensor *x = NULL, *y = NULL;
  dg_error* error = dg_message_tensor(request->message, 0, &x);
  if (error == NULL) {
    const dg_value arguments[2] = {dg_value_tensor(x), dg_value_tensor((dg_tensor*)user_data)};
    error = dg_op_tensors(DG_STR("aten::add.Tensor"), arguments, 2, &y, 1);
  }
  if (error == NULL) {
    const dg_tensor* result = y;
    error = dg_message_create(NULL, 0, &result, 1, reply);
  }
  dg_tensor_destroy(x);
  dg_tensor_destroy(y);
  return error;
}

static dg_error* die(void* user_data, const dg_request* request, dg_message** reply) {
  (void)user_data, (void)request, (void)reply;
  raise(SIGKILL); /* as the kernel does where memory is out */
  return NULL;
}

/* ----------------------------------------------------------------------------------- Training */

/* One step over both processes. Stores the loss of its batch; returns the error of a step that has
 * failed. */
static dg_error* step(dg_worker* worker, const dg_tensor* slope, dg_optimizer* optimizer,
                      int number, double* loss) {
  const int64_t size = BATCH;
  const dg_value shape = dg_value_integers(&size, 1);
  dg_context* context = NULL;
  dg_message *request = NULL, *reply = NULL;
  dg_tensor *sum = NULL, *error_of_batch = NULL;
  void* data = NULL;
  must(dg_manual_seed((uint64_t)number)); /* a step that is taken again has the same batch */
  dg_tensor* x = compute_op(DG_STR("aten::randn"), &shape, 1);
  dg_tensor* y = combine(DG_STR("aten::mul.Scalar"), dg_value_tensor(x), dg_value_integer(3));
  dg_tensor* target = combine(DG_STR("aten::sub.Scalar"), dg_value_tensor(y), dg_value_integer(1));
  dg_tensor* product =
      combine(DG_STR("aten::mul.Tensor"), dg_value_tensor(x), dg_value_tensor(slope));
  const dg_tensor* sent = product;
  must(dg_message_create(NULL, 0, &sent, 1, &request));
  must(dg_context_create(worker, &context));
  dg_call_options options = DG_CALL_OPTIONS_INIT;
  options.context = context;
  dg_error* error =
      dg_worker_call(worker, DG_STR("back"), DG_STR("add"), request, &options, &reply);
  if (error == NULL) {
    must(dg_message_tensor(reply, 0, &sum));
    error_of_batch =
        combine(DG_STR("aten::mse_loss"), dg_value_tensor(sum), dg_value_tensor(target));
    const dg_tensor* root = error_of_batch;
    error = dg_context_backward(context, &root, 1, NULL);
  }
  if (error == NULL) error = dg_optimizer_step(optimizer, context);
  if (error == NULL) {
    must(dg_tensor_data(error_of_batch, &data));
    *loss = *(const float*)data;
  }
  dg_tensor* made[] = {x, y, target, product, sum, error_of_batch};
  for (size_t i = 0; i < sizeof(made) / sizeof(made[0]); ++i) dg_tensor_destroy(made[i]);
  dg_message_destroy(request);
  dg_message_destroy(reply);
  dg_context_destroy(context);
  return error;
}

/* [doc: resume] */
/* Loads the newest checkpoint, and stores its step. If there is none, saves what there is as that
 * of step 0: something to come back to. */
static dg_error* resume(dg_checkpoint_manager* checkpoints, int* number) {
  dg_loaded_checkpoint* loaded = NULL;
  dg_error* error = dg_checkpoint_manager_load(checkpoints, NULL, &loaded);
  if (error == NULL) {
    *number = (int)dg_loaded_checkpoint_step(loaded);
  } else if (dg_error_code(error) == DG_NOT_FOUND) {
    dg_error_destroy(error);
    *number = 0;
    error = dg_checkpoint_manager_save(checkpoints, 0, DG_FOREVER);
  }
  dg_loaded_checkpoint_destroy(loaded);
  return error;
}
/* [doc: end] */

static dg_error* kill_back(dg_worker* worker) {
  dg_message *request = NULL, *reply = NULL;
  must(dg_message_create(NULL, 0, NULL, 0, &request));
  dg_error* error = dg_worker_call(worker, DG_STR("back"), DG_STR("die"), request, NULL, &reply);
  dg_message_destroy(request);
  dg_message_destroy(reply);
  return error;
}

/* [doc: train] */
static void train(dg_worker* worker, const dg_tensor* slope, dg_optimizer* optimizer, dg_str folder,
                  int kill_at) {
  dg_checkpoint_manager* checkpoints = NULL;
  must(dg_checkpoint_manager_create(worker, folder, NULL, &checkpoints));
  time_t give_up = time(NULL) + 60;
  bool ready = false;
  int number = 0;
  while (number < STEPS) {
    dg_error* error = NULL;
    double loss = 0;
    if (!ready) {
      error = resume(checkpoints, &number);
      ready = error == NULL;
      if (ready) printf("going on from step %d\n", number);
    } else if (number == kill_at) {
      kill_at = -1; /* once */
      error = kill_back(worker);
    } else {
      error = step(worker, slope, optimizer, number, &loss);
      if (error == NULL && ++number % EVERY == 0) {
        error = dg_checkpoint_manager_save(checkpoints, number, DG_FOREVER);
        if (error == NULL) printf("step %d: loss %g\n", number, loss);
      }
    }
    if (error == NULL) continue;

    /* The back process is gone, or is there and has not created its part yet. */
    const dg_code code = dg_error_code(error);
    const dg_str message = dg_error_message(error);
    if (code != DG_UNAVAILABLE && code != DG_FAILED_PRECONDITION) must(error);
    if (ready) {
      printf("step %d has failed: %.*s\n", number, (int)message.size, message.data);
      give_up = time(NULL) + 60;
      ready = false;
    }
    if (time(NULL) > give_up) must(error);
    dg_error_destroy(error);
    usleep(100000); /* before it tries again */
  }
  dg_checkpoint_manager_destroy(checkpoints);
}
/* [doc: end] */

/* [doc: part] */
/* One of the two processes. */
static int run(int rank, FILE* rendezvous, const char* folder, int kill_at) {
  const float zero = 0;
  const int64_t shape = 1;
  dg_tensor* parameter = NULL;
  dg_optimizer* optimizer = NULL;
  dg_checkpoint_part* part = NULL;
  must(dg_tensor_from_data(&zero, DG_FLOAT32, &shape, 1, &parameter));
  must(dg_tensor_require_grad(parameter));
  const dg_tensor* leaf = parameter;
  dg_worker* worker = create_worker(rank, rendezvous);
  dg_sgd_options options = DG_SGD_OPTIONS_INIT;
  options.learning_rate = 0.02;
  options.momentum = 0.5;
  must(dg_optimizer_create_sgd(worker, DG_STR("sgd"), &leaf, 1, &options, &optimizer));
  must(dg_worker_register(worker, DG_STR("add"), add, parameter, NULL));
  must(dg_worker_register(worker, DG_STR("die"), die, NULL, NULL));
  /* Last, for whoever finds this part finds all of the above. */
  const dg_str tensor_name = rank == 0 ? DG_STR("slope") : DG_STR("offset");
  const dg_str optimizer_name = DG_STR("sgd");
  dg_checkpoint_contents contents = DG_CHECKPOINT_CONTENTS_INIT;
  contents.tensor_names = &tensor_name;
  contents.tensors = &leaf;
  contents.tensor_count = 1;
  contents.optimizer_names = &optimizer_name;
  contents.optimizers = &optimizer;
  contents.optimizer_count = 1;
  must(dg_checkpoint_part_create(worker, DG_STR(""), &contents, NULL, NULL, &part));
  if (rank == 0) {
    const dg_str to = {folder, strlen(folder)};
    train(worker, parameter, optimizer, to, kill_at);
  }
  must(dg_worker_shutdown(worker, DG_FOREVER, 0)); /* until then the back process answers */
  dg_checkpoint_part_destroy(part);
  dg_optimizer_destroy(optimizer);
  dg_worker_destroy(worker);
  dg_tensor_destroy(parameter);
  return 0;
}
/* [doc: end] */

/* [doc: launcher] */
static pid_t start_process(int rank, FILE* rendezvous, const char* folder, int kill_at) {
  const pid_t child = fork();
  if (child == 0) exit(run(rank, rendezvous, folder, kill_at));
  if (child < 0) {
    perror("fork");
    exit(1);
  }
  return child;
}

/* What a launcher does: starts the processes, and the back one once more if it is killed. It never
 * uses the library itself, so that it can fork. */
static int launch(FILE* rendezvous, const char* folder, int kill_at) {
  int status = 0, of_child = 0, restarts = 1;
  start_process(0, rendezvous, folder, kill_at);
  pid_t back = start_process(1, rendezvous, folder, kill_at), child;
  while ((child = wait(&of_child)) > 0) {
    if (child == back && WIFSIGNALED(of_child) && restarts-- > 0) {
      back = start_process(1, rendezvous, folder, kill_at);
    } else if (!WIFEXITED(of_child) || WEXITSTATUS(of_child) != 0) {
      status = 1;
    }
  }
  return status;
}
/* [doc: end] */

int main(int argc, char** argv) {
  if (argc < 2) {
    fprintf(stderr, "recover FOLDER [KILL_AT]\n");
    return 2;
  }
  return launch(create_rendezvous(), argv[1], argc > 2 ? atoi(argv[2]) : -1);
}
