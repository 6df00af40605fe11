// A stand-in for NCCL over the stand-in for CUDA, for ranks that are threads of one process: depend
// on it, and process groups add and broadcast without a GPU. It has communicators that do not
// block, all-reduce, reduce (sums of float, int64_t and bytes) and broadcast. Other functions of
// NCCL are the real ones, and know nothing of its communicators.
#ifndef DISTGRAD_TESTS_TESTING_FAKE_NCCL_FAKE_NCCL_H_
#define DISTGRAD_TESTS_TESTING_FAKE_NCCL_FAKE_NCCL_H_

#include <cstddef>

namespace distgrad::fake_nccl {

// How many communicators were made and have not been ended.
int Communicators();

// How many were told that they will end; how many wait to be destroyed, until all that they have
// sent is taken; and how many were, as against aborted.
int Finalized();
int Destroying();
int Destroyed();

// How often a communicator was ended, or told to, by a thread with another current device than the
// communicator's: NCCL makes that one current in the end, which makes a context on it.
int EndedElsewhere();

// Which cudaSetDevice() was the last one, before it, of the thread that ended the communicator that
// was ended last: as fake_cuda::LastSetDevice() says it.
size_t SetDeviceBeforeTheEnd();

// How many parts of collectives ranks have begun.
int Begun();

// While it lives, no rank hears of another one: nothing that waits for one gets ready.
class Silence {
 public:
  Silence();
  ~Silence();
  Silence(const Silence&) = delete;
  Silence& operator=(const Silence&) = delete;
};

// While it lives, no rank takes what another one has sent: none can be destroyed, as against
// aborted.
class Untaken {
 public:
  Untaken();
  ~Untaken();
  Untaken(const Untaken&) = delete;
  Untaken& operator=(const Untaken&) = delete;
};

// While it lives, every communicator says that a remote rank has gone, and none can be destroyed.
class Failure {
 public:
  Failure();
  ~Failure();
  Failure(const Failure&) = delete;
  Failure& operator=(const Failure&) = delete;
};

// As if NCCL's file said that communicators block: from the first ncclGetUniqueId() on, until this
// ends, the variable says so.
class BlockingByFile {
 public:
  BlockingByFile();
  ~BlockingByFile();
  BlockingByFile(const BlockingByFile&) = delete;
  BlockingByFile& operator=(const BlockingByFile&) = delete;
};

}  // namespace distgrad::fake_nccl

#endif  // DISTGRAD_TESTS_TESTING_FAKE_NCCL_FAKE_NCCL_H_
