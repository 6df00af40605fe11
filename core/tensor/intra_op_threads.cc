// Tells libtorch's OpenMP how many threads to use.
#include "core/tensor/intra_op_threads.h"

#include <ATen/Parallel.h>

// Of the OpenMP runtime that libtorch has, whichever header a compiler comes with. It holds for the
// calling thread.
extern "C" void omp_set_num_threads(int count);

namespace distgrad {

void SetIntraOpThreadsHere(int count) {
  // The first time on a thread libtorch sets what is right for the process. That comes first.
  at::get_num_threads();
  omp_set_num_threads(count);
}

}  // namespace distgrad
