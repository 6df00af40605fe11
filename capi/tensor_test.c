/* Errors, tensors, values, operators and messages, from plain C; and what becomes of wrong use. */
#include "capi/testing/check.h"
#include "capi/testing/dlpack.h"

static void test_version(void) {
  CHECK(dg_abi_version() >> 16 == DG_ABI_MAJOR);
  CHECK(dg_abi_version() >= ((uint32_t)DG_ABI_MAJOR << 16 | DG_ABI_MINOR));
  CHECK(dg_torch_version().size > 0);
}

/* A slot of the table of handles has 2^24 of them in its time, and then no more. */
static void test_no_handle_comes_again(void) {
  const uintptr_t slot_bits = ((uintptr_t)1 << 24) - 1;
  dg_error* const first = dg_error_create(DG_NOT_FOUND, DG_STR("gone"));
  uintptr_t handle = (uintptr_t)first;
  for (long i = 1; i < 1L << 24; ++i) {
    dg_error_destroy((dg_error*)handle);
    handle = (uintptr_t)dg_error_create(DG_NOT_FOUND, DG_STR("gone"));
    CHECK((handle & slot_bits) == ((uintptr_t)first & slot_bits));
  }
  dg_error_destroy((dg_error*)handle);
  handle = (uintptr_t)dg_error_create(DG_NOT_FOUND, DG_STR("gone"));
  CHECK((handle & slot_bits) != ((uintptr_t)first & slot_bits));
  CHECK(dg_error_code(first) == DG_INVALID_ARGUMENT); /* destroyed */
  dg_error_destroy((dg_error*)handle);
}

static void test_errors(void) {
  dg_error* error = dg_error_create(DG_NOT_FOUND, DG_STR("gone"));
  CHECK(dg_error_code(error) == DG_NOT_FOUND);
  CHECK(str_is(dg_error_message(error), "gone"));
  dg_error_destroy(error);
  CHECK(dg_error_code(error) == DG_INVALID_ARGUMENT); /* destroyed */
  dg_error_destroy(error);
  dg_error_destroy(NULL);
  CHECK(dg_error_code(NULL) == DG_OK);
  CHECK(dg_error_message(NULL).size == 0);
  FAILS(DG_UNKNOWN, dg_error_create(99, DG_STR("odd")));
  FAILS(DG_UNKNOWN, dg_error_create(DG_OK, DG_STR("odd")));
  {
    dg_str bad;
    bad.data = NULL;
    bad.size = 3;
    error = dg_error_create(DG_ABORTED, bad);
    CHECK(dg_error_code(error) == DG_ABORTED);
    dg_error_destroy(error);
  }
}

static void test_tensors(void) {
  const float data[6] = {1, 2, 3, 4, 5, 6};
  dg_tensor *a = floats(data, 2, 3), *b = NULL, *c = NULL;
  CHECK(dg_tensor_dtype(a) == DG_FLOAT32);
  CHECK(dg_tensor_dim_count(a) == 2);
  CHECK(size_of(a, 0) == 2 && size_of(a, 1) == 3);
  CHECK(stride_of(a, 0) == 3 && stride_of(a, 1) == 1);
  CHECK(dg_tensor_element_count(a) == 6);
  CHECK(str_is(dg_tensor_device(a), "cpu"));
  CHECK(data_of(a) != data && data_of(a)[5] == 6);

  OK(dg_tensor_clone(a, &b));
  CHECK(b != a && data_of(b) == data_of(a));
  OK(dg_tensor_from_torch(dg_tensor_torch(a), &c));
  CHECK(data_of(c) == data_of(a));
  dg_tensor_destroy(c);
  dg_tensor_destroy(a);
  CHECK(data_of(b)[0] == 1); /* each handle holds the tensor */

  CHECK(!dg_tensor_requires_grad(b));
  OK(dg_tensor_require_grad(b));
  CHECK(dg_tensor_requires_grad(b));
  c = op1("aten::exp", b);
  CHECK(dg_tensor_requires_grad(c));
  FAILS(DG_FAILED_PRECONDITION, dg_tensor_require_grad(c)); /* no leaf */
  dg_tensor_destroy(c);
  CHECK(dg_grad_enabled());
  CHECK(dg_grad_set_enabled(false));
  CHECK(!dg_grad_enabled());
  c = op1("aten::exp", b);
  CHECK(!dg_tensor_requires_grad(c));
  CHECK(!dg_grad_set_enabled(true));
  dg_tensor_destroy(c);
  OK(dg_tensor_detach(b, &c));
  CHECK(!dg_tensor_requires_grad(c) && data_of(c) == data_of(b));
  dg_tensor_destroy(c);
  dg_tensor_destroy(b);

  { /* no dimensions, no elements */
    const int64_t seven = 7;
    const int64_t shape[2] = {0, 3};
    OK(dg_tensor_from_data(&seven, DG_INT64, NULL, 0, &a));
    CHECK(dg_tensor_dim_count(a) == 0 && dg_tensor_element_count(a) == 1);
    FAILS(DG_INVALID_ARGUMENT, dg_tensor_require_grad(a)); /* integers */
    dg_tensor_destroy(a);
    OK(dg_tensor_from_data(NULL, DG_INT64, shape, 2, &a));
    CHECK(dg_tensor_element_count(a) == 0);
    dg_tensor_destroy(a);
  }
}

static void test_memory(void) {
  float data[6] = {1, 2, 3, 4, 5, 6};
  const int64_t shape[2] = {3, 2}, strides[2] = {1, 3}, negative[2] = {-1, 3};
  const int64_t huge[2] = {INT64_C(1) << 40, INT64_C(1) << 40};
  const int64_t far[2] = {INT64_MAX / 2, 1};
  int ended = 0;
  dg_tensor *a = NULL, *b = NULL;
  OK(dg_tensor_from_memory(data, DG_FLOAT32, shape, strides, 2, &ended, count_up, &a));
  CHECK(data_of(a) == data);
  b = op1("aten::t", a); /* a view holds the memory */
  CHECK(data_of(b) == data && stride_of(b, 0) == 3);
  dg_tensor_destroy(a);
  CHECK(ended == 0);
  dg_tensor_destroy(b);
  CHECK(ended == 1);

  OK(dg_tensor_from_memory(data, DG_FLOAT32, shape, NULL, 2, NULL, NULL, &a));
  dg_tensor_destroy(a);

  /* Taken, also when the call fails; and outs are untouched. */
  a = b = NULL;
  FAILS(DG_INVALID_ARGUMENT, dg_tensor_from_memory(data, 77, shape, NULL, 2, &ended, count_up, &a));
  FAILS(DG_INVALID_ARGUMENT,
        dg_tensor_from_memory(NULL, DG_FLOAT32, shape, NULL, 2, &ended, count_up, &a));
  FAILS(DG_INVALID_ARGUMENT,
        dg_tensor_from_memory(data, DG_FLOAT32, negative, NULL, 2, &ended, count_up, &a));
  FAILS(DG_INVALID_ARGUMENT,
        dg_tensor_from_memory(data, DG_FLOAT32, shape, negative, 2, &ended, count_up, &a));
  FAILS(DG_INVALID_ARGUMENT,
        dg_tensor_from_memory(data, DG_FLOAT32, huge, NULL, 2, &ended, count_up, &a));
  FAILS(DG_INVALID_ARGUMENT,
        dg_tensor_from_memory(data, DG_FLOAT32, shape, far, 2, &ended, count_up, &a));
  FAILS(DG_INVALID_ARGUMENT,
        dg_tensor_from_memory(data, DG_FLOAT32, NULL, NULL, 2, &ended, count_up, &a));
  FAILS(DG_INVALID_ARGUMENT,
        dg_tensor_from_memory(data, DG_FLOAT32, shape, NULL, 65, &ended, count_up, &a));
  FAILS(DG_INVALID_ARGUMENT,
        dg_tensor_from_memory(data, DG_FLOAT32, shape, NULL, 2, &ended, count_up, NULL));
  CHECK(ended == 10 && a == NULL);
  FAILS(DG_INVALID_ARGUMENT, dg_tensor_from_data(NULL, DG_FLOAT32, shape, 2, &a));
  FAILS(DG_INVALID_ARGUMENT, dg_tensor_from_data(data, DG_FLOAT32, huge, 2, &a));
  FAILS(DG_INVALID_ARGUMENT, dg_tensor_from_torch(NULL, &a));
}

static int dlpack_deleted;
static void delete_dlpack(DLManagedTensorVersioned* self) {
  ++dlpack_deleted;
  free(self);
}

static DLManagedTensorVersioned* dlpack(float* data, int64_t* shape) {
  DLManagedTensorVersioned* made = (DLManagedTensorVersioned*)calloc(1, sizeof(*made));
  made->version.major = 1;
  made->deleter = delete_dlpack;
  made->dl_tensor.data = data;
  made->dl_tensor.device.type = kCpu;
  made->dl_tensor.ndim = 2;
  made->dl_tensor.dtype.code = kFloat;
  made->dl_tensor.dtype.bits = 32;
  made->dl_tensor.dtype.lanes = 1;
  made->dl_tensor.shape = shape;
  return made;
}

static void test_dlpack(void) {
  float data[6] = {1, 2, 3, 4, 5, 6};
  int64_t shape[2] = {2, 3}, strides[2];
  dg_tensor *a = NULL, *b = NULL;
  DLManagedTensorVersioned *out = NULL, *in;
  OK(dg_tensor_from_dlpack(dlpack(data, shape), &a));
  CHECK(data_of(a) == data && size_of(a, 1) == 3 && stride_of(a, 0) == 3);
  OK(dg_tensor_to_dlpack(a, &out));
  CHECK(out->version.major == 1 && out->dl_tensor.data == data && out->dl_tensor.ndim == 2);
  CHECK(out->dl_tensor.shape[1] == 3 && out->dl_tensor.dtype.bits == 32);
  OK(dg_tensor_from_dlpack(out, &b)); /* round and round, in one memory */
  dg_tensor_destroy(a);
  CHECK(dlpack_deleted == 0 && data_of(b) == data);
  dg_tensor_destroy(b);
  CHECK(dlpack_deleted == 1);

  /* Two columns, from the second one on; and no elements need no data. */
  shape[1] = 2;
  strides[0] = 3;
  strides[1] = 1;
  in = dlpack(data, shape);
  in->dl_tensor.strides = strides;
  in->dl_tensor.byte_offset = sizeof(float);
  OK(dg_tensor_from_dlpack(in, &a));
  CHECK(data_of(a) == data + 1 && data_of(a)[3] == 5);
  dg_tensor_destroy(a);
  shape[1] = 0;
  OK(dg_tensor_from_dlpack(dlpack(NULL, shape), &a));
  CHECK(dg_tensor_element_count(a) == 0);
  dg_tensor_destroy(a);
  CHECK(dlpack_deleted == 3);
  dlpack_deleted = 1;
  shape[1] = 3;

  a = NULL;
  in = dlpack(data, shape);
  in->version.major = 2;
  FAILS(DG_UNIMPLEMENTED, dg_tensor_from_dlpack(in, &a));
  in = dlpack(data, shape);
  in->flags = kReadOnly;
  FAILS(DG_FAILED_PRECONDITION, dg_tensor_from_dlpack(in, &a));
  in = dlpack(data, shape);
  in->dl_tensor.device.type = kCuda;
  FAILS(DG_UNIMPLEMENTED, dg_tensor_from_dlpack(in, &a));
  in = dlpack(data, shape);
  in->dl_tensor.dtype.lanes = 4;
  FAILS(DG_INVALID_ARGUMENT, dg_tensor_from_dlpack(in, &a));
  in = dlpack(data, shape);
  in->dl_tensor.dtype.code = 99;
  FAILS(DG_INVALID_ARGUMENT, dg_tensor_from_dlpack(in, &a));
  in = dlpack(data, shape);
  in->dl_tensor.ndim = -1;
  FAILS(DG_INVALID_ARGUMENT, dg_tensor_from_dlpack(in, &a));
  in = dlpack(data, NULL);
  FAILS(DG_INVALID_ARGUMENT, dg_tensor_from_dlpack(in, &a));
  SAYS(DG_INVALID_ARGUMENT, "data is NULL", dg_tensor_from_dlpack(dlpack(NULL, shape), &a));
  FAILS(DG_INVALID_ARGUMENT, dg_tensor_from_dlpack(dlpack(data, shape), NULL));
  CHECK(dlpack_deleted == 10 && a == NULL); /* taken each time */
  FAILS(DG_INVALID_ARGUMENT, dg_tensor_from_dlpack(NULL, &a));

  a = floats(data, 2, 3);
  OK(dg_tensor_require_grad(a));
  FAILS(DG_FAILED_PRECONDITION, dg_tensor_to_dlpack(a, &out));
  dg_tensor_destroy(a);
}

/* Memory that does not hold the elements as they are. */
static void test_no_plain_memory(void) {
  const float one[2] = {1, 2};
  const int64_t shape[1] = {1};
  dg_tensor *complex = NULL, *conjugate, *sparse, *zeros, *dense = floats(one, 1, 2);
  dg_value size;
  DLManagedTensorVersioned* out = NULL;
  void* data = NULL;
  int64_t layout[2];
  size_t dim_count = 0;
  OK(dg_tensor_from_data(one, DG_COMPLEX64, shape, 1, &complex));
  conjugate = op1("aten::conj", complex);
  FAILS(DG_FAILED_PRECONDITION, dg_tensor_data(conjugate, &data));
  FAILS(DG_FAILED_PRECONDITION, dg_tensor_to_dlpack(conjugate, &out));
  sparse = op1("aten::to_sparse", dense);
  FAILS(DG_FAILED_PRECONDITION, dg_tensor_data(sparse, &data));
  /* Zeros that are nowhere. */
  size = dg_value_integers(shape, 1);
  zeros = op("aten::_efficientzerotensor", &size, 1);
  FAILS(DG_FAILED_PRECONDITION, dg_tensor_data(zeros, &data));
  FAILS(DG_FAILED_PRECONDITION, dg_tensor_to_dlpack(zeros, &out));
  dg_tensor_destroy(zeros);
  dim_count = 7;
  FAILS(DG_FAILED_PRECONDITION, dg_tensor_layout(sparse, NULL, layout, 2, &dim_count));
  CHECK(dim_count == 7); /* as it was */
  CHECK(size_of(sparse, 1) == 2);
  CHECK(data == NULL && out == NULL);
  dg_tensor_destroy(dense);
  dg_tensor_destroy(sparse);
  dg_tensor_destroy(conjugate);
  dg_tensor_destroy(complex);
}

/* Shapes are copied out, so that nothing changes under them. */
static void test_layout(void) {
  const float data[6] = {1, 2, 3, 4, 5, 6};
  int64_t shape[3] = {0, 0, 7}, strides[3] = {0, 0, 7};
  size_t dim_count = 0;
  dg_tensor* a = floats(data, 2, 3);
  OK(dg_tensor_layout(a, NULL, NULL, 0, &dim_count));
  CHECK(dim_count == 2);
  OK(dg_tensor_layout(a, shape, strides, 3, &dim_count));
  CHECK(shape[0] == 2 && shape[1] == 3 && shape[2] == 7);
  CHECK(strides[0] == 3 && strides[1] == 1 && strides[2] == 7);
  dim_count = 0;
  FAILS(DG_OUT_OF_RANGE, dg_tensor_layout(a, shape, NULL, 1, &dim_count));
  CHECK(dim_count == 2);
  FAILS(DG_INVALID_ARGUMENT, dg_tensor_layout(a, shape, NULL, 3, NULL));
  dg_tensor_destroy(a);
}

/* Two rows and three, of two elements each. */
static void test_nested(void) {
  const float data[6] = {1, 2, 3, 4, 5, 6};
  dg_tensor *parts[2] = {floats(data, 2, 2), floats(data, 3, 2)}, *nested = NULL;
  DLManagedTensorVersioned* out = NULL;
  int64_t shape[3] = {0, 0, 0};
  size_t dim_count = 0;
  void* memory = NULL;
  dg_value list = dg_value_tensors((const dg_tensor* const*)parts, 2);
  OK(dg_op_tensors(DG_STR("aten::_nested_tensor_from_tensor_list"), &list, 1, &nested, 1));
  CHECK(dg_tensor_dim_count(nested) == 3);
  OK(dg_tensor_layout(nested, shape, NULL, 3, &dim_count));
  CHECK(dim_count == 3 && shape[0] == 2 && shape[1] == -1 && shape[2] == 2);
  FAILS(DG_FAILED_PRECONDITION, dg_tensor_layout(nested, NULL, shape, 3, &dim_count));
  FAILS(DG_FAILED_PRECONDITION, dg_tensor_data(nested, &memory));
  FAILS(DG_FAILED_PRECONDITION, dg_tensor_to_dlpack(nested, &out));
  dg_tensor_destroy(nested);
  dg_tensor_destroy(parts[0]);
  dg_tensor_destroy(parts[1]);
}

/* Which operators a language in which memory is safe may call as it likes. */
static void test_pure_operators(void) {
  const float data[2] = {1, 2};
  dg_tensor *a = floats(data, 1, 2), *beyond = NULL;
  const int64_t size[1] = {1 << 20}, stride[1] = {1};
  dg_value arguments[3];
  DLManagedTensorVersioned* out = NULL;
  void* memory = NULL;
  OK(dg_op_check_functional(DG_STR("aten::add.Tensor")));
  OK(dg_op_check_functional(DG_STR("aten::transpose.int")));
  SAYS(DG_PERMISSION_DENIED, "writes to its arguments",
       dg_op_check_functional(DG_STR("aten::add_.Tensor")));
  FAILS(DG_PERMISSION_DENIED, dg_op_check_functional(DG_STR("aten::add.out")));
  FAILS(DG_PERMISSION_DENIED,
        dg_op_check_functional(DG_STR("aten::batch_norm"))); /* to statistics */
  FAILS(DG_PERMISSION_DENIED, dg_op_check_functional(DG_STR("aten::unsqueeze_")));
  FAILS(DG_PERMISSION_DENIED, dg_op_check_functional(DG_STR("aten::from_file")));
  FAILS(DG_NOT_FOUND, dg_op_check_functional(DG_STR("aten::ad.Tensor")));
  FAILS(DG_PERMISSION_DENIED, dg_op_check_functional(DG_STR("inductor::_reinterpret_tensor")));
  arguments[0] = dg_value_tensor(a);
  arguments[1] = dg_value_integers(size, 1);
  arguments[2] = dg_value_integers(stride, 1);
  OK(dg_op_tensors(DG_STR("inductor::_reinterpret_tensor"), arguments, 3, &beyond, 1));
  SAYS(DG_FAILED_PRECONDITION, "too small", dg_tensor_data(beyond, &memory));
  SAYS(DG_FAILED_PRECONDITION, "too small", dg_tensor_to_dlpack(beyond, &out));
  dg_tensor_destroy(beyond);
  dg_tensor_destroy(a);
}

/* Every kind of argument and of result. */
/* Sizes that no memory has, as they come of a subtraction that went below zero. */
static void test_hostile_sizes(void) {
  const dg_value value = dg_value_none();
  const dg_tensor* tensor = NULL;
  dg_values* values = NULL;
  dg_message* message = NULL;
  dg_str name;
  name.data = "aten::exp";
  name.size = SIZE_MAX;
  SAYS(DG_INVALID_ARGUMENT, "the size of op is 18446744073709551615",
       dg_op_call(name, &value, 1, &values));
  SAYS(DG_INVALID_ARGUMENT, "the size of arguments is 18446744073709551615",
       dg_op_call(DG_STR("aten::exp"), &value, SIZE_MAX, &values));
  FAILS(DG_INVALID_ARGUMENT, dg_op_call(DG_STR("aten::exp"), &value, SIZE_MAX / 4, &values));
  SAYS(DG_INVALID_ARGUMENT, "the size of payload is",
       dg_message_create(name.data, SIZE_MAX, NULL, 0, &message));
  SAYS(DG_INVALID_ARGUMENT, "the size of tensors is",
       dg_message_create("", 0, &tensor, SIZE_MAX, &message));
  CHECK(values == NULL && message == NULL);
}

/* An operator's own errors about its arguments. */
static void test_bad_arguments(void) {
  const float data[6] = {1, 2, 3, 4, 5, 6};
  dg_tensor* a = floats(data, 2, 3);
  dg_value arguments[2];
  dg_values* values = NULL;
  dg_str rows = DG_STR("rows");
  arguments[0] = arguments[1] = dg_value_tensor(a);
  SAYS(DG_INVALID_ARGUMENT, "aten::mm: ", dg_op_call(DG_STR("aten::mm"), arguments, 2, &values));
  arguments[1] = dg_value_string(rows);
  SAYS(DG_INVALID_ARGUMENT, "'dim' names dimensions",
       dg_op_call(DG_STR("aten::argsort.dimname"), arguments, 2, &values));
  CHECK(values == NULL);
  dg_tensor_destroy(a);
}

static void test_values(void) {
  const float data[6] = {1, 2, 3, 4, 5, 6};
  const int64_t ints[2] = {3, 2};
  const double reals[2] = {2.0, 4.0};
  const uint8_t bools[3] = {1, 0, 1}, bad_bools[1] = {7};
  dg_tensor *a = floats(data, 2, 3), *b, *c;
  dg_value arguments[8], result;
  dg_values* values = NULL;

  arguments[0] = dg_value_tensor(a);
  arguments[1] = dg_value_integers(ints, 2);
  b = op("aten::reshape", arguments, 2);
  CHECK(size_of(b, 0) == 3);
  dg_tensor_destroy(b);

  arguments[1] = dg_value_real(0.5); /* a number for a tensor; `alpha` has a default */
  b = op("aten::add.Tensor", arguments, 2);
  CHECK(data_of(b)[0] == 1.5f);
  dg_tensor_destroy(b);

  arguments[1] = dg_value_integers(ints, 0); /* an empty list; bool; none */
  arguments[2] = dg_value_bool(true);
  arguments[3] = dg_value_integer(DG_FLOAT64); /* a dtype */
  b = op("aten::sum.dim_IntList", arguments, 4);
  CHECK(dg_tensor_dtype(b) == DG_FLOAT64 && dg_tensor_dim_count(b) == 2);
  dg_tensor_destroy(b);
  arguments[3] = dg_value_none();
  b = op("aten::sum.dim_IntList", arguments, 4);
  CHECK(dg_tensor_dtype(b) == DG_FLOAT32);
  dg_tensor_destroy(b);

  arguments[0] = dg_value_integers(ints, 2);
  arguments[1] = dg_value_complex(1, -1);
  arguments[2] = dg_value_none(); /* dtype, layout */
  arguments[3] = dg_value_none();
  arguments[4] = dg_value_string(DG_STR("cpu")); /* a device */
  b = op("aten::full", arguments, 5);
  CHECK(dg_tensor_dtype(b) == DG_COMPLEX64);
  CHECK(data_of(b)[1] == -1);
  dg_tensor_destroy(b);

  { /* lists of tensors; of optional ones; of reals; several results */
    const dg_tensor *pair[2], *indices[2];
    const int64_t first = 1;
    dg_tensor *index = NULL, *parts[3], *outs[2];
    pair[0] = pair[1] = a;
    arguments[0] = dg_value_tensors(pair, 2);
    b = op("aten::cat", arguments, 1);
    CHECK(size_of(b, 0) == 4);
    dg_tensor_destroy(b);

    OK(dg_tensor_from_data(&first, DG_INT64, ints + 2, 0, &index));
    indices[0] = NULL;
    indices[1] = index;
    arguments[0] = dg_value_tensor(a);
    arguments[1] = dg_value_tensors(indices, 2);
    b = op("aten::index.Tensor", arguments, 2);
    CHECK(data_of(b)[0] == 2 && data_of(b)[1] == 5);
    dg_tensor_destroy(b);
    dg_tensor_destroy(index);
    indices[1] = NULL;
    arguments[0] = dg_value_tensors(indices, 2); /* of tensors that must be there */
    FAILS(DG_INVALID_ARGUMENT, dg_op_call(DG_STR("aten::cat"), arguments, 1, &values));

    arguments[0] = dg_value_tensor(a);
    arguments[1] = dg_value_integer(1);
    OK(dg_op_tensors(DG_STR("aten::unbind.int"), arguments, 2, parts, 3)); /* a list, spread */
    CHECK(data_of(parts[2])[0] == 3);
    for (int i = 0; i < 3; ++i) dg_tensor_destroy(parts[i]);
    OK(dg_op_tensors(DG_STR("aten::max.dim"), arguments, 2, outs, 2));
    CHECK(dg_tensor_dtype(outs[1]) == DG_INT64);
    dg_tensor_destroy(outs[0]);
    dg_tensor_destroy(outs[1]);
    outs[0] = outs[1] = NULL;
    FAILS(DG_INVALID_ARGUMENT, dg_op_tensors(DG_STR("aten::max.dim"), arguments, 2, outs, 1));
    CHECK(outs[0] == NULL);

    OK(dg_op_call(DG_STR("aten::unbind.int"), arguments, 2, &values));
    CHECK(dg_values_count(values) == 1);
    OK(dg_values_get(values, 0, &result));
    CHECK(result.kind == DG_VALUE_TENSORS && result.as.tensors.size == 3);
    CHECK(dg_tensor_element_count(result.as.tensors.data[0]) == 2);
    OK(dg_tensor_clone(result.as.tensors.data[1], &c)); /* to keep one */
    FAILS(DG_INVALID_ARGUMENT, dg_values_get(values, 1, &result));
    dg_values_destroy(values);
    CHECK(dg_tensor_element_count(result.as.tensors.data ? c : NULL) == 2);
    CHECK(dg_values_count(values) == 0);
    dg_tensor_destroy(c);
  }
  /* size is an int, equal a bool, item a number. */
  OK(dg_op_call(DG_STR("aten::size.int"), arguments, 2, &values));
  OK(dg_values_get(values, 0, &result));
  CHECK(result.kind == DG_VALUE_INTEGER && result.as.integer == 3);
  dg_values_destroy(values);
  arguments[1] = dg_value_tensor(a);
  OK(dg_op_call(DG_STR("aten::equal"), arguments, 2, &values));
  OK(dg_values_get(values, 0, &result));
  CHECK(result.kind == DG_VALUE_BOOL && result.as.integer == 1);
  dg_values_destroy(values);
  FAILS(DG_INVALID_ARGUMENT, dg_op_tensors(DG_STR("aten::equal"), arguments, 2, &b, 1));
  b = op1("aten::sum", a);
  arguments[0] = dg_value_tensor(b);
  OK(dg_op_call(DG_STR("aten::item"), arguments, 1, &values));
  OK(dg_values_get(values, 0, &result));
  CHECK(result.kind == DG_VALUE_REAL && result.as.real == 21);
  dg_values_destroy(values);
  dg_tensor_destroy(b);

  { /* reals in a list */
    const float image[4] = {1, 2, 3, 4};
    const int64_t shape[4] = {1, 1, 2, 2};
    OK(dg_tensor_from_data(image, DG_FLOAT32, shape, 4, &b));
    arguments[0] = dg_value_tensor(b);
    arguments[1] = dg_value_none();
    arguments[2] = dg_value_reals(reals, 2);
    c = op("aten::upsample_nearest2d.vec", arguments, 3);
    CHECK(size_of(c, 2) == 4 && size_of(c, 3) == 8);
    dg_tensor_destroy(c);
    dg_tensor_destroy(b);
  }
  { /* bools in a list; results that are no tensor */
    dg_tensor* outs[3];
    const float image[4] = {1, 2, 3, 4}, weight[1] = {2};
    const int64_t shape[4] = {1, 1, 2, 2}, one[4] = {1, 1, 1, 1}, zero[2] = {0, 0};
    dg_value conv[11];
    OK(dg_tensor_from_data(image, DG_FLOAT32, shape, 4, &b));
    OK(dg_tensor_from_data(weight, DG_FLOAT32, one, 4, &c));
    conv[0] = dg_value_tensor(b);
    conv[1] = dg_value_tensor(b);
    conv[2] = dg_value_tensor(c);
    conv[3] = dg_value_none();
    conv[4] = dg_value_integers(one, 2);
    conv[5] = dg_value_integers(zero, 2);
    conv[6] = dg_value_integers(one, 2);
    conv[7] = dg_value_bool(false);
    conv[8] = dg_value_integers(zero, 2);
    conv[9] = dg_value_integer(1);
    conv[10] = dg_value_bools(bools, 3);
    OK(dg_op_tensors(DG_STR("aten::convolution_backward"), conv, 11, outs, 3));
    CHECK(data_of(outs[0])[3] == 8 && outs[1] == NULL && data_of(outs[2])[0] == 10);
    dg_tensor_destroy(outs[0]);
    dg_tensor_destroy(outs[2]);
    conv[10] = dg_value_bools(bad_bools, 1);
    FAILS(DG_INVALID_ARGUMENT,
          dg_op_tensors(DG_STR("aten::convolution_backward"), conv, 11, outs, 3));
    dg_tensor_destroy(b);
    dg_tensor_destroy(c);
  }

  arguments[0].kind = 1234;
  FAILS(DG_INVALID_ARGUMENT, dg_op_call(DG_STR("aten::exp"), arguments, 1, &values));
  arguments[0] = dg_value_integers(NULL, 5);
  FAILS(DG_INVALID_ARGUMENT, dg_op_call(DG_STR("aten::exp"), arguments, 1, &values));
  arguments[0] = dg_value_tensor(NULL);
  FAILS(DG_INVALID_ARGUMENT, dg_op_call(DG_STR("aten::exp"), arguments, 1, &values));
  FAILS(DG_INVALID_ARGUMENT, dg_op_call(DG_STR("aten::exp"), NULL, 1, &values));
  SAYS(DG_INVALID_ARGUMENT, "arguments is NULL, and its size is 1",
       dg_op_call(DG_STR("aten::exp"), NULL, 1, &values));
  SAYS(DG_INVALID_ARGUMENT, "out, where a result is to be stored, is NULL",
       dg_op_call(DG_STR("aten::exp"), arguments, 1, NULL));
  SAYS(DG_NOT_FOUND, "there is aten::exp", dg_op_call(DG_STR("aten::expp"), arguments, 1, &values));
  test_hostile_sizes();
  test_bad_arguments();
  FAILS(DG_NOT_FOUND, dg_op_call(DG_STR(""), arguments, 0, &values));
  arguments[0] = dg_value_tensor(a);
  FAILS(DG_INVALID_ARGUMENT, dg_op_call(DG_STR("aten::exp"), arguments, 1, NULL));
  arguments[1] = dg_value_tensor(a);
  {
    dg_error* error = dg_op_tensors(DG_STR("aten::mm"), arguments, 2, &b, 1); /* torch throws */
    CHECK(error != NULL && strstr(dg_error_message(error).data, "aten::mm") != NULL);
    dg_error_destroy(error);
  }
  dg_tensor_destroy(a);
}

static void test_messages(void) {
  const float data[2] = {1, 2};
  const dg_tensor* tensors[2];
  dg_tensor *a = floats(data, 1, 2), *b = NULL;
  dg_message* message = NULL;
  tensors[0] = a;
  tensors[1] = NULL;
  OK(dg_message_create("x\0y", 3, tensors, 2, &message));
  dg_tensor_destroy(a);
  CHECK(dg_message_payload(message).size == 3 && dg_message_payload(message).data[2] == 'y');
  CHECK(dg_message_tensor_count(message) == 2);
  OK(dg_message_tensor(message, 0, &b));
  CHECK(data_of(b)[1] == 2);
  dg_tensor_destroy(b);
  OK(dg_message_tensor(message, 1, &b));
  CHECK(b == NULL);
  FAILS(DG_INVALID_ARGUMENT, dg_message_tensor(message, 2, &b));
  tensors[0] = a; /* destroyed */
  {
    dg_message* none = NULL;
    FAILS(DG_INVALID_ARGUMENT, dg_message_create(NULL, 0, tensors, 1, &none));
    FAILS(DG_INVALID_ARGUMENT, dg_message_create(NULL, 1, NULL, 0, &none));
    FAILS(DG_INVALID_ARGUMENT, dg_message_create(NULL, 0, NULL, 1, &none));
    CHECK(none == NULL);
  }
  dg_message_destroy(message);
  CHECK(dg_message_tensor_count(message) == 0 && dg_message_payload(message).size == 0);
}

/* NULL, destroyed, of another kind, and pure garbage. */
static void test_wrong_handles(void) {
  const float data[1] = {1};
  dg_tensor *dead = floats(data, 1, 1), *alive = floats(data, 1, 1), *out = NULL;
  dg_message* message = NULL;
  const dg_tensor* wrong[5];
  void* pointer = NULL;
  int64_t shape[2];
  size_t dim_count = 0;
  OK(dg_message_create(NULL, 0, NULL, 0, &message));
  dg_tensor_destroy(dead);
  wrong[0] = NULL;
  wrong[1] = dead;
  wrong[2] = (const dg_tensor*)(const void*)message;
  wrong[3] = (const dg_tensor*)(uintptr_t)0x7fffdeadbeef;
  wrong[4] = (const dg_tensor*)(const void*)data;
  for (int i = 0; i < 5; ++i) {
    const dg_tensor* t = wrong[i];
    CHECK(dg_tensor_dtype(t) == -1 && dg_tensor_dim_count(t) == 0);
    FAILS(DG_INVALID_ARGUMENT, dg_tensor_layout(t, shape, NULL, 2, &dim_count));
    CHECK(dg_tensor_element_count(t) == 0 && dg_tensor_device(t).size == 0);
    CHECK(dg_tensor_torch(t) == NULL && !dg_tensor_requires_grad(t));
    FAILS(DG_INVALID_ARGUMENT, dg_tensor_data(t, &pointer));
    FAILS(DG_INVALID_ARGUMENT, dg_tensor_clone(t, &out));
    FAILS(DG_INVALID_ARGUMENT, dg_tensor_detach(t, &out));
    FAILS(DG_INVALID_ARGUMENT, dg_tensor_require_grad((dg_tensor*)(uintptr_t)t));
    dg_tensor_destroy((dg_tensor*)(uintptr_t)t); /* does nothing */
  }
  CHECK(dg_tensor_element_count(alive) == 1); /* which is not the dead one's handle */
  CHECK(dg_message_tensor_count(message) == 0);
  dg_message_destroy(message);
  dg_tensor_destroy(alive);
}

static void test_seed(void) {
  const int64_t three = 3;
  const dg_value shape = dg_value_integers(&three, 1);
  dg_tensor* x[2];
  for (int i = 0; i < 2; ++i) {
    OK(dg_manual_seed(7));
    x[i] = op("aten::randn", &shape, 1);
  }
  CHECK(memcmp(data_of(x[0]), data_of(x[1]), 3 * sizeof(float)) == 0);
  dg_tensor_destroy(x[1]);
  x[1] = op("aten::randn", &shape, 1);
  CHECK(memcmp(data_of(x[0]), data_of(x[1]), 3 * sizeof(float)) != 0);
  dg_tensor_destroy(x[0]);
  dg_tensor_destroy(x[1]);
}

/* -------------------------------------------------------------------------------- The process */

static void test_threads(void) {
  const uint32_t before = dg_num_threads();
  CHECK(before > 0);
  OK(dg_set_num_threads(3));
  CHECK(dg_num_threads() == 3);
  FAILS(DG_INVALID_ARGUMENT, dg_set_num_threads(0));
  FAILS(DG_INVALID_ARGUMENT, dg_set_num_threads(UINT32_MAX));
  CHECK(dg_num_threads() == 3);
  OK(dg_set_num_threads(before));
}

int main(void) {
  test_version();
  test_no_handle_comes_again();
  test_errors();
  test_tensors();
  test_memory();
  test_dlpack();
  test_no_plain_memory();
  test_layout();
  test_nested();
  test_pure_operators();
  test_values();
  test_messages();
  test_wrong_handles();
  test_seed();
  test_threads();
  return 0;
}
