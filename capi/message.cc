// Creates and reads messages; waits for futures and cancels them.
#include "core/tensor/message.h"

#include "absl/strings/str_cat.h"
#include "capi/guard.h"
#include "capi/objects.h"
#include "core/tensor/values.h"

namespace distgrad {
namespace {

template <typename T>
absl::Status CheckDone(const Future<T>& future) {
  if (!future.Done()) return absl::FailedPreconditionError("the future is not done");
  return future.Wait().status();
}

template <typename... Visitors>
struct Overloaded : Visitors... {
  using Visitors::operator()...;
};
template <typename... Visitors>
Overloaded(Visitors...) -> Overloaded<Visitors...>;

// Calls `use` with the core's future, whatever it is of.
template <typename F>
auto VisitFuture(const FutureObject& object, F&& use) {
  return std::visit(Overloaded{[&](const RemoteValues& remote) { return use(remote.reply); },
                               [&](const auto& future) { return use(future); }},
                    object.work);
}

}  // namespace
}  // namespace distgrad

using namespace distgrad;

extern "C" {

// ----------------------------------------------------------------------------------- Messages

dg_error* dg_message_create(const void* payload, size_t payload_size,
                            const dg_tensor* const* tensors, size_t tensor_count,
                            dg_message** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    Message message;
    DG_ASSIGN_OR_RETURN(message.payload,
                        FromStr({static_cast<const char*>(payload), payload_size}, "payload"));
    DG_ASSIGN_OR_RETURN(message.tensors,
                        PinTensors(tensors, tensor_count, /*allow_null=*/true, "tensors"));
    *out = NewHandle<MessageObject>(std::move(message));
    return absl::OkStatus();
  });
}

void dg_message_destroy(dg_message* message) noexcept { DestroyHandle<MessageObject>(message); }

dg_str dg_message_payload(const dg_message* message) noexcept {
  return GuardValue<dg_str>(ToStr(""), [&] {
    absl::StatusOr<Pinned<MessageObject>> pinned = Pin<MessageObject>(message, "message");
    return pinned.ok() ? ToStr((*pinned)->message.payload) : ToStr("");
  });
}

size_t dg_message_tensor_count(const dg_message* message) noexcept {
  return GuardValue<size_t>(0, [&]() -> size_t {
    absl::StatusOr<Pinned<MessageObject>> pinned = Pin<MessageObject>(message, "message");
    return pinned.ok() ? (*pinned)->message.tensors.size() : 0;
  });
}

dg_error* dg_message_tensor(const dg_message* message, size_t index, dg_tensor** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(const Pinned<MessageObject> pinned, Pin<MessageObject>(message, "message"));
    const std::vector<at::Tensor>& tensors = pinned->message.tensors;
    if (index >= tensors.size()) {
      return absl::InvalidArgumentError(absl::StrCat("no tensor ", index, " of ", tensors.size()));
    }
    *out = NewTensorHandle(tensors[index]);
    return absl::OkStatus();
  });
}

// ------------------------------------------------------------------------------------ Futures

dg_error* dg_future_wait(const dg_future* future, int64_t timeout_ms, bool* done) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(done, "done"));
    if (timeout_ms != 0) DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(const Pinned<FutureObject> pinned, Pin<FutureObject>(future, "future"));
    *done = VisitFuture(*pinned, [&](const auto& work) {
      return work.WaitUntil(ToDeadline(timeout_ms, absl::InfinitePast()));
    });
    return absl::OkStatus();
  });
}

dg_error* dg_future_result(const dg_future* future, dg_message** reply) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(reply, "reply"));
    DG_ASSIGN_OR_RETURN(const Pinned<FutureObject> pinned, Pin<FutureObject>(future, "future"));
    DG_RETURN_IF_ERROR(VisitFuture(*pinned, [](const auto& work) { return CheckDone(work); }));
    if (const auto* work = std::get_if<Future<Message>>(&pinned->work)) {
      *reply = NewHandle<MessageObject>(*work->Wait());
      return absl::OkStatus();
    }
    if (std::holds_alternative<RemoteValues>(pinned->work)) {
      return absl::FailedPreconditionError("an operator's future: use dg_future_values");
    }
    *reply = nullptr;
    return absl::OkStatus();
  });
}

dg_error* dg_future_values(const dg_future* future, dg_values** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(const Pinned<FutureObject> pinned, Pin<FutureObject>(future, "future"));
    DG_RETURN_IF_ERROR(VisitFuture(*pinned, [](const auto& work) { return CheckDone(work); }));
    const auto* remote = std::get_if<RemoteValues>(&pinned->work);
    if (remote == nullptr) {
      return absl::FailedPreconditionError("not an operator's future: use dg_future_result");
    }
    DG_ASSIGN_OR_RETURN(const std::vector<c10::IValue> values,
                        DecodeValues(*remote->reply.Wait(), remote->most_bytes));
    DG_ASSIGN_OR_RETURN(std::unique_ptr<ValuesObject> converted, ToValues(values));
    *out = AdoptHandle(std::move(converted));
    return absl::OkStatus();
  });
}

dg_error* dg_future_then(const dg_future* future, void (*done)(void* user_data), void* user_data,
                         void (*destroy)(void* user_data)) noexcept {
  UserData taken(user_data, destroy);
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckCallback(done != nullptr, "done"));
    DG_ASSIGN_OR_RETURN(const Pinned<FutureObject> pinned, Pin<FutureObject>(future, "future"));
    VisitFuture(*pinned, [&](const auto& work) {
      work.Then([done, taken = std::move(taken)](const auto&) {
        NoWaitScope scope;
        done(taken.get());
      });
    });
    return absl::OkStatus();
  });
}

dg_error* dg_future_cancel(const dg_future* future) noexcept {
  return Guard([&]() -> absl::Status {
    DG_ASSIGN_OR_RETURN(const Pinned<FutureObject> pinned, Pin<FutureObject>(future, "future"));
    VisitFuture(*pinned, [](const auto& work) { work.Cancel(); });
    return absl::OkStatus();
  });
}

void dg_future_destroy(dg_future* future) noexcept { DestroyHandle<FutureObject>(future); }

}  // extern "C"
