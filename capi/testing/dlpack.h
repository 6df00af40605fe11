/* The part of DLPack 1.0 that the tests use, from its specification. */
#ifndef DISTGRAD_CAPI_TESTING_DLPACK_H_
#define DISTGRAD_CAPI_TESTING_DLPACK_H_

#include <stdint.h>

enum { kCpu = 1, kCuda = 2, kInt = 0, kUInt = 1, kFloat = 2, kReadOnly = 1 };

typedef struct DLTensor {
  void* data;
  struct {
    int32_t type, id;
  } device;
  int32_t ndim;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} DLTensor;

typedef struct DLManagedTensorVersioned {
  struct {
    uint32_t major, minor;
  } version;
  void* manager_ctx;
  void (*deleter)(struct DLManagedTensorVersioned* self);
  uint64_t flags;
  DLTensor dl_tensor;
} DLManagedTensorVersioned;

#endif /* DISTGRAD_CAPI_TESTING_DLPACK_H_ */
