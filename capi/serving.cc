// Runs the handlers of a worker, with their requests, responders and cancellations.
#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "capi/guard.h"
#include "capi/objects.h"
#include "capi/worker_object.h"
#include "core/worker/worker.h"

namespace distgrad {
namespace {

thread_local Role serving;

// What a handler borrows; throws if memory is out.
class Borrowed {
 public:
  explicit Borrowed(Request& from)
      : function_(std::move(from.function)),
        message_(NewOwnedHandle<MessageObject>(std::move(from.message))),
        context_(from.context.valid() ? NewOwnedHandle<ContextObject>(std::move(from.context))
                                      : nullptr),
        cancellation_(NewOwnedHandle<CancellationObject>(from.cancellation)) {
    request_.struct_size = sizeof(request_);
    request_.function = ToStr(function_);
    request_.from = from.from;
    request_.message = message_.get();
    request_.context = context_.get();
    request_.timeout_ms = ToTimeoutMs(from.deadline);
    request_.cancellation = cancellation_.get();
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

  const dg_request* request() const { return &request_; }

 private:
  const std::string function_;
  const OwnedHandle<MessageObject> message_;
  const OwnedHandle<ContextObject> context_;
  const OwnedHandle<CancellationObject> cancellation_;
  dg_request request_ = {};
};

// NULL is an empty one. `name` is that of the parameter.
absl::StatusOr<Message> TakeReply(dg_message* reply, absl::string_view name) {
  if (reply == nullptr) return Message{};
  DG_ASSIGN_OR_RETURN(const std::unique_ptr<MessageObject> taken,
                      TakeHandle<MessageObject>(reply, name));
  return std::move(taken->message);
}

// What the caller is told of a reply that is not a valid handle.
absl::Status BadReply(const absl::Status& why) {
  return absl::InternalError(absl::StrCat("the handler's answer: ", why.message()));
}

struct ResponderObject : HandleObject {
  using Handle = dg_responder;
  static constexpr HandleKind kKind = HandleKind::kResponder;
  static constexpr char kName[] = "dg_responder";

  explicit ResponderObject(Request& request) : borrowed(request) {}
  ~ResponderObject() override {
    promise.Set(absl::InternalError("the handler destroyed its responder without an answer"));
  }
  const Borrowed borrowed;
  Promise<Message> promise;  // for whoever takes the responder
};

absl::Status Register(dg_worker* worker, dg_str function, Handler handler) {
  DG_RETURN_IF_ERROR(
      CheckCallback(handler.function != nullptr || handler.async_function != nullptr, "handler"));
  DG_ASSIGN_OR_RETURN(std::string name, FromStr(function, "function"));
  DG_ASSIGN_OR_RETURN(const SharedWorker::Use use, UseWorker(worker));
  return use.shared().Register(std::move(name), std::make_shared<Handler>(std::move(handler)));
}

}  // namespace

ServingScope::ServingScope(const Role& role) : outer_(std::exchange(serving, role)) {}
ServingScope::~ServingScope() { serving = outer_; }

const Role& Serving() { return serving; }
bool InHandlerOf(const SharedWorker& worker) { return serving.worker == &worker; }

absl::Status SharedWorker::Register(std::string function, std::shared_ptr<Handler> handler) {
  DG_ASSIGN_OR_RETURN(const Use use, Begin());
  const auto ending = [] { return absl::UnavailableError("the worker is ending"); };
  const std::weak_ptr<Handler> weak = handler;
  {
    absl::MutexLock lock(&mu_);
    handlers_.push_back(handler);  // there may be no memory for it once others can call it
  }
  absl::Cleanup forget = [&] {
    absl::MutexLock lock(&mu_);
    handlers_.erase(std::remove(handlers_.begin(), handlers_.end(), handler), handlers_.end());
  };
  if (handler->function != nullptr) {
    DG_RETURN_IF_ERROR(use->Register(
        std::move(function), [this, weak, ending](Request& request) -> absl::StatusOr<Message> {
          const std::shared_ptr<Handler> alive = weak.lock();
          return alive == nullptr ? ending() : Serve(*alive, request);
        }));
  } else {
    DG_RETURN_IF_ERROR(
        use->RegisterAsync(std::move(function), [this, weak, ending](Request& request) {
          const std::shared_ptr<Handler> alive = weak.lock();
          return alive == nullptr ? Future<Message>::Of(ending()) : ServeLater(*alive, request);
        }));
  }
  std::move(forget).Cancel();
  return absl::OkStatus();
}

absl::StatusOr<Message> SharedWorker::Serve(const Handler& handler, Request& request) const {
  const Borrowed borrowed(request);
  dg_message* reply = nullptr;
  dg_error* error = nullptr;
  {
    const ServingScope scope({.worker = this});
    error = handler.function(handler.user_data.get(), borrowed.request(), &reply);
  }
  const OwnedHandle<MessageObject> reply_owner(reply);
  DG_RETURN_IF_ERROR(TakeError(error));
  absl::StatusOr<Message> message = TakeReply(reply, "*reply");
  if (!message.ok()) return BadReply(message.status());
  return message;
}

Future<Message> SharedWorker::ServeLater(const Handler& handler, Request& request) const {
  auto made = std::make_unique<ResponderObject>(request);
  const dg_request* const borrowed = made->borrowed.request();
  Future<Message> answer = made->promise.future();
  dg_responder* const responder = AdoptHandle(std::move(made));
  const ServingScope scope({.worker = this});
  handler.async_function(handler.user_data.get(), borrowed, responder);
  return answer;
}

}  // namespace distgrad

using namespace distgrad;

extern "C" {

dg_error* dg_worker_register(dg_worker* worker, dg_str function, dg_handler handler,
                             void* user_data, void (*destroy)(void* user_data)) noexcept {
  UserData taken(user_data, destroy);
  return Guard([&] { return Register(worker, function, {handler, nullptr, std::move(taken)}); });
}

dg_error* dg_worker_register_responder(dg_worker* worker, dg_str function,
                                       dg_responder_handler handler, void* user_data,
                                       void (*destroy)(void* user_data)) noexcept {
  UserData taken(user_data, destroy);
  return Guard([&] { return Register(worker, function, {nullptr, handler, std::move(taken)}); });
}

dg_error* dg_responder_answer(dg_responder* responder, dg_message* reply,
                              dg_error* error) noexcept {
  return Guard([&]() -> absl::Status {
    const OwnedHandle<MessageObject> reply_owner(reply);
    const absl::Status failed = TakeError(error);
    DG_ASSIGN_OR_RETURN(const std::unique_ptr<ResponderObject> taken,
                        TakeHandle<ResponderObject>(responder, "responder"));
    if (!failed.ok()) {
      taken->promise.Set(failed);
      return absl::OkStatus();
    }
    absl::StatusOr<Message> message = TakeReply(reply, "reply");
    const absl::Status status = message.status();
    taken->promise.Set(status.ok() ? std::move(message) : BadReply(status));
    return status;
  });
}

void dg_responder_destroy(dg_responder* responder) noexcept {
  DestroyHandle<ResponderObject>(responder);
}

dg_error* dg_cancellation_create(dg_cancellation** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    *out = NewHandle<CancellationObject>(std::make_shared<Cancellation>());
    return absl::OkStatus();
  });
}

dg_error* dg_cancellation_cancel(dg_cancellation* cancellation) noexcept {
  return Guard([&]() -> absl::Status {
    DG_ASSIGN_OR_RETURN(const Pinned<CancellationObject> pinned,
                        Pin<CancellationObject>(cancellation, "cancellation"));
    pinned->cancellation->Cancel(absl::CancelledError("the program has cancelled it"));
    return absl::OkStatus();
  });
}

dg_error* dg_cancellation_check(const dg_cancellation* cancellation) noexcept {
  return Guard([&]() -> absl::Status {
    DG_ASSIGN_OR_RETURN(const Pinned<CancellationObject> pinned,
                        Pin<CancellationObject>(cancellation, "cancellation"));
    return pinned->cancellation->why();
  });
}

dg_error* dg_cancellation_on_cancel(const dg_cancellation* cancellation,
                                    void (*cancelled)(void* user_data), void* user_data,
                                    void (*destroy)(void* user_data), uint64_t* id) noexcept {
  UserData taken(user_data, destroy);
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckCallback(cancelled != nullptr, "cancelled"));
    DG_ASSIGN_OR_RETURN(const Pinned<CancellationObject> pinned,
                        Pin<CancellationObject>(cancellation, "cancellation"));
    const uint64_t watch = pinned->cancellation->OnCancel([cancelled, taken = std::move(taken)] {
      NoWaitScope scope;
      cancelled(taken.get());
    });
    if (id != nullptr) *id = watch;
    return absl::OkStatus();
  });
}

dg_error* dg_cancellation_forget(const dg_cancellation* cancellation, uint64_t id) noexcept {
  return Guard([&]() -> absl::Status {
    DG_ASSIGN_OR_RETURN(const Pinned<CancellationObject> pinned,
                        Pin<CancellationObject>(cancellation, "cancellation"));
    pinned->cancellation->Forget(id);
    return absl::OkStatus();
  });
}

void dg_cancellation_destroy(dg_cancellation* cancellation) noexcept {
  DestroyHandle<CancellationObject>(cancellation);
}

}  // extern "C"
