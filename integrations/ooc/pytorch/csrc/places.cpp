#include "places.h"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <limits>
#include <mutex>
#include <unordered_map>

#include "adapter.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

namespace {

struct Settings {
  std::vector<std::string> skipped;
  std::string here;
};

std::mutex places_mutex;  // of both below
Settings settings;
// Autograd numbers the forward pass's operators, and each node of the backward pass has its operator's number. Each thread
// counts for itself, so a program that runs forward passes in several threads may see another thread's place.
constexpr size_t kMostForward = size_t{1} << 20;
std::unordered_map<uint64_t, std::string> forward;

bool starts(const std::string& text, const std::string& start) { return text.compare(0, start.size(), start) == 0; }

// Returns the innermost frame of the user's, or the outermost one of all if the user has none.
std::string user_frame(const Settings& wanted) {
  const auto gathered = torch::CapturedTraceback::gather(true, false, false);
  const auto symbols = torch::symbolize({gathered.get()});
  if (symbols.tracebacks.empty()) return {};
  const torch::unwind::Frame* found = nullptr;
  for (const uint64_t index : symbols.tracebacks[0]) {
    const torch::unwind::Frame& frame = symbols.all_frames[index];
    if (frame.filename.empty() || frame.filename[0] == '<') continue;
    found = &frame;
    bool skipped = false;
    for (const std::string& start : wanted.skipped) skipped = skipped || starts(frame.filename, start);
    if (!skipped) break;
  }
  if (found == nullptr) return {};
  const bool near = !wanted.here.empty() && starts(found->filename, wanted.here);
  const std::string file = near ? found->filename.substr(wanted.here.size()) : found->filename;
  return file + ":" + std::to_string(found->lineno) + " in " + found->funcname;
}

std::string place_now() {
  const auto node = torch::autograd::get_current_node();
  std::unique_lock<std::mutex> lock(places_mutex);
  const Settings wanted = settings;
  if (node) {
    if (node->sequence_nr() == std::numeric_limits<uint64_t>::max()) return "gradient of a parameter, in the backward pass";
    const auto known = forward.find(node->sequence_nr());
    if (known != forward.end()) return "autograd of " + known->second;
  }
  lock.unlock();
  const std::string frame = user_frame(wanted);
  if (node) return frame.empty() ? "in the backward pass" : "in the backward pass, " + frame;
  lock.lock();
  if (forward.size() >= kMostForward) forward.clear();
  const uint64_t next = at::sequence_number::peek();
  if (!frame.empty() && next > 0) forward[next - 1] = frame;
  return frame;
}

}  // namespace

void want_places(bool on, std::vector<std::string> skipped, std::string here) {
  const std::lock_guard<std::mutex> lock(places_mutex);
  settings = {std::move(skipped), std::move(here)};
  if (!on) forward.clear();
  places_wanted = on;
}

void note_place(const void* address) {
  thread_local bool inside = false;  // walking the stack may run Python, which may allocate
  if (inside || address == nullptr) return;
  inside = true;
  try {
    const std::string place = place_now();
    if (!place.empty()) ooc_core_set_place(core, address, ooc_core_place_id(core, place.c_str()));
  } catch (const std::exception&) {
    // A place is never worth an error.
  }
  inside = false;
}

}  // namespace ooc_torch
