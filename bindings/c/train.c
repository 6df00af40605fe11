/* Trains a model that is split over two processes, on Fashion-MNIST: its first layer lives with the
 * data in the front process, its second one in the back process. One call forward, one backward
 * through both, and one step of an optimizer on both, for each batch.
 *
 *   train [FOLDER [IMAGES [EPOCHS]]]
 *
 * FOLDER has the four *-ubyte.gz files, which gzip unpacks; the default is where Debian's package
 * dataset-fashion-mnist puts them. */
#define _DEFAULT_SOURCE
#include "sample.h"

enum { PIXELS = 784, HIDDEN = 64, CLASSES = 10, BATCH = 50, TESTS = 1000 };

/* --------------------------------------------------------------------------------------- Data */

/* Reads `size` bytes of one of the files, after its header. */
static unsigned char* unpack(const char* folder, const char* name, size_t header, size_t size) {
  char command[600];
  snprintf(command, sizeof(command), "gzip -dc '%s/%s-ubyte.gz'", folder, name);
  FILE* pipe = popen(command, "r");
  unsigned char* bytes = (unsigned char*)malloc(header + size);
  if (pipe == NULL || bytes == NULL || fread(bytes, 1, header + size, pipe) != header + size) {
    fprintf(stderr, "cannot read %s/%s-ubyte.gz\n", folder, name);
    exit(1);
  }
  pclose(pipe);
  memmove(bytes, bytes + header, size);
  return bytes;
}

typedef struct dataset {
  float* pixels;
  int64_t* labels;
} dataset;

static dataset load(const char* folder, const char* images, const char* labels, size_t count) {
  dataset set;
  unsigned char* pixels = unpack(folder, images, 16, count * PIXELS);
  unsigned char* classes = unpack(folder, labels, 8, count);
  set.pixels = (float*)malloc(count * PIXELS * sizeof(float));
  set.labels = (int64_t*)malloc(count * sizeof(int64_t));
  if (set.pixels == NULL || set.labels == NULL) exit(1);
  for (size_t i = 0; i < count * PIXELS; ++i) set.pixels[i] = (float)pixels[i] / 255 - 0.5f;
  for (size_t i = 0; i < count; ++i) set.labels[i] = classes[i];
  free(pixels);
  free(classes);
  return set;
}

static void unload(dataset* set) {
  free(set->pixels);
  free(set->labels);
}

/* Returns the images from `first` on, without a copy. */
static dg_tensor* images(const dataset* set, size_t first, int64_t count) {
  const int64_t shape[2] = {count, PIXELS};
  dg_tensor* tensor = NULL;
  must(dg_tensor_from_memory(set->pixels + first * PIXELS, DG_FLOAT32, shape, NULL, 2, NULL, NULL,
                             &tensor));
  return tensor;
}

/* -------------------------------------------------------------------------------------- Model */

/* A linear layer. Its weights are small, different numbers. */
typedef struct linear {
  dg_tensor *weight, *bias;
} linear;

static dg_tensor* parameter(int64_t rows, int64_t columns, float range) {
  const int64_t shape[2] = {rows, columns};
  const int64_t count = rows * columns;
  float* data = (float*)malloc((size_t)count * sizeof(float));
  uint32_t random = 12345;
  if (data == NULL) exit(1);
  for (int64_t i = 0; i < count; ++i) {
    random = random * 1664525u + 1013904223u;
    data[i] = ((float)(random >> 8) / (float)(1 << 24) * 2 - 1) * range;
  }
  dg_tensor* tensor = NULL;
  must(dg_tensor_from_data(data, DG_FLOAT32, shape, columns == 1 ? 1 : 2, &tensor));
  must(dg_tensor_require_grad(tensor));
  free(data);
  return tensor;
}

static dg_error* apply(const linear* layer, const dg_tensor* x, dg_tensor** y) {
  const dg_value arguments[3] = {dg_value_tensor(x), dg_value_tensor(layer->weight),
                                 dg_value_tensor(layer->bias)};
  return dg_op_tensors(DG_STR("aten::linear"), arguments, 3, y, 1);
}

/* The back process's handler: hidden values in, a score for each class out. */
static dg_error* classify(void* user_data, const dg_request* request, dg_message** reply) {
  dg_tensor *x = NULL, *y = NULL;
  dg_error* error = dg_message_tensor(request->message, 0, &x);
  if (error == NULL) error = apply((const linear*)user_data, x, &y);
  if (error == NULL) {
    const dg_tensor* result = y;
    error = dg_message_create(NULL, 0, &result, 1, reply);
  }
  dg_tensor_destroy(x);
  dg_tensor_destroy(y);
  return error;
}

/* Runs both parts, one after the other. */
static dg_tensor* forward(dg_worker* worker, const linear* layer, const dg_tensor* x,
                          const dg_context* context) {
  dg_tensor *sums = NULL, *hidden = NULL, *scores = NULL;
  must(apply(layer, x, &sums));
  const dg_value argument = dg_value_tensor(sums);
  must(dg_op_tensors(DG_STR("aten::relu"), &argument, 1, &hidden, 1));
  const dg_tensor* sent = hidden;
  dg_message *request = NULL, *reply = NULL;
  must(dg_message_create(NULL, 0, &sent, 1, &request));
  dg_call_options options = DG_CALL_OPTIONS_INIT;
  options.context = context;
  must(dg_worker_call(worker, DG_STR("back"), DG_STR("classify"), request, &options, &reply));
  must(dg_message_tensor(reply, 0, &scores));
  dg_message_destroy(reply);
  dg_message_destroy(request);
  dg_tensor_destroy(hidden);
  dg_tensor_destroy(sums);
  return scores;
}

/* ----------------------------------------------------------------------------------- Training */

/* Takes one step, and returns the loss of the batch. */
static double step(dg_worker* worker, const linear* layer, dg_optimizer* optimizer,
                   const dataset* set, size_t first) {
  const int64_t batch = BATCH;
  dg_context* context = NULL;
  must(dg_context_create(worker, &context));
  dg_tensor *x = images(set, first, batch), *labels = NULL, *loss = NULL;
  must(dg_tensor_from_data(set->labels + first, DG_INT64, &batch, 1, &labels));
  dg_tensor* scores = forward(worker, layer, x, context);
  const dg_value arguments[2] = {dg_value_tensor(scores), dg_value_tensor(labels)};
  must(dg_op_tensors(DG_STR("aten::cross_entropy_loss"), arguments, 2, &loss, 1));
  const dg_tensor* root = loss;
  must(dg_context_backward(context, &root, 1, NULL));
  must(dg_optimizer_step(optimizer, context));
  void* data = NULL;
  must(dg_tensor_data(loss, &data));
  const double value = *(const float*)data;
  dg_tensor_destroy(loss);
  dg_tensor_destroy(scores);
  dg_tensor_destroy(labels);
  dg_tensor_destroy(x);
  dg_context_destroy(context);
  return value;
}

static double accuracy(dg_worker* worker, const linear* layer, const dataset* set) {
  dg_tensor *x = images(set, 0, TESTS), *best = NULL;
  const bool recorded = dg_grad_set_enabled(false);
  dg_tensor* scores = forward(worker, layer, x, NULL);
  const dg_value arguments[2] = {dg_value_tensor(scores), dg_value_integer(1)};
  must(dg_op_tensors(DG_STR("aten::argmax"), arguments, 2, &best, 1));
  dg_grad_set_enabled(recorded);
  void* data = NULL;
  must(dg_tensor_data(best, &data));
  int right = 0;
  for (int i = 0; i < TESTS; ++i) right += ((const int64_t*)data)[i] == set->labels[i];
  dg_tensor_destroy(best);
  dg_tensor_destroy(scores);
  dg_tensor_destroy(x);
  return (double)right / TESTS;
}

static int train(dg_worker* worker, const linear* layer, dg_optimizer* optimizer,
                 const char* folder, size_t count, int epochs) {
  dataset set = load(folder, "train-images-idx3", "train-labels-idx1", count);
  dataset tests = load(folder, "t10k-images-idx3", "t10k-labels-idx1", TESTS);
  for (int epoch = 1; epoch <= epochs; ++epoch) {
    double loss = 0;
    for (size_t first = 0; first + BATCH <= count; first += BATCH) {
      loss += step(worker, layer, optimizer, &set, first);
    }
    printf("epoch %d: loss %.3f\n", epoch, loss * BATCH / (double)count);
  }
  const double right = accuracy(worker, layer, &tests);
  printf("%.1f %% of %d images that it never saw are classified right\n", 100 * right, TESTS);
  unload(&set);
  unload(&tests);
  return right > 0.7 ? 0 : 1; /* guessing gives 0.1 */
}

int main(int argc, char** argv) {
  const char* folder = argc > 1 ? argv[1] : "/usr/share/datasets/fashion-mnist";
  const size_t count = argc > 2 ? strtoull(argv[2], NULL, 10) : 60000;
  const int epochs = argc > 3 ? atoi(argv[3]) : 1;
  job self = start();
  linear layer;
  layer.weight =
      self.rank == 0 ? parameter(HIDDEN, PIXELS, 0.05f) : parameter(CLASSES, HIDDEN, 0.1f);
  layer.bias = parameter(self.rank == 0 ? HIDDEN : CLASSES, 1, 0.05f);
  if (self.rank == 1) {
    must(dg_worker_register(self.worker, DG_STR("classify"), classify, &layer, NULL));
  }
  const dg_tensor* parameters[2] = {layer.weight, layer.bias};
  dg_sgd_options options = DG_SGD_OPTIONS_INIT;
  options.learning_rate = 0.05;
  options.momentum = 0.9;
  dg_optimizer* optimizer = NULL;
  must(dg_optimizer_create_sgd(self.worker, DG_STR(""), parameters, 2, &options, &optimizer));
  must(dg_worker_barrier(self.worker, 60000, 0)); /* both are ready */

  int result = 0;
  if (self.rank == 0) result = train(self.worker, &layer, optimizer, folder, count, epochs);
  const int ended = finish(&self);
  dg_optimizer_destroy(optimizer);
  dg_tensor_destroy(layer.weight);
  dg_tensor_destroy(layer.bias);
  return ended != 0 ? ended : result;
}
