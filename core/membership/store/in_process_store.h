// A store for the workers of one process.
#ifndef DISTGRAD_CORE_MEMBERSHIP_STORE_IN_PROCESS_STORE_H_
#define DISTGRAD_CORE_MEMBERSHIP_STORE_IN_PROCESS_STORE_H_

#include <memory>

#include "core/membership/store.h"

namespace distgrad {

std::shared_ptr<Store> NewInProcessStore();

}  // namespace distgrad

#endif  // DISTGRAD_CORE_MEMBERSHIP_STORE_IN_PROCESS_STORE_H_
