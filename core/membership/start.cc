// Numbers the starts of a job in its store, and gives each keys of its own.
#include "core/membership/start.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "core/base/complaints.h"
#include "core/base/random.h"
#include "core/base/status.h"
#include "core/membership/backoff.h"

namespace distgrad {
namespace {

// The keys. A worker asks under its rank with its nonce; worker 0 answers "<nonce> <number>".
std::string Question(int rank) { return absl::StrCat("start/ask/", rank); }
std::string Answer(int rank) { return absl::StrCat("start/answer/", rank); }
std::string Heard(int64_t number, int rank) {
  return absl::StrCat("start/", number, "/heard/", rank);
}

absl::StatusOr<int64_t> Ask(Store& store, int rank, const std::string& nonce, Deadline deadline) {
  DG_RETURN_IF_ERROR(store.Set(Question(rank), nonce, deadline));
  const std::string keys[] = {Answer(rank)};
  std::vector<Store::Value> seen(1);
  for (;;) {
    DG_ASSIGN_OR_RETURN(const std::vector<Store::Value> now,
                        store.AwaitChange(keys, seen, deadline));
    if (now == seen) return absl::DeadlineExceededError("worker 0 did not join in time");
    seen = now;
    // An answer with another nonce was for a worker of a former start.
    absl::string_view text = seen[0].has_value() ? absl::string_view(*seen[0]) : "";
    if (absl::ConsumePrefix(&text, absl::StrCat(nonce, " "))) {
      int64_t number = 0;
      if (!absl::SimpleAtoi(text, &number)) {
        return absl::InvalidArgumentError("the number of this start is malformed in the store");
      }
      DG_RETURN_IF_ERROR(store.Set(Heard(number, rank), "1", deadline));
      return number;
    }
  }
}

// A question that a former start has left is answered too, and nobody hears it.
absl::StatusOr<int64_t> Number(Store& store, int world_size, Deadline deadline) {
  DG_ASSIGN_OR_RETURN(const int64_t number, store.Add("start/count", 1, deadline));
  std::vector<std::string> answered(world_size);
  std::vector<int> missing(world_size - 1);
  for (int rank = 1; rank < world_size; ++rank) missing[rank - 1] = rank;
  Backoff backoff(deadline);
  do {
    std::vector<std::string> keys;
    for (const int rank : missing) {
      keys.push_back(Heard(number, rank));
      keys.push_back(Question(rank));
    }
    DG_ASSIGN_OR_RETURN(const std::vector<Store::Value> values, store.GetEach(keys, deadline));
    std::vector<int> still;
    for (size_t i = 0; i < missing.size(); ++i) {
      const int rank = missing[i];
      if (values[2 * i].has_value()) continue;  // it has heard
      still.push_back(rank);
      const std::string nonce = values[2 * i + 1].value_or("");
      if (nonce.empty() || nonce == answered[rank]) continue;
      DG_RETURN_IF_ERROR(store.Set(Answer(rank), absl::StrCat(nonce, " ", number), deadline));
      answered[rank] = nonce;
    }
    missing = std::move(still);
    if (missing.empty()) return number;
  } while (backoff.Sleep());
  return absl::DeadlineExceededError(
      absl::StrCat("of ", world_size, " workers these did not join in time: ", FirstOf(missing)));
}

}  // namespace

absl::StatusOr<int64_t> AgreeOnStart(Store& store, int rank, int world_size, uint64_t nonce,
                                     Deadline deadline) {
  if (rank == 0) return Number(store, world_size, deadline);
  return Ask(store, rank, absl::StrCat(nonce), deadline);
}

absl::StatusOr<std::shared_ptr<Store>> StoreOfThisStart(std::shared_ptr<Store> store, int rank,
                                                        int world_size, Deadline deadline) {
  DG_ASSIGN_OR_RETURN(const int64_t start,
                      AgreeOnStart(*store, rank, world_size, RandomNumber(), deadline));
  return std::make_shared<PrefixStore>(absl::StrCat(start, "/"), std::move(store));
}

}  // namespace distgrad
