// What a worker is told of its place in the job: the URL of its rendezvous, and variables that a
// launcher, or whoever writes its files, has set.
//
// An input is the URL and then NAME=value, each up to a newline, and a 0 at the end.
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "core/base/check.h"
#include "core/membership/environment.h"
#include "core/membership/rendezvous_url.h"
#include "tests/fuzz/target.h"

namespace distgrad {
namespace {

void CheckUrl(const RendezvousUrl& url) {
  DG_CHECK(url.rank >= -1 && url.rank < kMaxWorldSize) << url.rank;
  DG_CHECK(url.world_size >= -1 && url.world_size <= kMaxWorldSize) << url.world_size;
  switch (url.kind) {
    case RendezvousUrl::Kind::kEnvironment:
      return;
    case RendezvousUrl::Kind::kTcp:
      DG_CHECK(!url.host.empty() && url.port > 0);
      return;
    case RendezvousUrl::Kind::kFile:
      DG_CHECK(absl::StartsWith(url.path, "/")) << url.path;
      return;
  }
}

}  // namespace

// A place that was found is one that a job has.
bool ReadHostile(absl::string_view bytes) {
  if (bytes.empty() || bytes.back() != '\0') return false;
  bytes.remove_suffix(1);
  const std::vector<std::string> lines = absl::StrSplit(bytes, '\n');
  std::map<std::string, std::string> variables;
  for (size_t i = 1; i < lines.size(); ++i) {
    const std::pair<std::string, std::string> variable =
        absl::StrSplit(lines[i], absl::MaxSplits('=', 1));
    variables.insert(variable);
  }
  if (const auto url = ParseRendezvousUrl(lines[0]); url.ok()) CheckUrl(*url);
  PlaceOptions options;
  options.rendezvous = lines[0];
  const absl::StatusOr<Place> place =
      FindPlace(options, [&](const std::string& name) -> std::optional<std::string> {
        const auto found = variables.find(name);
        if (found == variables.end()) return std::nullopt;
        return found->second;
      });
  if (!place.ok()) {
    DG_CHECK(absl::IsInvalidArgument(place.status()) || absl::IsFailedPrecondition(place.status()))
        << place.status();
    return false;
  }
  DG_CHECK(place->rank >= 0 && place->rank < place->world_size &&
           place->world_size <= kMaxWorldSize)
      << place->rank << " of " << place->world_size;
  DG_CHECK(place->local_rank >= 0 && place->local_world_size >= 0 &&
           (place->local_world_size == 0 || place->local_rank < place->local_world_size))
      << place->local_rank << " of " << place->local_world_size;
  CheckUrl(place->rendezvous);
  return true;
}

std::vector<std::string> GoodInputs() {
  const std::string texts[] = {
      "env://",
      "tcp://[::1]:4711?rank=1&world_size=2&bind=::",
      "file:///shared/job?rank=0&world_size=3",
      "env://\nRANK=3\nWORLD_SIZE=8\nMASTER_ADDR=node0\nMASTER_PORT=29500\nLOCAL_RANK=1\n"
      "LOCAL_WORLD_SIZE=2\nTORCHELASTIC_USE_AGENT_STORE=True\nTORCHELASTIC_RUN_ID=run",
      "env://\nSLURM_JOB_ID=123456\nSLURM_STEP_ID=1\nSLURM_PROCID=5\nSLURM_NTASKS=6\n"
      "SLURM_LOCALID=1\nSLURM_NODEID=1\nSLURM_STEP_TASKS_PER_NODE=4,2\n"
      "SLURM_STEP_NODELIST=gpu[013-014,020]",
      "env://\nOMPI_COMM_WORLD_RANK=2\nOMPI_COMM_WORLD_SIZE=4\nOMPI_COMM_WORLD_LOCAL_RANK=2\n"
      "OMPI_COMM_WORLD_LOCAL_SIZE=4\nPMIX_NAMESPACE=prterun-host-1@1",
      "env://\nPMI_RANK=1\nPMI_SIZE=4\nMPI_LOCALRANKID=1\nMPI_LOCALNRANKS=2\nMASTER_ADDR=head\n"
      "MASTER_PORT=4711",
      "env://\nPET_NODE_RANK=1\nPET_NNODES=3\nPET_MASTER_ADDR=job-master-0\nPET_MASTER_PORT=23456",
      "env://\nDISTGRAD_RANK=1\nDISTGRAD_WORLD_SIZE=2\nDISTGRAD_NAME=back\n"
      "DISTGRAD_RENDEZVOUS=tcp://head:1?bind=0.0.0.0",
  };
  std::vector<std::string> inputs;
  for (const std::string& text : texts) inputs.push_back(text + std::string(1, '\0'));
  return inputs;
}

}  // namespace distgrad
