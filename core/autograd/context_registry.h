// The contexts that a worker knows of.
#ifndef DISTGRAD_CORE_AUTOGRAD_CONTEXT_REGISTRY_H_
#define DISTGRAD_CORE_AUTOGRAD_CONTEXT_REGISTRY_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "core/autograd/context_record.h"
#include "core/base/ids.h"

namespace distgrad {

// Thread-safe.
class ContextRegistry {
 public:
  // The number of ids that are remembered of contexts that are gone. A message older than so many
  // contexts is not on its way any more.
  static constexpr size_t kRemembered = 16384;

  // `most` contexts of one other origin are known at a time.
  ContextRegistry(WorkerRank self, Incarnation incarnation, size_t most = 4096)
      : self_{self, incarnation}, most_(most), last_(FirstCounter(incarnation)) {}

  // Makes a context whose origin is this worker.
  std::shared_ptr<ContextRecord> New();

  // Returns the context that a message names, and knows it from now on. kFailedPrecondition if it
  // was released lately: a message that comes late brings no context back. kResourceExhausted if
  // its origin has too many; and from then on, where that cost the context the `edge` of the
  // message (0: it has none), which would be waited for in vain.
  // One that is added is refused if this worker `refuses` new ones (ContextRecord::SetRefused()).
  // kUnavailable for one that an earlier incarnation of this worker may have taken part in
  // (SetOlder()); also of FindUnlessGone().
  absl::StatusOr<std::shared_ptr<ContextRecord>> FindOrAdd(ContextId id, EdgeId edge,
                                                           bool refuses = false);

  // Returns null if this worker does not know it.
  std::shared_ptr<ContextRecord> Find(ContextId id) const;
  // Returns null if this worker has never known it. kFailedPrecondition if it was released lately,
  // kResourceExhausted if it was refused.
  absl::StatusOr<std::shared_ptr<ContextRecord>> FindUnlessGone(ContextId id) const;
  std::vector<std::shared_ptr<ContextRecord>> All() const;
  size_t size() const;
  // Returns how many this worker has ever known.
  uint64_t begun() const;

  // Forgets a context; null if it is not known (any more). Needs no memory for one of this worker.
  std::shared_ptr<ContextRecord> Remove(ContextId id);

  // The id of the last context of New(); of none that there is if it has made none.
  ContextId last() const;
  // Has this worker's contexts of earlier incarnations refused, and all of others that are not
  // known here, until SetMayBeOlder(): an earlier incarnation may have a part of them.
  void SetComesBack();
  // Has fewer refused: those of the maker of each of `last` up to that one, until the maker has
  // said more. The contexts of makers that are not named are newer.
  void SetMayBeOlder(const std::vector<ContextId>& last);
  // Has those of the maker of `last` up to that one refused, as that maker says, and none behind it
  // of the same start (ids.h). Those of later starts stay as they were: it may have been a former
  // incarnation of the maker that said it. Returns whether it has the last word: whether no context
  // of the maker may be older any more.
  bool SetOlder(ContextId last);

 private:
  enum class Gone : uint8_t { kReleased, kTooMany, kOlder };
  void Remember(ContextId id, Gone how) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Why it is known no more, of one that is not known.
  absl::Status WhyGone(ContextId id) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  // How a context compares with this incarnation, of which an earlier one may have a part of it.
  enum class Age : uint8_t { kNewer, kMayBeOlder, kOlder };
  Age AgeOf(ContextId id) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status OlderError(ContextId id) const ABSL_SHARED_LOCKS_REQUIRED(mu_);

  const ContextRecord::Holder self_;
  const size_t most_;

  mutable absl::Mutex mu_;
  // Guarded by mu_.
  uint64_t last_ ABSL_GUARDED_BY(mu_);
  uint64_t begun_ ABSL_GUARDED_BY(mu_) = 0;
  absl::flat_hash_map<ContextId, std::shared_ptr<ContextRecord>> contexts_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<WorkerRank, size_t> of_origin_ ABSL_GUARDED_BY(mu_);  // how many; not ours
  absl::flat_hash_map<ContextId, Gone> gone_ ABSL_GUARDED_BY(mu_);
  std::deque<ContextId> gone_order_ ABSL_GUARDED_BY(mu_);
  // The last context of a maker that is older than this incarnation, as the maker has said, and the
  // last one that may be.
  struct Older {
    std::optional<ContextId> last = std::nullopt;
    ContextId may_be = 0;
  };
  absl::flat_hash_map<WorkerRank, Older> older_ ABSL_GUARDED_BY(mu_);
  bool refuses_others_ ABSL_GUARDED_BY(mu_) = false;  // all that are not known, whoever made them
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_CONTEXT_REGISTRY_H_
