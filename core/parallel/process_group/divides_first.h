// The rule by which averages of float16 stay below its largest number.
#ifndef DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_DIVIDES_FIRST_H_
#define DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_DIVIDES_FIRST_H_

#include <c10/core/ScalarType.h>

namespace distgrad {

// Whether averages of this dtype are divided before they are added up, and not after it: the sum of
// a few gradients in float16 may be more than its largest number, 65504.
inline bool DividesFirst(c10::ScalarType dtype) { return dtype == c10::ScalarType::Half; }

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_DIVIDES_FIRST_H_
