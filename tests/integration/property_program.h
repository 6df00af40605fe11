// Random programs for property_test: what they consist of, how they are made from a seed, printed,
// and made smaller.
#ifndef DISTGRAD_TESTS_INTEGRATION_PROPERTY_PROGRAM_H_
#define DISTGRAD_TESTS_INTEGRATION_PROPERTY_PROGRAM_H_

#include <cstdint>
#include <string>
#include <vector>

namespace distgrad {

inline constexpr int kWorkers = 5;
inline constexpr int kNewcomer = kWorkers;  // one more, which joins when the others run already
inline constexpr int kParameters = 2;       // of each worker

// One step of a program, which a worker runs on a list of values. `a`, `b` and `c` are numbers that
// Kind says the meaning of. A number that means a value is taken modulo how many there are, so that
// a program stays one whatever is left out of it.
struct Step {
  enum Kind {
    kOp,         // a, b: values; c: which operator
    kParameter,  // a: which one of this worker
    kConstant,   // a: its hundredfold
    kInPlace,    // a: a value; b: an InPlace
    kFunction,   // a, b: the inputs of a custom function with two outputs; c: it materializes
    kHook,       // a: the value that gets a tensor hook
    kNodeHook,   // a: the value whose grad_fn gets a hook; b: 0 before it, 1 after it
    kNested,     // a: an input of a function whose backward runs `body` and a backward in a context
                 // of its own; b: 1: libtorch's own engine runs that, at once; c: 1: before it
                 // comes a backward that fails, and is caught
    kSaved,      // a: a value whose sine keeps it by a hook, which runs `body` when it is unpacked
    kOperator,   // a, b: values; c: the worker that multiplies them, as matrices of float
    kCall,       // a: a worker; b: the Modes that it is made in; c: 1: what it sends is written to
                 // as soon as it is sent
    kAsync,      // the same, whose results come with the next kJoin
    kJoin,
    kKeep,      // a: the value that this worker keeps
    kFetch,     // a: which one it kept
    kBackward,  // a: retain_graph; b: 1: twice, at once
  } kind;
  enum InPlace { kOnCopy, kOnViewOfCopy, kOnItself, kInPlaces };
  enum Modes { kDefault, kNoGrad, kInference, kAutocast, kModes };
  int a = 0, b = 0, c = 0;
  std::vector<int> arguments = {}, results = {};  // values; kBackward: the roots
  std::vector<Step> body = {};                    // kNested, kSaved, kCall, kAsync
};
using Steps = std::vector<Step>;

// What a program may have in it besides calls, operators, in-place and backwards.
enum Features : unsigned {
  kUnusedTensors = 1 << 0,  // tensor hooks and custom functions, which see what is not used
  kNestedContexts = 1 << 1,
  kNewcomers = 1 << 2,  // calls of a worker that the caller has to look up
  kNodeHooks = 1 << 3,
  kSendersInOtherModes = 1 << 4,  // other threads send meanwhile
  kAllFeatures = (1 << 5) - 1,
};

// The same for the same seed. With fewer features it is the same program without their steps.
Steps RandomProgram(uint64_t seed, unsigned features);

std::string Text(const Step& step);  // without its body
std::string Text(const Steps& steps);
int CountSteps(const Steps& steps);
// Whether it keeps, fetches or goes backward, here or in a handler that it calls. A frame joins
// before such a step, so that no handler runs beside it: of what a handler keeps meanwhile the
// order would be left to chance, and a hook must not be added to a node that a pass may be running.
bool HasSideEffects(const Step& step);
bool CallsNewcomer(const Steps& steps);

// All programs with one step less; then those with one value less that is passed on; then those
// in which one number is 0, since most say which of the values there are is meant. All of them are
// as right as the program itself.
std::vector<Steps> Smaller(const Steps& steps);

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_INTEGRATION_PROPERTY_PROGRAM_H_
