// Lists the rows of the table, and derives medians and ratios from what was measured.
#include "benchmarks/rows.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace distgrad {
namespace {

std::string Bytes(size_t bytes) {
  if (bytes >= (1 << 20)) return absl::StrCat(bytes >> 20, " MB");
  if (bytes >= (1 << 10)) return absl::StrCat(bytes >> 10, " KB");
  return absl::StrCat(bytes, " B");
}

std::vector<Contender> Pytorch(const Work& work, bool quick) {
  std::vector<Contender> contenders = {{"pytorch", "default", work}, {"pytorch", "uv", work}};
  if (!quick) {
    contenders.push_back({"pytorch", "uv+cma", work});
    contenders.push_back({"pytorch", "few", work});
  }
  return contenders;
}
std::vector<Contender> PytorchTcp(const Work& work) { return {{"pytorch", "uv", work}}; }

// Raw TensorPipe on distgrad's transport, with both ways of sending the bytes.
std::vector<Contender> RawTensorPipe(const std::string& transport, const Work& work) {
  const std::string raw = transport == "shm" ? "shm" : "uv";
  return {{"tensorpipe", raw, work}, {"tensorpipe", raw + "+cma", work}};
}

// Blocking sockets between two processes.
std::vector<Contender> Socket(const std::string& kind, const Work& work) {
  return {{"sockets", kind, work}};
}

}  // namespace

std::vector<Row> AllRows(const std::string& transport, bool quick) {
  std::vector<Row> rows;
  const auto add = [&](std::string metric, std::string title, const Work& work, double reach) {
    rows.push_back({.metric = std::move(metric),
                    .title = std::move(title),
                    .ours = {"distgrad", transport, work},
                    .pytorch = Pytorch(work, quick),
                    .reach = reach});
    return &rows.back();
  };
  Row* row;

  row = add("start", "start of a worker", {"start"}, 1);
  row->value = Row::Value::kMillis;
  row = add("threads", "its threads", {"thread_count"}, 1);
  row->value = Row::Value::kCount;
  row = add("memory", "its peak memory", {"memory"}, 1);
  row->value = Row::Value::kMegabytes;
  row = add("idle", "idle worker, share of a core", {"idle"}, 0.5);
  row->value = Row::Value::kPercent;
  row->against = Row::Against::kLimit;

  for (const size_t bytes : {size_t{4}, size_t{4} << 10}) {
    const Work work = {"call", 1, bytes};
    row = add(absl::StrCat("call_", bytes), "call, " + Bytes(bytes), work, 6);
    row->baselines = Socket("unix", work);
    row = add(absl::StrCat("call_tcp_", bytes), "call over TCP, " + Bytes(bytes), work, 4);
    row->ours.config = "tcp";
    row->pytorch = PytorchTcp(work);
    row->baselines = Socket("tcp", work);
  }
  for (const size_t bytes : {size_t{1} << 20, size_t{16} << 20}) {
    const Work work = {"call", 1, bytes};
    row = add(absl::StrCat("call_", bytes), "call, " + Bytes(bytes), work, 1.3);
    row->baselines = RawTensorPipe(transport, work);
    row->against = Row::Against::kBaseline;
    row->quick = bytes < (16 << 20);
  }
  row = add("call_beside", "call, 4 B, beside 64 MB", {"beside", 2, size_t{64} << 20}, 0);
  row->quick = false;
  for (const size_t bytes : {size_t{4}, size_t{4} << 10}) {
    row = add(absl::StrCat("calls_64_", bytes), "calls, 64 in flight, " + Bytes(bytes),
              {"calls", 64, bytes}, 8);
    row->value = Row::Value::kPerSecond;
  }
  for (const int count : {1, 10, 100}) {
    row = add(absl::StrCat("pass_", count),
              absl::StrCat("pass of ", count, " remote operator", count > 1 ? "s" : ""),
              {"pass", count, 4}, 6);
    row->quick = count < 100;
  }
  for (const int count : {8, 64, 500}) {
    row = add(absl::StrCat("fan_", count),
              absl::StrCat("pass of ", count, " at once", count == 500 ? " (1,000 edges)" : ""),
              {"fan", count, 4}, count == 500 ? 0 : 8);
    row->quick = count < 500;
  }
  for (const size_t bytes : {size_t{1} << 20, size_t{16} << 20}) {
    row = add(absl::StrCat("pass_1_", bytes), "pass of one, " + Bytes(bytes), {"pass", 1, bytes},
              bytes == (1 << 20) ? 2 : 1.3);
    row->quick = bytes < (16 << 20);
  }
  row = add("passes_8", "passes, 8 threads", {"threads", 8, 4}, 6);
  row->value = Row::Value::kPerSecond;
  for (const int nodes : {10, 1000, 10000}) {
    row = add(absl::StrCat("executor_", nodes),
              absl::StrCat("local graph of ", nodes, " nodes, to backward()"),
              {"executor", nodes, 4}, 1 / 0.75);
    row->ours = {"local", "", {"executor", nodes, 4}};
    row->pytorch = {{"local", "", {"backward", nodes, 4}}};
    row->quick = nodes < 10000;
    row->world = 1;
  }
  // Data parallel on the CPU, as a multiple of the plain step, which has one thread, as each
  // replica has; and what the plain step takes with a thread for each processor.
  for (const auto& [size, batch] : std::vector<std::pair<std::string, std::string>>{
           {"small", "small layers"}, {"large", "large layers"}, {"tall", "2,048 rows"}}) {
    const Work step = {absl::StrCat("step_", size), 1, 4};
    rows.push_back({.metric = absl::StrCat("step_", size, "_all"),
                    .title = absl::StrCat("plain step, ", batch, ", all processors"),
                    .world = 1,
                    .ours = {"local", "all", step},
                    .baselines = {{"local", "", step}},
                    .against = Row::Against::kBaseline,
                    .quick = false});
    for (const int replicas : {1, 2, 4, 8}) {
      const Work work = {absl::StrCat("parallel_", size), replicas, 4};
      rows.push_back({.metric = absl::StrCat(work.kind, "_", replicas),
                      .title = absl::StrCat("data parallel, ", batch, ", ", replicas,
                                            replicas > 1 ? " replicas" : " replica"),
                      .world = 1,
                      .ours = {"local", "", work},
                      .baselines = {{"local", "", step}},
                      .reach = size == "small" ? 0 : 1.05,
                      .against = Row::Against::kBaseline,
                      .quick = false});
    }
  }
  // Averages over processes, as a multiple of the steps without them.
  for (const char* const size : {"small", "many", "large"}) {
    for (const int ranks : {2, 4}) {
      const auto by = [&](const char* how) -> Contender {
        return {"ranks", "", {absl::StrCat(how, "_", size), 1, 4}};
      };
      rows.push_back(
          {.metric = absl::StrCat("averaged_", size, "_", ranks),
           .title = absl::StrCat("gradients averaged, ", size, " layers, ", ranks, " processes"),
           .world = ranks,
           .ours = by("averaged"),
           .pytorch = {by("reducer"), by("views")},
           .baselines = {by("alone")},
           .quick = false});
      rows.push_back({.metric = absl::StrCat("baseline_allreduce_", size, "_", ranks),
                      .title = absl::StrCat("baseline: one allreduce, ", size, " layers, ", ranks,
                                            " processes"),
                      .world = ranks,
                      .ours = {},
                      .baselines = {by("allreduce")},
                      .quick = false});
    }
  }
  for (const int hops : {1, 2, 3}) {
    row = add(absl::StrCat("chain_", hops + 1), absl::StrCat("chain of ", hops + 1, " workers"),
              {"chain", hops, 1024}, hops == 3 ? 5 : 0);
    row->world = 4;
    row->quick = hops == 3;
  }
  for (const int peers : {1, 2, 4, 8, 16}) {
    row = add(absl::StrCat("star_", peers), absl::StrCat("pass over a star of ", peers),
              {"fan", peers, 4}, 0);
    row->world = 17;
    row->quick = false;
  }
  // The baselines by themselves.
  const auto add_baseline = [&](const std::string& title, const std::string& side,
                                const std::string& config, const Work& work) {
    rows.push_back({.metric = absl::StrCat("baseline_", side, config.empty() ? "" : "_", config,
                                           "_", work.bytes),
                    .title = absl::StrCat("baseline: ", title, ", ", Bytes(work.bytes)),
                    .world = side == "local" ? 1 : 2,
                    .ours = {},
                    .baselines = {{side, config, work}},
                    .quick = work.bytes < (16 << 20)});
  };
  for (const size_t bytes : {size_t{4}, size_t{4} << 10, size_t{1} << 20, size_t{16} << 20}) {
    add_baseline("Unix socket", "sockets", "unix", {"call", 1, bytes});
    add_baseline("TCP socket", "sockets", "tcp", {"call", 1, bytes});
    add_baseline("TensorPipe over TCP", "tensorpipe", "uv", {"call", 1, bytes});
    add_baseline("TensorPipe, shared memory", "tensorpipe", "shm", {"call", 1, bytes});
    add_baseline("memcpy", "local", "", {"memcpy", 1, bytes});
  }
  return rows;
}

const char* UnitOf(const Row& row) {
  switch (row.value) {
    case Row::Value::kMicros:
      return "us";
    case Row::Value::kPerSecond:
      return "1/s";
    case Row::Value::kMillis:
      return "ms";
    case Row::Value::kPercent:
      return "%";
    case Row::Value::kCount:
      return "";
    case Row::Value::kMegabytes:
      return "MB";
  }
  return "";
}

double ValueOf(const Row& row, const Sample& sample) {
  return row.value == Row::Value::kPerSecond ? sample.per_second : sample.median_us;
}

namespace {

bool MoreIsBetter(const Row& row) { return row.value == Row::Value::kPerSecond; }

// Returns the median over rounds, or the best if other processes disturbed most of them.
double Typical(std::vector<double> values, bool noisy, bool more_is_better) {
  return Quantile(std::move(values), !noisy ? 0.5 : more_is_better ? 1 : 0);
}

double TypicalValue(const Result& result, const std::vector<Slice>& slices) {
  std::vector<double> values;
  for (const Slice& slice : slices) values.push_back(ValueOf(result.row, slice.sample));
  return Typical(std::move(values), result.noisy, MoreIsBetter(result.row));
}

double TypicalP99(const Result& result, const std::vector<Slice>& slices) {
  std::vector<double> values;
  for (const Slice& slice : slices) values.push_back(slice.sample.p99_us);
  return Typical(std::move(values), result.noisy, /*more_is_better=*/false);
}

// Returns how many times better `a` is than `b`: round by round, or best against best.
double Ratio(const Result& result, const std::vector<Slice>& a, const std::vector<Slice>& b) {
  const auto times = [&](double one, double other) {
    return MoreIsBetter(result.row) ? one / other : other / one;
  };
  if (result.noisy) return times(TypicalValue(result, a), TypicalValue(result, b));
  std::vector<double> ratios;
  for (size_t i = 0; i < a.size(); ++i) {
    ratios.push_back(times(ValueOf(result.row, a[i].sample), ValueOf(result.row, b[i].sample)));
  }
  return Quantile(std::move(ratios), 0.5);
}

int BestOf(const Result& result, const std::vector<std::vector<Slice>>& all, double* value) {
  int best = -1;
  for (size_t i = 0; i < all.size(); ++i) {
    const double typical = TypicalValue(result, all[i]);
    const bool better =
        best < 0 || (MoreIsBetter(result.row) ? typical > *value : typical < *value);
    if (!better) continue;
    best = static_cast<int>(i);
    *value = typical;
  }
  return best;
}

}  // namespace

void Derive(Result* result) {
  const Row& row = result->row;
  result->best = BestOf(*result, result->pytorch, &result->pytorch_value);
  result->best_baseline = BestOf(*result, result->baselines, &result->baseline_value);
  if (result->best >= 0) result->pytorch_p99 = TypicalP99(*result, result->pytorch[result->best]);
  if (result->ours.empty()) return;
  result->our_value = TypicalValue(*result, result->ours);
  result->our_p99 = TypicalP99(*result, result->ours);
  if (result->best >= 0)
    result->ratio = Ratio(*result, result->ours, result->pytorch[result->best]);
  if (result->best_baseline >= 0)
    result->baseline_ratio =
        1 / Ratio(*result, result->ours, result->baselines[result->best_baseline]);
  if (row.reach == 0) return;
  switch (row.against) {
    case Row::Against::kPytorch:
      result->achieved = result->ratio / row.reach;
      return;
    case Row::Against::kBaseline:
      result->achieved = row.reach / result->baseline_ratio;
      return;
    case Row::Against::kLimit:
      result->achieved = row.reach / result->our_value;
      return;
  }
}

}  // namespace distgrad
