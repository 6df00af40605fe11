// The variables of each launcher, their order, and those that contradict each other.
#include "core/membership/environment.h"

#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

using Kind = RendezvousUrl::Kind;
using Variables = std::map<std::string, std::string>;

absl::StatusOr<Place> Find(const Variables& variables, const PlaceOptions& options = {}) {
  return FindPlace(options, [&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional<std::string>(found->second);
  });
}

// "3/8 1/2 tcp://node0:29500 client", "... run x": all that matters of a place.
std::string Summary(const absl::StatusOr<Place>& place) {
  if (!place.ok()) return place.status().ToString();
  std::string text = absl::StrCat(place->rank, "/", place->world_size, " ", place->local_rank, "/",
                                  place->local_world_size);
  const RendezvousUrl& url = place->rendezvous;
  if (url.kind == Kind::kTcp) {
    absl::StrAppend(&text, " tcp://", url.host, ":", url.port,
                    place->serves_store ? " server" : " client");
  }
  if (url.kind == Kind::kFile) absl::StrAppend(&text, " file://", url.path);
  if (!place->name.empty()) absl::StrAppend(&text, " name ", place->name);
  if (!place->run.empty()) absl::StrAppend(&text, " run ", place->run);
  return text;
}

// With some variables changed; one that is "-" is taken out.
Variables With(Variables variables, const Variables& changes) {
  for (const auto& [name, value] : changes) {
    if (value == "-") {
      variables.erase(name);
    } else {
      variables[name] = value;
    }
  }
  return variables;
}

const Variables kPlain = {
    {"RANK", "3"}, {"WORLD_SIZE", "8"}, {"MASTER_ADDR", "node0"}, {"MASTER_PORT", "29500"}};

// As torchrun 2.11 sets them; tests/launchers runs the real one.
const Variables kTorchrun = With(kPlain, {{"LOCAL_RANK", "1"},
                                          {"LOCAL_WORLD_SIZE", "2"},
                                          {"GROUP_RANK", "1"},
                                          {"ROLE_RANK", "3"},
                                          {"ROLE_WORLD_SIZE", "8"},
                                          {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                          {"TORCHELASTIC_RESTART_COUNT", "2"},
                                          {"TORCHELASTIC_MAX_RESTARTS", "3"},
                                          {"TORCHELASTIC_RUN_ID", "run"}});

// Two nodes, four tasks on the first and two on the second.
const Variables kSrun = {{"SLURM_JOB_ID", "123456"},
                         {"SLURM_STEP_ID", "1"},
                         {"SLURM_PROCID", "5"},
                         {"SLURM_NTASKS", "6"},
                         {"SLURM_LOCALID", "1"},
                         {"SLURM_NODEID", "1"},
                         {"SLURM_STEP_TASKS_PER_NODE", "4,2"},
                         {"SLURM_JOB_NODELIST", "gpu[012-015,020]"},
                         {"SLURM_STEP_NODELIST", "gpu[013-014]"}};

const Variables kMpirun = {{"OMPI_COMM_WORLD_RANK", "2"},       {"OMPI_COMM_WORLD_SIZE", "4"},
                           {"OMPI_COMM_WORLD_LOCAL_RANK", "2"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                           {"PMIX_NAMESPACE", "2684354561"},    {"PMIX_RANK", "2"}};

const Variables kHydra = {{"PMI_RANK", "1"},
                          {"PMI_SIZE", "4"},
                          {"MPI_LOCALRANKID", "1"},
                          {"MPI_LOCALNRANKS", "2"},
                          {"PMI_FD", "7"}};

const Variables kPod = {{"PET_NODE_RANK", "1"},
                        {"PET_NNODES", "3"},
                        {"PET_MASTER_ADDR", "job-master-0"},
                        {"PET_MASTER_PORT", "23456"}};

const Variables kAddress = {{"MASTER_ADDR", "head"}, {"MASTER_PORT", "4711"}};

TEST(FindPlaceTest, NobodySays) { EXPECT_EQ(Summary(Find({})), "0/1 0/0"); }

TEST(FindPlaceTest, Plain) {
  EXPECT_EQ(Summary(Find(kPlain)), "3/8 0/0 tcp://node0:29500 client");
  EXPECT_EQ(Summary(Find(With(kPlain, {{"RANK", "0"}}))), "0/8 0/0 tcp://node0:29500 server");
  EXPECT_EQ(Summary(Find(With(kPlain, {{"LOCAL_RANK", "3"}}))), "3/8 3/0 tcp://node0:29500 client");
  EXPECT_EQ(Summary(Find(With(kPlain, {{"MASTER_ADDR", "fd00::2"}}))),
            "3/8 0/0 tcp://fd00::2:29500 client");
}

TEST(FindPlaceTest, Torchrun) {
  EXPECT_EQ(Summary(Find(kTorchrun)), "3/8 1/2 tcp://node0:29500 client run run");
  const Variables first = With(kTorchrun, {{"RANK", "0"}, {"LOCAL_RANK", "0"}});
  EXPECT_EQ(Summary(Find(first)), "0/8 0/2 tcp://node0:29500 client run run");
  EXPECT_TRUE(Find(kTorchrun)->launcher_serves);
  EXPECT_FALSE(Find(kPlain)->launcher_serves);
  EXPECT_EQ(Summary(Find(With(first, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}}))),
            "0/8 0/2 tcp://node0:29500 server run run");
  // A store of our own is ours to serve, but a start is a start.
  EXPECT_EQ(Summary(Find(With(first, {{"DISTGRAD_RENDEZVOUS", "tcp://a:1"}}))),
            "0/8 0/2 tcp://a:1 server run run");
  // A program that reads the rank itself is started anew in the same store all the same.
  EXPECT_EQ(Summary(Find(kTorchrun, {.rank = 3, .world_size = 8})),
            "3/8 1/2 tcp://node0:29500 client run run");
  EXPECT_EQ(Summary(Find(kTorchrun, {.rendezvous = "env://?rank=2&world_size=4"})),
            "2/4 0/0 tcp://node0:29500 client run run");
  EXPECT_EQ(Summary(Find(With(kTorchrun, {{"DISTGRAD_RANK", "1"}, {"DISTGRAD_WORLD_SIZE", "2"}}))),
            "1/2 0/0 tcp://node0:29500 client run run");
  // Whoever has said the place needs nothing of these.
  EXPECT_EQ(Summary(Find({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "3"}},
                         {.rank = 0, .world_size = 1})),
            "0/1 0/0");
  // But such a job in a store of its own may be of other processes, too.
  EXPECT_EQ(
      Summary(Find(kTorchrun, {.rank = 3, .world_size = 8, .rendezvous = "file:///tmp/meet"})),
      "3/8 1/2 file:///tmp/meet");
}

// It has no place of the start, whoever says one.
TEST(FindPlaceTest, WhoJoinsLater) {
  const std::string meet = "tcp://node0:29500?rank=0&world_size=4";
  EXPECT_EQ(Summary(Find({}, {.rendezvous = meet, .join = true})),
            "1/2 0/0 tcp://node0:29500 client");
  EXPECT_EQ(Summary(Find({{"DISTGRAD_RENDEZVOUS", meet}}, {.join = true})),
            "1/2 0/0 tcp://node0:29500 client");
  EXPECT_EQ(Summary(Find(kPlain, {.rank = 7, .join = true})), "1/2 0/0 tcp://node0:29500 client");
  EXPECT_EQ(Summary(Find({}, {.has_store = true, .join = true})), "1/2 0/0");
  EXPECT_EQ(Summary(Find({}, {.join = true})),
            "FAILED_PRECONDITION: this worker is to join a job, but no rendezvous is set: set "
            "MASTER_ADDR and MASTER_PORT, or DISTGRAD_RENDEZVOUS=tcp://host:port");
  // It could not know which start it is.
  EXPECT_EQ(Summary(Find(kTorchrun, {.join = true})),
            "FAILED_PRECONDITION: this worker is to join a job, and "
            "TORCHELASTIC_USE_AGENT_STORE=\"True\": nobody joins one in torchrun's store, where "
            "each start has keys of its own; have torchrun start this worker, without the option "
            "join");
  EXPECT_EQ(Summary(Find(With(kTorchrun, {{"DISTGRAD_RENDEZVOUS", meet}}), {.join = true})),
            "1/2 0/0 tcp://node0:29500 client");
}

TEST(FindPlaceTest, Slurm) {
  // 20000 + 123456 % 10000 + 1009 of the step.
  EXPECT_EQ(Summary(Find(kSrun)), "5/6 1/2 tcp://gpu013:24465 client");
  EXPECT_EQ(Summary(Find(With(kSrun, {{"SLURM_STEP_NODELIST", "-"}, {"SLURM_STEP_ID", "-"}}))),
            "5/6 1/2 tcp://gpu012:23456 client");
  EXPECT_EQ(Summary(Find(With(kSrun, {{"SLURM_STEP_NODELIST", "gpu013"},
                                      {"SLURM_PROCID", "0"},
                                      {"SLURM_LOCALID", "0"},
                                      {"SLURM_NODEID", "0"}}))),
            "0/6 0/4 tcp://127.0.0.1:24465 server");
  EXPECT_EQ(Summary(Find(With(kSrun, kAddress))), "5/6 1/2 tcp://head:4711 client");
  // A step may be smaller than its job.
  EXPECT_EQ(Summary(Find(With(kSrun, {{"SLURM_NTASKS", "64"}, {"SLURM_STEP_NUM_TASKS", "6"}}))),
            "5/6 1/2 tcp://gpu013:24465 client");
  // The shell of an allocation, in which srun has started nothing.
  EXPECT_EQ(Summary(Find(With(kSrun, {{"SLURM_PROCID", "-"}}))), "0/1 0/0");
}

TEST(FindPlaceTest, OpenMpi) {
  const std::string here = Summary(Find(kMpirun));
  EXPECT_TRUE(absl::StartsWith(here, "2/4 2/4 tcp://127.0.0.1:2")) << here;
  // All ranks find one port, and another job finds another.
  const auto port = [](const Variables& changes) {
    return Find(With(kMpirun, changes))->rendezvous.port;
  };
  EXPECT_EQ(port({}), port({{"OMPI_COMM_WORLD_RANK", "0"}}));
  EXPECT_NE(port({}), port({{"PMIX_NAMESPACE", "2684354562"}}));
  const Variables two_machines =
      With(kMpirun, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}});
  EXPECT_EQ(Summary(Find(With(two_machines, kAddress))), "2/4 0/2 tcp://head:4711 client");
  EXPECT_EQ(
      Summary(Find(two_machines)),
      "FAILED_PRECONDITION: Open MPI says that this is worker 2 of 4, but no rendezvous is set: "
      "set MASTER_ADDR and MASTER_PORT, or DISTGRAD_RENDEZVOUS=tcp://host:port");
}

// What mpirun starts inside of an allocation inherits the variables of whoever started mpirun.
TEST(FindPlaceTest, MpiWithinSlurm) {
  Variables both = kMpirun;
  both.insert(kSrun.begin(), kSrun.end());
  EXPECT_EQ(Find(both)->rank, 2);
  // srun that sets both kinds says the same twice.
  both = With(both, {{"SLURM_PROCID", "2"}, {"SLURM_NTASKS", "4"}, {"SLURM_LOCALID", "0"}});
  EXPECT_EQ(Summary(Find(both)), "2/4 0/2 tcp://gpu013:24465 client");
}

TEST(FindPlaceTest, Pmi) {
  EXPECT_EQ(Summary(Find(With(kHydra, kAddress))), "1/4 1/2 tcp://head:4711 client");
  EXPECT_TRUE(absl::StartsWith(Summary(Find(kHydra)),
                               "FAILED_PRECONDITION: PMI says that this is "
                               "worker 1 of 4, but no rendezvous is set"));
  const Variables pmix = With(kAddress, {{"PMIX_RANK", "1"}});
  EXPECT_TRUE(absl::StrContains(Summary(Find(pmix)), "PMIX_RANK=\"1\" is set, but PMIx has no "));
  PlaceOptions options;
  options.world_size = 4;
  EXPECT_EQ(Summary(Find(pmix, options)), "1/4 0/0 tcp://head:4711 client");
}

TEST(FindPlaceTest, Kubernetes) {
  EXPECT_EQ(Summary(Find(kPod)), "1/3 0/1 tcp://job-master-0:23456 client");
  EXPECT_EQ(Summary(Find(With(kPod, {{"PET_NODE_RANK", "0"}, {"PET_NPROC_PER_NODE", "1"}}))),
            "0/3 0/1 tcp://job-master-0:23456 server");
  // Older operators set both kinds.
  EXPECT_EQ(Summary(Find(With(kPod, kPlain))), "3/8 0/0 tcp://node0:29500 client");
  // torchrun has started this one, in its pod.
  EXPECT_EQ(Summary(Find(With(With(kPod, kTorchrun), {{"PET_NPROC_PER_NODE", "2"}}))),
            "3/8 1/2 tcp://node0:29500 client run run");
  for (const char* several : {"4", "auto", "gpu"}) {
    const absl::Status status = Find(With(kPod, {{"PET_NPROC_PER_NODE", several}})).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status));
    EXPECT_TRUE(absl::StrContains(
        status.message(), absl::StrCat("PET_NPROC_PER_NODE=\"", several, "\" asks for several")))
        << status;
  }
  EXPECT_TRUE(absl::StrContains(Summary(Find(With(kPod, {{"PET_NNODES", "2:4"}}))),
                                "PET_NNODES=\"2:4\" must be a number from 1 to 65536"));
}

TEST(FindPlaceTest, OursGoFirst) {
  const Variables ours = {
      {"DISTGRAD_RANK", "1"},       {"DISTGRAD_WORLD_SIZE", "2"},
      {"DISTGRAD_LOCAL_RANK", "1"}, {"DISTGRAD_LOCAL_WORLD_SIZE", "2"},
      {"DISTGRAD_NAME", "back"},    {"DISTGRAD_RENDEZVOUS", "file:///tmp/meet"}};
  for (const Variables& other : {Variables(), kPlain, kSrun, kMpirun, kHydra, kPod}) {
    EXPECT_EQ(Summary(Find(With(other, ours))), "1/2 1/2 file:///tmp/meet name back");
  }
  // Each goes with what others say of the rest.
  EXPECT_EQ(Summary(Find(With(kSrun, {{"DISTGRAD_RENDEZVOUS", "tcp://a:1"}}))),
            "5/6 1/2 tcp://a:1 client");
  EXPECT_EQ(Summary(Find(With(kPlain, {{"DISTGRAD_RANK", "0"}, {"DISTGRAD_WORLD_SIZE", "2"}}))),
            "0/2 0/0 tcp://node0:29500 server");
}

TEST(FindPlaceTest, OrderOfLaunchers) {
  Variables all;
  for (const Variables& some : {kTorchrun, kSrun, kMpirun, kHydra, kPod}) {
    all.insert(some.begin(), some.end());
  }
  EXPECT_EQ(Find(all)->rank, 3);  // torchrun
  all = With(all, {{"RANK", "-"}, {"WORLD_SIZE", "-"}});
  EXPECT_EQ(Find(all)->rank, 2);  // Open MPI, within Slurm
  all = With(all, {{"OMPI_COMM_WORLD_RANK", "-"}, {"OMPI_COMM_WORLD_SIZE", "-"}});
  EXPECT_EQ(Find(all)->rank, 1);  // PMI, within Slurm
  all = With(all, {{"PMI_RANK", "-"}, {"PMI_SIZE", "-"}});
  EXPECT_EQ(Find(all)->rank, 5);  // Slurm
}

TEST(FindPlaceTest, OptionsGoBeforeAll) {
  const Variables ours = With(kTorchrun, {{"DISTGRAD_RANK", "1"},
                                          {"DISTGRAD_WORLD_SIZE", "2"},
                                          {"DISTGRAD_NAME", "back"},
                                          {"DISTGRAD_RENDEZVOUS", "file:///tmp/meet"}});
  PlaceOptions options{.rank = 4, .world_size = 5, .rendezvous = "tcp://[::1]:7"};
  EXPECT_EQ(Summary(Find(ours, options)), "4/5 0/0 tcp://::1:7 client");
  options = {.rendezvous = "tcp://a:7?rank=0&world_size=9"};
  EXPECT_EQ(Summary(Find({}, options)), "0/9 0/0 tcp://a:7 server");
  // Malformed variables are not looked at where options say it all.
  options = {.rank = 0, .world_size = 2, .has_store = true};
  EXPECT_EQ(Summary(Find({{"RANK", "x"}, {"MASTER_PORT", "x"}}, options)), "0/2 0/0");
  // One may be left to the launcher.
  EXPECT_EQ(Summary(Find(kPlain, {.rank = 0})), "0/8 0/0 tcp://node0:29500 server");
  EXPECT_EQ(Summary(Find(kPlain, {.rendezvous = "env://?rank=1"})),
            "1/8 0/0 tcp://node0:29500 client");
}

TEST(FindPlaceTest, WhatIsHalfSaid) {
  const std::vector<std::pair<Variables, std::string>> half = {
      {{{"RANK", "3"}}, "RANK=\"3\" is set, but WORLD_SIZE is not"},
      {{{"WORLD_SIZE", "8"}, {"RANK", ""}}, "WORLD_SIZE=\"8\" is set, but RANK is not"},
      {{{"DISTGRAD_RANK", "3"}}, "DISTGRAD_RANK=\"3\" is set, but DISTGRAD_WORLD_SIZE is not"},
      {{{"SLURM_PROCID", "3"}}, "SLURM_PROCID=\"3\" is set, but SLURM_NTASKS is not"},
      {{{"PMI_SIZE", "3"}}, "PMI_SIZE=\"3\" is set, but PMI_RANK is not"},
      {With(kPlain, {{"MASTER_PORT", "-"}}),
       "MASTER_ADDR=\"node0\" is set, but MASTER_PORT is not"},
      {With(kPlain, {{"MASTER_ADDR", "-"}}),
       "MASTER_PORT=\"29500\" is set, but MASTER_ADDR is not"},
      {With(kPod, {{"PET_MASTER_PORT", "-"}}), "is set, but PET_MASTER_PORT is not"},
      {kAddress, "MASTER_ADDR=\"head\" is set, but nobody says which rank"},
      {{{"DISTGRAD_RENDEZVOUS", "tcp://a:1"}},
       "rendezvous 'tcp://a:1' is given, but nobody says which rank"},
      {{{"RANK", "1"}, {"WORLD_SIZE", "2"}}, "this is worker 1 of 2, but no rendezvous is set"},
      {With(kSrun, {{"SLURM_JOB_ID", "-"}}),
       "Slurm says that this is worker 5 of 6, but no rendezvous"},
  };
  for (const auto& [variables, complaint] : half) {
    const absl::Status status = Find(variables).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << complaint << "\n" << status;
    EXPECT_TRUE(absl::StrContains(status.message(), complaint)) << complaint << "\n" << status;
  }
  EXPECT_TRUE(absl::StrContains(Find({}, {.rank = 2}).status().message(),
                                "has rank 2, but nobody says of how many"));
  EXPECT_TRUE(absl::StrContains(Find({}, {.world_size = 2}).status().message(),
                                "the job has 2 workers, but nobody says which rank"));
}

TEST(FindPlaceTest, WhatIsMalformedOrContradicts) {
  const std::vector<std::pair<Variables, std::string>> bad = {
      {{{"RANK", "-1"}}, "RANK=\"-1\" must be a number from 0 to 65535"},
      {{{"RANK", "3x"}}, "RANK=\"3x\" must be"},
      {{{"RANK", " 3"}}, "RANK=\" 3\" must be"},
      {{{"RANK", "8"}}, "RANK=\"8\" must be less than WORLD_SIZE=\"8\""},
      {{{"WORLD_SIZE", "0"}}, "WORLD_SIZE=\"0\" must be a number from 1 to 65536"},
      {{{"WORLD_SIZE", "99999999999"}}, "WORLD_SIZE=\"99999999999\" must be"},
      {{{"MASTER_PORT", "0"}}, "MASTER_PORT=\"0\" must be a number from 1 to 65535"},
      {{{"MASTER_PORT", "many"}}, "MASTER_PORT=\"many\" must be"},
      {{{"MASTER_ADDR", " node0"}}, "MASTER_ADDR=\" node0\" must be a host name or an address"},
      {{{"MASTER_ADDR", "node0?x"}}, "MASTER_ADDR=\"node0?x\" must be a host name or an address"},
      {{{"LOCAL_RANK", "8"}}, "LOCAL_RANK=\"8\" must be a number from 0 to 7"},
      {{{"LOCAL_RANK", "2"}, {"LOCAL_WORLD_SIZE", "2"}},
       "LOCAL_RANK=\"2\" must be a number from 0 to 1"},
      {{{"LOCAL_WORLD_SIZE", "9"}}, "LOCAL_WORLD_SIZE=\"9\" must be a number from 1 to 8"},
      {{{"TORCHELASTIC_USE_AGENT_STORE", "maybe"}},
       "USE_AGENT_STORE=\"maybe\" must be True or False"},
      {{{"DISTGRAD_RENDEZVOUS", "tpc://a:1"}},
       "DISTGRAD_RENDEZVOUS: rendezvous 'tpc://a:1' is not one of"},
  };
  for (const auto& [change, complaint] : bad) {
    const absl::Status status = Find(With(kPlain, change)).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << complaint << "\n" << status;
    EXPECT_TRUE(absl::StrContains(status.message(), complaint)) << complaint << "\n" << status;
  }
  for (const auto& [name, value] :
       std::vector<std::pair<std::string, std::string>>{{"SLURM_STEP_NODELIST", "gpu["},
                                                        {"SLURM_STEP_TASKS_PER_NODE", "x"},
                                                        {"SLURM_JOB_ID", "x"},
                                                        {"SLURM_NODEID", "7"}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(Find(With(kSrun, {{name, value}})).status())) << name;
  }
  const PlaceOptions options{.rank = 1, .rendezvous = "tcp://a:1?rank=2&world_size=3"};
  EXPECT_EQ(Summary(Find({}, options)),
            "INVALID_ARGUMENT: the option rank is 1, but rendezvous "
            "'tcp://a:1?rank=2&world_size=3' says 2");
  EXPECT_EQ(Summary(Find({}, {.rank = 3, .world_size = 3, .rendezvous = "file:///f"})),
            "INVALID_ARGUMENT: there is no worker of rank 3 in a job of 3");
}

TEST(ProcessEnvironmentTest, EmptyIsNotSet) {
  setenv("DISTGRAD_NAME", "", 1);
  EXPECT_EQ(ProcessEnvironment("DISTGRAD_NAME"), std::nullopt);
  setenv("DISTGRAD_NAME", "x", 1);
  EXPECT_EQ(ProcessEnvironment("DISTGRAD_NAME"), "x");
  unsetenv("DISTGRAD_NAME");
  EXPECT_EQ(ProcessEnvironment("DISTGRAD_NAME"), std::nullopt);
}

}  // namespace
}  // namespace distgrad
