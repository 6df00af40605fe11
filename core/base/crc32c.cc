// Computes CRC-32C by the processor's instruction, 8 bytes at a time, or else by a table.
#include "core/base/crc32c.h"

#include <array>
#include <cstddef>
#include <cstring>

namespace distgrad {
namespace {

using Table = std::array<uint32_t, 256>;

constexpr Table MakeTable() {
  constexpr uint32_t kPolynomial = 0x82f63b78;  // with its bits the other way round
  Table table = {};
  for (uint32_t i = 0; i < table.size(); ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    table[i] = crc;
  }
  return table;
}
constexpr Table kTable = MakeTable();

uint32_t ByTable(uint32_t crc, const char* data, size_t size) {
  for (size_t i = 0; i < size; ++i) {
    crc = (crc >> 8) ^ kTable[(crc ^ static_cast<unsigned char>(data[i])) & 0xff];
  }
  return crc;
}

#ifdef __x86_64__
__attribute__((target("sse4.2"))) uint32_t ByInstruction(uint32_t crc, const char* data,
                                                         size_t size) {
  uint64_t wide = crc;
  for (; size >= sizeof(uint64_t); data += sizeof(uint64_t), size -= sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, data, sizeof(word));
    wide = __builtin_ia32_crc32di(wide, word);
  }
  return ByTable(static_cast<uint32_t>(wide), data, size);
}
#endif

}  // namespace

uint32_t Crc32c(absl::string_view bytes, uint32_t before) {
#ifdef __x86_64__
  static const bool has_instruction = __builtin_cpu_supports("sse4.2") != 0;
  if (has_instruction) return ~ByInstruction(~before, bytes.data(), bytes.size());
#endif
  return ~ByTable(~before, bytes.data(), bytes.size());
}

}  // namespace distgrad
