// The numbers by which workers name each other and what they share.
#ifndef DISTGRAD_CORE_BASE_IDS_H_
#define DISTGRAD_CORE_BASE_IDS_H_

#include <cstdint>

namespace distgrad {

// A worker's number in its job.
using WorkerRank = uint16_t;

// Changes with each start of a worker, so that messages of an earlier incarnation can be told: the
// number of that start, from 1, in the top 32 bits, so that the later is the greater one.
using Incarnation = uint64_t;

constexpr uint64_t StartOf(Incarnation incarnation) { return incarnation >> 32; }

// Made by one worker and known by all: the maker's rank in the top 16 bits, a counter that
// starts at 1 below. 0 means none. A later incarnation counts on from where no earlier one got, so
// that it gives no number again.
using ContextId = uint64_t;  // made by the origin of the context
using EdgeId = uint64_t;     // made by the sender
using PassId = uint64_t;     // made by the initiator

inline constexpr int kCounterBits = 48;

constexpr uint64_t MakeId(WorkerRank maker, uint64_t counter) {
  return (uint64_t{maker} << kCounterBits) | (counter & ((uint64_t{1} << kCounterBits) - 1));
}
constexpr uint64_t FirstCounter(Incarnation incarnation) {
  return StartOf(incarnation) < 2 ? 0 : ((StartOf(incarnation) - 1) & 0xffff) << 32;
}
// The greatest that this incarnation of a maker may give.
constexpr uint64_t LastIdOf(WorkerRank maker, Incarnation incarnation) {
  return MakeId(maker, FirstCounter(incarnation) + 0xffffffff);
}
constexpr WorkerRank MakerOf(uint64_t id) { return static_cast<WorkerRank>(id >> kCounterBits); }
constexpr uint64_t CounterOf(uint64_t id) { return id & ((uint64_t{1} << kCounterBits) - 1); }

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_IDS_H_
