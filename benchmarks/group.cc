// Starts the processes of a side, tells them what to do, and stops and continues them.
#include "benchmarks/group.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iostream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "benchmarks/baseline_side.h"
#include "benchmarks/distgrad_side.h"
#include "benchmarks/local_side.h"
#include "benchmarks/pytorch_side.h"
#include "benchmarks/rank_side.h"
#include "core/base/status.h"
#include "tests/testing/free_port.h"

namespace distgrad {
namespace {

std::string ReadLine(FILE* file) {
  std::string line;
  for (int c; (c = std::fgetc(file)) != EOF && c != '\n';) line.push_back(static_cast<char>(c));
  return line;
}

// Returns the number after "`key`:" in a file of /proc.
double ProcNumber(const std::string& path, absl::string_view key) {
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    absl::string_view rest = line;
    if (!absl::ConsumePrefix(&rest, key) || !absl::ConsumePrefix(&rest, ":")) continue;
    const std::vector<absl::string_view> words =
        absl::StrSplit(rest, absl::ByAnyChar(" \t"), absl::SkipEmpty());
    double number = 0;
    if (!words.empty() && absl::SimpleAtod(words[0], &number)) return number;
  }
  return 0;
}

double CpuMicros(pid_t pid) {
  clockid_t clock;
  timespec time = {};
  if (clock_getcpuclockid(pid, &clock) != 0 || clock_gettime(clock, &time) != 0) return 0;
  return time.tv_sec * 1e6 + time.tv_nsec * 1e-3;
}

double Switches(pid_t pid) {
  const std::string folder = absl::StrCat("/proc/", pid, "/task");
  double switches = 0;
  DIR* const tasks = opendir(folder.c_str());
  if (tasks == nullptr) return 0;
  while (const dirent* entry = readdir(tasks)) {
    if (entry->d_name[0] == '.') continue;
    const std::string status = absl::StrCat(folder, "/", entry->d_name, "/status");
    switches += ProcNumber(status, "voluntary_ctxt_switches");
    switches += ProcNumber(status, "nonvoluntary_ctxt_switches");
  }
  closedir(tasks);
  return switches;
}

// Returns the busy time of all processors, and the time that other guests of the host took.
double MachineMicros() {
  std::ifstream in("/proc/stat");
  std::string cpu;
  double user, nice, system, idle, iowait, irq, softirq, steal;
  in >> cpu >> user >> nice >> system >> idle >> iowait >> irq >> softirq >> steal;
  return (user + nice + system + irq + softirq + steal) * 1e6 / sysconf(_SC_CLK_TCK);
}

absl::StatusOr<std::unique_ptr<BenchmarkSide>> StartSide(const std::string& side,
                                                         const SideOptions& place) {
  if (side == "distgrad") return StartDistgrad(place);
  if (side == "pytorch") return StartPytorch(place);
  if (side == "local") return StartLocal(place);
  if (side == "ranks") return StartRank(place);
  if (side == "sockets") return StartSockets(place);
  if (side == "tensorpipe") return StartTensorPipe(place);
  return absl::InvalidArgumentError(absl::StrCat("there is no side '", side, "'"));
}

}  // namespace

// ----------------------------------------------------------------------------- In the children

GroupMember::GroupMember(CLI::App* app) {
  app->add_option("--side", side_)->group("");
  app->add_option("--config", place_.config)->group("");
  app->add_option("--rank", place_.rank)->group("");
  app->add_option("--world", place_.world)->group("");
  app->add_option("--port", place_.port)->group("");
}

int GroupMember::Serve() const {
  signal(SIGPIPE, SIG_IGN);  // its peers' end must not be a PyTorch process's own
  const auto say = [](const std::string& line) { std::cout << line << std::endl; };
  say("loaded");
  std::string line;
  if (!std::getline(std::cin, line)) return 0;
  const double start = MicrosNow();
  absl::StatusOr<std::unique_ptr<BenchmarkSide>> started = StartSide(side_, place_);
  if (!started.ok()) {
    say(absl::StrCat("error ", started.status().ToString()));
    return 1;
  }
  say(absl::StrCat("ready ", (MicrosNow() - start) / 1000));
  while (std::getline(std::cin, line)) {
    const std::pair<std::string, std::string> words = absl::StrSplit(line, ' ');
    double seconds = 0;
    absl::StatusOr<Work> work = WorkFromText(words.first);
    absl::StatusOr<Sample> sample = absl::InvalidArgumentError(line);
    if (work.ok() && absl::SimpleAtod(words.second, &seconds)) {
      sample = (*started)->Run(*work, absl::Seconds(seconds));
    }
    say(sample.ok() ? absl::StrFormat("ok %d %f %f %f", sample->operations, sample->median_us,
                                      sample->p99_us, sample->per_second)
                    : absl::StrCat("error ", sample.status().ToString()));
  }
  _exit(0);  // shutting down is not measured
}

// ------------------------------------------------------------------------------- In the parent

absl::StatusOr<std::unique_ptr<Group>> Group::Start(const std::string& side,
                                                    const std::string& config, int world,
                                                    const std::string& program) {
  std::unique_ptr<Group> group(new Group());
  group->name_ = absl::StrCat(program, program.empty() ? "" : ", ", side, " ", config);
  const bool one_process = side == "local" || config == "inproc";
  const std::string port = absl::StrCat(FreePort());
  for (int rank = 0; rank < (one_process ? 1 : world); ++rank) {
    DG_RETURN_IF_ERROR(
        group->Spawn(program.empty() ? "/proc/self/exe" : program,
                     {"--side", side, "--config", config, "--rank", absl::StrCat(rank), "--world",
                      absl::StrCat(world), "--port", port}));
  }
  // All begin at once, when all have loaded.
  for (Process& process : group->processes_) {
    if (ReadLine(process.out) != "loaded")
      return absl::InternalError(absl::StrCat(group->name_, " did not start"));
  }
  for (Process& process : group->processes_) {
    std::fputs("go\n", process.in);
    std::fflush(process.in);
  }
  for (size_t i = group->processes_.size(); i-- > 0;) {
    const std::string line = ReadLine(group->processes_[i].out);
    absl::string_view rest = line;
    double ms = 0;
    if (!absl::ConsumePrefix(&rest, "ready ") || !absl::SimpleAtod(rest, &ms))
      return absl::InternalError(absl::StrCat(group->name_, ": ", line));
    group->facts_.start_ms = ms;
  }
  if (side == "distgrad" || side == "pytorch") {
    DG_RETURN_IF_ERROR(group->Ask({"pass", 1, 4}, absl::ZeroDuration()).status());
    const std::string status = absl::StrCat("/proc/", group->processes_[0].pid, "/status");
    group->facts_.threads = static_cast<int>(ProcNumber(status, "Threads"));
    group->facts_.peak_mb = ProcNumber(status, "VmHWM") / 1024;
  }
  group->Signal(SIGSTOP);
  return group;
}

absl::Status Group::Spawn(std::string program, const std::vector<std::string>& arguments) {
  int in[2], out[2];
  if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0)
    return absl::InternalError(std::strerror(errno));
  std::vector<std::string> strings = arguments;
  std::vector<char*> argv = {program.data()};
  for (std::string& argument : strings) argv.push_back(argument.data());
  argv.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) return absl::InternalError(std::strerror(errno));
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(126);
    dup2(in[0], STDIN_FILENO);
    dup2(out[1], STDOUT_FILENO);
    execv(program.c_str(), argv.data());
    _exit(127);
  }
  close(in[0]);
  close(out[1]);
  processes_.push_back({pid, fdopen(in[1], "w"), fdopen(out[0], "r")});
  return absl::OkStatus();
}

Group::~Group() {
  Signal(SIGKILL);
  for (Process& process : processes_) {
    waitpid(process.pid, nullptr, 0);
    std::fclose(process.in);
    std::fclose(process.out);
  }
}

void Group::Signal(int signal) {
  for (Process& process : processes_) kill(process.pid, signal);
}

absl::StatusOr<std::string> Group::Ask(Process& process, const std::string& line) {
  std::fprintf(process.in, "%s\n", line.c_str());
  std::fflush(process.in);
  const std::string answer = ReadLine(process.out);
  absl::string_view rest = answer;
  if (absl::ConsumePrefix(&rest, "ok ")) return std::string(rest);
  return absl::InternalError(
      absl::StrCat(name_, ", ", line, ": ", answer.empty() ? "the process ended" : answer));
}

absl::StatusOr<Sample> Group::Ask(const Work& work, absl::Duration budget) {
  DG_ASSIGN_OR_RETURN(
      const std::string answer,
      Ask(processes_[0], absl::StrCat(ToText(work), " ", absl::ToDoubleSeconds(budget))));
  const std::vector<std::string> words = absl::StrSplit(answer, ' ');
  Sample sample;
  if (words.size() != 4 || !absl::SimpleAtoi(words[0], &sample.operations) ||
      !absl::SimpleAtod(words[1], &sample.median_us) ||
      !absl::SimpleAtod(words[2], &sample.p99_us) ||
      !absl::SimpleAtod(words[3], &sample.per_second)) {
    return absl::InternalError(absl::StrCat(name_, " answers ", answer));
  }
  return sample;
}

Group::Usage Group::Take() const {
  Usage usage;
  for (const Process& process : processes_) {
    usage.cpu_us += CpuMicros(process.pid);
    usage.switches += Switches(process.pid);
  }
  usage.machine_us = MachineMicros() - CpuMicros(getpid());
  usage.now_us = MicrosNow();
  return usage;
}

absl::StatusOr<Slice> Group::Run(const Work& work, absl::Duration budget) {
  Signal(SIGCONT);
  DG_RETURN_IF_ERROR(Ask(work, std::min(budget / 5, absl::Milliseconds(50))).status());
  const Usage before = Take();
  absl::StatusOr<Sample> sample = Ask(work, budget);
  const Usage after = Take();
  Signal(SIGSTOP);
  DG_RETURN_IF_ERROR(sample.status());
  const auto operations = static_cast<double>(sample->operations);
  const double own = after.cpu_us - before.cpu_us;
  const double machine = (after.now_us - before.now_us) * sysconf(_SC_NPROCESSORS_ONLN);
  return Slice{.sample = *sample,
               .cpu_us = own / operations,
               .switches = std::max(0.0, after.switches - before.switches) / operations,
               .others = std::max(0.0, after.machine_us - before.machine_us - own) / machine};
}

absl::StatusOr<Slice> Group::Idle(absl::Duration budget) {
  Signal(SIGCONT);
  DG_RETURN_IF_ERROR(Ask({"pass", 1, 4}, absl::ZeroDuration()).status());
  usleep(300000);  // by then the worker has finished its work after its last call
  const Usage before = Take();
  usleep(static_cast<useconds_t>(absl::ToDoubleMicroseconds(budget)));
  const Usage after = Take();
  Signal(SIGSTOP);
  Slice slice;
  slice.sample.operations = 1;
  slice.cpu_us = (after.cpu_us - before.cpu_us) / processes_.size();
  slice.switches = (after.switches - before.switches) / processes_.size();
  // At least a ten-thousandth of a percent, for ratios divide by it.
  slice.sample.median_us = std::max(1e-4, 100 * slice.cpu_us / (after.now_us - before.now_us));
  return slice;
}

}  // namespace distgrad
