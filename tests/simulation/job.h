// A whole job under simulation: real workers over a network and a store that fail, what they do and
// what becomes of them, all of it by a seed.
#ifndef DISTGRAD_TESTS_SIMULATION_JOB_H_
#define DISTGRAD_TESTS_SIMULATION_JOB_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "tests/simulation/scheduler.h"

namespace distgrad::simulation {

// What may go wrong; a seed draws some of them.
enum Faults : unsigned {
  kSlowPackets = 1 << 0,  // some packets take long
  kStalls = 1 << 1,       // threads stand still
  kPreemption = 1 << 2,   // at locks
  kCuts = 1 << 3,         // connections break
  kHolds = 1 << 4,        // nothing gets through for a while, one way or both
  kKills = 1 << 5,        // workers die, and some come back
  kStoreFaults = 1 << 6,  // the store does not answer for a while
  kHalfCuts = 1 << 7,     // one end of a connection is gone, and the other does not hear of it
  kAllFaults = (1 << 8) - 1,
  kHarmless = kSlowPackets | kStalls | kPreemption,  // nothing may fail for these
};

// One thing that somebody does: a worker's thread, or, with `actor` -1, fate.
struct Action {
  enum Kind {
    kProgram,  // a: the seed of a program of property_program.h
    kCall,     // a: a worker; b: a Function; c: how it may end early, an Ending
    kPass,     // a: the seed of its path; b: an Ending; c: of the bits of PassFlags
    kUpdate,   // Worker::UpdateMembers
    kPause,    // a: milliseconds
    kCut,      // a, b: workers; c: silently
    kHold,     // a, b: workers; c: milliseconds, negative for one way
    kKill,     // a: a worker; b: silently; c: after so many milliseconds it comes back, -1: never
    kOutage,   // of the store; c: milliseconds
  } kind;
  // kUntil: until nobody waits for it any more.
  enum Function { kEcho, kSlow, kNested, kLater, kWaits, kThrows, kUntil, kFunctions };
  enum Ending { kByItself, kByDeadline, kByCancel, kByRelease, kEndings };
  enum PassFlags { kTwice = 1, kAsync = 2, kSideCall = 4, kCancelSide = 8, kPassFlags = 16 };
  int actor = 0;
  int a = 0, b = 0, c = 0;
};

struct Plan {
  uint64_t seed = 0;
  unsigned faults = 0;
  bool trace = false;
  int workers = 2, threads = 2;
  std::vector<Action> actions;
};

// "seed=7 faults=127 without=3,4 trace": an order of Runner's. `without` leaves out actions.
std::string OrderText(uint64_t seed, unsigned faults, const std::vector<int>& without,
                      bool trace = false);
Plan PlanOf(absl::string_view order);
std::string Text(const Action& action);
std::string Text(const Plan& plan);

// For Runner.
std::string RunJob(absl::string_view order, Course* course);
void WarmUp();

}  // namespace distgrad::simulation

#endif  // DISTGRAD_TESTS_SIMULATION_JOB_H_
