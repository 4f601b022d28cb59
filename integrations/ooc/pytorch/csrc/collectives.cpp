#include "collectives.h"

#ifdef OOC_WITH_DISTRIBUTED
#include <torch/csrc/distributed/c10d/Work.hpp>
#endif

#include <algorithm>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace ooc_torch __attribute__((visibility("hidden"))) {
namespace {

// Pins that end with this object. `ends_alone`: the work ends without the program, so that others may wait for it.
class Pins {
 public:
  Pins(const Operands& operands, bool ends_alone) : ends_alone_(ends_alone) {
    for (const ooc_operand& operand : operands) {
      tokens_.push_back({0, operand.access});
      const int status = ooc_core_pin(core, operand.address, operand.access, &tokens_.back().first);
      if (status == OOC_OK) continue;
      tokens_.pop_back();
      unpin();
      raise(status);
    }
    if (ends_alone_) ooc_core_work_begins(core);
  }
  ~Pins() {
    unpin();
    if (ends_alone_) ooc_core_work_ends(core);
  }
  // The function that runs keeps what it allocated (ooc_core_function_end): that pin ends with these.
  void take_over(const void* allocated) {
    uint64_t token = 0;
    if (ooc_core_pin(core, allocated, OOC_READ | OOC_WRITE, &token) != OOC_OK) return;
    for (int pins = 0; pins < 2; ++pins) tokens_.push_back({token, OOC_READ | OOC_WRITE});
  }
  Pins(const Pins&) = delete;
  Pins& operator=(const Pins&) = delete;

 private:
  void unpin() {
    for (const auto& [token, access] : tokens_) ooc_core_unpin(core, token, access);
  }

  std::vector<std::pair<uint64_t, uint32_t>> tokens_;
  bool ends_alone_;
};

uint64_t bytes_of(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? value.toTensor().nbytes() : 0;
  uint64_t bytes = 0;
  if (value.isList())
    for (const c10::IValue& element : value.toListRef()) bytes += bytes_of(element);
  return bytes;
}

std::mutex results_mutex;  // of both below

// By the memory of each result. The pins end when all results have been waited for.
std::unordered_map<const void*, std::shared_ptr<Pins>>& of_results() {
  static auto* pins = new std::unordered_map<const void*, std::shared_ptr<Pins>>;
  return *pins;
}

void hold_until_waited_for(const Operands& results, const Operands& operands, bool keeps) {
  const auto pins = std::make_shared<Pins>(operands, false);
  const auto given = [&](const ooc_operand& result) {
    return std::any_of(operands.begin(), operands.end(), [&](const ooc_operand& one) { return one.address == result.address; });
  };
  for (const ooc_operand& result : results)
    if (keeps && !given(result)) pins->take_over(result.address);
  const std::lock_guard<std::mutex> lock(results_mutex);
  for (const ooc_operand& result : results) of_results()[result.address] = pins;
}

#ifdef OOC_WITH_DISTRIBUTED
// Work that calls nobody when it ends (sends and receives end as the program waits for them): looked at with each collective.
struct Watched {
  c10::weak_intrusive_ptr<c10d::Work> work;
  std::shared_ptr<Pins> pins;
};
std::list<Watched>& watched() {
  static auto* list = new std::list<Watched>;
  return *list;
}

void look_at_watched() {
  const std::lock_guard<std::mutex> lock(results_mutex);
  watched().remove_if([](const Watched& one) {
    const auto work = one.work.lock();
    return !work || work->isCompleted();
  });
}

void hold_until_work_ends(const c10::intrusive_ptr<c10d::Work>& work, const Operands& operands) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  try {
    if (!on_cuda()) future = work->getFuture();
  } catch (const std::exception&) {  // there is none
  }
  auto pins = std::make_shared<Pins>(operands, future != nullptr);
  if (future == nullptr) {
    const std::lock_guard<std::mutex> lock(results_mutex);
    // Work on a GPU says that it is complete when it has been enqueued: only the end of the object is believed there.
    if (!on_cuda()) return watched().push_back({c10::weak_intrusive_ptr<c10d::Work>(work), std::move(pins)});
    static auto* for_life = new std::list<std::shared_ptr<Pins>>;
    return for_life->push_back(std::move(pins));
  }
  future->addCallback([pins = std::move(pins)](c10::ivalue::Future&) mutable { pins.reset(); });
}
#endif

}  // namespace

Collective collective_of(std::string_view space, std::string_view name) {
  if (space == "c10d") return Collective::kWork;
  if (space != "_c10d_functional") return Collective::kNone;
  return name.find("wait_tensor") != std::string_view::npos ? Collective::kWait : Collective::kResult;
}

void make_room_for_scratch(std::string_view name, c10::ArrayRef<c10::IValue> arguments) {
  // gloo lays these out flat, inputs and outputs; others it lays out in the calling thread, or not at all.
  if (on_cuda() || (name != "c10d::alltoall_" && name.find("coalesced") == std::string_view::npos)) return;
  uint64_t bytes = 0;
  for (const c10::IValue& argument : arguments) bytes += bytes_of(argument);
  void* room = ooc_core_malloc(core, bytes);
  if (room == nullptr) raise(ooc_last_status());
  ooc_core_free(core, room);
}

void hold_while_it_works(Collective kind, c10::ArrayRef<c10::IValue> results, const Operands& operands, bool keeps) {
  if (kind == Collective::kWait) {
    const std::lock_guard<std::mutex> lock(results_mutex);
    for (const ooc_operand& operand : operands) of_results().erase(operand.address);
    return;
  }
  if (kind == Collective::kResult) {
    Operands made;
    for (const c10::IValue& result : results) add_value(result, OOC_READ | OOC_WRITE, made);
    return hold_until_waited_for(made, operands, keeps);
  }
#ifdef OOC_WITH_DISTRIBUTED
  look_at_watched();
  for (const c10::IValue& result : results)
    if (result.isCustomClass()) return hold_until_work_ends(result.toCustomClass<c10d::Work>(), operands);
#endif
  for (const ooc_operand& operand : operands) ooc_core_pin(core, operand.address, operand.access, nullptr);
}

}  // namespace ooc_torch
