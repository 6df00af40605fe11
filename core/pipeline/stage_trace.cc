// Names actions for people, and keeps them until they are taken.
#include "core/pipeline/stage_trace.h"

#include <new>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"

namespace distgrad {
namespace {

// As short as fits into a slice.
const char* ShortName(Action::Kind kind) {
  switch (kind) {
    case Action::Kind::kForward:
      return "forward";
    case Action::Kind::kBackward:
      return "backward";
    case Action::Kind::kBackwardInput:
      return "backward of inputs";
    case Action::Kind::kBackwardWeight:
      return "backward of weights";
    case Action::Kind::kSendActivation:
      return "send activations";
    case Action::Kind::kReceiveActivation:
      return "receive activations";
    case Action::Kind::kSendGradient:
      return "send gradients";
    case Action::Kind::kReceiveGradient:
      return "receive gradients";
    case Action::Kind::kStep:
      return "step";
  }
  return "";
}

RowSpan RowSpanOf(const StageSpan& span) {
  const Action& action = span.action;
  const bool is_step = action.kind == Action::Kind::kStep;
  return {.row = absl::StrCat("pipeline, rank ", span.rank),
          .name = is_step ? "step" : absl::StrCat(ShortName(action.kind), " ", action.micro_batch),
          .category = "pipeline",
          .begin = span.begin,
          .end = span.end,
          .args = {{"action", ShortName(action.kind)},
                   {"rank", absl::StrCat(span.rank)},
                   {"stage", absl::StrCat(action.stage)},
                   {"micro_batch", absl::StrCat(action.micro_batch)},
                   {"step", absl::StrCat(span.step)}}};
}

}  // namespace

struct StageTrace::Spans {
  explicit Spans(size_t max) : max_spans(max) {}

  void Record(const StageSpan& span) {
    absl::MutexLock lock(&mu);
    if (spans.size() < max_spans) {
      try {
        spans.push_back(span);
        return;
      } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): it counts as dropped
      }
    }
    ++dropped;
  }

  const size_t max_spans;
  absl::Mutex mu;
  std::vector<StageSpan> spans ABSL_GUARDED_BY(mu);
  uint64_t dropped ABSL_GUARDED_BY(mu) = 0;
};

StageTrace::StageTrace(size_t max_spans) : spans_(std::make_shared<Spans>(max_spans)) {}

std::function<void(const StageSpan&)> StageTrace::Recorder() const {
  return [spans = spans_](const StageSpan& span) { spans->Record(span); };
}

void StageTrace::Record(const StageSpan& span) { spans_->Record(span); }

std::vector<RowSpan> StageTrace::Take() {
  std::vector<StageSpan> taken;
  {
    absl::MutexLock lock(&spans_->mu);
    taken.swap(spans_->spans);
  }
  std::vector<RowSpan> rows;
  rows.reserve(taken.size());
  for (const StageSpan& span : taken) rows.push_back(RowSpanOf(span));
  return rows;
}

uint64_t StageTrace::dropped() const {
  absl::MutexLock lock(&spans_->mu);
  return spans_->dropped;
}

}  // namespace distgrad
