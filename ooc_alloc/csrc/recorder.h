// Records the function-sequence and the variable-sequence of one iteration, and its fingerprint as it grows.
//
// Variables are numbered by first appearance within the iteration, so two iterations that do the same have the same
// numbers, whatever addresses they were given; `previous` links a variable to its number in the iteration before.
// Frees are recorded but not part of the fingerprint: garbage collection is not deterministic.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "region.h"

namespace ooc {

struct Trace {
  struct Variable {
    RegionHandle handle;
    uint64_t bytes = 0;
    int32_t born = -1, died = 0, previous = -1;
    uint32_t place = 0;
  };
  struct Use {
    uint32_t function, variable;
    uint32_t access : 2, range : 30;  // 0: the whole variable; else the number of its range
  };
  struct Range {
    uint32_t first, count;  // chunks
  };
  std::vector<uint32_t> names;      // [functions] function id
  std::vector<double> starts;       // [functions] seconds since the iteration began
  std::vector<double> seconds;      // [functions] until the next one, or the iteration's end; without stalls
  std::vector<uint64_t> prefixes;   // [functions] fingerprint of the sequence up to and with the function
  std::vector<Variable> variables;
  std::vector<Use> uses;            // by function, ascending
  std::vector<Range> ranges{{0, UINT32_MAX}};  // the first one stands for any whole variable
  uint64_t fingerprint = 0;
  bool overflow = false;            // too long: not recorded to the end

  uint32_t functions() const { return static_cast<uint32_t>(names.size()); }
  Range range(const Use& use) const { return ranges[use.range]; }
};

class Recorder {
 public:
  Recorder() { begin_iteration(0); }

  uint32_t function_id(const std::string& name);
  const char* function_name(uint32_t id) const { return names_[id].c_str(); }

  void begin_function(uint32_t id, double now);
  void use(Region* region, uint32_t access);
  // Some chunks of it. Of the runs of one region the function uses each once, ascending.
  void use(Region* region, uint32_t access, uint32_t first, uint32_t count);
  // The function uses these chunks wherever they are, and needs none of them on the device.
  void mention(Region* region, const Hold& run);
  void widen_last_use(const Region* region, uint32_t access);  // a second operand of the same region
  uint64_t end_operands();  // the running fingerprint, all operands told
  // The function that began last did not begin after all.
  void forget_function();
  void allocate(Region* region, bool in_function);
  void free(Region* region, bool in_function);
  // The region's place was learnt after it was allocated.
  void set_place(const Region* region);
  // Seconds since the function began that were spent waiting for memory.
  void stalled(double seconds) { stalled_ += seconds; }

  // Closes the iteration; the next begins at `now`.
  std::shared_ptr<Trace> finish(double now);

  const Trace& current() const { return *trace_; }
  uint64_t iteration() const { return iteration_; }
  bool seen(const Region* region) const { return region->iteration == iteration_ && region->variable >= 0; }
  // Some of these chunks were used in this iteration.
  bool seen(const Region* region, uint32_t first, uint32_t count) const;

 private:
  static constexpr size_t kMostFunctions = size_t{1} << 20;

  void begin_iteration(double now);
  void end_function(double now);
  void count_chunks(uint32_t chunks);
  uint32_t add(Region* region, int32_t born);
  uint32_t number(Region* region) {
    if (__builtin_expect(seen(region), true)) return static_cast<uint32_t>(region->variable);
    known_before_.push_back({region->iteration, region->variable});
    return add(region, -1);
  }
  void link_to_previous(Trace& ended) const;

  std::shared_ptr<Trace> trace_;
  // Of the running function: chunks of all its variables, the most of them at once, and those that are freed again.
  struct Freed {
    uint32_t variable, chunks;
  };
  double stalled_ = 0;
  uint64_t chunks_now_ = 0, chunks_peak_ = 0, chunks_sum_ = 0;
  std::vector<Freed> workspaces_;

  // As it was before the function that began last, to go back there.
  struct {
    uint64_t hash = 0;
    double stalled = 0;
  } before_;
  struct Known {
    uint64_t iteration;
    int32_t variable;
  };
  std::vector<Known> known_before_;  // what the variables that appeared as its operands were known as

  std::vector<Trace::Variable> only_freed_;  // freed without a use: known only at the end, so numbered last
  uint64_t hash_ = 0, last_fingerprint_ = 0;
  uint64_t iteration_ = 1;
  double began_ = 0;
  std::vector<std::string> names_;
  std::vector<uint64_t> name_hashes_;
  std::unordered_map<std::string, uint32_t> ids_;
};

}  // namespace ooc
