// Has the table of launchers, and reads the variables that each of them sets.
#include "core/membership/environment.h"

#include <cstdint>
#include <cstdlib>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/membership/slurm.h"

namespace distgrad {
namespace {

using Kind = RendezvousUrl::Kind;

// The variables in which a launcher says a worker's place; nullptr: it does not.
struct Launcher {
  const char* name;
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_world_size;
};

constexpr Launcher kOurs = {"DISTGRAD_*", "DISTGRAD_RANK", "DISTGRAD_WORLD_SIZE",
                            "DISTGRAD_LOCAL_RANK", "DISTGRAD_LOCAL_WORLD_SIZE"};
constexpr Launcher kTorch = {"torchrun and its like", "RANK", "WORLD_SIZE", "LOCAL_RANK",
                             "LOCAL_WORLD_SIZE"};
constexpr Launcher kSlurm = {"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", nullptr};
// A step may have fewer tasks than its job.
constexpr Launcher kSlurmStep = {"Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
                                 nullptr};
constexpr Launcher kOpenMpi = {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                               "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr Launcher kPmi = {"PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"};
constexpr Launcher kPmix = {"PMIx", "PMIX_RANK", nullptr, nullptr, nullptr};
constexpr Launcher kKubernetes = {"Kubernetes", "PET_NODE_RANK", "PET_NNODES", nullptr, nullptr};

// Whether torchrun's agent serves the store at MASTER_ADDR.
constexpr char kAgentStore[] = "TORCHELASTIC_USE_AGENT_STORE";

bool IsSlurm(const Launcher& launcher) { return &launcher == &kSlurm || &launcher == &kSlurmStep; }

// "RANK=\"8\""
std::string Shown(const std::string& name, const std::string& value) {
  return absl::StrCat(name, "=\"", absl::CHexEscape(value), "\"");
}

// Ports that are derived from a job's number lie below those that Linux gives away by itself.
uint16_t DerivedPort(uint64_t number) { return static_cast<uint16_t>(20000 + number % 10000); }

// FNV-1a (Fowler, Noll, Vo), the same on all machines of a job.
uint64_t Hash(absl::string_view text) {
  uint64_t hash = 14695981039346656037u;
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 1099511628211u;
  return hash;
}

// Reads one environment.
class Finder {
 public:
  Finder(const PlaceOptions& options, const Getenv& getenv) : options_(options), getenv_(getenv) {}

  absl::StatusOr<Place> Find() {
    std::string url = options_.has_store ? "env://" : options_.rendezvous;
    DG_ASSIGN_OR_RETURN(place_.rendezvous, ParseRendezvousUrl(url));
    const auto ours = Get("DISTGRAD_RENDEZVOUS");
    if (ours.has_value() && !options_.has_store && place_.rendezvous.kind == Kind::kEnvironment) {
      const RendezvousUrl given = place_.rendezvous;
      auto said = ParseRendezvousUrl(*ours);
      DG_RETURN_IF_ERROR(Annotate(said.status(), "DISTGRAD_RENDEZVOUS"));
      url = *ours;
      place_.rendezvous = *said;
      if (given.rank >= 0) place_.rendezvous.rank = given.rank;
      if (given.world_size >= 0) place_.rendezvous.world_size = given.world_size;
    }
    if (options_.join) {
      place_.rank = 1;
      place_.world_size = 2;
    } else {
      DG_RETURN_IF_ERROR(FindRank(url));
    }
    if (!options_.has_store) DG_RETURN_IF_ERROR(FindRendezvous());
    // In torchrun's own store the starts meet, whoever says the rank.
    if (launcher_ == &kTorch || place_.launcher_serves) {
      place_.run = Get("TORCHELASTIC_RUN_ID").value_or("");
    }
    if (options_.join && !place_.run.empty()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "this worker is to join a job, and ", Shown(kAgentStore, *Get(kAgentStore)),
          ": nobody joins one in torchrun's store, where each start has keys of its own; have "
          "torchrun start this worker, without the option join"));
    }
    if (options_.rank < 0) place_.name = Get("DISTGRAD_NAME").value_or("");
    return std::move(place_);
  }

 private:
  std::optional<std::string> Get(const std::string& name) const {
    std::optional<std::string> value = getenv_(name);
    if (value.has_value() && value->empty()) value.reset();
    return value;
  }

  absl::StatusOr<int> Number(const std::string& name, int low, int high) const {
    const std::string value = Get(name).value_or("");
    int number = 0;
    if (ParseNumber(value, low, high, &number)) return number;
    return absl::InvalidArgumentError(
        absl::StrCat(Shown(name, value), " must be a number from ", low, " to ", high));
  }

  // Of variables of which all or none must be set, whether they are.
  absl::StatusOr<bool> Both(const std::string& one, const std::string& other) const {
    const auto first = Get(one);
    const auto second = Get(other);
    if (first.has_value() == second.has_value()) return first.has_value();
    return absl::FailedPreconditionError(
        first.has_value() ? absl::StrCat(Shown(one, *first), " is set, but ", other, " is not")
                          : absl::StrCat(Shown(other, *second), " is set, but ", one, " is not"));
  }

  // Who started this process; nullptr: nobody that we know.
  const Launcher* FindLauncher() const {
    const auto says = [this](const Launcher& launcher) {
      return Get(launcher.rank).has_value() ||
             (launcher.world_size != nullptr && Get(launcher.world_size).has_value());
    };
    if (says(kOurs)) return &kOurs;
    if (says(kTorch)) return &kTorch;
    const Launcher* mpi = nullptr;
    if (says(kOpenMpi)) {
      mpi = &kOpenMpi;
    } else if (says(kPmi)) {
      mpi = &kPmi;
    }
    // SLURM_NTASKS alone is the shell of an allocation. And where mpirun was started in an
    // allocation, its processes inherit Slurm's variables of the one that started them.
    const Launcher& slurm = Get(kSlurmStep.world_size).has_value() ? kSlurmStep : kSlurm;
    if (Get(slurm.rank).has_value() &&
        (mpi == nullptr ||
         (Get(slurm.rank) == Get(mpi->rank) && Get(slurm.world_size) == Get(mpi->world_size)))) {
      return &slurm;
    }
    if (mpi != nullptr) return mpi;
    if (says(kPmix)) return &kPmix;
    return says(kKubernetes) ? &kKubernetes : nullptr;
  }

  absl::Status FindRank(const std::string& url) {
    DG_RETURN_IF_ERROR(Merge("rank", options_.rank, place_.rendezvous.rank, url, &place_.rank));
    DG_RETURN_IF_ERROR(Merge("world_size", options_.world_size, place_.rendezvous.world_size, url,
                             &place_.world_size));
    if (place_.rank < 0 || place_.world_size < 0) {
      launcher_ = FindLauncher();
      if (launcher_ != nullptr) {
        place_.is_launched = true;
        DG_RETURN_IF_ERROR(ReadLauncher(*launcher_));
      } else {
        DG_RETURN_IF_ERROR(NobodySays(url));
      }
    } else if (const Launcher* launcher = FindLauncher();
               launcher != nullptr && SaysThisPlace(*launcher)) {
      // They need nothing of it, so what is wrong there is no error of theirs.
      if (!ReadLocalRank(*launcher, place_.world_size).ok()) {
        place_.local_rank = place_.local_world_size = 0;
      }
    }
    if (place_.world_size >= 1 && place_.world_size <= kMaxWorldSize &&
        place_.rank < place_.world_size) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat("there is no worker of rank ", place_.rank,
                                                   " in a job of ", place_.world_size));
  }

  // Whether the launcher says the same as options and URL do: a program may have read it itself.
  bool SaysThisPlace(const Launcher& launcher) const {
    return launcher.world_size != nullptr && Get(launcher.rank) == absl::StrCat(place_.rank) &&
           Get(launcher.world_size) == absl::StrCat(place_.world_size);
  }

  absl::Status Merge(const char* what, int option, int in_url, const std::string& url, int* to) {
    *to = option >= 0 ? option : in_url;
    if (option < 0 || in_url < 0 || option == in_url) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("the option ", what, " is ", option,
                                                   ", but rendezvous '", url, "' says ", in_url));
  }

  // Completes what options and URL leave open.
  absl::Status ReadLauncher(const Launcher& launcher) {
    int world_size = place_.world_size;
    if (launcher.world_size != nullptr) {
      DG_RETURN_IF_ERROR(Both(launcher.rank, launcher.world_size).status());
      DG_ASSIGN_OR_RETURN(world_size, Number(launcher.world_size, 1, kMaxWorldSize));
    } else if (world_size < 0) {
      return absl::FailedPreconditionError(absl::StrCat(
          Shown(launcher.rank, *Get(launcher.rank)), " is set, but ", launcher.name,
          " has no variable for the number of workers: set DISTGRAD_RANK and DISTGRAD_WORLD_SIZE"));
    }
    DG_ASSIGN_OR_RETURN(const int rank, Number(launcher.rank, 0, kMaxWorldSize - 1));
    if (rank >= world_size && launcher.world_size != nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat(Shown(launcher.rank, *Get(launcher.rank)), " must be less than ",
                       Shown(launcher.world_size, *Get(launcher.world_size))));
    }
    // A process of each pod that is to start some of its own is not yet a worker.
    const std::string of_pod = Get("PET_NPROC_PER_NODE").value_or("1");
    if ((&launcher == &kTorch || &launcher == &kKubernetes) && of_pod != "1" &&
        !Get("LOCAL_RANK").has_value()) {
      return absl::FailedPreconditionError(
          absl::StrCat(Shown("PET_NPROC_PER_NODE", of_pod),
                       " asks for several workers in this pod, and nobody has started them: run "
                       "this program by `torchrun --no-python`"));
    }
    if (place_.rank < 0) place_.rank = rank;
    if (place_.world_size < 0) place_.world_size = world_size;
    DG_RETURN_IF_ERROR(ReadLocalRank(launcher, world_size));
    return absl::OkStatus();
  }

  absl::Status ReadLocalRank(const Launcher& launcher, int world_size) {
    int& local_world_size = place_.local_world_size;
    if (&launcher == &kKubernetes) local_world_size = 1;
    if (IsSlurm(launcher)) DG_RETURN_IF_ERROR(ReadSlurmTasks());
    if (launcher.local_world_size != nullptr && Get(launcher.local_world_size).has_value()) {
      DG_ASSIGN_OR_RETURN(local_world_size, Number(launcher.local_world_size, 1, world_size));
    }
    if (launcher.local_rank == nullptr || !Get(launcher.local_rank).has_value()) {
      return absl::OkStatus();
    }
    const int end = local_world_size > 0 ? local_world_size : world_size;
    DG_ASSIGN_OR_RETURN(place_.local_rank, Number(launcher.local_rank, 0, end - 1));
    return absl::OkStatus();
  }

  absl::Status ReadSlurmTasks() {
    for (const char* const name : {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"}) {
      const auto tasks = Get(name);
      if (!tasks.has_value() || !Get("SLURM_NODEID").has_value()) continue;
      DG_ASSIGN_OR_RETURN(const int node, Number("SLURM_NODEID", 0, 1 << 24));
      auto of_node = SlurmTasksOfNode(*tasks, node);
      DG_RETURN_IF_ERROR(Annotate(of_node.status(), name));
      place_.local_world_size = *of_node;
      return absl::OkStatus();
    }
    return absl::OkStatus();
  }

  // No launcher: one worker alone, unless something says that it is not.
  absl::Status NobodySays(const std::string& url) {
    std::string but;
    if (place_.rank >= 0) {
      but = absl::StrCat("this worker has rank ", place_.rank, ", but nobody says of how many");
    } else if (place_.world_size > 1) {
      but = absl::StrCat("the job has ", place_.world_size, " workers");
    } else if (place_.rendezvous.kind != Kind::kEnvironment) {
      but = absl::StrCat("rendezvous '", url, "' is given");
    } else {
      for (const char* const name :
           {"MASTER_ADDR", "MASTER_PORT", "PET_MASTER_ADDR", "PET_MASTER_PORT"}) {
        if (Get(name).has_value() && but.empty()) {
          but = absl::StrCat(Shown(name, *Get(name)), " is set");
        }
      }
    }
    if (!but.empty()) {
      const bool of_how_many = place_.rank >= 0;
      return absl::FailedPreconditionError(absl::StrCat(
          but, of_how_many ? "" : ", but nobody says which rank this worker has",
          ": set the options rank and world_size, or RANK and WORLD_SIZE as launchers do"));
    }
    place_.rank = 0;
    place_.world_size = 1;
    return absl::OkStatus();
  }

  absl::Status FindRendezvous() {
    place_.serves_store = place_.rank == 0;
    if (place_.rendezvous.kind != Kind::kEnvironment) return absl::OkStatus();
    DG_ASSIGN_OR_RETURN(bool found, TakeAddress("MASTER_ADDR", "MASTER_PORT"));
    // torchrun writes "True" and "False".
    if (const auto agent = Get(kAgentStore); found && agent.has_value()) {
      if (!absl::SimpleAtob(*agent, &place_.launcher_serves)) {
        return absl::InvalidArgumentError(
            absl::StrCat(Shown(kAgentStore, *agent), " must be True or False"));
      }
      if (place_.launcher_serves) place_.serves_store = false;
    }
    if (!found) {
      DG_ASSIGN_OR_RETURN(found, TakeAddress("PET_MASTER_ADDR", "PET_MASTER_PORT"));
    }
    if (!found && launcher_ != nullptr && IsSlurm(*launcher_)) {
      DG_ASSIGN_OR_RETURN(found, TakeSlurmAddress());
    }
    if (!found && launcher_ == &kOpenMpi) found = TakeMpiAddress();
    if (found || place_.world_size == 1) return absl::OkStatus();
    const std::string who =
        options_.join
            ? "this worker is to join a job"
            : absl::StrCat(
                  launcher_ == nullptr ? "options say" : absl::StrCat(launcher_->name, " says"),
                  " that this is worker ", place_.rank, " of ", place_.world_size);
    return absl::FailedPreconditionError(
        absl::StrCat(who,
                     ", but no rendezvous is set: set MASTER_ADDR and MASTER_PORT, or "
                     "DISTGRAD_RENDEZVOUS=tcp://host:port"));
  }

  absl::StatusOr<bool> TakeAddress(const std::string& host, const std::string& port) {
    DG_ASSIGN_OR_RETURN(const bool both, Both(host, port));
    if (!both) return false;
    DG_ASSIGN_OR_RETURN(const int number, Number(port, 1, 65535));
    DG_RETURN_IF_ERROR(SetRendezvous(*Get(host), static_cast<uint16_t>(number), host));
    return true;
  }

  // `said_by` is the variable that says the host.
  absl::Status SetRendezvous(absl::string_view host, uint16_t port, const std::string& said_by) {
    // One grammar for hosts; an IPv6 address needs no brackets here.
    const bool bare = absl::StrContains(host, ':') && host[0] != '[';
    auto url = ParseRendezvousUrl(
        absl::StrCat("tcp://", bare ? "[" : "", host, bare ? "]" : "", ":", port));
    if (!url.ok() || absl::StrContains(host, '?')) {
      return absl::InvalidArgumentError(
          absl::StrCat(Shown(said_by, std::string(host)), " must be a host name or an address"));
    }
    place_.rendezvous = *std::move(url);
    return absl::OkStatus();
  }

  absl::StatusOr<bool> TakeSlurmAddress() {
    const std::string name =
        Get("SLURM_STEP_NODELIST").has_value() ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST";
    const auto nodes = Get(name);
    if (!nodes.has_value() || !Get("SLURM_JOB_ID").has_value()) return false;
    auto host = FirstSlurmHost(*nodes);
    DG_RETURN_IF_ERROR(Annotate(host.status(), name));
    // Two steps of a job may run on one node at a time.
    uint64_t job = 0;
    uint32_t step = 0;
    if (!absl::SimpleAtoi(*Get("SLURM_JOB_ID"), &job)) {
      return absl::InvalidArgumentError(
          absl::StrCat(Shown("SLURM_JOB_ID", *Get("SLURM_JOB_ID")), " must be a number"));
    }
    if (!absl::SimpleAtoi(Get("SLURM_STEP_ID").value_or("0"), &step)) step = 0;
    DG_RETURN_IF_ERROR(SetRendezvous(IsOneSlurmHost(*nodes) ? "127.0.0.1" : *host,
                                     DerivedPort(job % 10000 + uint64_t{step} * 1009), name));
    return true;
  }

  // Open MPI says nothing of machines; but where all its processes are on one, that is enough.
  bool TakeMpiAddress() {
    const auto name = Get("PMIX_NAMESPACE");
    if (!name.has_value() || place_.local_world_size != place_.world_size) return false;
    return SetRendezvous("127.0.0.1", DerivedPort(Hash(*name)), "PMIX_NAMESPACE").ok();
  }

  const PlaceOptions& options_;
  const Getenv& getenv_;
  const Launcher* launcher_ = nullptr;
  Place place_;
};

}  // namespace

std::optional<std::string> ProcessEnvironment(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

absl::StatusOr<Place> FindPlace(const PlaceOptions& options, const Getenv& getenv) {
  return Finder(options, getenv).Find();
}

}  // namespace distgrad
