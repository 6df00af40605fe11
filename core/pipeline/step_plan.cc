// Writes and reads what ranks are told.
#include "core/pipeline/step_plan.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/base/wire.h"

namespace distgrad {
namespace {

constexpr uint32_t kMost = 1 << 20;  // of anything that is counted here

absl::Status Complete(const WireReader& reader, absl::string_view what) {
  DG_RETURN_IF_ERROR(reader.status(what));
  if (reader.remaining() > 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " has ", reader.remaining(), " bytes too many"));
  }
  return absl::OkStatus();
}

// A number of things that are to be read, each of at least `size` bytes. What cannot be there is
// none, and fails the reader.
uint32_t ReadCount(WireReader& reader, size_t size) {
  const uint32_t count = reader.U32();
  if (count <= kMost && count * size <= reader.remaining()) return count;
  reader.Rest();
  reader.U8();
  return 0;
}

void Append(const StepRef& ref, WireWriter& writer) {
  writer.U64(ref.step);
  writer.U32(static_cast<uint32_t>(ref.first_stage));
}

// Numbers of stages and micro-batches; -1 for what is none.
int ReadNumber(WireReader& reader) {
  const uint32_t number = reader.U32();
  return number < kMost ? static_cast<int>(number) : -1;
}

StepRef ReadRef(WireReader& reader) {
  const uint64_t step = reader.U64();
  return {step, ReadNumber(reader)};
}

// Without backward a step has no gradients, and may have no context, which the others need.
bool IsOfForward(Action::Kind kind) {
  return kind == Action::Kind::kForward || kind == Action::Kind::kSendActivation ||
         kind == Action::Kind::kReceiveActivation;
}

}  // namespace

int FirstStage(const std::vector<int>& rank_of_stage, int rank) {
  const auto first = std::find(rank_of_stage.begin(), rank_of_stage.end(), rank);
  return first == rank_of_stage.end() ? -1 : static_cast<int>(first - rank_of_stage.begin());
}

std::string EncodePlan(const StepPlan& plan) {
  std::string bytes;
  WireWriter writer(&bytes);
  writer.U64(plan.step);
  writer.U64(plan.pipeline);
  writer.U64(plan.follows);
  writer.U32(static_cast<uint32_t>(plan.rank));
  writer.U32(static_cast<uint32_t>(plan.micro_batches));
  writer.U8(static_cast<uint8_t>((plan.backward ? 1 : 0) | (plan.has_targets ? 2 : 0)));
  writer.U32(static_cast<uint32_t>(plan.rank_of_stage.size()));
  for (const int rank : plan.rank_of_stage) writer.U32(static_cast<uint32_t>(rank));
  writer.U32(static_cast<uint32_t>(plan.workers.size()));
  for (const std::string& worker : plan.workers) writer.Str16(worker);
  writer.U32(static_cast<uint32_t>(plan.list.size()));
  for (const Action& action : plan.list) {
    writer.U8(static_cast<uint8_t>(action.kind));
    writer.U32(static_cast<uint32_t>(action.stage));
    writer.U32(static_cast<uint32_t>(action.micro_batch));
  }
  for (const double weight : plan.weights) writer.F64(weight);
  return bytes;
}

absl::StatusOr<StepPlan> DecodePlan(absl::string_view bytes) {
  constexpr absl::string_view kWhat = "the plan of a pipeline's step";
  WireReader reader(bytes);
  StepPlan plan{.step = reader.U64()};
  plan.pipeline = reader.U64();
  plan.follows = reader.U64();
  plan.rank = ReadNumber(reader);
  plan.micro_batches = ReadNumber(reader);
  const uint8_t flags = reader.U8();
  plan.backward = flags & 1;
  plan.has_targets = flags & 2;
  plan.rank_of_stage.resize(ReadCount(reader, 4));
  for (int& rank : plan.rank_of_stage) rank = ReadNumber(reader);
  plan.workers.resize(ReadCount(reader, 2));
  for (std::string& worker : plan.workers) worker = std::string(reader.Str16());
  plan.list.resize(ReadCount(reader, 9));
  for (Action& action : plan.list) {
    action.kind = static_cast<Action::Kind>(reader.U8());
    action.stage = ReadNumber(reader);
    action.micro_batch = ReadNumber(reader);
  }
  DG_RETURN_IF_ERROR(reader.status(kWhat));
  const auto is_rank = [&](int rank) {
    return rank >= 0 && rank < static_cast<int>(plan.workers.size());
  };
  bool good = is_rank(plan.rank) && plan.micro_batches > 0 &&
              uint64_t(plan.micro_batches) * plan.rank_of_stage.size() <= kMost &&
              uint64_t(plan.micro_batches) * 8 <= reader.remaining();
  for (const int rank : plan.rank_of_stage) good = good && is_rank(rank);
  for (const Action& action : plan.list) {
    good = good && static_cast<int>(action.kind) < Action::kKinds && action.stage >= 0 &&
           action.stage < plan.stages() && plan.rank_of_stage[action.stage] == plan.rank &&
           action.micro_batch >= 0 && action.micro_batch < plan.micro_batches &&
           (plan.backward || IsOfForward(action.kind));
  }
  if (!good) {
    return absl::InvalidArgumentError(absl::StrCat(kWhat, " has numbers that do not fit together"));
  }
  // A rank is known by its first stage: to one that has none nothing could be sent.
  std::vector<bool> has_stage(plan.workers.size());
  for (const int rank : plan.rank_of_stage) has_stage[rank] = true;
  const auto without = std::find(has_stage.begin(), has_stage.end(), false);
  if (without != has_stage.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat(kWhat, ": rank ", without - has_stage.begin(), " has no stage"));
  }
  for (int m = 0; m < plan.micro_batches; ++m) {
    plan.weights.push_back(reader.F64());
    if (!std::isfinite(plan.weights.back())) {
      return absl::InvalidArgumentError(
          absl::StrCat("micro-batch ", m, " has the weight ", plan.weights.back()));
    }
  }
  DG_RETURN_IF_ERROR(Complete(reader, kWhat));
  return plan;
}

std::string EncodeStepRef(const StepRef& ref) {
  std::string bytes;
  WireWriter writer(&bytes);
  Append(ref, writer);
  return bytes;
}

absl::StatusOr<StepRef> DecodeStepRef(absl::string_view bytes) {
  WireReader reader(bytes);
  const StepRef ref = ReadRef(reader);
  DG_RETURN_IF_ERROR(Complete(reader, "the reference of a pipeline's step"));
  return ref;
}

std::string EncodeBegun(const Begun& begun) {
  std::string bytes;
  if (begun.names.empty() && begun.averager == 0) return bytes;  // as most
  WireWriter writer(&bytes);
  writer.U64(begun.averager);
  writer.U32(static_cast<uint32_t>(begun.names.size()));
  for (const std::string& name : begun.names) writer.Str16(name);
  return bytes;
}

absl::StatusOr<Begun> DecodeBegun(absl::string_view bytes) {
  Begun begun;
  if (bytes.empty()) return begun;
  WireReader reader(bytes);
  begun.averager = reader.U64();
  begun.names.resize(ReadCount(reader, 2));
  for (std::string& name : begun.names) name = std::string(reader.Str16());
  DG_RETURN_IF_ERROR(Complete(reader, "what a rank of a pipeline shares with others"));
  return begun;
}

std::string EncodeEnd(const StepEnd& end) {
  std::string bytes;
  WireWriter writer(&bytes);
  Append(end.of, writer);
  writer.U64(end.averager);
  return bytes;
}

absl::StatusOr<StepEnd> DecodeEnd(absl::string_view bytes) {
  WireReader reader(bytes);
  StepEnd end{.of = ReadRef(reader)};
  end.averager = reader.U64();
  DG_RETURN_IF_ERROR(Complete(reader, "the end of a pipeline's step"));
  return end;
}

std::string EncodeStepped(const Stepped& stepped) {
  std::string bytes;
  WireWriter writer(&bytes);
  writer.U32(static_cast<uint32_t>(stepped.size()));
  for (const auto& [stage, well] : stepped) {
    writer.U32(static_cast<uint32_t>(stage));
    writer.U8(well ? 1 : 0);
  }
  return bytes;
}

absl::StatusOr<Stepped> DecodeStepped(absl::string_view bytes) {
  Stepped stepped;
  WireReader reader(bytes);
  const uint32_t count = ReadCount(reader, 5);
  for (uint32_t i = 0; i < count; ++i) {
    const auto stage = static_cast<int>(reader.U32());
    stepped[stage] = reader.U8() != 0;
  }
  DG_RETURN_IF_ERROR(Complete(reader, "the stages of a rank that have stepped"));
  return stepped;
}

std::string EncodeTies(const Ties& ties) {
  std::string bytes;
  WireWriter writer(&bytes);
  Append(ties.to, writer);
  writer.U32(static_cast<uint32_t>(ties.ranks.size()));
  for (const auto& [name, ranks] : ties.ranks) {
    writer.Str16(name);
    writer.U32(static_cast<uint32_t>(ranks.size()));
    for (const int rank : ranks) writer.U32(static_cast<uint32_t>(rank));
  }
  writer.Str16(ties.averages);
  return bytes;
}

absl::StatusOr<Ties> DecodeTies(absl::string_view bytes) {
  constexpr absl::string_view kWhat = "the tied parameters of a pipeline's step";
  WireReader reader(bytes);
  Ties ties{.to = ReadRef(reader)};
  const uint32_t count = ReadCount(reader, 6);
  bool good = true;
  for (uint32_t i = 0; i < count; ++i) {
    std::vector<int>& ranks = ties.ranks[std::string(reader.Str16())];
    ranks.resize(ReadCount(reader, 4));
    int last = -1;
    for (int& rank : ranks) {
      rank = ReadNumber(reader);
      good = good && rank > last;
      last = rank;
    }
  }
  ties.averages = std::string(reader.Str16());
  DG_RETURN_IF_ERROR(Complete(reader, kWhat));
  if (good && ties.ranks.size() == count) return ties;
  return absl::InvalidArgumentError(
      absl::StrCat(kWhat, " have names twice, or ranks that do not rise"));
}

std::string EncodeParcel(const Parcel& parcel) {
  std::string bytes;
  WireWriter writer(&bytes);
  Append(parcel.to, writer);
  writer.U8(static_cast<uint8_t>(parcel.kind));
  writer.U32(static_cast<uint32_t>(parcel.stage));
  writer.U32(static_cast<uint32_t>(parcel.micro_batch));
  writer.U32(static_cast<uint32_t>(parcel.wanted.size()));
  for (const bool wanted : parcel.wanted) writer.U8(wanted ? 1 : 0);
  writer.U32(static_cast<uint32_t>(parcel.other));
  writer.U32(static_cast<uint32_t>(parcel.skips.size()));
  for (const StageSkip& skip : parcel.skips) {
    writer.U32(static_cast<uint32_t>(skip.from));
    writer.U32(static_cast<uint32_t>(skip.to));
  }
  return bytes;
}

absl::StatusOr<Parcel> DecodeParcel(absl::string_view bytes) {
  constexpr absl::string_view kWhat = "a parcel of a pipeline's step";
  WireReader reader(bytes);
  Parcel parcel{.to = ReadRef(reader)};
  const uint8_t kind = reader.U8();
  parcel.kind = static_cast<Parcel::Kind>(kind);
  parcel.stage = ReadNumber(reader);
  parcel.micro_batch = ReadNumber(reader);
  parcel.wanted.resize(ReadCount(reader, 1));
  for (size_t i = 0; i < parcel.wanted.size(); ++i) parcel.wanted[i] = reader.U8() != 0;
  parcel.other = ReadNumber(reader);
  parcel.skips.resize(ReadCount(reader, 8));
  bool skips_on = true;
  for (StageSkip& skip : parcel.skips) {
    skip.from = ReadNumber(reader);
    skip.to = ReadNumber(reader);
    skips_on = skips_on && skip.from >= 0 && skip.to >= parcel.stage && skip.to > skip.from + 1;
  }
  DG_RETURN_IF_ERROR(Complete(reader, kWhat));
  if (!skips_on) {
    return absl::InvalidArgumentError(absl::StrCat(
        kWhat, ", for stage ", parcel.stage, ", has a skip that does not lead on from there"));
  }
  if (kind > static_cast<uint8_t>(Parcel::Kind::kSkipGradient) || parcel.stage < 0 ||
      parcel.micro_batch < 0 || parcel.other < 0) {
    return absl::InvalidArgumentError(absl::StrCat(kWhat, " says that it is for stage ",
                                                   parcel.stage, ", micro-batch ",
                                                   parcel.micro_batch, ", of kind ", int{kind}));
  }
  return parcel;
}

}  // namespace distgrad
