// A worker in the tests of hosts: joins the job that its variables say, and then does what each
// line of its standard input asks for. Each line is answered by one that begins with "= ".
//
//   train STEPS BYTES     leads that many steps through all workers, with a tensor of that size,
//                         and compares every gradient with what it must be
//   call NAME BYTES       sends that worker so much, and gets it back
//   descriptors           counts the file descriptors that it has open
//   barrier               waits for all workers
//   leave                 ends the job in good order; then this program ends
//   serve                 the same, for as long as the job lasts
//   stay                  the same as serve, but this program takes commands afterwards
//
// What happens to other members it says in lines that begin with "* ": "* lost worker1".
//
// Options: --heartbeat=SECONDS, --join_timeout=SECONDS, --timeout=SECONDS, and --user=ID, whom it
// becomes before all else (the program's file is not there for everybody).
#include <ATen/ATen.h>
#include <grp.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "core/base/status.h"
#include "core/worker/worker.h"

namespace distgrad {
namespace {

// Holds one weight, and multiplies by it. A step moves the weight away from where it began, by what
// its gradient says.
class Member {
 public:
  explicit Member(std::unique_ptr<Worker> worker)
      : worker_(std::move(worker)), weight_(at::full({}, Begin()).requires_grad_(true)) {}

  absl::Status Register() {
    DG_RETURN_IF_ERROR(worker_->Register("forward", [this](Request& r) -> absl::StatusOr<Message> {
      return Message{"", {r.message.tensors.at(0) * weight_}};
    }));
    DG_RETURN_IF_ERROR(worker_->Register("step", [this](Request& r) -> absl::StatusOr<Message> {
      DG_ASSIGN_OR_RETURN(const at::Tensor gradient, r.context.Gradient(weight_));
      weight_ = (Begin() - gradient.clamp(-50, 50) / 100).requires_grad_(true);
      return Message{"", {gradient}};
    }));
    DG_RETURN_IF_ERROR(worker_->Register("weight", [this](Request&) -> absl::StatusOr<Message> {
      return Message{"", {weight_.detach().clone()}};
    }));
    worker_->OnMember([](const MemberEvent& event) {
      const char* const kinds[] = {"?", "joined", "left", "lost"};
      // One string, lest an answer come in between.
      std::cout << absl::StrCat("* ", kinds[static_cast<int>(event.kind)], " ", event.name, "\n")
                << std::flush;
    });
    return worker_->Register(
        "echo", [](Request& r) -> absl::StatusOr<Message> { return std::move(r.message); });
  }

  absl::Status Do(const std::string& line) {
    std::istringstream words(line);
    std::string what, name;
    int64_t steps = 1, bytes = 4;
    words >> what;
    if (what == "train") {
      words >> steps >> bytes;
      for (; steps > 0; --steps) DG_RETURN_IF_ERROR(Step(bytes));
      return absl::OkStatus();
    }
    if (what == "call") {
      words >> name >> bytes;
      const at::Tensor sent = at::full({bytes / 4}, 0.5);
      DG_ASSIGN_OR_RETURN(const Message reply, worker_->Call(name, "echo", {"", {sent}}));
      if (reply.tensors.at(0).equal(sent)) return absl::OkStatus();
      return absl::DataLossError("another tensor came back");
    }
    if (what == "barrier") return worker_->Barrier(absl::Now() + absl::Minutes(10));
    if (what == "leave") return worker_->Shutdown(absl::Now() + absl::Minutes(10));
    if (what == "serve" || what == "stay") return worker_->Serve();
    return absl::InvalidArgumentError(absl::StrCat("no command: ", line));
  }

 private:
  double Begin() const { return worker_->rank() + 1.0; }

  absl::Status Step(int64_t bytes) {
    const std::vector<std::string> names = worker_->names();
    std::vector<double> weights;
    double product = 1;
    for (const std::string& name : names) {
      DG_ASSIGN_OR_RETURN(const Message reply, worker_->Call(name, "weight", {}));
      weights.push_back(reply.tensors.at(0).item<double>());
      product *= weights.back();
    }
    Context context = worker_->NewContext();
    const CallOptions in_context{.context = &context};
    const at::Tensor x = at::ones({bytes / 4}).div_(static_cast<double>(bytes / 4));
    const at::Tensor input = x.requires_grad_(true);
    at::Tensor y = input;
    for (const std::string& name : names) {
      DG_ASSIGN_OR_RETURN(const Message reply,
                          worker_->Call(name, "forward", {"", {y}}, in_context));
      y = reply.tensors.at(0);
    }
    DG_RETURN_IF_ERROR(context.Backward({y.sum()}));
    DG_ASSIGN_OR_RETURN(const at::Tensor gradient, context.Gradient(input));
    if (!at::allclose(gradient, at::full_like(gradient, product))) {
      return absl::DataLossError("a wrong gradient of the input");
    }
    for (size_t i = 0; i < names.size(); ++i) {
      DG_ASSIGN_OR_RETURN(const Message reply, worker_->Call(names[i], "step", {}, in_context));
      const double expected = product / weights[i], given = reply.tensors.at(0).item<double>();
      if (std::abs(given - expected) > 1e-3 * (1 + std::abs(expected))) {
        return absl::DataLossError(
            absl::StrCat("the gradient at ", names[i], " is ", given, ", not ", expected));
      }
    }
    return absl::OkStatus();
  }

  const std::unique_ptr<Worker> worker_;
  at::Tensor weight_;
};

void Answer(const absl::Status& status, absl::string_view said, absl::Time begin) {
  const std::string took =
      absl::FormatDuration(absl::Trunc(absl::Now() - begin, absl::Milliseconds(1)));
  std::cout << "= " << (status.ok() ? absl::StrCat("done: ", said) : status.ToString())
            << " (after " << took << ")" << std::endl;
}

int Main(const std::vector<std::string>& arguments) {
  WorkerOptions options;
  options.thread_count = 2;
  options.timeout = options.join_timeout = absl::Minutes(5);
  for (absl::string_view argument : arguments) {
    int number = 0;
    const size_t equals = argument.find('=');
    if (equals == std::string::npos || !absl::SimpleAtoi(argument.substr(equals + 1), &number)) {
      std::cerr << "what is " << argument << "?\n";
      return 2;
    }
    const absl::string_view name = argument.substr(0, equals);
    if (name == "--heartbeat") options.heartbeat_limit = absl::Seconds(number);
    if (name == "--join_timeout") options.join_timeout = absl::Seconds(number);
    if (name == "--timeout") options.timeout = absl::Seconds(number);
    if (name == "--user") {
      const auto id = static_cast<uid_t>(number);
      if (setgroups(0, nullptr) != 0 || setresgid(id, id, id) != 0 || setresuid(id, id, id) != 0) {
        std::perror("--user");
        return 1;
      }
      prctl(PR_SET_DUMPABLE, 1);  // as a process that this user has started
    }
  }
  const absl::Time started = absl::Now();
  auto worker = Worker::Create(options);
  if (!worker.ok()) {
    Answer(worker.status(), "", started);
    return 1;
  }
  const std::string name = (*worker)->name();
  Member member(*std::move(worker));
  Answer(member.Register(), absl::StrCat("joined as ", name), started);
  for (std::string line; std::getline(std::cin, line);) {
    const absl::Time asked = absl::Now();
    if (line == "descriptors") {
      const std::filesystem::directory_iterator open("/proc/self/fd");
      // The folder's own is one of them.
      Answer(absl::OkStatus(), absl::StrCat(std::distance(begin(open), end(open)) - 1), asked);
      continue;
    }
    const absl::Status status = member.Do(line);
    Answer(status, line, asked);
    if (line == "leave" || line == "serve") return status.ok() ? 0 : 1;
  }
  return 0;
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  return distgrad::Main(std::vector<std::string>(argv + 1, argv + argc));
}
