// The messages between a manager and the parts of a checkpoint, as JSON.
//
//   plan   {}: what each part has
//   hold   which of it to save; keeps that, as it is or as a copy
//   write  where to; what is kept is written
//   check  which checkpoint to load; keeps what is needed of it
//   load   loads that
//   drop   ends what is on its way, and forgets what is kept
//
// What is kept belongs to a token of the manager's; the next one's takes its place.
#ifndef DISTGRAD_CORE_CHECKPOINT_JOB_MESSAGES_H_
#define DISTGRAD_CORE_CHECKPOINT_JOB_MESSAGES_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/base/ids.h"

namespace distgrad {

// Function names; the name of the checkpoint follows.
constexpr absl::string_view kCheckpointPlan = "distgrad.checkpoint.plan/";
constexpr absl::string_view kCheckpointHold = "distgrad.checkpoint.hold/";
constexpr absl::string_view kCheckpointWrite = "distgrad.checkpoint.write/";
constexpr absl::string_view kCheckpointCheck = "distgrad.checkpoint.check/";
constexpr absl::string_view kCheckpointLoad = "distgrad.checkpoint.load/";
constexpr absl::string_view kCheckpointDrop = "distgrad.checkpoint.drop/";
constexpr size_t kMaxCheckpointName = 900;  // with the longest of these it is a function's name

// The answer to plan.
struct PartPlan {
  struct Tensor {
    std::string type;  // dtype and shape, to be compared
    uint64_t bytes = 0;
  };
  std::map<std::string, Tensor> tensors;
  std::map<std::string, std::vector<std::string>> optimizers;  // their parameters' names
  // The same, and the other names of those that have several (tied weights).
  std::map<std::string, std::vector<std::string>> aliases;
  std::map<std::string, std::vector<std::string>> with_state;  // which of these have one by now
};

struct HoldRequest {
  uint64_t token = 0;
  bool copy = false;
  std::set<std::string> tensors;
  std::map<std::string, std::set<std::string>> optimizers;
  std::set<std::string> replicas;  // tensors that other workers have, too: their checksums
};
struct HoldReply {
  Incarnation incarnation = 0;                // of the worker
  bool loaded = false;                        // since the part was made
  std::map<std::string, uint32_t> checksums;  // of the replicas
};

// Its answer is a ManifestWorker (manifest.h).
struct WriteRequest {
  uint64_t token = 0;
  std::string folder;
  int number = 0;  // in the names of files: "00001-of-00003"
  int count = 0;
};

struct CheckRequest {
  uint64_t token = 0;
  std::string folder;
  uint32_t manifest = 0;  // the CRC-32C of its text
  bool strict = true;
};
// What does not fit, each with a text for people; strict or not.
struct CheckReply {
  Incarnation incarnation = 0;  // of the worker
  std::vector<std::string> missing = {};
  std::vector<std::string> mismatched = {};
  // Which file is damaged, or not there, and how; empty if none is. No error code says that: any
  // other thing that fails on the way may have the same.
  std::string damage = {};
};

absl::StatusOr<std::string> Encode(const PartPlan& plan);
absl::StatusOr<std::string> Encode(const HoldRequest& request);
absl::StatusOr<std::string> Encode(const HoldReply& reply);
absl::StatusOr<std::string> Encode(const WriteRequest& request);
absl::StatusOr<std::string> Encode(const CheckRequest& request);
absl::StatusOr<std::string> Encode(const CheckReply& reply);
absl::StatusOr<PartPlan> DecodePlanReply(absl::string_view text);
absl::StatusOr<HoldRequest> DecodeHold(absl::string_view text);
absl::StatusOr<HoldReply> DecodeHoldReply(absl::string_view text);
absl::StatusOr<WriteRequest> DecodeWrite(absl::string_view text);
absl::StatusOr<CheckRequest> DecodeCheck(absl::string_view text);
absl::StatusOr<CheckReply> DecodeCheckReply(absl::string_view text);
// Of load and drop.
std::string EncodeToken(uint64_t token);
absl::StatusOr<uint64_t> DecodeToken(absl::string_view text);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_CHECKPOINT_JOB_MESSAGES_H_
