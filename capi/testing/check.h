/* Checks for tests in C: a failed one says where, and ends the program. */
#ifndef DISTGRAD_CAPI_TESTING_CHECK_H_
#define DISTGRAD_CAPI_TESTING_CHECK_H_

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "distgrad/distgrad.h"

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) {                                                         \
      fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      abort();                                                                  \
    }                                                                           \
  } while (0)

/* Takes the error. */
static inline dg_code code_of(dg_error* error) {
  const dg_code code = dg_error_code(error);
  dg_error_destroy(error);
  return code;
}

/* The call succeeds. */
#define OK(call) check_code(DG_OK, (call), #call, __FILE__, __LINE__)
/* The call fails with that code. */
#define FAILS(code, call) check_code((code), (call), #call, __FILE__, __LINE__)

static inline void check_code(dg_code want, dg_error* error, const char* call, const char* file,
                              int line) {
  const dg_code got = dg_error_code(error);
  const dg_str message = dg_error_message(error);
  if (got != want) {
    fprintf(stderr, "%s:%d: %s\n  code %d, not %d: %.*s\n", file, line, call, (int)got, (int)want,
            (int)message.size, message.data);
    abort();
  }
  CHECK(want == DG_OK || message.size > 0); /* no error is silent */
  dg_error_destroy(error);
}

/* The call fails with that code, and says `part`. */
#define SAYS(code, part, call) check_text((code), (part), (call), __FILE__, __LINE__)

static inline void check_text(dg_code want, const char* part, dg_error* error, const char* file,
                              int line) {
  const dg_str message = dg_error_message(error);
  char text[2000];
  const size_t size = message.size < sizeof(text) ? message.size : sizeof(text) - 1;
  if (size > 0) memcpy(text, message.data, size);
  text[size] = '\0';
  if (dg_error_code(error) != want || strstr(text, part) == NULL) {
    fprintf(stderr, "%s:%d: code %d, not %d; or '%s' lacks '%s'\n", file, line,
            (int)dg_error_code(error), (int)want, text, part);
    abort();
  }
  dg_error_destroy(error);
}

static inline bool str_is(dg_str text, const char* want) {
  return text.size == strlen(want) && memcmp(text.data, want, text.size) == 0;
}

/* Takes the error, which names the parameter `flags` and nothing else. */
static inline void of_unknown_flags(dg_error* error) {
  CHECK(str_is(dg_error_message(error),
               "flags has bits that this version of the library does not know"));
  CHECK(code_of(error) == DG_UNIMPLEMENTED);
}

static inline dg_tensor* floats(const float* data, int64_t rows, int64_t columns) {
  int64_t shape[2];
  dg_tensor* tensor = NULL;
  shape[0] = rows;
  shape[1] = columns;
  OK(dg_tensor_from_data(data, DG_FLOAT32, shape, 2, &tensor));
  return tensor;
}

/* The size along a dimension, and the distance. */
typedef struct layout {
  int64_t shape[8], strides[8];
} layout;
static inline layout layout_of(const dg_tensor* tensor, size_t dim, bool strides) {
  layout of;
  size_t dim_count = 0;
  OK(dg_tensor_layout(tensor, of.shape, strides ? of.strides : NULL, 8, &dim_count));
  CHECK(dim < dim_count);
  return of;
}
static inline int64_t size_of(const dg_tensor* tensor, size_t dim) {
  return layout_of(tensor, dim, false).shape[dim];
}
static inline int64_t stride_of(const dg_tensor* tensor, size_t dim) {
  return layout_of(tensor, dim, true).strides[dim];
}

static inline float* data_of(const dg_tensor* tensor) {
  void* data = NULL;
  OK(dg_tensor_data(tensor, &data));
  return (float*)data;
}

/* An operator of one result. */
static inline dg_tensor* op(const char* name, const dg_value* arguments, size_t count) {
  dg_str text;
  dg_tensor* out = NULL;
  text.data = name;
  text.size = strlen(name);
  OK(dg_op_tensors(text, arguments, count, &out, 1));
  return out;
}
static inline dg_tensor* op1(const char* name, const dg_tensor* a) {
  dg_value arguments[1];
  arguments[0] = dg_value_tensor(a);
  return op(name, arguments, 1);
}
static inline dg_tensor* op2(const char* name, const dg_tensor* a, const dg_tensor* b) {
  dg_value arguments[2];
  arguments[0] = dg_value_tensor(a);
  arguments[1] = dg_value_tensor(b);
  return op(name, arguments, 2);
}

/* For user_data that counts how often it was ended. */
static inline void count_up(void* user_data) {
  __atomic_add_fetch((int*)user_data, 1, __ATOMIC_SEQ_CST);
}

#endif /* DISTGRAD_CAPI_TESTING_CHECK_H_ */
