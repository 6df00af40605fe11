// Writes a member's entry for the store, and reads it back, checked.
#include "core/membership/worker_info.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/base/wire.h"

namespace distgrad {

std::string EncodeWorkerInfo(const WorkerInfo& worker) {
  std::string entry;
  WireWriter writer(&entry);
  writer.U16(worker.rank);
  writer.U64(worker.incarnation);
  writer.U8(worker.left ? 1 : 0);
  writer.I64(worker.barriers);
  writer.Str16(worker.name);
  writer.Str16(worker.address);
  writer.Str16(worker.devices);
  return entry;
}

absl::StatusOr<WorkerInfo> DecodeWorkerInfo(absl::string_view entry, WorkerRank rank) {
  WireReader reader(entry);
  WorkerInfo worker;
  worker.rank = reader.U16();
  worker.incarnation = reader.U64();
  const uint8_t left = reader.U8();
  worker.left = left == 1;
  worker.barriers = reader.I64();
  worker.name = std::string(reader.Str16());
  worker.address = std::string(reader.Str16());
  worker.devices = std::string(reader.Str16());
  if (!reader.ok() || reader.remaining() > 0 || worker.rank != rank || left > 1 ||
      worker.barriers < 0 || worker.name.empty() || worker.name.size() > kMaxWorkerText ||
      worker.address.size() > kMaxWorkerText || worker.devices.size() > kMaxWorkerDevices) {
    return absl::InvalidArgumentError(
        absl::StrCat("the store's entry of worker ", rank, " is malformed"));
  }
  return worker;
}

}  // namespace distgrad
