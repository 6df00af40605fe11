// Tensors of every dtype and layout in packets and back, and packets that lie.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/tensor/message_codec.h"
#include "core/tensor/message_format.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

absl::StatusOr<Message> Read(Packet& packet, const MessageLimits& limits = {}) {
  WireReader reader(packet.bytes);
  SegmentReader segments(absl::MakeSpan(packet.segments));
  absl::StatusOr<Message> message = ReadMessage(reader, segments, limits);
  if (message.ok() && (reader.remaining() != 0 || segments.remaining() != 0)) {
    return absl::InternalError("something was left over");
  }
  return message;
}

at::Tensor RoundTrip(const at::Tensor& tensor) {
  Packet sent;
  absl::Status status = AppendMessage(Message{"p", {tensor}}, &sent);
  EXPECT_TRUE(status.ok()) << status;
  Packet received = CopyPacket(sent);
  absl::StatusOr<Message> message = Read(received);
  EXPECT_TRUE(message.ok()) << message.status();
  if (!message.ok()) return {};
  EXPECT_EQ(message->payload, "p");
  return message->tensors.at(0);
}

// The elements one by one, as bytes: tells NaNs and minus zeros apart, and knows every dtype.
std::string BytesOf(const at::Tensor& tensor) {
  at::Tensor whole = tensor.detach().resolve_conj().resolve_neg().contiguous();
  return std::string(static_cast<const char*>(whole.const_data_ptr()), whole.nbytes());
}

void ExpectSame(const at::Tensor& a, const at::Tensor& b) {
  ASSERT_EQ(a.defined(), b.defined());
  if (!a.defined()) return;
  ASSERT_EQ(a.scalar_type(), b.scalar_type());
  ASSERT_EQ(a.sizes(), b.sizes());
  ASSERT_EQ(a.layout(), b.layout());
  EXPECT_EQ(a.device(), b.device());
  EXPECT_FALSE(b.requires_grad());
  EXPECT_EQ(b.grad_fn(), nullptr);
  if (a.is_sparse()) {
    EXPECT_EQ(a.is_coalesced(), b.is_coalesced());
    EXPECT_EQ(BytesOf(a._indices()), BytesOf(b._indices()));
    EXPECT_EQ(BytesOf(a._values()), BytesOf(b._values()));
  } else {
    EXPECT_EQ(BytesOf(a), BytesOf(b));
  }
}

const at::ScalarType kDtypes[] = {at::kByte,
                                  at::kChar,
                                  at::kShort,
                                  at::kInt,
                                  at::kLong,
                                  at::kHalf,
                                  at::kFloat,
                                  at::kDouble,
                                  at::kComplexHalf,
                                  at::kComplexFloat,
                                  at::kComplexDouble,
                                  at::kBool,
                                  at::kBFloat16,
                                  at::kFloat8_e5m2,
                                  at::kFloat8_e4m3fn,
                                  at::kFloat8_e5m2fnuz,
                                  at::kFloat8_e4m3fnuz,
                                  at::ScalarType::UInt16,
                                  at::ScalarType::UInt32,
                                  at::ScalarType::UInt64,
                                  at::ScalarType::Float8_e8m0fnu,
                                  at::ScalarType::Float4_e2m1fn_x2,
                                  at::ScalarType::Bits8,
                                  at::ScalarType::Int4,
                                  at::ScalarType::UInt7};

at::Tensor RandomTensor(at::ScalarType dtype, at::IntArrayRef sizes, std::mt19937& random) {
  at::Tensor tensor = at::empty(sizes, dtype);
  auto* bytes = static_cast<unsigned char*>(tensor.data_ptr());
  for (size_t i = 0; i < tensor.nbytes(); ++i) {
    bytes[i] = static_cast<unsigned char>(random());
    if (dtype == at::kBool) bytes[i] &= 1;
  }
  return tensor;
}

TEST(Message, EveryDtypeAndSize) {
  std::mt19937 random(1);
  const std::vector<std::vector<int64_t>> shapes = {
      {}, {0}, {1}, {7}, {2, 3}, {3, 0, 2}, {2, 1, 3, 1}, {300, 50}, {1, 4096}, {5, 4, 3, 2, 1, 2}};
  for (at::ScalarType dtype : kDtypes) {
    for (const auto& shape : shapes) {
      SCOPED_TRACE(absl::StrCat(at::toString(dtype), " of ", shape.size(), " dims"));
      at::Tensor tensor = RandomTensor(dtype, shape, random);
      at::Tensor received = RoundTrip(tensor);
      ExpectSame(tensor, received);
      EXPECT_EQ(tensor.strides(), received.strides());
    }
  }
}

TEST(Message, SixtyFourDimensions) {
  std::vector<int64_t> sizes(64, 1);
  sizes[3] = 5;
  at::Tensor tensor = at::rand(sizes);
  ExpectSame(tensor, RoundTrip(tensor));
  ExpectSame(tensor.transpose(3, 40), RoundTrip(tensor.transpose(3, 40)));
  sizes.push_back(1);
  Packet packet;
  EXPECT_EQ(AppendMessage(Message{"", {at::rand(sizes)}}, &packet).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(Message, DenseStridesAreKept) {
  at::manual_seed(2);
  const at::Tensor base = at::rand({4, 5, 6, 7});
  for (const at::Tensor& tensor :
       {base.permute({3, 1, 0, 2}), base.contiguous(at::MemoryFormat::ChannelsLast),
        base.select(0, 2).transpose(0, 1),
        at::rand({1, 3, 1, 1}).contiguous(at::MemoryFormat::ChannelsLast),
        at::rand({2, 3, 4, 5, 6}).contiguous(at::MemoryFormat::ChannelsLast3d),
        at::rand({40, 50}).t(), at::rand({1, 1, 9}).transpose(0, 2)}) {
    at::Tensor received = RoundTrip(tensor);
    ExpectSame(tensor, received);
    EXPECT_EQ(tensor.strides(), received.strides());
    EXPECT_EQ(tensor.suggest_memory_format(), received.suggest_memory_format());
    EXPECT_EQ(tensor.is_non_overlapping_and_dense(), received.is_non_overlapping_and_dense());
  }
}

TEST(Message, SlicesSendOnlyThemselves) {
  at::manual_seed(3);
  const at::Tensor base = at::rand({1000, 64});
  for (const at::Tensor& tensor :
       {base.slice(0, 10, 20), base.slice(1, 3, 9), base.slice(0, 0, 1000, 7), base.select(1, 5),
        base.slice(1, 63), base.diagonal(), base.as_strided({3, 3}, {1, 1}),
        base.slice(1, 0, 2).t(), base.slice(0, 5, 6).t(), base.slice(0, 5, 6).slice(1, 0, 8).t()}) {
    Packet packet;
    ASSERT_TRUE(AppendMessage(Message{"", {tensor}}, &packet).ok());
    size_t sent = packet.bytes.size();
    for (const Segment& segment : packet.segments) sent += segment.size;
    EXPECT_LE(sent, tensor.nbytes() + 100);
    ExpectSame(tensor, RoundTrip(tensor));
  }
}

TEST(Message, ExpandedTensorsSendEachElementOnce) {
  at::manual_seed(4);
  for (const at::Tensor& tensor :
       {at::rand({}).expand({1000, 1000}), at::rand({5, 1}).expand({5, 100000}),
        at::rand({5, 1, 6}).expand({5, 3000, 6}), at::rand({3, 4}).t().expand({100, 4, 3})}) {
    Packet packet;
    ASSERT_TRUE(AppendMessage(Message{"", {tensor}}, &packet).ok());
    EXPECT_LT(packet.bytes.size(), 300);
    EXPECT_TRUE(packet.segments.empty());
    at::Tensor received = RoundTrip(tensor);
    EXPECT_EQ(received.strides(), tensor.strides());
    ExpectSame(tensor, received);
  }
}

// It is one for an accelerator, and arrives in any grad mode.
TEST(Message, AViewOfAnExpandedTensorThatWasCopiedMayBeWrittenTo) {
  for (const bool grad_mode : {false, true}) {
    SCOPED_TRACE(grad_mode);
    at::Tensor copy;
    {
      const at::AutoGradMode mode(grad_mode);
      copy = internal::CopyTo(at::rand({5, 1}).expand({5, 100}), at::kMeta);
    }
    EXPECT_EQ(copy.strides(), at::IntArrayRef({1, 0}));
    EXPECT_FALSE(copy.is_view());
    torch::autograd::create_gradient_edge(
        copy, std::make_shared<torch::autograd::DelayedError>("unused", /*num_inputs=*/0));
    EXPECT_NO_THROW(copy.select(1, 0).mul_(2));
  }
}

TEST(Message, ConjugateNegativeAndZeroTensorsArriveResolved) {
  at::manual_seed(5);
  const at::Tensor z = at::rand({3, 4}, at::kComplexFloat);
  for (const at::Tensor& tensor : {z.conj(), at::imag(z.conj()), z.t().conj()}) {
    at::Tensor received = RoundTrip(tensor);
    EXPECT_FALSE(received.is_conj() || received.is_neg());
    ExpectSame(tensor, received);
  }
  at::Tensor zero = at::_efficientzerotensor({2, 3});
  at::Tensor received = RoundTrip(zero);
  EXPECT_FALSE(received._is_zerotensor());
  EXPECT_TRUE(at::equal(received, at::zeros({2, 3})));
}

at::Tensor RandomSparse(int64_t rows, int64_t entries, bool coalesce) {
  at::Tensor indices =
      at::stack({at::randint(rows, {entries}, at::kLong), at::randint(8, {entries}, at::kLong)});
  at::Tensor sparse = at::sparse_coo_tensor(indices, at::rand({entries, 5}), {rows, 8, 5});
  return coalesce ? sparse.coalesce() : sparse;
}

TEST(Message, Sparse) {
  at::manual_seed(6);
  for (bool coalesce : {false, true}) {
    for (int64_t entries : {0, 1, 7, 2000}) {
      at::Tensor sparse = RandomSparse(30, entries, coalesce);
      at::Tensor received = RoundTrip(sparse);
      ExpectSame(sparse, received);
      EXPECT_TRUE(at::equal(sparse.to_dense(), received.to_dense()));
    }
  }
  // As the gradient of an embedding comes: indices and values that are views.
  at::Tensor indices = at::arange(12).slice(0, 0, 12, 3).reshape({1, -1});
  at::Tensor views = at::_sparse_coo_tensor_unsafe(indices, at::rand({1, 3}).expand({4, 3}),
                                                   {100, 3}, at::TensorOptions(), false);
  at::Tensor received = RoundTrip(views);
  EXPECT_TRUE(at::equal(views.to_dense(), received.to_dense()));
  // One row of indices, with the stride of the longer one that it was cut from: what coalesce()
  // makes where places are there twice.
  at::Tensor rows = at::tensor({2, 7, 2, 2, 5}, at::kLong).unsqueeze(0);
  at::Tensor cut = at::sparse_coo_tensor(rows, at::rand({5, 3}), {9, 3}).coalesce();
  EXPECT_EQ(cut._indices().sizes(), at::IntArrayRef({1, 3}));
  EXPECT_EQ(cut._indices().stride(0), 5);
  at::Tensor arrived = RoundTrip(cut);
  EXPECT_TRUE(at::equal(arrived.to_dense(), cut.to_dense()));
  EXPECT_TRUE(arrived.is_coalesced());
  // No sparse dimensions at all.
  at::Tensor none = at::sparse_coo_tensor(at::empty({0, 1}, at::kLong), at::rand({1, 3}), {3});
  EXPECT_TRUE(at::equal(none.to_dense(), RoundTrip(none).to_dense()));
}

TEST(Message, ArrivesWithoutHistory) {
  at::Tensor leaf = at::rand({3}).requires_grad_();
  ExpectSame(leaf, RoundTrip(leaf));
  ExpectSame(leaf * 2, RoundTrip(leaf * 2));
  at::Tensor strided = (at::rand({4, 4}).requires_grad_() * 2).slice(1, 0, 2);
  ExpectSame(strided, RoundTrip(strided));
}

TEST(Message, SeveralInOnePacket) {
  at::manual_seed(7);
  const std::vector<Message> messages = {
      {"one", {at::rand({3}), at::Tensor(), at::rand({4000})}},
      {"", {}},
      {std::string(100, '\0'), {at::rand({2000}), RandomSparse(9, 3000, true), at::rand({})}}};
  Packet packet;
  packet.bytes = "before";
  for (const Message& message : messages) ASSERT_TRUE(AppendMessage(message, &packet).ok());
  packet.bytes += "after";
  Packet received = CopyPacket(packet);
  WireReader reader(received.bytes);
  char before[6];
  reader.Raw(before, 6);
  SegmentReader segments(absl::MakeSpan(received.segments));
  for (const Message& message : messages) {
    absl::StatusOr<Message> read = ReadMessage(reader, segments, {});
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->payload, message.payload);
    ASSERT_EQ(read->tensors.size(), message.tensors.size());
    for (size_t i = 0; i < message.tensors.size(); ++i) {
      ExpectSame(message.tensors[i], read->tensors[i]);
    }
  }
  EXPECT_EQ(reader.Rest(), "after");
  EXPECT_EQ(segments.remaining(), 0);
}

TEST(Message, SmallIsCopiedAndLargeIsNot) {
  at::Tensor small = at::zeros({int64_t{kInlineBytes}}, at::kByte);
  at::Tensor large = at::zeros({int64_t{kInlineBytes} + 1}, at::kByte);
  Packet packet;
  ASSERT_TRUE(AppendMessage(Message{"", {small, large}}, &packet).ok());
  ASSERT_EQ(packet.segments.size(), 1);
  EXPECT_EQ(packet.segments[0].data, large.data_ptr());
  small.fill_(1);
  Packet received = CopyPacket(packet);
  const void* segment = received.segments[0].data;
  absl::StatusOr<Message> message = Read(received);
  ASSERT_TRUE(message.ok());
  EXPECT_EQ(message->tensors[0].sum().item<int64_t>(), 0);
  EXPECT_EQ(message->tensors[1].data_ptr(), segment);
  message->tensors[0].fill_(7);
  EXPECT_EQ(small.max().item<int64_t>(), 1);
}

TEST(Message, SegmentKeepsStorageAndReceivedTensorKeepsSegment) {
  Packet packet;
  {
    at::Tensor large = at::arange(5000, at::kDouble);
    ASSERT_TRUE(AppendMessage(Message{"", {large}}, &packet).ok());
  }
  std::weak_ptr<void> owner = packet.segments[0].owner;
  {
    at::Tensor received;
    {
      absl::StatusOr<Message> message = Read(packet);
      ASSERT_TRUE(message.ok());
      received = message->tensors[0];
    }
    packet = {};
    EXPECT_FALSE(owner.expired());
    EXPECT_TRUE(at::equal(received, at::arange(5000, at::kDouble)));
    EXPECT_TRUE(received.add_(1).is_contiguous());  // it is the receiver's to write to
  }
  EXPECT_TRUE(owner.expired());
}

TEST(Message, WhatCannotBeSent) {
  Packet packet;
  packet.bytes = "kept";
  auto code = [&packet](const at::Tensor& tensor) {
    absl::Status status =
        AppendMessage(Message{"payload", {at::zeros({9000}), at::zeros({1}), tensor}}, &packet);
    EXPECT_TRUE(absl::StrContains(status.message(), "tensor 2: ")) << status;
    EXPECT_EQ(packet.bytes, "kept");
    EXPECT_TRUE(packet.segments.empty());
    return status.code();
  };
  EXPECT_EQ(code(at::quantize_per_tensor(at::rand({4}), 0.1, 0, at::kQInt8)),
            absl::StatusCode::kUnimplemented);
  EXPECT_EQ(code(at::rand({4, 4}).to_sparse_csr()), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(code(at::empty({4}, at::device(at::kMeta))), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(code(at::_nested_tensor_from_tensor_list({at::rand({2}), at::rand({3})})),
            absl::StatusCode::kUnimplemented);
  at::Tensor hollow = at::rand({100});
  hollow.storage().set_nbytes(8);
  EXPECT_EQ(code(hollow), absl::StatusCode::kInvalidArgument);
}

TEST(Message, Limits) {
  Packet packet;
  ASSERT_TRUE(AppendMessage(Message{"1234", {at::rand({1, 1}), at::Tensor()}}, &packet).ok());
  MessageLimits exact;
  exact.max_tensors = 2;
  exact.max_payload_bytes = 4;
  exact.max_dims = 2;
  EXPECT_TRUE(Read(packet, exact).ok());
  for (int i = 0; i < 3; ++i) {
    MessageLimits less = exact;
    if (i == 0) --less.max_tensors;
    if (i == 1) --less.max_payload_bytes;
    if (i == 2) --less.max_dims;
    EXPECT_EQ(Read(packet, less).status().code(), absl::StatusCode::kResourceExhausted) << i;
  }
}

// ---------------------------------------------------------------- hostile input

// A message of one tensor, field by field.
std::string Encoded(uint8_t form, at::ScalarType dtype, uint8_t flags, uint8_t device,
                    std::vector<int64_t> sizes, std::vector<int64_t> strides = {},
                    std::string elements = "") {
  std::string bytes;
  WireWriter writer(&bytes);
  writer.U8(1);
  writer.U32(1);
  writer.U64(0);
  for (uint8_t byte : {form, static_cast<uint8_t>(dtype), static_cast<uint8_t>(sizes.size()), flags,
                       device, uint8_t{0}, uint8_t{0}, uint8_t{0}}) {
    writer.U8(byte);
  }
  for (int64_t size : sizes) writer.I64(size);
  for (int64_t stride : strides) writer.I64(stride);
  writer.Raw(elements.data(), elements.size());
  return bytes;
}

absl::Status ReadBytes(std::string bytes, size_t segment_bytes = 0) {
  Packet packet;
  packet.bytes = std::move(bytes);
  if (segment_bytes != 0) packet.segments.push_back(AllocateSegment(segment_bytes));
  return Read(packet).status();
}

TEST(HostileMessage, FieldByField) {
  const int64_t huge = int64_t{1} << 62;
  const std::string four(16, '\0');
  ASSERT_TRUE(ReadBytes(Encoded(1, at::kFloat, 0, 0, {4}, {}, four)).ok());
  ASSERT_TRUE(ReadBytes(Encoded(1, at::kFloat, 1, 0, {2, 2}, {1, 2}, four)).ok());
  ASSERT_TRUE(ReadBytes(Encoded(1, at::kFloat, 2, 0, {4}), 16).ok());
  const std::vector<std::string> bad = {
      Encoded(3, at::kFloat, 0, 0, {4}, {}, four),
      Encoded(0, at::kFloat, 0, 0, {4}, {}, four),
      Encoded(1, at::kFloat, 8, 0, {4}, {}, four),
      Encoded(1, at::kFloat, 4, 0, {4}, {}, four),
      Encoded(1, at::kQInt8, 0, 0, {4}, {}, "1234"),
      Encoded(1, at::ScalarType::Undefined, 0, 0, {4}, {}, four),
      Encoded(1, static_cast<at::ScalarType>(200), 0, 0, {4}, {}, four),
      Encoded(1, at::kFloat, 0, 0, {5}, {}, four),
      Encoded(1, at::kFloat, 0, 0, {3}, {}, four),  // four bytes left over
      Encoded(1, at::kFloat, 0, 0, {-1}, {}, four),
      Encoded(1, at::kFloat, 0, 0, {-2, -2}, {}, four),
      Encoded(1, at::kFloat, 0, 0, {huge}, {}, four),
      Encoded(1, at::kFloat, 0, 0, {huge, huge}, {}, four),
      Encoded(1, at::kFloat, 0, 0, {huge, 0, huge}),
      Encoded(1, at::kFloat, 0, 0, {int64_t{1} << 40}, {}, four),
      Encoded(1, at::kFloat, 1, 0, {2, 2}, {2, 2}, four),
      Encoded(1, at::kFloat, 1, 0, {2, 2}, {1, 3}, four),
      Encoded(1, at::kFloat, 1, 0, {2, 2}, {-1, 2}, four),
      Encoded(1, at::kFloat, 1, 0, {4, 1}, {1, -1}, four),
      Encoded(1, at::kFloat, 1, 0, {4, 1}, {1, huge}, four),
      Encoded(1, at::kFloat, 1, 0, {4, huge}, {1, 0}, four),
      Encoded(1, at::kFloat, 1, 0, {0, 4}, {1, 1}),
      Encoded(1, at::kFloat, 2, 0, {4}),
      Encoded(1, at::kFloat, 0, 200, {4}, {}, four),
      Encoded(1, at::kFloat, 0, 14, {4}, {}, four),  // meta
  };
  for (size_t i = 0; i < bad.size(); ++i) EXPECT_FALSE(ReadBytes(bad[i]).ok()) << i;
  EXPECT_FALSE(ReadBytes(Encoded(1, at::kFloat, 2, 0, {4}), 15).ok());
  EXPECT_FALSE(ReadBytes(Encoded(1, at::kFloat, 2, 0, {4}), 17).ok());
  absl::Status cuda = ReadBytes(Encoded(1, at::kFloat, 0, 1, {4}, {}, four));
  if (!at::hasCUDA()) {
    EXPECT_EQ(cuda.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_TRUE(absl::StrContains(cuda.message(), "cuda:0")) << cuda;
  }
}

TEST(HostileMessage, BoolsBecomeZeroOrOne) {
  for (const std::string& sent : {std::string("\1\2\0\1", 4), std::string(8, '\0') + "\x80",
                                  std::string("\0\0\0\0\0\0\0\xff\0", 9)}) {
    Packet packet;
    packet.bytes = Encoded(1, at::kBool, 0, 0, {static_cast<int64_t>(sent.size())}, {}, sent);
    absl::StatusOr<Message> message = Read(packet);
    ASSERT_TRUE(message.ok()) << message.status();
    std::string received = BytesOf(message->tensors[0]);
    for (size_t i = 0; i < sent.size(); ++i) EXPECT_EQ(received[i], sent[i] != 0) << i;
  }
}

TEST(HostileMessage, CountsThatAreNotThere) {
  std::string bytes;
  WireWriter writer(&bytes);
  writer.U8(1);
  writer.U32(60000);
  writer.U64(1 << 20);
  bytes += "short";
  EXPECT_EQ(ReadBytes(bytes).code(), absl::StatusCode::kInvalidArgument);
  bytes[0] = 2;
  EXPECT_TRUE(absl::StrContains(ReadBytes(bytes).message(), "version 2"));
}

TEST(HostileMessage, SparseIndices) {
  auto send = [](at::Tensor indices, std::vector<int64_t> sizes, bool coalesced) {
    at::Tensor sparse = at::_sparse_coo_tensor_unsafe(indices, at::rand({indices.size(1)}), sizes,
                                                      at::TensorOptions(), coalesced);
    Packet packet;
    EXPECT_TRUE(AppendMessage(Message{"", {sparse}}, &packet).ok());
    return Read(packet).status();
  };
  auto indices = [](std::vector<int64_t> values, int64_t dims) {
    return at::tensor(values, at::kLong).reshape({dims, -1});
  };
  EXPECT_TRUE(send(indices({0, 1, 1, 5, 0, 2}, 2), {2, 6}, true).ok());
  EXPECT_FALSE(send(indices({0, 1, 1, 5, 0, 6}, 2), {2, 6}, true).ok());
  EXPECT_FALSE(send(indices({0, -1, 1, 5, 0, 2}, 2), {2, 6}, false).ok());
  EXPECT_FALSE(send(indices({0, 1, 1, 5, 2, 2}, 2), {2, 6}, true).ok());
  EXPECT_FALSE(send(indices({0, 1, 0, 5, 0, 2}, 2), {2, 6}, true).ok());
  EXPECT_TRUE(send(indices({0, 1, 0, 5, 0, 2}, 2), {2, 6}, false).ok());
  EXPECT_TRUE(send(indices({3, 3, 3}, 1), {4}, false).ok());
}

// Indices are looked at one after the other, as they lie.
TEST(HostileMessage, ThePartsOfASparseTensorAreContiguous) {
  const at::Tensor sparse =
      at::_sparse_coo_tensor_unsafe(at::tensor({0, 1, 1, 5}, at::kLong).reshape({2, 2}),
                                    at::rand({2}), {2, 6}, at::TensorOptions(), false);
  Packet packet;
  ASSERT_TRUE(AppendMessage(Message{"", {sparse}}, &packet).ok());
  Packet whole = packet;
  ASSERT_TRUE(Read(whole).ok());
  // Behind the message's head and the tensor's, with its sizes, is the head of the indices.
  const size_t head = 13 + 8 + 2 * 8;
  packet.bytes[head + 3] = 1;  // they have strides
  std::string strides;
  WireWriter writer(&strides);
  for (const int64_t stride : {1, 2}) writer.I64(stride);
  packet.bytes.insert(head + 8 + 2 * 8, strides);
  EXPECT_EQ(Read(packet).status().code(), absl::StatusCode::kInvalidArgument);
}

// Messages that together use every part of the codec.
std::vector<Message> Corpus() {
  at::manual_seed(8);
  at::Tensor flags = at::rand({9}) > 0.5;
  return {
      {"payload", {at::rand({2, 3}), at::Tensor(), at::rand({}), flags}},
      {"", {at::rand({4, 5}).t(), at::rand({3, 1}).expand({3, 100}), at::empty({0, 3})}},
      {"x", {RandomSparse(5, 6, true), RandomSparse(5, 6, false)}},
      {"large", {at::rand({40, 50}).t(), RandomSparse(5, 2000, false), at::rand({1500})}},
      {"", {at::rand({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast)}},
  };
}

// Uses what was read, so that a tensor which reaches outside its memory is noticed.
void Touch(const Message& message) {
  for (const at::Tensor& tensor : message.tensors) {
    if (!tensor.defined() || tensor.numel() > 100000) continue;
    if (tensor.is_sparse() && tensor._nnz() * tensor.numel() > 1000000) continue;
    BytesOf(tensor.is_sparse() ? tensor.coalesce()._values() : tensor);
  }
}

TEST(HostileMessage, TruncatedAnywhere) {
  for (const Message& message : Corpus()) {
    Packet whole;
    ASSERT_TRUE(AppendMessage(message, &whole).ok());
    for (size_t size = 0; size < whole.bytes.size(); ++size) {
      Packet cut = {whole.bytes.substr(0, size), whole.segments};
      EXPECT_FALSE(Read(cut).ok()) << size;
    }
    for (size_t count = 0; count < whole.segments.size(); ++count) {
      Packet cut = whole;
      cut.segments.resize(count);
      EXPECT_FALSE(Read(cut).ok()) << count;
    }
  }
}

// Notes the most that libtorch was asked for at once.
class WatchingAllocator : public c10::Allocator {
 public:
  explicit WatchingAllocator(c10::Allocator* real) : real_(real) {}
  c10::DataPtr allocate(size_t bytes) override {
    largest = std::max(largest, bytes);
    return real_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return real_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  size_t largest = 0;

 private:
  c10::Allocator* const real_;
};

TEST(HostileMessage, RandomCorruption) {
  c10::Allocator* const real = c10::GetCPUAllocator();
  WatchingAllocator watching(real);
  std::mt19937 random(9);
  const std::vector<Message> corpus = Corpus();
  int accepted = 0;
  for (int round = 0; round < 10000; ++round) {
    Packet packet;
    ASSERT_TRUE(AppendMessage(corpus[random() % corpus.size()], &packet).ok());
    Packet received = CopyPacket(packet);
    // Mostly the front, where the lengths are.
    const size_t range =
        random() % 2 != 0 ? std::min<size_t>(received.bytes.size(), 80) : received.bytes.size();
    for (uint32_t changes = 1 + random() % 4; changes > 0; --changes) {
      char& byte = received.bytes[random() % range];
      byte = random() % 2 != 0 ? static_cast<char>(random())
                               : static_cast<char>(byte ^ (1 << random() % 8));
    }
    if (random() % 8 == 0) received.bytes.resize(random() % (received.bytes.size() + 1));
    watching.largest = 0;
    c10::SetCPUAllocator(&watching);
    absl::StatusOr<Message> message = Read(received);
    c10::SetCPUAllocator(real);
    EXPECT_LE(watching.largest, received.bytes.size());
    if (!message.ok()) continue;
    ++accepted;
    Touch(*message);
  }
  EXPECT_GT(accepted, 100);  // changed elements are as good as the old ones
}

}  // namespace
}  // namespace distgrad
