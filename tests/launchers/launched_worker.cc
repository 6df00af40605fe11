// Joins the job, and has all workers greet each other.
#include "tests/launchers/launched_worker.h"

#include <cstdio>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/status.h"

namespace distgrad {

absl::Status RunLaunchedWorker(const std::function<absl::Status(const Worker&)>& joined) {
  const absl::Duration patience = absl::Minutes(4);  // on a machine under load
  const absl::Time deadline = absl::Now() + patience;
  DG_ASSIGN_OR_RETURN(
      const std::unique_ptr<Worker> worker,
      Worker::Create({.thread_count = 1, .timeout = patience, .join_timeout = patience}));
  DG_RETURN_IF_ERROR(
      worker->Register("greet", [&worker](Request& request) -> absl::StatusOr<Message> {
        return Message{absl::StrCat(request.message.payload, " greeted by ", worker->name()), {}};
      }));
  DG_RETURN_IF_ERROR(worker->Barrier(deadline));
  DG_RETURN_IF_ERROR(joined(*worker));

  std::vector<std::pair<std::string, Future<Message>>> replies;
  for (const std::string& name : worker->names()) {
    replies.emplace_back(name, worker->CallAsync(name, "greet", {worker->name(), {}}));
  }
  for (const auto& [name, reply] : replies) {
    DG_RETURN_IF_ERROR(reply.Wait().status());
    const std::string expected = absl::StrCat(worker->name(), " greeted by ", name);
    if (reply.Wait()->payload != expected) {
      return absl::DataLossError(absl::StrCat("'", reply.Wait()->payload, "'"));
    }
  }
  const std::string done = absl::StrCat(
      "rank ", worker->rank(), " of ", worker->world_size(), ", local ", worker->local_rank(),
      " of ", worker->local_world_size(), ", called ", replies.size(), "\n");
  DG_RETURN_IF_ERROR(worker->Shutdown(deadline));
  std::fputs(done.c_str(), stdout);
  std::fflush(stdout);
  return absl::OkStatus();
}

}  // namespace distgrad
