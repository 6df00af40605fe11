// What a worker of the soak does for the others: the functions that they call, and its part of
// their models.
#ifndef DISTGRAD_TESTS_SOAK_FUNCTIONS_H_
#define DISTGRAD_TESTS_SOAK_FUNCTIONS_H_

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/worker/optimizer.h"
#include "core/worker/worker.h"

namespace distgrad {

// The workers. "front" and "middle" last as long as the soak; "victim" is killed, stopped and
// started again; "guest" leaves and comes again.
constexpr char kFront[] = "front", kMiddle[] = "middle", kVictim[] = "victim", kGuest[] = "guest";
// Those who last, each of whom trains a model of its own over all workers.
constexpr const char* kLeaders[] = {kFront, kMiddle};

constexpr double kLearningRate = 0.125;

// Whether it may be gone at any moment.
bool IsTransient(absl::string_view worker);
// What "scale" of that worker multiplies by: a power of two, so that products are exact.
double FactorOf(absl::string_view worker);
// What its part of that leader's model begins with.
at::Tensor InitialWeight(absl::string_view worker, absl::string_view leader);

// One layer of a model.
at::Tensor Layer(const at::Tensor& weight, const at::Tensor& x);

using Optimizers = std::map<std::string, std::unique_ptr<Optimizer>>;

// Registers
//
//   echo           sends the message back
//   wait           answers when nobody waits for it any more
//   block          computes something, and keeps its thread until nobody waits for it any more
//   fail           fails, by an exception if the payload is "throw"
//   relay          calls the function that is the payload's first word by way of the workers that
//                  are the others
//   scale          x times the worker's factor, which requires grad
//   forward        its layer of the model of the leader that is the payload
//   weight         what it has of that
//
// and returns this worker's part of the optimizer of each leader.
absl::StatusOr<Optimizers> ServeFunctions(Worker* worker);

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_SOAK_FUNCTIONS_H_
