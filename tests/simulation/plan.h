// The plan of a simulated job: what each worker does, and what goes wrong, as a seed draws it.
#ifndef DISTGRAD_TESTS_SIMULATION_PLAN_H_
#define DISTGRAD_TESTS_SIMULATION_PLAN_H_

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace distgrad::simulation {

// What may go wrong; a seed draws some of them.
enum Faults : unsigned {
  kSlowPackets = 1 << 0,  // some packets take long
  kStalls = 1 << 1,       // threads stand still
  kPreemption = 1 << 2,   // at locks
  kCuts = 1 << 3,         // connections break
  kHolds = 1 << 4,        // nothing gets through for a while, one way or both
  kKills = 1 << 5,        // workers die, and some come back
  kStoreFaults = 1 << 6,  // the store does not answer for a while, all of them or one
  kHalfCuts = 1 << 7,     // one end of a connection is gone, and the other does not hear of it
  kClockJumps = 1 << 8,   // somebody sets the wall clock
  kNoThreads = 1 << 9,    // the system starts no more threads of a worker for a while
  kDeafOnes = 1 << 10,    // one of several connections with a worker carries nothing any more
  kNoConnects = 1 << 11,  // connections that a worker opens fail for a while, at that end alone
  kChokedOnes = 1 << 12,  // and one takes no large packets any more
  kHangs = 1 << 13,       // connections that a worker opens are never there, nor do they fail
  kStops = 1 << 14,       // a process stands still, perhaps while its worker is started elsewhere
  kAllFaults = (1 << 15) - 1,
  kHarmless = kSlowPackets | kStalls | kPreemption | kClockJumps,  // nothing may fail for these
};

// One action of an actor: a worker's thread; fate; or all workers together, each by one more
// thread.
struct Action {
  static constexpr int kFate = -1, kAll = -2;  // actors
  enum Kind {
    kProgram,   // a: the seed of a program of property_program.h
    kCall,      // a: a worker; b: a Function; c: how it may end early, an Ending
    kPass,      // a: the seed of its path; b: an Ending; c: of the bits of PassFlags
    kUpdate,    // Worker::UpdateMembers
    kTrain,     // a: the seed of its path; b: how many came before it; c: of the bits of TrainFlags
    kPipeline,  // a: a seed; b: an Ending; c: of the bits of PipelineFlags
    kAverages,  // all: a: a seed; b: steps
    kBarrier,   // all: a: an OnLost, the same in all of a plan
    kGuest,     // fate: a worker joins; a: its number; b: a seed; c: milliseconds until it leaves
    kPause,     // a: milliseconds
    kCut,       // a, b: workers; c: silently
    kHold,      // a, b: workers; c: milliseconds, negative for one way
    kKill,      // a: a worker; b: silently; c: after so many milliseconds it comes back, -1: never
    kOutage,    // of the store; c: milliseconds; for worker a alone, or, where b is the same, all
    kClock,     // a: milliseconds that the wall clock jumps
    kRefuse,    // threads of worker a; c: milliseconds
    kDeafen,    // a, b: workers
    kFailOpen,  // a: a worker, which opens connections; b: these hang; c: milliseconds
    kBurst,     // a: a worker; b: at once, or one after the other; c: so many calls that end by
                // their deadlines
    kCrowd,     // a: a worker; b: threads; c: so many calls of each at once, which are cancelled
    kChoke,     // a, b: workers
    kAwait,     // a: a worker; c: milliseconds that an answer is waited for which does not come
    kWatch,     // Worker::OnMember
    kLook,      // a: a seed of passes; b: threads that look on; c: so often each
    kStop,  // a: a worker; c: milliseconds until its process goes on; b: after so many the worker
            // is started elsewhere, -1: never
    kKinds
  } kind;
  // The functions; kUntil runs until no caller waits for it any more.
  enum Function { kEcho, kSlow, kNested, kLater, kWaits, kThrows, kUntil, kFunctions };
  enum Ending { kByItself, kByDeadline, kByCancel, kByRelease, kEndings };
  enum PassFlags {
    kTwice = 1,
    kAsync = 2,
    kSideCall = 4,
    kCancelSide = 8,
    kVisit = 16,   // its path goes by a guest
    kWrite = 32,   // what was sent is written to at once, if it is small
    kLarge = 64,   // of one seed in four: what is sent goes over connections for large packets
    kAside = 128,  // and one on its way makes a call that it does not wait for
    kPassFlags = 256
  };
  enum TrainFlags { kTwoPasses = 1, kClips = 2, kTrainFlags = 4 };
  enum PipelineFlags { kEvaluates = 1, kFails = 2, kPipelineFlags = 4 };
  int actor = 0;
  int a = 0, b = 0, c = 0;
};

// The most optimizer steps that can be told apart in what they leave behind.
inline constexpr int kMostTrained = 12;

struct Plan {
  uint64_t seed = 0;
  unsigned faults = 0;
  bool trace = false, fibers = true;  // as in Schedule
  int workers = 2, threads = 2, guests = 0;
  std::vector<Action> actions;
};

// Draws a plan: everything in it follows from the seed and the faults that may be.
Plan DrawPlan(uint64_t seed, unsigned faults = kAllFaults);
// A plan as text, which is an order of Runner's, what a failure prints, and a file below cases/: a
// line that begins with "seed", and one for each action. ReadPlan passes over lines that begin with
// '#', and stops the program at one that it cannot read.
std::string Text(const Plan& plan);
std::string Text(const Action& action);
Plan ReadPlan(absl::string_view text);
// The workers of a pass, one for each byte, as `random` draws them, which begins as Action::a says.
std::string DrawPath(std::mt19937_64& random, int workers);
// Whom worker `i` of a path calls aside, if it goes on to `next`.
int AsideOf(int i, int next, int workers);

}  // namespace distgrad::simulation

#endif  // DISTGRAD_TESTS_SIMULATION_PLAN_H_
