// Gloo is inside libtorch_cpu, and its headers are not in the wheel. The declarations in this
// folder are ours, and of two kinds:
//
// - What c10d's ProcessGroupGloo.hpp names, by pointers alone: its own layout does not depend on
//   it. Nothing of that may be used.
// - Gloo's transports, in transport/: classes that gloo_device.cc and encrypted_gloo.cc, both in
//   core/parallel/process_group, derive from. The order of their functions and the place of their
//   members are those of the Gloo in the pinned libtorch, and are to be looked at again with each
//   other one.
#pragma once

#include <chrono>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

}  // namespace gloo
