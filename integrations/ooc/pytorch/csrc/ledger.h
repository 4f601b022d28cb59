// What kept calls read and wrote: which bytes a block of memory holds, whether they still exist, and which calls make them
// again. The bytes of a block between two writes are a version of it; version k is what its k-th writer left, from 0.
// It is swapd/recompute/history.py while the program runs, and knows nothing of operators. Guarded by its owner.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

namespace ooc_torch __attribute__((visibility("hidden"))) {

using BlockId = int32_t;
using CallId = int32_t;
constexpr int32_t kNoId = -1;

struct Version {
  BlockId block = kNoId;
  uint32_t number = 0;

  auto operator<=>(const Version&) const = default;
};

struct Block {
  char* address = nullptr;
  uint64_t bytes = 0;
  bool there = true;      // the memory is the program's, or stays although the program freed it
  bool freed = false;     // the program has freed it
  bool dropped = false;   // its bytes were given up
  bool rehearsed = false; // its bytes are there, but are to be made again as if they were not
  bool exposed = false;   // somebody may write it at any time
  uint64_t hash = 0;      // of the bytes that were dropped, where that is checked
  uint32_t users = 0;     // calls that run again and read it, or make its bytes
  uint32_t version = 0;
  std::vector<CallId> writers;               // [versions]; kNoId: the bytes cannot be made again
  std::vector<std::vector<CallId>> readers;  // [versions] kept calls that read it
};

// Whose bytes count as lost: those that are dropped, or those that a rehearsal takes for dropped as well.
enum class Loss { kReal, kRehearsed };

class Ledger {
 public:
  // The block whose memory an address lies in; kNoId: no call that was kept has used it.
  BlockId find(const void* address) const;
  // It is added if need be; its first version is the program's own.
  BlockId find_or_add(char* address, uint64_t bytes);
  // A call allocated it.
  BlockId add_made(char* address, uint64_t bytes, CallId maker);
  Block& block(BlockId id) { return blocks_[static_cast<size_t>(id)]; }
  const Block& block(BlockId id) const { return blocks_[static_cast<size_t>(id)]; }
  Version current(BlockId id) const { return {id, block(id).version}; }

  CallId new_call() {
    reads_.emplace_back();
    writes_.emplace_back();
    return static_cast<CallId>(reads_.size()) - 1;
  }
  void read(CallId call, const Version& version);
  const std::vector<Version>& reads(CallId call) const { return reads_[static_cast<size_t>(call)]; }
  const std::vector<Version>& writes(CallId call) const { return writes_[static_cast<size_t>(call)]; }
  // Somebody writes a block: it has a new version, which nobody can make again unless `written_by` says so.
  void write(BlockId id);
  void written_by(BlockId id, CallId call);
  // The memory is gone.
  void forget_memory(BlockId id);

  // Whether bytes exist.
  bool exists(const Version& version, Loss loss) const {
    const Block& b = block(version.block);
    return b.there && !b.dropped && !b.exposed && b.version == version.number && (loss == Loss::kReal || !b.rehearsed);
  }
  // The calls that make versions again, in the order in which the program made them; none if that is not possible, or
  // takes more than `most` calls. `without` is a block that may not be read.
  std::optional<std::vector<CallId>> repeats(std::vector<Version> wanted, Loss loss, BlockId without = kNoId,
                                             size_t most = SIZE_MAX) const;
  // The lost blocks whose bytes may have to be made from a version.
  std::vector<BlockId> dependents(const Version& version, Loss loss) const;
  // Of these, the ones that cannot be made again any more once the block that has the version is gone, or written.
  std::vector<BlockId> stranded_without(const Version& version, Loss loss) const;

  void clear();
  bool empty() const { return blocks_.empty(); }
  const std::deque<Block>& blocks() const { return blocks_; }

 private:
  BlockId add(char* address, uint64_t bytes, CallId writer);
  bool lost(const Block& b, Loss loss) const { return b.dropped || (loss == Loss::kRehearsed && b.rehearsed); }

  std::deque<Block> blocks_;
  std::map<const char*, BlockId> places_;  // of those whose memory is there
  std::vector<std::vector<Version>> reads_, writes_;  // [calls]
};

}  // namespace ooc_torch
