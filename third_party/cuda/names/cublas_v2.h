// NVIDIA's libraries of mathematics are loaded by libtorch alone, and their headers are not
// fetched. Headers of libtorch for CUDA that c10d's of NCCL includes name a few of their types, as
// handles and return values: they compile with the declarations in this folder, which are ours.
// Nothing of them may be used.
#pragma once

using cublasHandle_t = struct cublasContext*;
enum cublasStatus_t : int;
