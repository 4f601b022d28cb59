// Records the function-sequence and the variable-sequence of one iteration, and its fingerprint as it grows.
//
// Variables are numbered by first appearance within the iteration, so two iterations that do the same have the same
// numbers, whatever addresses they were given; `previous` links a variable to its number in the iteration before.
// Frees are recorded but not part of the fingerprint: garbage collection is not deterministic.
#pragma once

#include <algorithm>
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
  uint32_t remade = 0;              // functions that made again what others had made
  bool discards = false;            // a variable's bytes were given up
  bool overflow = false;            // too long: not recorded to the end

  uint32_t functions() const { return static_cast<uint32_t>(names.size()); }
  uint32_t own_functions() const { return functions() - remade; }
  bool as_written() const { return remade == 0 && !discards; }  // nothing but what the program does
  Range range(const Use& use) const { return ranges[use.range]; }
};

class Recorder {
 public:
  Recorder() { begin_iteration(0); }

  uint32_t function_id(const std::string& name) {
    const auto [entry, fresh] = ids_.try_emplace(name, static_cast<uint32_t>(names_.size()));
    if (fresh) {
      names_.push_back(name);
      name_hashes_.push_back(hash_name(name));
    }
    return entry->second;
  }
  const char* function_name(uint32_t id) const { return names_[id].c_str(); }

  void begin_function(uint32_t id, double now) {
    before_ = {hash_, stalled_};
    end_function(now);
    chunks_now_ = chunks_peak_ = chunks_sum_ = 0;
    workspaces_.clear();
    if (!known_before_.empty()) known_before_.clear();
    hash_ = mix(hash_, name_hashes_[id]);
    if (trace_->names.size() >= kMostFunctions) {
      trace_->overflow = true;
      return;
    }
    trace_->names.push_back(id);
    trace_->starts.push_back(now - began_);
    trace_->seconds.push_back(0);
  }
  // The function that began last makes again what others made.
  void remakes() {
    if (trace_->overflow) return;
    ++trace_->remade;
    last_remade_ = trace_->functions();
  }
  void use(Region* region, uint32_t access) {
    if (trace_->overflow) return;
    const uint32_t id = number(region);
    hash_ = mix(hash_, (uint64_t{id} << 34) ^ (uint64_t{region->count} << 2) ^ access);
    trace_->uses.push_back({trace_->functions() - 1, id, access & 3, 0});
    region->whole_iteration = iteration_;
    count_chunks(region->count);
  }
  // Some chunks of it. Of the runs of one region the function uses each once, ascending.
  void use(Region* region, uint32_t access, uint32_t first, uint32_t count) {
    if (trace_->overflow) return;
    const uint32_t id = number(region);
    hash_ = mix(hash_, (uint64_t{id} << 34) ^ (uint64_t{region->count} << 2) ^ access);
    hash_ = mix(hash_, uint64_t{first} << 32 ^ count);
    constexpr uint32_t kMostRanges = uint32_t{1} << 30;
    const auto range = static_cast<uint32_t>(trace_->ranges.size());
    if (range >= kMostRanges) {
      trace_->overflow = true;
      return;
    }
    trace_->uses.push_back({trace_->functions() - 1, id, access & 3, range & (kMostRanges - 1)});
    trace_->ranges.push_back({first, count});
    for (uint32_t i = first; i < first + count; ++i) region->slots[i].iteration = static_cast<uint32_t>(iteration_);
    count_chunks(count);
  }
  // The function uses these chunks wherever they are, and needs none of them on the device.
  void mention(Region* region, const Hold& run) {
    if (trace_->overflow) return;
    const uint64_t access = (run.reads ? 1u : 0u) | (run.writes ? 2u : 0u);
    hash_ = mix(hash_, (uint64_t{number(region)} << 34) ^ (uint64_t{region->count} << 2) ^ access);
    hash_ = mix(mix(hash_, kMentioned), uint64_t{run.first} << 32 ^ run.count);
  }
  // a second operand of the same region
  void widen_last_use(const Region* region, uint32_t access) {
    if (trace_->overflow) return;
    for (auto use = trace_->uses.rbegin(); use != trace_->uses.rend(); ++use) {
      if (use->variable != static_cast<uint32_t>(region->variable)) continue;
      use->access |= access & 3;
      hash_ = mix(hash_, access);
      return;
    }
  }
  // the running fingerprint, all operands told
  uint64_t end_operands() {
    if (!trace_->overflow) trace_->prefixes.push_back(hash_);
    return hash_;
  }
  // The function that began last did not begin after all.
  // The time until the next one begins counts for the function before, as it does when nothing was tried in between.
  void forget_function() {
    if (trace_->overflow || trace_->names.empty()) return;
    const uint32_t function = trace_->functions() - 1;
    const size_t variables = trace_->variables.size() - known_before_.size();
    for (size_t v = variables; v < trace_->variables.size(); ++v) {
      const Trace::Variable& variable = trace_->variables[v];
      const Known& known = known_before_[v - variables];
      if (Region* region = variable.handle.get()) {
        region->iteration = known.iteration;
        region->variable = known.variable;
      } else if (known.iteration + 1 == iteration_ && known.variable >= 0 && function > 0) {  // freed meanwhile
        const int32_t last = static_cast<int32_t>(function) - 1;
        only_freed_.push_back({{}, variable.bytes, -1, last, known.variable, variable.place});
      }
    }
    trace_->variables.resize(variables);
    known_before_.clear();
    while (!trace_->uses.empty() && trace_->uses.back().function == function) {
      if (trace_->uses.back().range > 0) trace_->ranges.pop_back();
      trace_->uses.pop_back();
    }
    if (last_remade_ == trace_->functions()) {
      --trace_->remade;
      last_remade_ = 0;
    }
    trace_->names.pop_back();
    trace_->starts.pop_back();
    trace_->seconds.pop_back();
    if (trace_->prefixes.size() > function) trace_->prefixes.pop_back();
    hash_ = before_.hash;
    stalled_ += before_.stalled;
    for (Trace::Variable& variable : trace_->variables)  // freed meanwhile, by another thread
      if (variable.died == static_cast<int32_t>(function)) variable.died = std::max(variable.died - 1, variable.born);
    chunks_now_ = chunks_peak_ = chunks_sum_ = 0;
    workspaces_.clear();
  }
  void allocate(Region* region, bool in_function) {
    if (trace_->overflow) return;
    const auto function = static_cast<int32_t>(trace_->functions());
    const uint32_t id = add(region, in_function ? function - 1 : function);
    hash_ = mix(hash_, (uint64_t{id} << 34) ^ (uint64_t{region->count} << 2) ^ 3);
    if (region->in_ranges) hash_ = mix(hash_, kAbsent);  // its first use comes later
    if (!in_function || region->in_ranges) return;
    region->whole_iteration = iteration_;
    trace_->uses.push_back({trace_->functions() - 1, id, 2, 0});
    count_chunks(region->count);
  }
  void free(Region* region, bool in_function) {
    const int32_t last = static_cast<int32_t>(trace_->functions()) - 1;
    if (trace_->overflow) return;
    if (seen(region)) {
      Trace::Variable& variable = trace_->variables[static_cast<size_t>(region->variable)];
      variable.died = std::max(last, variable.born);
      if (in_function && variable.born == last) {
        chunks_now_ -= region->count;
        workspaces_.push_back({static_cast<uint32_t>(region->variable), region->count});
      }
    } else if (region->iteration + 1 == iteration_ && region->variable >= 0 && last >= 0) {
      only_freed_.push_back({{}, region->bytes, -1, last, region->variable, region->place});
    }
  }
  // The variable ends, and its region's next use is the birth of another one.
  void discard(Region* region) {
    trace_->discards = true;
    if (!trace_->overflow) hash_ = mix(mix(hash_, kDiscarded), seen(region) ? static_cast<uint64_t>(region->variable) : ~uint64_t{0});
    free(region, false);
    region->variable = kUnborn;
  }
  // The region's place was learnt after it was allocated.
  void set_place(const Region* region) {
    if (!trace_->overflow && seen(region)) trace_->variables[static_cast<size_t>(region->variable)].place = region->place;
  }
  // Seconds since the function began that were spent waiting for memory.
  void stalled(double seconds) { stalled_ += seconds; }

  // Closes the iteration; the next begins at `now`.
  std::shared_ptr<Trace> finish(double now) {
    end_function(now);
    std::shared_ptr<Trace> ended = trace_;
    const auto functions = static_cast<int32_t>(ended->functions());
    ended->fingerprint = hash_;
    ended->variables.insert(ended->variables.end(), only_freed_.begin(), only_freed_.end());
    for (auto& variable : ended->variables) {
      variable.born = std::min(variable.born, functions - 1);
      variable.died = std::min(variable.died, functions);
    }
    link_to_previous(*ended);
    last_fingerprint_ = hash_;
    ++iteration_;
    begin_iteration(now);
    return ended;
  }

  const Trace& current() const { return *trace_; }
  uint64_t iteration() const { return iteration_; }
  bool seen(const Region* region) const { return region->iteration == iteration_ && region->variable >= 0; }
  // Some of these chunks were used in this iteration.
  bool seen(const Region* region, uint32_t first, uint32_t count) const {
    if (!seen(region)) return false;
    if (!region->in_ranges || region->whole_iteration == iteration_) return true;
    const uint32_t end = std::min(first + count, region->count);
    for (uint32_t i = first; i < end; ++i)
      if (region->slots[i].iteration == static_cast<uint32_t>(iteration_)) return true;
    return false;
  }

 private:
  static uint64_t mix(uint64_t hash, uint64_t value) {  // the finaliser of SplitMix64, chained
    hash ^= value + 0x9e3779b97f4a7c15ULL + (hash << 6) + (hash >> 2);
    hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9ULL;
    hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebULL;
    return hash ^ (hash >> 31);
  }

  // Mixed into the fingerprint beside what a variable's number, size and access say.
  static constexpr uint64_t kMentioned = 0x686f7374, kAbsent = 0x61627374, kDiscarded = 0x64726f70;  // "host", "abst", "drop"

  static uint64_t hash_name(const std::string& name) {  // FNV-1a: the same in every process
    uint64_t hash = 0xcbf29ce484222325ULL;
    for (unsigned char c : name) hash = (hash ^ c) * 0x100000001b3ULL;
    return hash;
  }

  static constexpr int32_t kUnborn = -2;  // the region's variable has no bytes yet
  static constexpr size_t kMostFunctions = size_t{1} << 20;

  void begin_iteration(double now) {
    trace_ = std::make_shared<Trace>();
    only_freed_.clear();
    workspaces_.clear();
    stalled_ = 0;
    last_remade_ = 0;
    hash_ = 0x6f6f63;  // "ooc"
    began_ = now;
  }
  // Workspaces that a function allocates and frees one after the other are never there together. Whoever reads the trace
  // adds up a function's variables, so what is too much is taken off the workspaces: they never move, only the room counts.
  void end_function(double now) {
    if (trace_->overflow || trace_->seconds.empty()) return;
    trace_->seconds.back() = std::max(0.0, now - began_ - trace_->starts.back() - stalled_);
    stalled_ = 0;
    uint64_t excess = chunks_sum_ - chunks_peak_;
    for (const Freed& workspace : workspaces_) {
      if (excess == 0) return;
      const uint64_t off = std::min<uint64_t>(excess, workspace.chunks);
      uint64_t& bytes = trace_->variables[workspace.variable].bytes;
      bytes = bytes / workspace.chunks * (workspace.chunks - off);
      excess -= off;
    }
  }
  void count_chunks(uint32_t chunks) {
    chunks_sum_ += chunks;
    chunks_now_ += chunks;
    chunks_peak_ = std::max(chunks_peak_, chunks_now_);
  }
  uint32_t add(Region* region, int32_t born) {
    const auto id = static_cast<uint32_t>(trace_->variables.size());
    const int32_t previous = region->iteration + 1 == iteration_ && born < 0 ? region->variable : -1;
    trace_->variables.push_back({{region, region->generation}, region->bytes, born, INT32_MAX, previous, region->place});
    region->iteration = iteration_;
    region->variable = static_cast<int32_t>(id);
    return id;
  }
  uint32_t number(Region* region) {
    if (__builtin_expect(seen(region), true)) return static_cast<uint32_t>(region->variable);
    known_before_.push_back({region->iteration, region->variable});
    return add(region, region->variable == kUnborn ? static_cast<int32_t>(trace_->functions()) - 1 : -1);
  }
  // The numbers of the iteration before mean something only if it did the same. Else what is there from the start to the
  // end is taken to keep its number.
  void link_to_previous(Trace& ended) const {
    const bool repeats = last_fingerprint_ == ended.fingerprint;
    const auto functions = static_cast<int32_t>(ended.functions());
    for (size_t v = 0; v < ended.variables.size(); ++v) {
      Trace::Variable& variable = ended.variables[v];
      if (!repeats) variable.previous = variable.born < 0 && variable.died == functions ? static_cast<int32_t>(v) : -1;
      const auto before = static_cast<size_t>(variable.previous);
      if (variable.previous >= 0 && (before >= ended.variables.size() || ended.variables[before].died != functions))
        variable.previous = -1;
    }
  }

  std::shared_ptr<Trace> trace_;
  // Of the running function: chunks of all its variables, the most of them at once, and those that are freed again.
  struct Freed {
    uint32_t variable, chunks;
  };
  uint64_t chunks_now_ = 0, chunks_peak_ = 0, chunks_sum_ = 0;
  double stalled_ = 0;
  std::vector<Freed> workspaces_;

  // As it was before the function that began last, to go back there.
  struct {
    uint64_t hash = 0;
    double stalled = 0;
  } before_;
  uint32_t last_remade_ = 0;  // functions up to and with the last one that made something again; 0 also where it did not begin
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
