// The rows of the table: the work, the sides that do it, and the target.
#ifndef DISTGRAD_BENCHMARKS_ROWS_H_
#define DISTGRAD_BENCHMARKS_ROWS_H_

#include <map>
#include <string>
#include <vector>

#include "benchmarks/group.h"
#include "benchmarks/work.h"

namespace distgrad {

struct Contender {
  std::string side;
  std::string config;
  Work work;
  std::string program = {};  // another build of this program, to run it; empty: this one

  std::string name() const { return config.empty() ? side : side + " " + config; }
};

struct Row {
  enum class Value { kMicros, kPerSecond, kMillis, kPercent, kCount, kMegabytes };
  enum class Against { kPytorch, kBaseline, kLimit };

  std::string metric;
  std::string title;
  int world = 2;
  Value value = Value::kMicros;
  Contender ours;
  std::vector<Contender> pytorch = {};    // the best of them counts
  std::vector<Contender> baselines = {};  // the best of them is the baseline
  // kPytorch: at least so many times better than PyTorch. kBaseline: at most so many times the
  // baseline. kLimit: at most this value. 0: only measured.
  double reach = 0;
  Against against = Against::kPytorch;
  bool quick = true;  // part of --quick
};

// Returns all rows. `transport` is distgrad's, unless the row chooses one. PyTorch has two
// contenders in `quick` rows, and else four.
std::vector<Row> AllRows(const std::string& transport, bool quick);

const char* UnitOf(const Row& row);

// The measurements of a row.
struct Result {
  Row row;
  // One slice for each round that was kept, in order; by contender, as the row lists them.
  std::vector<Slice> ours;
  std::vector<std::vector<Slice>> pytorch, baselines;
  int rounds = 0;  // before some were dropped
  // There were too few quiet rounds: all were kept, and each contender's best one counts.
  bool noisy = false;

  // Derived by Derive().
  double our_value = 0, our_p99 = 0;
  double pytorch_value = 0, pytorch_p99 = 0;  // of the best
  double baseline_value = 0;
  int best = -1, best_baseline = -1;  // which of row.pytorch, row.baselines; -1: none
  double ratio = 0;                   // how many times better than PyTorch
  double baseline_ratio = 0;          // how many times the baseline
  // 1: the target; 2: twice as good. 0 without a target.
  double achieved = 0;
};

// Returns the value of a slice in the row's unit.
double ValueOf(const Row& row, const Sample& sample);

void Derive(Result* result);

}  // namespace distgrad

#endif  // DISTGRAD_BENCHMARKS_ROWS_H_
