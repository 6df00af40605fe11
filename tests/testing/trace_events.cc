// Reads slices and flows out of the JSON, and checks how they lie.
#include "tests/testing/trace_events.h"

#include <algorithm>
#include <exception>
#include <set>
#include <tuple>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace distgrad {
namespace {

using Json = nlohmann::json;
using Place = std::pair<int64_t, int64_t>;  // process and thread

absl::Status Read(const std::string& text, TraceEvents* all) {
  const Json json = Json::parse(text);
  all->dropped.push_back(json.at("otherData").at("dropped_spans"));
  std::map<int64_t, std::string> processes;
  std::map<Place, std::string> threads;
  std::map<Place, std::vector<TraceSlice>> slices;
  std::vector<std::tuple<Place, int64_t, std::string>> flows;
  for (const Json& event : json.at("traceEvents")) {
    const std::string phase = event.at("ph"), name = event.at("name");
    const Place place(event.at("pid"), event.at("tid"));
    if (phase == "M") {
      if (name == "process_name") processes[place.first] = event.at("args").at("name");
      if (name == "thread_name") threads[place] = event.at("args").at("name");
      continue;
    }
    const int64_t at = event.at("ts");
    if (phase == "X") {
      TraceSlice slice;
      slice.category = event.at("cat");
      slice.name = name;
      slice.begin = at;
      slice.end = at + event.at("dur").get<int64_t>();
      for (const auto& [key, value] : event.at("args").items())
        slice.args[key] = value.is_string() ? value.get<std::string>() : value.dump();
      slices[place].push_back(std::move(slice));
    } else if (phase == "s" || phase == "f") {
      if ((phase == "f") != (event.contains("bp") && event.at("bp") == "e"))
        return absl::InternalError("a flow's end binds to what encloses it, and nothing else does");
      flows.emplace_back(place, at, event.at("id"));
    } else if (phase == "i") {
      all->notes.push_back(name);
    } else {
      return absl::InternalError(absl::StrCat("an event of phase ", phase));
    }
  }
  for (auto& [place, of_thread] : slices) {
    // As they stand in the file where they begin together: the outer one first.
    std::stable_sort(of_thread.begin(), of_thread.end(), [](const auto& a, const auto& b) {
      return std::tuple(a.begin, -a.end) < std::tuple(b.begin, -b.end);
    });
    std::vector<int64_t> open;
    for (TraceSlice& slice : of_thread) {
      if (processes.count(place.first) == 0 || threads.count(place) == 0)
        return absl::InternalError(absl::StrCat("no name of the row of ", slice.name));
      slice.process = processes[place.first];
      slice.thread = threads[place];
      while (!open.empty() && open.back() <= slice.begin) open.pop_back();
      if (!open.empty() && open.back() < slice.end)
        return absl::InternalError(absl::StrCat(slice.name, " ends behind what it began in"));
      slice.depth = static_cast<int>(open.size());
      open.push_back(slice.end);
    }
  }
  for (const auto& [place, at, id] : flows) {
    auto& of_thread = slices[place];
    // Several of no length may stand at one time.
    const auto slice =
        std::find_if(of_thread.begin(), of_thread.end(), [at = at](const TraceSlice& s) {
          return s.begin == at && s.flow.empty() && s.args.count("call") > 0;
        });
    if (slice == of_thread.end()) return absl::InternalError(absl::StrCat("flow ", id, " of none"));
    slice->flow = id;
  }
  for (auto& [place, of_thread] : slices)
    for (TraceSlice& slice : of_thread) all->slices.push_back(std::move(slice));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TraceEvents> ReadTraces(const std::vector<std::string>& texts) {
  TraceEvents events;
  try {
    for (const std::string& text : texts) {
      if (absl::Status status = Read(text, &events); !status.ok()) return status;
    }
  } catch (const std::exception& error) {
    return absl::InternalError(error.what());
  }
  return events;
}

const TraceSlice* OtherEnd(const TraceEvents& events, const TraceSlice& slice) {
  if (slice.flow.empty()) return nullptr;
  for (const TraceSlice& other : events.slices)
    if (other.flow == slice.flow && other.category != slice.category) return &other;
  return nullptr;
}

}  // namespace distgrad
