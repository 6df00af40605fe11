// What a false server of a store answers to each kind of question of a client. The first byte says
// which kind, the second for how many keys; the rest is the answer, behind which the connection
// ends.
#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/base/check.h"
#include "core/base/wire.h"
#include "core/membership/store/tcp_store_answers.h"
#include "core/membership/store/tcp_store_protocol.h"
#include "tests/fuzz/target.h"

namespace distgrad {
namespace {

enum Kind : uint8_t { kPong, kDone, kSession, kSumOnce, kNumber, kAwaited, kCompared };

constexpr absl::string_view kNothing = "nothing 1 2";
constexpr size_t kMostBytes = 32 << 10;  // for which there is room between two sockets

std::string BytesOf(const std::vector<Store::Value>& values, Kind kind) {
  std::string bytes;
  WireWriter writer(&bytes);
  if (kind == kAwaited) {
    std::string answer;
    WireWriter(&answer).U32(static_cast<uint32_t>(values.size()));
    for (const Store::Value& value : values) {
      AppendStoreValue(value.has_value() ? &*value : nullptr, &answer);
    }
    writer.U32(static_cast<uint32_t>(answer.size()));
    return bytes + answer;
  }
  for (const Store::Value& value : values) {
    const std::string text = value.value_or(std::string(kNothing));
    writer.U64(text.size());
    bytes += text;
  }
  return bytes;
}

// Whether they were read; `bytes` is then what was read.
bool Read(Kind kind, size_t keys, Socket& socket, absl::string_view bytes) {
  const Deadline deadline = Deadline::After(absl::Minutes(1));
  std::string same;
  WireWriter writer(&same);
  switch (kind) {
    case kPong:
      if (!ReadPong(socket, deadline).ok()) return false;
      writer.U32(kStorePing);
      break;
    case kDone:
      return ReadDone(socket, deadline).ok();
    case kSession: {
      const absl::StatusOr<bool> known = ReadSessionAnswer(socket, deadline);
      if (known.ok()) DG_CHECK(*known == (bytes[0] != 0));
      return known.ok();
    }
    case kSumOnce: {
      const absl::StatusOr<std::optional<int64_t>> sum = ReadSumOnce(socket, deadline);
      if (!sum.ok()) return false;
      DG_CHECK(sum->has_value() == (bytes[0] != 0));
      writer.U8(static_cast<uint8_t>(bytes[0]));
      writer.I64(sum->value_or(WireReader(bytes.substr(1)).I64()));
      break;
    }
    case kNumber: {
      const absl::StatusOr<int64_t> number = ReadNumber(socket, deadline);
      if (!number.ok()) return false;
      writer.I64(*number);
      break;
    }
    case kAwaited:
    case kCompared: {
      const absl::StatusOr<std::vector<Store::Value>> values =
          kind == kAwaited ? ReadAwaitAnswer(socket, keys, deadline)
                           : ReadComparedValues(socket, keys, kNothing, deadline);
      if (!values.ok()) {
        DG_CHECK(!absl::IsDeadlineExceeded(values.status()));
        return false;
      }
      DG_CHECK(values->size() <= keys && (kind == kAwaited || values->size() == keys));
      same = BytesOf(*values, kind);
      break;
    }
    default:
      return false;
  }
  // What follows is no part of the answer.
  DG_CHECK(same == bytes.substr(0, same.size()));
  return true;
}

}  // namespace

bool ReadHostile(absl::string_view bytes) {
  WireReader reader(bytes);
  const auto kind = static_cast<Kind>(reader.U8());
  const size_t keys = reader.U8();
  if (!reader.ok() || reader.remaining() > kMostBytes) return false;
  int ends[2];
  DG_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
  Socket client(ends[0]);
  {
    Socket server(ends[1]);
    const absl::Status sent = server.Send(reader.Rest(), Deadline::After(absl::Minutes(1)));
    DG_CHECK(sent.ok()) << sent;
  }
  return Read(kind, keys, client, bytes.substr(2));
}

std::vector<std::string> GoodInputs() {
  std::vector<std::string> inputs;
  const auto add = [&](Kind kind, uint8_t keys, const std::string& answer) {
    inputs.emplace_back(1, static_cast<char>(kind));
    inputs.back() += static_cast<char>(keys);
    inputs.back() += answer;
  };
  const auto number = [](std::string before, int64_t number) {
    WireWriter(&before).I64(number);
    return before;
  };
  std::string pong;
  WireWriter(&pong).U32(kStorePing);
  add(kPong, 0, pong);
  add(kDone, 0, "\1");
  for (const char flag : {'\0', '\1'}) {
    add(kSession, 0, std::string(1, flag));
    add(kSumOnce, 0, number(std::string(1, flag), 7));
  }
  add(kNumber, 0, number("", -1));
  const std::vector<Store::Value> values = {"value", std::nullopt, ""};
  for (const Kind kind : {kAwaited, kCompared}) add(kind, 3, BytesOf(values, kind));
  add(kAwaited, 3, BytesOf({"value"}, kAwaited));  // the others are too long for one answer
  return inputs;
}

}  // namespace distgrad
