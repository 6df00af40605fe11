// Reads calls, runs what they ask for, and answers.
#include "core/worker/server.h"

#include <algorithm>
#include <array>
#include <new>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "core/autograd/context_record.h"
#include "core/base/await_memory.h"
#include "core/base/deadline.h"
#include "core/base/near_names.h"
#include "core/base/origin.h"
#include "core/base/status.h"
#include "core/rpc/frame.h"
#include "core/rpc/send_window.h"
#include "core/tensor/allocation_limit.h"
#include "core/tensor/cheap_operators.h"
#include "core/tensor/exception.h"
#include "core/tensor/find_operator.h"
#include "core/tensor/number_check.h"
#include "core/tensor/operator.h"
#include "core/tensor/operator_policy.h"
#include "core/tensor/piece_count.h"
#include "core/tensor/values.h"
#include "core/worker/last_context.h"

namespace distgrad {
namespace {

constexpr absl::string_view kOperatorMark = "::";
constexpr absl::string_view kOwnPrefix = "distgrad.";
constexpr absl::string_view kOptimizerPrefix = "distgrad.optimizer.";  // those of optimizer.cc
constexpr absl::string_view kPipelinePrefix = "distgrad.pipeline.";    // those of core/pipeline
constexpr absl::string_view kStepPrefix = "distgrad.pipeline.begin/";  // that begins a step
// Those of core/checkpoint/job by which a save or load that has begun goes on.
constexpr std::array<absl::string_view, 3> kOfSavesAndLoads = {
    "distgrad.checkpoint.write/", "distgrad.checkpoint.load/", "distgrad.checkpoint.drop/"};
constexpr size_t kMaxName = 1000;  // bytes
static_assert(kMaxName <= kMaxFunctionName);

bool IsOperator(absl::string_view function) { return absl::StrContains(function, kOperatorMark); }

// Whether a call in no context is of something that began before it: of another worker's context,
// of a step of a pipeline, or of a save or load of a checkpoint. Only the call that begins a step
// is in its context, for whose end a worker that leaves waits; for a save or load it waits while a
// call of that is served, and takes the next one as long as it waits for anything.
bool GoesOn(absl::string_view function) {
  const auto begins = [&](absl::string_view prefix) { return absl::StartsWith(function, prefix); };
  return function == kLastContext || (begins(kPipelinePrefix) && !begins(kStepPrefix)) ||
         std::any_of(kOfSavesAndLoads.begin(), kOfSavesAndLoads.end(), begins);
}

}  // namespace

absl::Status Server::Register(std::string name, Function function) {
  if (name.empty() || name.size() > kMaxName || IsOperator(name) ||
      (absl::StartsWith(name, kOwnPrefix) && !function.is_own)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", name, "' cannot be the name of a function of worker '", parts_.self.name,
        "': it has 1 to ", kMaxName, " bytes, '::' is for operators, and what begins with '",
        kOwnPrefix, "' is distgrad's own"));
  }
  if (function.handler == nullptr && function.async_handler == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "function '", name, "' of worker '", parts_.self.name, "' has no handler: it is null"));
  }
  auto shared = std::make_shared<const Function>(std::move(function));
  absl::MutexLock lock(&mu_);
  if (!functions_.emplace(name, std::move(shared)).second) {
    return absl::AlreadyExistsError(absl::StrCat("function '", name, "' is registered on worker '",
                                                 parts_.self.name, "' already"));
  }
  return absl::OkStatus();
}

void Server::Unregister(absl::string_view name) {
  std::shared_ptr<const Function> removed;  // ends outside the lock
  absl::MutexLock lock(&mu_);
  const auto found = functions_.find(name);
  if (found == functions_.end()) return;
  removed = std::move(found->second);
  functions_.erase(found);
}

std::shared_ptr<const Server::Function> Server::FindFunction(absl::string_view name) const {
  absl::MutexLock lock(&mu_);
  const auto found = functions_.find(name);
  return found == functions_.end() ? nullptr : found->second;
}

void Server::OnCall(IncomingCall call) {
  absl::StatusOr<CallHeader> header = ReadCallHeader(call.body().packet, call.body().offset);
  if (!header.ok()) return call.Fail(header.status());
  call.SetContext(header->context);
  const std::shared_ptr<Owner> owner = owner_.lock();
  if (owner == nullptr) return call.Fail(absl::CancelledError("this worker is shutting down"));
  absl::Status refusal = call.refusal();
  const bool goes_on = header->context == 0 && GoesOn(call.function());
  const bool leaves =
      call.from() != parts_.self.rank && !goes_on && owner->Refuses(header->context);
  if (leaves) {
    refusal = absl::UnavailableError("it is leaving the job");
    if (header->edge == 0) return call.Fail(refusal);
  }
  std::shared_ptr<ContextRecord> context;
  if (header->context != 0) {
    absl::StatusOr<std::shared_ptr<ContextRecord>> found =
        parts_.contexts.FindOrAdd(header->context, header->edge, /*refuses=*/leaves);
    if (!found.ok()) {
      if (absl::IsUnavailable(found.status())) owner->OnOlder(header->context);
      return call.Fail(found.status());
    }
    context = *std::move(found);
    const absl::Status added =
        parts_.engine.AddPeer(*context, call.from(), [&call] { return call.is_cut_off(); });
    if (!added.ok()) return call.Fail(added);
  }
  // Here and now: messages of a pass that follow from this call must find its edge. One that is
  // refused has an edge too; nothing else is made of it.
  absl::StatusOr<Message> message =
      refusal.ok() ? parts_.messages.Read(call.body().packet, call.body().offset) : refusal;
  absl::Status taken;
  try {
    taken = parts_.messages.TakeEdge(context, call.from(), *header, message);
  } catch (const std::bad_alloc&) {
    throw;  // the connection ends, for nobody would hear that no gradient comes over this edge
  } catch (...) {
    taken = StatusFromException(std::current_exception());
  }
  if (!message.ok()) return call.Fail(message.status());
  if (!taken.ok()) return call.Fail(taken);
  Request request{.from = call.from(),
                  .function = call.function(),
                  .message = *std::move(message),
                  .context = context ? Context(owner, context, /*is_origin=*/false) : Context(),
                  .deadline = Deadline::After(call.deadline() - parts_.clock.Now()),
                  .cancellation = call.cancellation()};
  const auto window = call.window();
  Serving serving{std::move(call), *std::move(header), std::move(context), std::move(request)};
  // While a caller does not take its answers, no more of them are made.
  if (!window->TryAcquire(0).has_value()) {
    window->AcquireAsync(0, [this, owner = owner_, serving = std::move(serving)](
                                const absl::StatusOr<SendWindow::Credit>& credit) mutable {
      const auto alive = owner.lock();
      if (alive == nullptr || !credit.ok()) return;
      try {
        parts_.pool.Schedule(
            [this, serving = std::move(serving)]() mutable { Serve(std::move(serving)); });
      } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): its call has failed
      }
    });
    return;
  }
  if (RunsInline(serving.request)) return Serve(std::move(serving));
  parts_.pool.ScheduleInline(
      [this, serving = std::move(serving)]() mutable { Serve(std::move(serving)); });
}

bool Server::RunsInline(const Request& request) const {
  // Other arguments than tensors count, too: a list of sizes may be longer than any tensor.
  constexpr size_t kShortArguments = 1 << 10;  // bytes
  if (request.message.payload.size() > kShortArguments) return false;
  if (!absl::StartsWith(request.function, kOwnPrefix)) {
    return CheapToRunInline(request.function, request.message.tensors);
  }
  absl::MutexLock lock(&mu_);
  const auto found = functions_.find(request.function);
  return found != functions_.end() && found->second->is_inline;
}

void Server::Serve(Serving serving) {
  serving.call.Begin();
  absl::StatusOr<Message> reply = absl::InternalError("");
  std::shared_ptr<const Function> function = FindFunction(serving.request.function);
  try {
    if (serving.request.cancellation->cancelled()) {
      reply = serving.request.cancellation->why();
    } else if (serving.request.deadline.Passed()) {
      // A caller that is slow to say so has given up, too.
      reply = absl::DeadlineExceededError("its time was over before it began");
    } else {
      serving.by_handler = function != nullptr && !function->is_own;
      if (function != nullptr && function->async_handler != nullptr) {
        return ServeLater(function->async_handler, std::make_shared<Serving>(std::move(serving)));
      }
      reply = Run(serving, function.get());
    }
  } catch (...) {
    reply = StatusFromException(std::current_exception());
  }
  const bool is_inline = function != nullptr && function->is_inline;
  if (is_inline) LetGo(std::move(function), serving.request.function);
  function = nullptr;
  if (is_inline && !serving.request.message.tensors.empty()) {
    return AnswerWhenFreed(std::move(serving), reply);
  }
  Answer(serving, reply);
}

absl::StatusOr<Message> Server::Run(Serving& serving, const Function* function) {
  // The caller's modes are the handler's too.
  const CallModesScope modes(serving.header.modes);
  if (function != nullptr) return function->handler(serving.request);
  if (!IsOperator(serving.request.function)) return NotRegistered(serving.request.function);
  serving.by_operator = true;
  return ServeOperator(serving.request);
}

void Server::LetGo(std::shared_ptr<const Function> function, absl::string_view name) {
  {
    absl::MutexLock lock(&mu_);
    const auto found = functions_.find(name);
    // This one is not the last while the other stands. Else it was unregistered meanwhile.
    if (found != functions_.end() && found->second == function) function = nullptr;
  }
  if (function == nullptr) return;
  // This thread keeps it until there is memory for the task, and the task empties what both hold:
  // so it ends there, whichever of the two lets go last.
  const auto held = AwaitMemory(
      [&] { return std::make_shared<std::shared_ptr<const Function>>(std::move(function)); });
  AwaitMemory([&] { parts_.pool.Schedule([held] { held->reset(); }); });
}

void Server::AnswerWhenFreed(Serving serving, const absl::StatusOr<Message>& reply) {
  std::shared_ptr<Serving> later;
  try {
    later = std::make_shared<Serving>(std::move(serving));
    parts_.pool.Schedule([this, later, reply] {
      later->request.message.tensors.clear();
      Answer(*later, reply);
    });
  } catch (const std::bad_alloc&) {  // here, then, which gives some back
    Serving& now = later != nullptr ? *later : serving;
    now.request.message.tensors.clear();
    Answer(now, reply);
  }
}

void Server::ServeLater(const AsyncRequestHandler& handler,
                        const std::shared_ptr<Serving>& serving) {
  absl::StatusOr<Message> failed = absl::InternalError("");
  try {
    Future<Message> reply;
    {
      const CallModesScope modes(serving->header.modes);
      reply = handler(serving->request);
    }
    if (!reply.valid()) reply = Future<Message>::Of(absl::InternalError("it returned no future"));
    if (reply.Done()) return Answer(*serving, reply.Wait());
    serving->request.cancellation->OnCancel([reply] { reply.Cancel(); });
    reply.Then([this, owner = owner_, serving, reply](const absl::StatusOr<Message>&) {
      const auto alive = owner.lock();
      if (alive == nullptr) return;
      // Whoever completes it may be a thread that must not be kept.
      try {
        parts_.pool.Schedule([this, serving, reply] { Answer(*serving, reply.Wait()); });
      } catch (const std::bad_alloc&) {
        serving->call.Fail(StatusFromException(std::current_exception()));
      }
    });
    return;
  } catch (...) {
    failed = StatusFromException(std::current_exception());
  }
  Answer(*serving, failed);
}

void Server::Answer(Serving& serving, const absl::StatusOr<Message>& reply) {
  EdgeId edge = 0;
  try {
    if (!reply.ok()) {
      return serving.call.Fail(
          serving.by_handler
              ? WithOrigin(reply.status(), {parts_.self.rank, ErrorOrigin::By::kHandler})
              : reply.status());
    }
    const WorkerRank from = serving.request.from;
    Packet packet = serving.call.NewReply();
    CallHeader header{.modes = serving.header.modes};
    {
      const CallModesScope modes(header.modes);
      const absl::StatusOr<size_t> body =
          parts_.messages.Encode(header, serving.context, from, *reply, &packet);
      if (!body.ok()) return serving.call.Fail(body.status());
      const absl::StatusOr<EdgeId> recorded =
          parts_.messages.Record(serving.context, from, CallMessages::MakeSend(header, *reply),
                                 serving.by_operator, *body, &packet);
      if (!recorded.ok()) return serving.call.Fail(recorded.status());
      edge = *recorded;
    }
    const bool sent = serving.call.Reply(std::move(packet));
    // A backward would wait for a gradient of what nobody has got.
    if (!sent && edge != 0) parts_.engine.DropSend(*serving.context, edge);
  } catch (...) {
    serving.call.Fail(StatusFromException(std::current_exception()));
  }
}

absl::Status Server::NotRegistered(absl::string_view function) const {
  constexpr absl::string_view kMissing = "no such function is registered there";
  absl::string_view rest = function;
  if (absl::ConsumePrefix(&rest, kOptimizerPrefix)) {
    const size_t slash = rest.find('/');
    const absl::string_view name = slash == rest.npos ? "" : rest.substr(slash + 1);
    return absl::NotFoundError(
        absl::StrCat("every worker needs a part of this optimizer, and that one has none of the "
                     "name '",
                     name.substr(0, kMaxNearName),
                     "': make it there before the first step, with no parameters if it has none"));
  }
  if (absl::ConsumePrefix(&rest, kPipelinePrefix)) {
    const size_t slash = rest.find('/');
    const absl::string_view name = slash == rest.npos ? "" : rest.substr(slash + 1);
    return absl::NotFoundError(absl::StrCat(
        "that worker has no PipelineStages of the name '", name.substr(0, kMaxNearName),
        "' (yet): every worker of a pipeline creates its stages, and a barrier stands "
        "before the first step"));
  }
  if (absl::StartsWith(function, kOwnPrefix)) return absl::NotFoundError(kMissing);
  std::set<std::string> all, near;
  {
    absl::MutexLock lock(&mu_);
    for (const auto& [name, what] : functions_) {
      if (!what->is_own) all.insert(name.substr(0, kMaxNearName));
    }
  }
  for (const std::string& name : all) {
    if (IsNearName(name, function)) near.insert(name);
  }
  return absl::NotFoundError(
      all.empty() ? absl::StrCat(kMissing, ", nor any other")
                  : absl::StrCat(kMissing, near.empty() ? "; there are: " : "; there is ",
                                 FirstNames(near.empty() ? all : near)));
}

absl::StatusOr<Message> Server::ServeOperator(Request& request) {
  if (parts_.options.serve_operators == ServeOperators::kNone) {
    return absl::PermissionDeniedError("operators are not served there");
  }
  DG_ASSIGN_OR_RETURN(const c10::OperatorHandle op, FindOperator(request.function));
  const bool serves_all = parts_.options.serve_operators == ServeOperators::kAll;
  if (const absl::Status served = serves_all ? absl::OkStatus() : CheckServed(op); !served.ok()) {
    return absl::PermissionDeniedError(absl::StrCat(
        served.message(),
        "; register a function there that calls it, or, if all members may do anything in that "
        "process, have it serve all operators (ServeOperators::kAll, in C DG_WORKER_ALL_OPERATORS, "
        "in Rust ServeOperators::All)"));
  }
  DG_ASSIGN_OR_RETURN(
      std::vector<c10::IValue> arguments,
      DecodeValues(std::move(request.message), parts_.options.limits.message_bytes));
  const int64_t pieces = CountPieces(op, arguments);
  if (pieces > int64_t{parts_.options.limits.tensors_per_message}) {
    return absl::ResourceExhaustedError(absl::StrCat("it would make ", pieces,
                                                     " tensors; limit tensors_per_message is ",
                                                     parts_.options.limits.tensors_per_message));
  }
  const ShownTensors shown = CountShown(arguments);
  if (shown.bytes > parts_.options.limits.message_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("its arguments have elements of ", shown.bytes,
                     " bytes, all of those that a view shows counted; limit message_bytes is ",
                     parts_.options.limits.message_bytes,
                     shown.repeating.empty()
                         ? ""
                         : "; most operators expand their arguments themselves, so send what was "
                           "expanded as it was before, or raise the limit of that worker"));
  }
  const int64_t list_bytes = CountListBytes(op, arguments);
  if (static_cast<uint64_t>(list_bytes) > parts_.options.limits.message_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "it would take ", list_bytes,
        " bytes beside elements, for lists (of a sparse tensor: of its dimensions), for "
        "Fourier transforms of a length with a large prime factor, or for the text of an error; "
        "limit message_bytes is ",
        parts_.options.limits.message_bytes));
  }
  DG_RETURN_IF_ERROR(CheckAttention(op, arguments));
  DG_RETURN_IF_ERROR(CheckViews(op, arguments, shown));
  if (!serves_all) {
    DG_RETURN_IF_ERROR(CheckListLengths(op, arguments));
    DG_RETURN_IF_ERROR(CheckNumbers(op, arguments));
  }
  absl::StatusOr<std::vector<c10::IValue>> results;
  {
    // What is more could not be sent back.
    const AllocationLimit limit(parts_.options.limits.message_bytes, "limit message_bytes");
    results = distgrad::CallOperator(op, std::move(arguments));
  }
  DG_RETURN_IF_ERROR(results.status());
  DG_RETURN_IF_ERROR(CheckSizes(*results));
  return EncodeValues(*results);
}

}  // namespace distgrad
