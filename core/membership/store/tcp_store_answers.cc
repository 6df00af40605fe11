// Reads answers field by field, with every length checked before its bytes are read.
#include "core/membership/store/tcp_store_answers.h"

#include <string>
#include <utility>

#include "core/base/status.h"
#include "core/membership/store/store_errors.h"
#include "core/membership/store/tcp_store_protocol.h"

namespace distgrad {
namespace {

absl::Status RoomIn(uint8_t answer) {
  return answer == kStoreIsFull ? absl::ResourceExhaustedError("it is full") : absl::OkStatus();
}

}  // namespace

absl::Status ReadPong(Socket& socket, Deadline deadline) {
  uint32_t answer = 0;
  DG_RETURN_IF_ERROR(socket.Receive(&answer, sizeof(answer), deadline));
  if (answer == kStorePing) return absl::OkStatus();
  return absl::UnavailableError("what answers there is no store");
}

absl::Status ReadDone(Socket& socket, Deadline deadline) {
  uint8_t done = 0;
  DG_RETURN_IF_ERROR(socket.Receive(&done, sizeof(done), deadline));
  return RoomIn(done);
}

absl::StatusOr<bool> ReadSessionAnswer(Socket& socket, Deadline deadline) {
  uint8_t known = 0;
  DG_RETURN_IF_ERROR(socket.Receive(&known, sizeof(known), deadline));
  DG_RETURN_IF_ERROR(RoomIn(known));
  return known != 0;
}

absl::StatusOr<std::optional<int64_t>> ReadSumOnce(Socket& socket, Deadline deadline) {
  uint8_t is_counter = 0;
  DG_RETURN_IF_ERROR(socket.Receive(&is_counter, sizeof(is_counter), deadline));
  DG_ASSIGN_OR_RETURN(const int64_t sum, ReadNumber(socket, deadline));
  DG_RETURN_IF_ERROR(RoomIn(is_counter));
  if (is_counter == 0) return std::nullopt;
  return sum;
}

absl::StatusOr<int64_t> ReadNumber(Socket& socket, Deadline deadline) {
  int64_t number = 0;
  DG_RETURN_IF_ERROR(socket.Receive(&number, sizeof(number), deadline));
  return number;
}

absl::StatusOr<std::vector<Store::Value>> ReadAwaitAnswer(Socket& socket, size_t keys,
                                                          Deadline deadline) {
  uint32_t size = 0;
  DG_RETURN_IF_ERROR(socket.Receive(&size, sizeof(size), deadline));
  if (size > kMaxAnswer + sizeof(uint32_t) + kMaxStoreValue) {
    return absl::InternalError("an answer that is too long");
  }
  std::string answer(size, '\0');
  DG_RETURN_IF_ERROR(socket.Receive(answer.data(), size, deadline));
  return DecodeStoreAwaitAnswer(answer, keys);
}

absl::StatusOr<std::vector<Store::Value>> ReadComparedValues(Socket& socket, size_t keys,
                                                             absl::string_view nothing,
                                                             Deadline deadline) {
  std::vector<Store::Value> values;
  for (size_t i = 0; i < keys; ++i) {
    uint64_t size = 0;
    DG_RETURN_IF_ERROR(socket.Receive(&size, sizeof(size), deadline));
    if (size > kMaxStoreValue) return absl::InternalError("a value that is too long");
    std::string value(size, '\0');
    DG_RETURN_IF_ERROR(socket.Receive(value.data(), size, deadline));
    values.push_back(value == nothing ? Store::Value() : Store::Value(std::move(value)));
  }
  return values;
}

}  // namespace distgrad
