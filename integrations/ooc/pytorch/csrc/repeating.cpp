// Making bytes again: the calls that made them run once more, in the program's order.
#include <chrono>
#include <cstring>
#include <map>

#include "function_scope.h"
#include "operators.h"
#include "recompute_state.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

namespace {

using Clock = std::chrono::steady_clock;

// While it exists, the thread's functions are not the program's: OOC_APART or OOC_REMAKES.
class Busy {
 public:
  explicit Busy(int part) : was_(std::exchange(remaking_thread.busy, true)) { ooc_core_set_apart(core, part, &before_); }
  ~Busy() {
    int ignored = 0;
    ooc_core_set_apart(core, before_, &ignored);
    remaking_thread.busy = was_;
  }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  const bool was_;
  int before_ = 0;
};

Operands of_memory(std::initializer_list<std::pair<char*, uint32_t>> memory) {
  Operands operands;
  for (const auto& [address, access] : memory) operands.push_back({address, access, 0, 0});
  return operands;
}

uint32_t checks_id() {
  static const uint32_t id = ooc_core_function_id(core, "ooc::compare");
  return id;
}

template <class AddResults>
void end(FunctionScope& scope, AddResults add_results) {
  if (const int status = scope.end(false, add_results); status != OOC_OK) raise(status);
}
void end(FunctionScope& scope) {
  end(scope, [](Operands&) {});
}

// Bytes of the device, where the host can read them.
class HostView {
 public:
  HostView(const char* address, size_t bytes) : bytes_(address) {
    if constexpr (kWithCuda)
      if (on_cuda()) {
        copy_.resize(bytes);
        cuda_read(copy_.data(), address, bytes);
        bytes_ = copy_.data();
      }
  }
  const char* get() const { return bytes_; }

 private:
  std::vector<char> copy_;
  const char* bytes_;
};

// Calls `act(offset, bytes)` for each part of so many bytes, as long as it returns true.
template <class Act>
bool all_parts(uint64_t bytes, Act act) {
  constexpr uint64_t kPart = 4 << 20;
  for (uint64_t at = 0; at < bytes; at += kPart)
    if (!act(at, std::min(kPart, bytes - at))) return false;
  return true;
}

constexpr uint64_t kHashOfNothing = 0xcbf29ce484222325ULL;

// FNV-1a over words, going on from another hash: any change of a bit changes it.
uint64_t hash_of(const char* bytes, uint64_t count, uint64_t hash) {
  uint64_t word = 0, i = 0;
  for (; i + sizeof word <= count; i += sizeof word) {
    std::memcpy(&word, bytes + i, sizeof word);
    hash = (hash ^ word) * 0x100000001b3ULL;
    hash ^= hash >> 29;
  }
  for (; i < count; ++i) hash = (hash ^ static_cast<unsigned char>(bytes[i])) * 0x100000001b3ULL;
  return hash;
}

void copy_bytes(char* target, const char* bytes, size_t count) {
  if constexpr (kWithCuda)
    if (on_cuda()) return cuda_copy(target, bytes, count);
  std::memcpy(target, bytes, count);
}

// Calls that run again together.
class Batch {
 public:
  Batch(Recompute& r, Loss loss, std::vector<CallId> calls, const std::vector<Version>& wanted)
      : r_(r), loss_(loss), ids_(std::move(calls)) {
    // Of the lost variables, those of which all writers run again, and that are wanted or stay. The books are held.
    for (const CallId id : ids_) {
      calls_.push_back(r.calls[static_cast<size_t>(id)]);
      for (const Version& written : r.history.writes(id)) {
        const Variable& b = r.history.variable(written.variable);
        const bool lost = b.dropped || (loss == Loss::kRehearsed && b.rehearsed);
        const auto runs = [this](CallId writer) { return std::find(ids_.begin(), ids_.end(), writer) != ids_.end(); };
        const bool stays = !b.fleeting || std::ranges::find(wanted, written.variable, &Version::variable) != wanted.end();
        if (lost && stays && std::ranges::all_of(b.writers, runs)) restored_.try_emplace(written.variable);
      }
      for (const Version& read : r.history.reads(id)) last_use_[read.variable] = calls_.size() - 1;
      if (calls_.back()->role == Role::kLink) last_use_[calls_.back()->target.variable] = calls_.size() - 1;
    }
    for (auto& [id, place] : restored_) place = {r.history.variable(id).address, {}};
    for (const auto& [id, last] : last_use_) touched_.push_back(id);
    for (const auto& [id, place] : restored_)
      if (!last_use_.contains(id)) touched_.push_back(id);
    for (const VariableId id : touched_) ++r.history.variable(id).users;
  }
  ~Batch() {
    const std::lock_guard<std::mutex> lock(r_.books);
    for (const VariableId id : touched_) --r_.history.variable(id).users;
  }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  const auto& restored() const { return restored_; }
  std::string names() const {
    std::string text;
    for (const auto& call : calls_) text += (text.empty() ? "" : ", ") + std::string(ooc_core_function_name(core, call->info.id));
    return text;
  }

  void run() {
    if (loss_ == Loss::kRehearsed) make_stand_ins();
    for (size_t i = 0; i < calls_.size(); ++i) {
      run(*calls_[i]);
      std::erase_if(fresh_, [&](const auto& entry) { return last_use_[entry.first] <= i; });
    }
  }

  // Of a rehearsal: whether the bytes are those that the variable has.
  bool agrees(VariableId id, char* address, uint64_t bytes) {
    char* other = restored_.at(id).address;
    FunctionScope scope(checks_id(), of_memory({{address, OOC_READ}, {other, OOC_READ}}));
    const bool same = all_parts(bytes, [&](uint64_t at, uint64_t count) {
      return std::memcmp(HostView(address + at, count).get(), HostView(other + at, count).get(), count) == 0;
    });
    end(scope);
    return same;
  }

 private:
  struct Place {
    char* address = nullptr;
    c10::DataPtr memory;  // of a stand-in
  };

  // A rehearsal has other memory for what it makes again.
  void make_stand_ins() {
    for (auto& [id, place] : restored_) {
      uint64_t bytes = 0;
      {
        const std::lock_guard<std::mutex> lock(r_.books);
        bytes = r_.history.variable(id).bytes;
      }
      place.memory = c10::GetAllocator(on_cuda() ? c10::DeviceType::CUDA : c10::DeviceType::CPU)->allocate(bytes);
      place.address = static_cast<char*>(place.memory.get());
    }
  }

  char* place_of(const Version& version) {
    const std::lock_guard<std::mutex> lock(r_.books);
    if (r_.history.exists(version, loss_)) return r_.history.variable(version.variable).address;
    if (const auto place = restored_.find(version.variable); place != restored_.end()) return place->second.address;
    const auto fresh = fresh_.find(version.variable);
    TORCH_CHECK(fresh != fresh_.end(), "an input of a function that runs again is not there");
    return static_cast<char*>(fresh->second.storage().mutable_data());
  }

  void run(const KeptCall& call) {
    torch::jit::Stack stack = call.arguments([this](const Version& version) { return place_of(version); });
    Operands operands;
    for (size_t i = 0; i < stack.size(); ++i) add_value(stack[i], call.info.access[i], operands);
    std::vector<char*> places(call.allocations.size(), nullptr);
    for (const KeptCall::Output& output : call.outputs)
      if (const auto place = restored_.find(output.version.variable); place != restored_.end()) {
        places[output.allocation] = place->second.address;
        operands.push_back({place->second.address, OOC_WRITE, 0, 0});
      }
    FunctionScope scope(r_.again_id(call.info.id), operands);
    const Clock::time_point began = Clock::now();
    std::vector<at::Tensor> results;
    {
      CallMemory memory(call.allocations, std::move(places));
      const CallMemory::During during(&memory);
      results = call.run(std::move(stack));
      put_in_place(call, memory, results);
    }
    end(scope, [this](Operands& made) {
      for (const auto& [id, result] : fresh_) made.push_back({static_cast<char*>(result.storage().mutable_data()), OOC_READ, 0, 0});
    });
    const double seconds = std::chrono::duration<double>(Clock::now() - began).count();
    const std::lock_guard<std::mutex> lock(r_.books);
    ++r_.figures.repeats;
    r_.figures.repeat_seconds += seconds;
  }

  // Results belong in memory that is there already, or are kept for the calls that follow.
  void put_in_place(const KeptCall& call, const CallMemory& memory, const std::vector<at::Tensor>& results) {
    for (const KeptCall::Output& output : call.outputs) {
      TORCH_CHECK(output.result < results.size(), "a function that ran again had other results");
      const at::Tensor& result = results[output.result];
      const uint64_t bytes = call.allocations[output.allocation].bytes;
      TORCH_CHECK(result.defined() && result.storage().nbytes() == bytes, "a result of a function that ran again had another size");
      const auto place = restored_.find(output.version.variable);
      if (place == restored_.end()) {
        fresh_.insert_or_assign(output.version.variable, result);
        continue;
      }
      char* made = static_cast<char*>(result.storage().mutable_data());
      if (made == place->second.address) continue;
      TORCH_CHECK(!memory.gave(made), "a function that ran again allocated its results in another order");
      copy_bytes(place->second.address, made, bytes);
    }
  }

  Recompute& r_;
  const Loss loss_;
  const std::vector<CallId> ids_;
  std::vector<std::shared_ptr<const KeptCall>> calls_;
  std::map<VariableId, Place> restored_;
  std::map<VariableId, at::Tensor> fresh_;  // what is made on the way
  std::map<VariableId, size_t> last_use_;   // by which call of the batch
  std::vector<VariableId> touched_;
};

void rehearse(Recompute& r, Batch& batch) {
  bool ran = false;
  try {
    batch.run();
    ran = true;
  } catch (const c10::Error&) {  // there was no room, or it cannot run again: nothing is dropped then
  }
  for (const auto& [id, place] : batch.restored()) {
    std::unique_lock<std::mutex> lock(r.books);
    const Variable b = r.history.variable(id);
    lock.unlock();
    const bool same = ran && batch.agrees(id, b.address, b.bytes);
    lock.lock();
    r.history.variable(id).rehearsed = false;
    if (const auto drop = r.rehearsed.find(id); drop != r.rehearsed.end()) {
      if (same) ++drop->second->passed;
      else r.follower.refuse(*drop->second);
      r.rehearsed.erase(drop);
    }
  }
}

// Those of them that are still lost. The books are held.
std::vector<Version> still_lost(const Recompute& r, const std::vector<VariableId>& asked, Loss loss) {
  std::vector<Version> wanted;
  for (const VariableId id : asked) {
    const Variable& b = r.history.variable(id);
    if (loss == Loss::kReal ? b.dropped : b.rehearsed) wanted.push_back(r.history.current(id));
  }
  return wanted;
}

void refuse_rehearsed(Recompute& r, const std::vector<Version>& versions) {
  for (const Version& version : versions) {
    r.history.variable(version.variable).rehearsed = false;
    if (const auto drop = r.rehearsed.find(version.variable); drop != r.rehearsed.end()) r.follower.refuse(*drop->second);
    r.rehearsed.erase(version.variable);
  }
}

void check_bytes(Recompute& r, const Batch& batch) {
  for (const auto& [id, place] : batch.restored()) {
    std::unique_lock<std::mutex> lock(r.books);
    const Variable b = r.history.variable(id);
    lock.unlock();
    TORCH_CHECK(hash_of_variable(b.address, b.bytes) == b.hash, "a variable of ", b.bytes,
                " bytes did not have the same bytes when it was made again by ", batch.names());
  }
}

}  // namespace

uint64_t hash_of_variable(char* address, uint64_t bytes) {
  const Busy busy(OOC_APART);
  FunctionScope scope(checks_id(), of_memory({{address, OOC_READ}}));
  uint64_t hash = kHashOfNothing;
  all_parts(bytes, [&](uint64_t at, uint64_t count) {
    hash = hash_of(HostView(address + at, count).get(), count, hash);
    return true;
  });
  end(scope);
  return hash;
}

void make_again_alone(const std::vector<VariableId>& asked, Loss loss) {
  Recompute& r = recompute();
  std::unique_lock<std::mutex> lock(r.books);
  const std::vector<Version> wanted = still_lost(r, asked, loss);
  if (wanted.empty()) return;
  std::optional<std::vector<CallId>> calls = r.history.repeats(wanted, loss);
  if (!calls && loss == Loss::kRehearsed) return refuse_rehearsed(r, wanted);
  TORCH_CHECK(calls, "internal error: a variable that was dropped cannot be made again");
  Batch batch(r, loss, std::move(*calls), wanted);
  lock.unlock();
  const Busy busy(loss == Loss::kRehearsed ? OOC_APART : OOC_REMAKES);
  if (loss == Loss::kRehearsed) return rehearse(r, batch);
  batch.run();
  if (r.checks) check_bytes(r, batch);
  lock.lock();
  for (const auto& [id, place] : batch.restored()) r.history.variable(id).dropped = false;
  lock.unlock();
}

void make_again(const std::vector<VariableId>& asked, Loss loss, uint64_t iteration) {
  Recompute& r = recompute();
  {
    const std::lock_guard<std::mutex> alone(r.remaking);
    std::unique_lock<std::mutex> lock(r.books);
    if (r.iteration != iteration) return;  // another thread ended it, and made everything again for that
    lock.unlock();
    make_again_alone(asked, loss);
  }
  free_needless();
}

void free_needless() {
  Recompute& r = recompute();
  std::vector<char*> needless;
  {
    const std::lock_guard<std::mutex> lock(r.books);
    std::erase_if(r.lingering, [&](VariableId id) {
      if (r.stays(id)) return false;
      needless.push_back(r.history.variable(id).address);
      r.history.forget_memory(id);
      return true;
    });
  }
  remaking_thread.frees = true;
  for (char* address : needless) ooc_core_free(core, address);
  remaking_thread.frees = false;
}

}  // namespace ooc_torch
