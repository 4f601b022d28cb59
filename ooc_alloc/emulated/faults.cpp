#include "faults.h"

#include <sys/prctl.h>

#include <chrono>
#include <thread>
#include <utility>

#include "config.h"
#include "link.h"

namespace ooc::emulated {
namespace {

constexpr const char* kForm =
    "use rules such as cuMemCreate:after=10,times=2,error=2;cuMemcpyDtoHAsync:every=50;cuMemMap:probability=0.01,seed=7 "
    "(keys: after, every, times, probability, seed, error, site, delay, cost, chunk_cost, mib_cost), or published";

// Of 2 MiB on an A100: to map it, to set access and to unmap it. A call that covers several chunks is taken to last as long as
// one for each.
constexpr std::string_view kPublished = "cuMemMap:chunk_cost=2us;cuMemSetAccess:chunk_cost=36us;cuMemUnmap:chunk_cost=30us";

thread_local double delay_of_work = 0;
thread_local CallCost cost_of_call;

// Calls that leave their work to a stream.
bool enqueues(Call call) {
  switch (call) {
    case Call::cuMemcpyHtoDAsync:
    case Call::cuMemcpyDtoHAsync:
    case Call::cuMemcpyDtoDAsync:
    case Call::cuMemsetD8Async:
    case Call::cuLaunchHostFunc:
    case Call::cuEventRecord:
    case Call::cuStreamWaitEvent:
      return true;
    default:
      return false;
  }
}

// A number in [0, 1) that depends on both arguments alone (the mixing function of splitmix64).
double draw(uint64_t seed, uint64_t number) {
  uint64_t bits = seed * 0x9e3779b97f4a7c15ull + number * 0xd1b54a32d192ed03ull + 0x632be59bd9b4e019ull;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9ull;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebull;
  bits ^= bits >> 31;
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

bool parse_error(std::string_view value, CUresult& result) {
  if (const ErrorText* named = find_error(value)) {
    result = named->result;
  } else {
    uint64_t number = 0;
    if (!parse_integer(value, number) || number > 999) return false;
    result = static_cast<CUresult>(number);
  }
  return result != CUDA_SUCCESS;
}

bool parse_setting(std::string_view setting, FaultRule& rule) {
  const size_t equals = setting.find('=');
  if (equals == std::string_view::npos) return false;
  const std::string_view key = trim(setting.substr(0, equals));
  const std::string_view value = trim(setting.substr(equals + 1));
  if (key == "after") return parse_integer(value, rule.after);
  if (key == "every") return parse_integer(value, rule.every) && rule.every > 0;
  if (key == "times") return parse_integer(value, rule.times);
  if (key == "seed") return parse_integer(value, rule.seed);
  if (key == "probability") return parse_number(value, rule.probability) && rule.probability <= 1;
  if (key == "error") return parse_error(value, rule.error);
  if (key == "site") return parse_site(value, rule.site);
  if (key == "delay" && value == "never") {
    rule.delay_seconds = kNever;
    return enqueues(rule.call);
  }
  if (key == "delay") return parse_quantity(value, kTimeUnits, rule.delay_seconds) && rule.delay_seconds <= 60;
  for (const auto& [name, seconds] : {std::pair{"cost", &rule.cost.seconds}, {"chunk_cost", &rule.cost.chunk_seconds},
                                      {"mib_cost", &rule.cost.mib_seconds}})
    if (key == name) return parse_quantity(value, kTimeUnits, *seconds) && *seconds <= 60;
  return false;
}

}  // namespace

bool parse_faults(std::string_view text, std::vector<FaultRule>& rules, std::string& error) {
  std::vector<FaultRule> parsed;
  for (const std::string_view part : split(text, ';')) {
    if (part.empty()) continue;
    if (part == "published") {
      parse_faults(kPublished, parsed, error);
      continue;
    }
    const size_t colon = part.find(':');
    const std::string_view name = trim(part.substr(0, colon));
    FaultRule rule;
    if (!find_call(name, rule.call)) {
      error = "OOC_EMULATED_FAULTS: '" + std::string(name) + "' is not a driver function of the emulated driver: " + kForm;
      return false;
    }
    if (colon != std::string_view::npos) {
      for (const std::string_view setting : split(part.substr(colon + 1), ',')) {
        if (parse_setting(setting, rule)) continue;
        error = "OOC_EMULATED_FAULTS: '" + std::string(setting) + "' is not valid in '" + std::string(part) + "': " + kForm;
        return false;
      }
    }
    if (rule.cost.any() && (rule.delay_seconds > 0 || part.find("error") != part.npos)) {
      error = "OOC_EMULATED_FAULTS: a cost and a fault in one rule, '" + std::string(part) + "': make two rules of it";
      return false;
    }
    if (rule.delay_seconds > 0 && part.find("error") == std::string_view::npos) rule.error = CUDA_SUCCESS;
    parsed.push_back(rule);
  }
  rules.insert(rules.end(), parsed.begin(), parsed.end());
  return true;
}

bool Faults::add(std::string_view rules, std::string& error) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (!parse_faults(rules, rules_, error)) return false;
  any_.store(!rules_.empty(), std::memory_order_relaxed);
  return true;
}

void Faults::clear() {
  const std::lock_guard<std::mutex> lock(mutex);
  rules_.clear();
  any_.store(false, std::memory_order_relaxed);
}

double Faults::take_delay() { return std::exchange(delay_of_work, 0); }

void Faults::covers(uint64_t chunks, uint64_t bytes) {
  CallCost& cost = cost_of_call;
  cost.seconds += static_cast<double>(chunks) * cost.chunk_seconds + static_cast<double>(bytes) * 0x1p-20 * cost.mib_seconds;
}

Faults::Cost::~Cost() {
  const double seconds = std::exchange(cost_of_call, CallCost()).seconds;
  if (seconds <= 0) return;
  const auto duration = std::chrono::duration_cast<steady_clock::duration>(std::chrono::duration<double>(seconds));
  const TimePoint end = steady_clock::now() + duration;
  [[maybe_unused]] thread_local const int exact = prctl(PR_SET_TIMERSLACK, 1);  // else sleeps are 50 us longer
  constexpr std::chrono::microseconds kWakesLate{20};  // which is not slept
  if (duration > kWakesLate) sleep_until(end - kWakesLate);
  while (steady_clock::now() < end) std::this_thread::yield();
}

CUresult Faults::check_rules(Call call, const void* return_address) {
  std::unique_lock<std::mutex> lock(mutex);
  CUresult result = CUDA_SUCCESS;
  double delay = 0;
  CallCost cost;
  bool decided = false;
  for (FaultRule& rule : rules_) {
    if (rule.call != call || (!rule.site.module.empty() && rule.site != site_of(return_address))) continue;
    rule.calls += 1;  // every rule counts the call, whichever rule decides
    if (decided || rule.calls <= rule.after || rule.failures >= rule.times) continue;
    if ((rule.calls - rule.after) % rule.every != 0) continue;
    if (rule.probability < 1 && draw(rule.seed, rule.calls) >= rule.probability) continue;
    rule.failures += 1;
    if (rule.cost.any()) {
      cost.seconds += rule.cost.seconds;
      cost.chunk_seconds += rule.cost.chunk_seconds;
      cost.mib_seconds += rule.cost.mib_seconds;
      continue;
    }
    injected_.fetch_add(1, std::memory_order_relaxed);
    result = rule.error;
    delay = rule.delay_seconds;
    decided = true;
  }
  lock.unlock();
  cost_of_call = result == CUDA_SUCCESS ? cost : CallCost();
  delay_of_work = enqueues(call) && result == CUDA_SUCCESS ? delay : 0;
  if (delay > 0 && delay_of_work == 0) std::this_thread::sleep_for(std::chrono::duration<double>(delay));
  return result;
}

}  // namespace ooc::emulated
