// How many threads an operator uses that a thread calls.
#ifndef DISTGRAD_CORE_TENSOR_INTRA_OP_THREADS_H_
#define DISTGRAD_CORE_TENSOR_INTRA_OP_THREADS_H_

namespace distgrad {

// Sets it for the calling thread alone; at::set_num_threads() does for the whole process.
void SetIntraOpThreadsHere(int count);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TENSOR_INTRA_OP_THREADS_H_
