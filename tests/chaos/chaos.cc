// Begins faults and ends them, and judges what the processes say meanwhile.
#include "tests/chaos/chaos.h"

#include <algorithm>
#include <cstdio>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "tests/chaos/fault_plan.h"
#include "tests/chaos/job.h"
#include "tests/chaos/reference.h"
#include "tests/chaos/worker.h"
#include "tests/soak/fit.h"

namespace distgrad {
namespace {

// By when everything has come that has no bound of its own: only a hang takes longer.
constexpr absl::Duration kPatience = absl::Seconds(90);
// From the end of a fault to the first step after it.
constexpr absl::Duration kRecovers = absl::Minutes(1);
// Until all others know that a worker's process is gone, and until a barrier says that the one that
// served the store is: docs/operating.md.
constexpr absl::Duration kHeard = absl::Seconds(30);
// Until a silence is noticed: a peer is lost after the heartbeat limit, on a connection of its own
// after 1.2 times that; and who had just lost its connection opens another one, which is given up
// after ten seconds where nobody answers.
absl::Duration NoticedWithin(absl::Duration heartbeat_limit) {
  return absl::Seconds(10) + 1.2 * heartbeat_limit;
}
// Until a fault that has to have an effect has one: a step or a save comes within that.
constexpr absl::Duration kFelt = absl::Minutes(1);
// One that has none yet takes so often what was given back meanwhile.
constexpr absl::Duration kFaultAgain = absl::Milliseconds(100);
// A barrier that has failed is called again so soon.
constexpr absl::Duration kBarrierAgain = absl::Milliseconds(200);

// What a process may hold while the job stands still, in runs of any length. Two workers may have
// four connections with each other, for both may open one at the same time, and each a probe, of up
// to four sockets; and the one that serves the store has one of it. A pool of two has as many
// threads more as handlers and callers block at once. A context that is left keeps the hidden
// activations of a layer, 256 KiB with their gradient, so those of 64 steps show.
constexpr double kDescriptors = 30, kDescriptorsPerPeer = 17, kThreads = 24;
constexpr double kHeapBytes = 16 << 20;  // more than when its process had warmed up

// By how much a process may have more after each fault that it outlives, where one has outlived so
// many that this can be told: in the first ten or so it opens connections with workers of whom the
// faults made it ask, which stay.
constexpr double kFewestToJudge = 40;
constexpr double kBytesPerFault = 64 << 10, kDescriptorsPerFault = 0.2, kThreadsPerFault = 0.2;

std::string NameOf(int worker) { return absl::StrCat("worker", worker); }

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::string Seconds(absl::Duration duration) {
  return absl::FormatDuration(absl::Trunc(duration, absl::Milliseconds(1)));
}

// What a process said of itself when nothing was left.
struct Sample {
  double descriptors = 0, threads = 0, heap = 0, resident = 0;
};

// A worker, through all its processes.
struct Member {
  std::deque<std::string> answers;
  std::deque<std::string> log;   // the last that it has said
  std::set<std::string> missed;  // whom it takes for lost
  std::set<std::string> lost;    // whom it has taken for lost at some time of this round
  bool ends = false;             // it was told to
  int age = 0;                   // how many faults its process has outlived
  std::optional<Sample> first;   // of its process, once it has warmed up
  Sample most;                   // of all its processes
  std::vector<Point> descriptors, threads, heap, resident;  // more than then, by age
};

struct KindOfFault {
  int count = 0;
  int ended = 0;  // processes that ended by themselves
  std::vector<double> noticed, recovered;
};

// For one thread.
class Chaos {
 public:
  explicit Chaos(const ChaosOptions& options) : options_(options), reference_(options.workers) {}

  ChaosResult Run() {
    auto job = ChaosJob::Create({.workers = options_.workers,
                                 .hosts = options_.hosts,
                                 .heartbeat_limit = options_.heartbeat_limit,
                                 .seed = options_.seed});
    if (!job.ok()) {
      return {{job.status().ToString()}, ""};
    }
    job_ = *std::move(job);
    members_.resize(options_.workers);
    std::printf("chaos with seed %zu: %d workers on %d host(s)\n",
                static_cast<size_t>(options_.seed), job_->workers(), job_->hosts());
    if (!job_->why_one_host().empty()) {
      std::printf("without faults of cables and disks, for there is one host only: %s\n",
                  job_->why_one_host().c_str());
    }
    plan_.emplace(job_.get(), options_.seed, options_.only);
    if (plan_->cycle() == 0) return {{"the job's hosts can have none of these faults"}, ""};
    const absl::Time end = absl::Now() + options_.duration;
    bool goes_on = StartJob();
    for (; goes_on && faults_ < options_.faults && absl::Now() < end; ++faults_) {
      goes_on = Round(plan_->Next());
    }
    fault_ = nullptr;
    if (goes_on) goes_on = EndJob();
    if (!goes_on) PrintLogs();
    PrintTable();
    PrintFits();
    for (const std::string& one : wrong_) std::printf("WRONG: %s\n", one.c_str());
    std::printf("%d faults, %zu things went wrong\n", faults_, wrong_.size());
    std::fflush(stdout);
    return {wrong_, options_.hosts == 1 ? "" : job_->why_one_host()};
  }

 private:
  // ------------------------------------------------------------------------ What one fault does

  // False where the job cannot go on.
  bool Round(const Fault& fault) {
    // One that is missed since the round before, and has come back unnoticed, is not lost again.
    for (Member& member : members_) member.lost = member.missed;
    job_->Say(0, "go");
    PumpUntil(absl::Now() + plan_->NextMoment());
    Drain();
    if (fatal_) return false;
    const int64_t corrupted = job_->cables() == nullptr ? 0 : job_->cables()->corrupted();
    fault_ = &fault;
    noticed_ = recovered_ = healed_ = std::nullopt;
    is_failing_ = must_resume_ = false;
    ended_ = 0;
    begin_ = absl::Now();
    if (!Succeeds("begin", fault.begin())) return false;
    if (fault.loses_worker) Dies(fault.named);
    PumpUntil(begin_ + fault.lasts);
    if (!fault.silent.empty()) AwaitNotice(fault);
    if (fault.lasts_until_effect && !AwaitEffect(fault)) return false;
    if (!Succeeds("end", fault.end())) return false;
    Drain();
    if (fatal_) return false;
    healed_ = absl::Now();
    do {
      if (!BringBack()) return false;
      const auto goes_on = [&] { return recovered_.has_value() || !dead_.empty(); };
      if (!Await(kRecovers, "a step after the fault", goes_on)) return false;
    } while (!dead_.empty());
    if (!Quiesce()) return false;

    KindOfFault& kind = KindOf(fault.kind);
    ++kind.count;
    kind.ended += ended_;
    if (noticed_) kind.noticed.push_back(absl::ToDoubleSeconds(*noticed_ - begin_));
    kind.recovered.push_back(absl::ToDoubleSeconds(*recovered_ - *healed_));
    std::printf("%4d %s (%s): %s, went on after %s; %d steps%s%s\n", faults_ + 1,
                fault.kind.c_str(), fault.where.c_str(),
                noticed_ ? absl::StrCat("noticed after ", Seconds(*noticed_ - begin_)).c_str()
                         : "not noticed",
                Seconds(*recovered_ - *healed_).c_str(), static_cast<int>(reference_.steps()),
                ended_ > 0 ? "; its process ended" : "",
                job_->cables() == nullptr || job_->cables()->corrupted() == corrupted
                    ? ""
                    : absl::StrCat("; ", job_->cables()->corrupted() - corrupted, " frames changed")
                          .c_str());
    std::fflush(stdout);
    return true;
  }

  bool Succeeds(const char* what, const absl::Status& status) {
    if (!status.ok()) Wrong(absl::StrCat("the fault does not ", what, ": ", status.ToString()));
    return status.ok();
  }

  // A silence that is longer than the heartbeats allow lasts until somebody takes somebody for lost
  // who does not hear them. It need not be all: who has no connection with them has nothing to
  // hear.
  void AwaitNotice(const Fault& fault) {
    const auto is_noticed = [&] {
      for (int one = 0; one < job_->workers(); ++one) {
        for (const int silent : fault.silent) {
          if (fault.silent.count(one) > 0) continue;
          if (members_[one].lost.count(NameOf(silent)) > 0) return true;
          if (members_[silent].lost.count(NameOf(one)) > 0) return true;
        }
      }
      return false;
    };
    const absl::Duration patience = NoticedWithin(job_->heartbeat_limit());
    while (!is_noticed() && Hear(begin_ + patience)) continue;
    if (is_noticed()) return;
    Wrong(absl::StrCat("within ", Seconds(patience), " nobody has lost a worker that is silent"));
  }

  // False where the job cannot go on.
  bool AwaitEffect(const Fault& fault) {
    const auto is_felt = [&] { return fault.effect ? fault.effect() : noticed_.has_value(); };
    while (!is_felt() && !fatal_ && absl::Now() < begin_ + kFelt) {
      if (fault.again && !Succeeds("go on", fault.again())) return false;
      PumpUntil(absl::Now() + kFaultAgain);
    }
    if (!is_felt()) Wrong(absl::StrCat("within ", Seconds(kFelt), " it has had no effect"));
    return !fatal_;
  }

  void Dies(int worker) {
    members_[worker].answers.clear();
    // What it had is gone: a step that does without is wrong.
    must_resume_ = true;
    dead_.insert(worker);
  }

  // Starts again what has ended.
  bool BringBack() {
    const std::set<int> dead = std::exchange(dead_, {});
    for (const int worker : dead) {
      for (int other = 0; other < job_->workers(); ++other) {
        if (dead.count(other) > 0) continue;
        must_hear_.emplace(other, worker);
      }
    }
    if (dead.count(0) > 0) return BeginAgain();
    for (const int worker : dead) {
      Start(worker);
      if (!AwaitAnswer(worker, "joined", "joined").has_value()) return false;
    }
    return true;
  }

  bool AllHaveHeard() {
    return Await(kHeard, "that all hear of a lost worker", [&] {
      for (const auto& [other, worker] : must_hear_) {
        if (members_[other].lost.count(NameOf(worker)) == 0) return false;
      }
      return true;
    });
  }

  // The store has ended with its worker: the others notice, and end; the job begins from its last
  // checkpoint.
  bool BeginAgain() {
    if (!AllHaveHeard()) return false;
    must_hear_.clear();
    for (int worker = 1; worker < job_->workers(); ++worker) job_->Say(worker, "barrier");
    for (int worker = 1; worker < job_->workers(); ++worker) {
      const std::optional<std::string> said = AwaitAnswer(worker, "a barrier", "", kHeard);
      if (!said.has_value()) return false;
      if (!absl::StrContains(*said, "UNAVAILABLE") || !absl::StrContains(*said, NameOf(0))) {
        Wrong(absl::StrCat(NameOf(worker), "'s barrier without the store's worker: ", *said));
      }
    }
    if (!EndAll("close")) return false;
    if (!StartJob()) return false;
    healed_ = absl::Now();
    must_resume_ = is_failing_ = false;
    job_->Say(0, "go");
    return true;
  }

  // Ends a round: the job stands still, all meet, nothing is left, and the state is what it must
  // be.
  bool Quiesce() {
    if (!AllHaveHeard()) return false;
    must_hear_.clear();
    job_->Say(0, "pause");
    const std::optional<std::string> paused = AwaitAnswer(0, "a pause", "paused ");
    int64_t steps = 0;
    if (!paused.has_value() || !absl::SimpleAtoi(*paused, &steps)) return false;
    if (!Meet()) return false;

    if (steps < reference_.steps()) {
      Wrong(absl::StrCat("it went back to step ", steps, ", before the checkpoint of step ",
                         reference_.steps()));
      return false;
    }
    reference_.TrainTo(steps);
    for (auto it = losses_.begin(); it != losses_.end() && it->first < steps;
         it = losses_.erase(it)) {
      if (it->second != reference_.LossBits(it->first)) {
        Wrong(absl::StrCat("the loss of step ", it->first, " has other bits than without faults"));
      }
    }
    const std::vector<uint32_t> checksums = reference_.Checksums();
    for (int worker = 0; worker < job_->workers(); ++worker) job_->Say(worker, "check");
    for (int worker = 0; worker < job_->workers(); ++worker) {
      const std::optional<std::string> said = AwaitAnswer(worker, "that nothing is left", "clean ");
      if (!said.has_value()) return false;
      const std::vector<std::string> words = absl::StrSplit(*said, ' ');
      uint32_t checksum = 0;
      Sample sample;
      if (words.size() != 5 || !absl::SimpleAtoi(words[0], &checksum) ||
          !absl::SimpleAtod(words[1], &sample.descriptors) ||
          !absl::SimpleAtod(words[2], &sample.threads) ||
          !absl::SimpleAtod(words[3], &sample.heap) ||
          !absl::SimpleAtod(words[4], &sample.resident)) {
        Wrong(absl::StrCat(NameOf(worker), " says ", *said));
        return false;
      }
      if (checksum != checksums[worker]) {
        Wrong(absl::StrCat("after step ", steps, " ", NameOf(worker),
                           " has other parameters than without faults"));
      }
      CheckHeld(worker, sample);
      Record(members_[worker], sample);
    }
    return true;
  }

  // What one holds while the job stands still has a bound, however many faults it has outlived.
  void CheckHeld(int worker, const Sample& sample) {
    Member& member = members_[worker];
    const int peers = job_->workers() - 1;
    const double warm = member.first.has_value() ? member.first->heap : sample.heap;
    const std::tuple<const char*, double, double, double*> all[] = {
        {"descriptors", sample.descriptors, kDescriptors + kDescriptorsPerPeer * peers,
         &member.most.descriptors},
        {"threads", sample.threads, kThreads, &member.most.threads},
        {"bytes of heap", sample.heap, warm + kHeapBytes, &member.most.heap}};
    for (const auto& [what, held, bound, most] : all) {
      *most = std::max(*most, held);
      if (held <= bound) continue;
      Wrong(absl::StrCat(NameOf(worker), " stands still, and has ", held, " ", what, ", more than ",
                         bound));
    }
  }

  // Calls a barrier until all have met. Who was taken for lost, and lives, may make it fail before.
  bool Meet() {
    const absl::Time patience = absl::Now() + kPatience;
    std::map<int, absl::Time> again;  // who has to call it, and when
    std::set<int> waiting;
    for (int worker = 0; worker < job_->workers(); ++worker) again[worker] = absl::InfinitePast();
    while (!again.empty() || !waiting.empty()) {
      absl::Time next = patience;
      for (auto it = again.begin(); it != again.end();) {
        if (it->second <= absl::Now()) {
          job_->Say(it->first, "barrier");
          waiting.insert(it->first);
          it = again.erase(it);
        } else {
          next = std::min(next, (it++)->second);
        }
      }
      if (absl::Now() > patience) {
        Wrong("the workers do not meet in a barrier");
        return false;
      }
      Hear(next);
      if (fatal_) return false;
      for (auto it = waiting.begin(); it != waiting.end();) {
        std::deque<std::string>& answers = members_[*it].answers;
        if (answers.empty()) {
          ++it;
          continue;
        }
        const std::string said = std::move(answers.front());
        answers.pop_front();
        if (said != "met") {
          CheckError(said, /*is_first=*/false);
          again[*it] = absl::Now() + kBarrierAgain;
        }
        it = waiting.erase(it);
      }
    }
    return true;
  }

  static void Record(Member& member, const Sample& sample) {
    if (++member.age < 2) return;  // what comes once has come
    if (!member.first.has_value()) member.first = sample;
    const double age = member.age;
    member.descriptors.push_back({age, sample.descriptors - member.first->descriptors});
    member.threads.push_back({age, sample.threads - member.first->threads});
    member.heap.push_back({age, sample.heap - member.first->heap});
    member.resident.push_back({age, sample.resident - member.first->resident});
  }

  // ------------------------------------------------------------------------------ Its processes

  void Start(int worker) {
    Member& member = members_[worker];
    member.answers.clear();
    member.ends = false;
    member.age = 0;
    member.missed.clear();
    member.first = std::nullopt;
    job_->Start(worker);
  }

  bool StartJob() {
    for (int worker = 0; worker < job_->workers(); ++worker) Start(worker);
    for (int worker = 0; worker < job_->workers(); ++worker) {
      if (!AwaitAnswer(worker, "joined", "joined").has_value()) return false;
    }
    job_->Say(0, "load");
    return AwaitAnswer(0, "its checkpoint", "loaded ").has_value();
  }

  // By "end" or "close": of all that run.
  bool EndAll(const std::string& command) {
    std::set<int> running;
    for (int worker = 0; worker < job_->workers(); ++worker) {
      if (!job_->Runs(worker)) continue;
      running.insert(worker);
      members_[worker].ends = true;
      job_->Say(worker, command);
    }
    for (const int worker : running) {
      if (!AwaitAnswer(worker, "its end", "ended").has_value()) return false;
    }
    return Await(kPatience, "the ends of the processes", [&] {
      return std::none_of(running.begin(), running.end(), [&](int w) { return job_->Runs(w); });
    });
  }
  bool EndJob() { return EndAll("end"); }

  // ------------------------------------------------------------------------- What they say of it

  // Waits for that answer, which begins with `expected`; what follows. Another one is wrong.
  std::optional<std::string> AwaitAnswer(int worker, const std::string& what,
                                         absl::string_view expected,
                                         absl::Duration patience = kPatience) {
    std::deque<std::string>& answers = members_[worker].answers;
    if (!Await(patience, absl::StrCat(NameOf(worker), " to say ", what),
               [&] { return !answers.empty(); })) {
      return std::nullopt;
    }
    std::string said = std::move(answers.front());
    answers.pop_front();
    absl::string_view rest = said;
    if (!absl::ConsumePrefix(&rest, expected)) {
      Wrong(absl::StrCat(NameOf(worker), " was to say ", what, ", and says ", said));
      return std::nullopt;
    }
    return std::string(rest);
  }

  bool Await(absl::Duration patience, const std::string& what, const std::function<bool()>& is_so) {
    const absl::Time until = absl::Now() + patience;
    while (!is_so()) {
      if (!Hear(until) && !fatal_ && !is_so()) {
        Wrong(absl::StrCat("waited ", Seconds(patience), " for ", what));
        return false;
      }
      if (fatal_) return false;
    }
    return true;
  }
  void PumpUntil(absl::Time until) {
    while (Hear(until)) continue;
  }
  // Hears what they have said already.
  void Drain() { PumpUntil(absl::Now()); }

  // Hears one line; false if there is none until then.
  bool Hear(absl::Time until) {
    const std::optional<ChaosJob::Line> line = job_->NextLine(until);
    if (!line.has_value()) return false;
    Member& member = members_[line->worker];
    if (line->is_end) {
      HearEnd(line->worker, line->code);
      return true;
    }
    member.log.push_back(absl::StrCat(
        absl::FormatTime("%H:%M:%E3S ", absl::Now(), absl::UTCTimeZone()), line->text));
    if (member.log.size() > 80) member.log.pop_front();
    absl::string_view text = line->text;
    if (absl::ConsumePrefix(&text, "= ")) {
      member.answers.emplace_back(text);
    } else if (absl::ConsumePrefix(&text, "! ")) {
      Wrong(absl::StrCat(NameOf(line->worker), ": ", text));
    } else if (absl::ConsumePrefix(&text, "step ")) {
      HearStep(text);
    } else if (absl::StartsWith(text, "saved ")) {
      if (fault_ != nullptr && fault_->is_of_checkpoints) GoesOn();
    } else if (absl::StartsWith(text, "resumed ")) {
      is_failing_ = must_resume_ = false;
    } else if (absl::ConsumePrefix(&text, "failed ")) {
      HearFailed(text);
    } else if (absl::ConsumePrefix(&text, "* lost ")) {
      const std::string name(text.substr(0, text.find(':')));
      member.missed.insert(name);
      member.lost.insert(name);
      Notices();
    } else if (absl::ConsumePrefix(&text, "* joined ")) {
      member.missed.erase(std::string(text.substr(0, text.find(':'))));
    }
    return true;
  }

  void HearEnd(int worker, int code) {
    Member& member = members_[worker];
    if (member.ends && code == 0) return;
    const bool may =
        fault_ != nullptr && fault_->may_end_process && fault_->named == worker && !member.ends;
    if (may && !recovered_.has_value()) {
      ++ended_;
      Dies(worker);
      Notices();
      return;
    }
    Wrong(absl::StrCat(NameOf(worker), "'s process has ended by itself, with ", code));
    fatal_ = true;
  }

  void HearStep(absl::string_view text) {
    const std::vector<std::string> words = absl::StrSplit(text, ' ');
    int64_t step = 0;
    uint32_t bits = 0;
    if (words.size() != 2 || !absl::SimpleAtoi(words[0], &step) ||
        !absl::SimpleAtoi(words[1], &bits)) {
      Wrong(absl::StrCat("a step that is none: ", text));
      return;
    }
    const auto [it, is_new] = losses_.emplace(step, bits);
    if (!is_new && it->second != bits) {
      Wrong(absl::StrCat("step ", step, " was taken again, and has another loss"));
    }
    if (fault_ != nullptr && !fault_->is_of_checkpoints) GoesOn();
  }

  // Something has gone well, if it is after the fault.
  void GoesOn() {
    if (healed_.has_value() && !is_failing_ && !must_resume_ && !recovered_.has_value()) {
      recovered_ = absl::Now();
    }
  }
  void Notices() {
    if (fault_ != nullptr && !noticed_.has_value()) noticed_ = absl::Now();
  }

  // "WHAT SECONDS STATUS"
  void HearFailed(absl::string_view text) {
    const std::pair<std::string, std::string> what = absl::StrSplit(text, absl::MaxSplits(' ', 1));
    const std::pair<std::string, std::string> took =
        absl::StrSplit(what.second, absl::MaxSplits(' ', 1));
    double seconds = 0;
    if (absl::SimpleAtod(took.first, &seconds)) longest_ = std::max(longest_, seconds);
    ++errors_;
    CheckError(took.second, !noticed_.has_value());
    if (what.first != "save") is_failing_ = true;
    Notices();
    // What had gone on has not.
    recovered_ = std::nullopt;
  }

  // Of an error that a fault has made.
  void CheckError(const std::string& status, bool is_first) {
    if (fault_ == nullptr) {
      Wrong(absl::StrCat("an error without a fault: ", status));
      return;
    }
    bool names_any = false;
    for (int worker = 0; worker < job_->workers(); ++worker) {
      names_any = names_any || absl::StrContains(status, NameOf(worker));
    }
    // What worker 0 cannot do itself it need not say of whom.
    const bool is_own = fault_->named == 0;
    if (!names_any && !is_own) Wrong(absl::StrCat("an error names nobody: ", status));
    if (absl::StartsWith(status, "DEADLINE_EXCEEDED")) {
      Wrong(absl::StrCat("nothing was to wait for its deadline: ", status));
    }
    // On a busy machine another one may have stood still for too long.
    if (is_first && fault_->named > 0 && !absl::StrContains(status, NameOf(fault_->named)) &&
        !absl::StrContains(status, "heartbeat limit")) {
      Wrong(absl::StrCat("the first error does not name ", NameOf(fault_->named), ": ", status));
    }
  }

  void Wrong(const std::string& what) {
    std::string text = fault_ == nullptr ? what
                                         : absl::StrCat("fault ", faults_ + 1, ", ", fault_->kind,
                                                        " (", fault_->where, "): ", what);
    std::printf("WRONG: %s\n", text.c_str());
    std::fflush(stdout);
    wrong_.push_back(std::move(text));
  }

  // ---------------------------------------------------------------------------- What came of it

  void PrintLogs() {
    for (int worker = 0; worker < job_->workers(); ++worker) {
      std::printf("---- the last words of %s%s\n", NameOf(worker).c_str(),
                  job_->Runs(worker) ? "" : ", which has ended");
      for (const std::string& line : members_[worker].log) std::printf("  %s\n", line.c_str());
    }
  }

  KindOfFault& KindOf(const std::string& kind) {
    for (auto& [name, of_it] : kinds_) {
      if (name == kind) return of_it;
    }
    kinds_.emplace_back(kind, KindOfFault());
    return kinds_.back().second;
  }

  void PrintTable() {
    std::sort(kinds_.begin(), kinds_.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    std::printf(
        "\n| fault | count | noticed | after, median (s) | most | went on after, median (s) | "
        "most |\n| --- | --- | --- | --- | --- | --- | --- |\n");
    for (const auto& [name, kind] : kinds_) {
      const auto times = [](const std::vector<double>& all) {
        if (all.empty()) return std::string("| ");
        char text[64];
        std::snprintf(text, sizeof(text), "%.2f | %.2f", Median(all),
                      *std::max_element(all.begin(), all.end()));
        return std::string(text);
      };
      std::printf("| %s%s | %d | %zu | %s | %s |\n", name.c_str(),
                  kind.ended > 0 ? absl::StrCat("; ", kind.ended, " processes ended").c_str() : "",
                  kind.count, kind.noticed.size(), times(kind.noticed).c_str(),
                  times(kind.recovered).c_str());
    }
    std::vector<std::string> unnoticed;
    for (const auto& [name, kind] : kinds_) {
      const int without = kind.count - static_cast<int>(kind.noticed.size());
      if (without == 0) continue;
      unnoticed.push_back(absl::StrCat(without, " of ", kind.count, " of '", name, "'"));
    }
    if (!unnoticed.empty()) {
      std::printf("\nwithout an effect that a worker has seen: %s\n",
                  absl::StrJoin(unnoticed, ", ").c_str());
    }
    std::printf(
        "\n%d steps, %d errors; no operation that failed took longer than %.1f s, of %.1f\n",
        static_cast<int>(reference_.steps()), errors_, longest_,
        absl::ToDoubleSeconds(ChaosBound(options_.heartbeat_limit)));
  }

  void PrintFits() {
    std::printf("\n%-10s %-12s %12s %6s %12s %24s %10s\n", "", "", "most", "points", "mean",
                "slope, per fault", "bound");
    for (int worker = 0; worker < options_.workers; ++worker) {
      const Member& member = members_[worker];
      const std::tuple<const char*, double, const std::vector<Point>*, double> all[] = {
          {"descriptors", member.most.descriptors, &member.descriptors, kDescriptorsPerFault},
          {"threads", member.most.threads, &member.threads, kThreadsPerFault},
          {"heap", member.most.heap, &member.heap, kBytesPerFault},
          {"resident", 0, &member.resident, 0}};
      for (const auto& [name, most, points, bound] : all) {
        const Fit fit = FitLine(*points);
        const auto is_old = [](const Point& point) { return point.x >= kFewestToJudge; };
        const bool is_judged = bound > 0 && std::any_of(points->begin(), points->end(), is_old);
        const Growth growth = JudgeGrowth(fit, bound, bound);
        std::printf("%-10s %-12s %12.0f %6zu %12.1f %12.3f +- %8.3f %10s%s\n",
                    NameOf(worker).c_str(), name, most, fit.points, fit.mean, fit.slope, fit.error,
                    is_judged ? absl::StrCat(bound).c_str() : "",
                    is_judged && growth == Growth::kTooNoisy ? ", too noisy to be judged" : "");
        if (is_judged && growth == Growth::kGrows) {
          Wrong(absl::StrCat(NameOf(worker), ": ", name, " grows by ", fit.slope, " +- ", fit.error,
                             " with each fault"));
        }
      }
    }
  }

  const ChaosOptions options_;
  std::unique_ptr<ChaosJob> job_;
  std::optional<FaultPlan> plan_;
  ChaosReference reference_;
  std::vector<Member> members_;

  int faults_ = 0;
  std::map<int64_t, uint32_t> losses_;  // that were not compared yet, by step

  // Of the round that runs, and of the one before it until the next fault begins.
  const Fault* fault_ = nullptr;
  absl::Time begin_;
  std::optional<absl::Time> noticed_, healed_, recovered_;
  bool is_failing_ = false;                  // there was an error, and the job has not resumed
  bool must_resume_ = false;                 // a worker has lost its state
  std::set<int> dead_;                       // whose processes have ended
  std::set<std::pair<int, int>> must_hear_;  // who has to hear that whom is lost
  int ended_ = 0;

  bool fatal_ = false;
  std::vector<std::string> wrong_;
  int errors_ = 0;
  double longest_ = 0;  // of what failed, in seconds
  std::vector<std::pair<std::string, KindOfFault>> kinds_;
};

}  // namespace

ChaosResult RunChaos(const ChaosOptions& options) { return Chaos(options).Run(); }

}  // namespace distgrad
