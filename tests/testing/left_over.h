// What a worker and its process still hold, for tests that look for what is left over.
#ifndef DISTGRAD_TESTS_TESTING_LEFT_OVER_H_
#define DISTGRAD_TESTS_TESTING_LEFT_OVER_H_

#include <cstddef>
#include <string>
#include <vector>

#include "core/worker/worker.h"

namespace distgrad {

// Calls in flight, bytes that wait to be sent, passes and contexts; "" if there are none.
std::string LeftOfWorker(const Worker& worker);

// Once a process's workers have ended: their threads, and all descriptors if there are more than
// there were before its first worker; "" if neither.
std::string LeftOfProcess(size_t descriptors_before);

// What each descriptor of this process is, without the one that reads the folder of them.
std::vector<std::string> OpenDescriptors();
// The names of this process's threads.
std::vector<std::string> ThreadNames();
// This process's memory that is no file's: the system takes files' from a process when it likes.
// Without what the transport keeps of freed segments (KeptSegmentBytes()): that rises for as long
// as more of them are in use at once than ever before, up to its bound, and is no leak.
double ResidentBytes();
// What malloc has given out, without the same.
double HeapBytes();

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_TESTING_LEFT_OVER_H_
