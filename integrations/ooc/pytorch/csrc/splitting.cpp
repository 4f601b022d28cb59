#include "splitting.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "operators.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

namespace {

constexpr size_t kDeepest = 6;  // operators that may run in parts within each other's parts
thread_local std::vector<const SplitState*> dividing;  // operators whose parts this thread runs

struct Refusal {
  bool is = false, inexact = false;
  bool whole = false, host = false;  // it can, but had better run so
  bool raised = false;  // an error of the operator's own, which undivided it may raise in other words, or not at all
  std::string reason;
};
thread_local Refusal refusal;  // of the operator that Python splits in this thread
thread_local bool tried_whole = false, tried_host = false;  // it did not fit

// Our key and those below it stay, so that the fallback sees a handler's operators, and nothing above it does.
c10::DispatchKeySet above_ours() {
  return c10::DispatchKeySet(c10::DispatchKeySet::FULL) - kBelow - c10::DispatchKeySet(kKey);
}

class Dividing {
 public:
  explicit Dividing(const SplitState& state) { dividing.push_back(&state); }
  ~Dividing() { dividing.pop_back(); }
  Dividing(const Dividing&) = delete;
  Dividing& operator=(const Dividing&) = delete;
};

// A part that does not fit is not divided again, as who divides can make smaller parts, and every way would be tried on
// every level. The bound is for operators that divide into parts of each other.
bool must_run_whole(const SplitState& state) {
  if (in_mode(kUndivided) || ooc_core_in_function(core) || dividing.size() >= kDeepest) return true;
  if constexpr (kWithCuda)
    if (on_cuda() && cuda_capturing()) return true;  // a graph has the addresses of all that it uses
  return std::find(dividing.begin(), dividing.end(), &state) != dividing.end();
}

// Nothing else will be tried.
void report_out_of_memory() {
  if constexpr (kWithCuda)
    if (on_cuda() && dividing.empty() && !ooc_core_in_function(core)) cuda_report_out_of_memory();
}

// ---- what is remembered ---------------------------------------------------------------------------------------------

uint64_t mixed(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
  return hash ^ hash >> 29;
}

uint64_t hash_of(const c10::IValue& value, uint64_t hash) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined() || tensor.layout() != c10::kStrided || is_nested(tensor.key_set())) return mixed(hash, 1);
    hash = mixed(hash, 2 + static_cast<uint64_t>(tensor.scalar_type()));
    for (const int64_t size : tensor.sizes()) hash = mixed(hash, static_cast<uint64_t>(size));
    for (const int64_t stride : tensor.strides()) hash = mixed(hash, ~static_cast<uint64_t>(stride));
    return hash;
  }
  if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) hash = hash_of(tensor, hash);
    return mixed(hash, 3);
  }
  if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) hash = hash_of(element, hash);
    return mixed(hash, 4);
  }
  if (value.isInt()) return mixed(hash, static_cast<uint64_t>(value.toInt()));
  if (value.isBool()) return mixed(hash, value.toBool() ? 5 : 6);
  return mixed(hash, value.isNone() ? 7 : 8);  // a number, which changes nothing about sizes
}

uint64_t hash_of(const torch::jit::Stack& stack, size_t count) {
  uint64_t hash = count;
  for (size_t i = stack.size() - count; i < stack.size(); ++i) hash = hash_of(stack[i], hash);
  return hash;
}

void remember(SplitState& state, uint64_t key, Way way) {
  {
    const std::lock_guard<std::mutex> lock(state.mutex);
    state.ways[key] = way;
  }
  state.any = any_remembered = true;
}

// ---- whether and how ------------------------------------------------------------------------------------------------

bool narrower_than_storage(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != c10::kStrided || is_nested(tensor.key_set())) return false;
  if (!tensor.has_storage()) return false;
  uint64_t reach = tensor.numel() == 0 ? 0 : 1;
  if (reach > 0)
    for (int64_t d = 0; d < tensor.dim(); ++d)
      reach += static_cast<uint64_t>(tensor.size(d) - 1) * static_cast<uint64_t>(tensor.stride(d));
  return reach * tensor.itemsize() < tensor.storage().nbytes();
}

std::vector<at::Tensor> tensors_of(const std::vector<c10::IValue>& arguments) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& value : arguments) {
    if (value.isTensor()) tensors.push_back(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorList()) tensors.push_back(tensor);
  }
  return tensors;
}

// Once its kernel has begun, an operator that writes its arguments may have written some of them: it is not run again.
// One that fills what it was given to fill can be, unless that is one of its operands.
bool spoils(const SplitState& state, const c10::IValue* arguments, size_t count) {
  for (const uint32_t out : state.outs) {
    const at::Tensor& filled = arguments[out].toTensor();
    for (size_t i = 0; i < count; ++i) {
      if (i == out) continue;
      for (const at::Tensor& other : tensors_of({arguments[i]}))
        if (other.defined() && (!other.has_storage() || !filled.has_storage() || other.is_alias_of(filled))) return true;
    }
  }
  return state.writes;
}

bool any_narrower(const std::vector<c10::IValue>& arguments) {
  const std::vector<at::Tensor> tensors = tensors_of(arguments);
  return std::any_of(tensors.begin(), tensors.end(), narrower_than_storage);
}

// Splitting is made for products and convolutions: a program that ran these from host memory would crawl. On a GPU, what of a
// convolution does not fit may be its workspace alone.
bool never_on_host(const std::string& name) {
  static constexpr std::string_view kParts[] = {"conv",   "linear", "::mm", "addmm", "bmm",
                                                "matmul", "addmv",  "::mv", "::dot", "addr"};
  const std::string operator_name = name.substr(0, name.find('.'));
  return std::any_of(std::begin(kParts), std::end(kParts),
                     [&](std::string_view part) { return operator_name.find(part) != std::string::npos; });
}

std::string shapes_of(const std::vector<c10::IValue>& arguments) {
  std::string text;
  for (const at::Tensor& tensor : tensors_of(arguments)) {
    if (!tensor.defined()) continue;
    text += (text.empty() ? "" : ", ") + std::string(c10::toString(tensor.scalar_type())) + "[";
    for (int64_t d = 0; d < tensor.dim(); ++d) text += (d > 0 ? "x" : "") + std::to_string(tensor.size(d));
    text += "]";
  }
  return text;
}

// Returns the operator ooc_split::NAME, or nothing where operators.py has not defined it.
std::optional<c10::OperatorHandle> find_split(const std::string& name) {
  return c10::Dispatcher::singleton().findSchema({"ooc_split::" + name, ""});
}

std::optional<c10::OperatorHandle> parts_operator(const std::string& name, SplitState& state) {
  {
    const std::lock_guard<std::mutex> lock(state.mutex);
    if (state.asked) return state.parts;
  }
  std::optional<c10::OperatorHandle> found;
  if (const auto prepare = find_split("prepare")) {
    torch::jit::Stack stack{c10::IValue(name)};
    prepare->callBoxed(&stack);  // our lock is not held, as Python may let another thread go on
    if (stack.back().toBool()) {
      std::string mangled = name;
      for (size_t at; (at = mangled.find("::")) != std::string::npos;) mangled.replace(at, 2, "__");
      for (size_t at; (at = mangled.find('.')) != std::string::npos;) mangled.replace(at, 1, "__");
      found = find_split(mangled);
    }
  }
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.asked = true;
  state.parts = found;
  return found;
}

// ---- one call -------------------------------------------------------------------------------------------------------

class Attempt {
 public:
  Attempt(const c10::OperatorHandle& op, const OperatorInfo& info, c10::DispatchKeySet keys, torch::jit::Stack* stack)
      : op_(op), info_(info), keys_(keys), stack_(stack), name_(c10::toString(op.operator_name())) {
    const size_t count = info.access.size();
    key_ = hash_of(*stack, count);
    arguments_.assign(stack->end() - static_cast<ptrdiff_t>(count), stack->end());
    torch::jit::drop(*stack, count);
    below_ = stack->size();
    if (info.split->random) generator_.keep(*info.split, arguments_.data());
  }

  // Tries `way` and those after it. `first` says why the whole operator did not fit, if that was tried just now.
  void run(Way way, const c10::OutOfMemoryError* first) {
    if (first != nullptr) failure_ = first->what_without_backtrace();
    const bool narrower = way == Way::kRanges && !in_mode(kRanges) && any_narrower(arguments_);
    if (narrower && in_ranges()) return remember(*info_.split, key_, Way::kRanges);
    if (way != Way::kHost && in_parts()) return remember(*info_.split, key_, Way::kParts);
    if (std::exchange(whole_, false)) {
      if (once(false)) return remember(*info_.split, key_, Way::kWhole);
      if (in_parts()) return remember(*info_.split, key_, Way::kParts);
    }
    if (std::exchange(host_, false)) {
      if (once(true)) return;  // the next time it may be known how it runs in parts
      host_failed_ = true;
      if (in_parts()) return remember(*info_.split, key_, Way::kParts);
    }
    if (on_host()) return remember(*info_.split, key_, Way::kHost);
    if (failure_.empty() && once(false)) return;  // a remembered way skips the whole operator, which now says what it needs
    if (raised_) std::rethrow_exception(raised_);
    report_out_of_memory();
    TORCH_CHECK_WITH(OutOfMemoryError, false, failure_, reasons_);
  }

  // On host memory, whatever the operator is.
  void run_undivided(const c10::OutOfMemoryError& first) {
    failure_ = first.what_without_backtrace();
    TORCH_CHECK_WITH(OutOfMemoryError, once(true), failure_, reasons_);
  }

 private:
  void give_arguments() {
    stack_->resize(below_);
    stack_->insert(stack_->end(), arguments_.begin(), arguments_.end());
    generator_.restore();
  }

  // Returns false if it does not fit that way either.
  bool once(bool host) {
    give_arguments();
    bool began = false;
    try {
      run_once(op_, info_, keys_, stack_, host, began);
      return true;
    } catch (const c10::OutOfMemoryError& error) {
      if (began && spoils(*info_.split, arguments_.data(), arguments_.size())) throw;
      if (host) reasons_ += std::string(" From host memory it cannot run: ") + error.what_without_backtrace();
      else if (failure_.empty()) failure_ = error.what_without_backtrace();
      return false;
    }
  }

  bool in_ranges() {
    const ModeGuard ranges(kRanges);
    return once(false);
  }

  bool in_parts() {
    const auto op = parts_operator(name_, *info_.split);
    if (!op.has_value()) {
      reasons_ += " There is no way to run it in parts.";
      return false;
    }
    give_arguments();
    const ModeGuard ranges(kRanges);
    const c10::impl::ExcludeDispatchKeyGuard guard(above_ours());
    refusal = {};
    tried_whole = !failure_.empty();
    tried_host = host_failed_;
    try {
      const Dividing parts(*info_.split);
      op->callBoxed(stack_);
      return true;
    } catch (const std::exception&) {
      if (!refusal.is) throw;
      if (refusal.raised) raised_ = std::current_exception();
    }
    whole_ = refusal.whole;
    host_ = refusal.host;
    if (whole_ || host_) return false;
    reasons_ += " It cannot run in parts: " + refusal.reason + ".";
    if (refusal.inexact) reasons_ += " OOC_SPLIT=allow takes parts that differ in rounding.";
    return false;
  }

  bool on_host() {
    if ((never_on_host(name_) && !(info_.picks_algorithm && on_cuda())) || !once(true)) return false;
    if (const auto note = find_split("host_backed")) {
      torch::jit::Stack stack{c10::IValue(name_), c10::IValue(shapes_of(arguments_))};
      note->callBoxed(&stack);
    }
    return true;
  }

  const c10::OperatorHandle& op_;
  const OperatorInfo& info_;
  c10::DispatchKeySet keys_;
  torch::jit::Stack* stack_;
  std::string name_, failure_, reasons_;
  std::exception_ptr raised_;
  bool whole_ = false, host_ = false;  // Python says so
  bool host_failed_ = false;
  std::vector<c10::IValue> arguments_;
  KeptGenerator generator_;
  size_t below_ = 0;
  uint64_t key_ = 0;
};

}  // namespace

SplitState* new_split_state(const c10::OperatorHandle& op) {
  auto* state = new SplitState;
  const auto& arguments = op.schema().arguments();
  state->random = op.hasTag(at::Tag::nondeterministic_seeded);
  for (uint32_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].type()->str() == "Generator?") state->generator = i;
    if (arguments[i].is_out() && arguments[i].type()->kind() == c10::TypeKind::TensorType) state->outs.push_back(i);
    else state->writes |= arguments[i].alias_info() != nullptr && arguments[i].alias_info()->isWrite();
    switch (arguments[i].type()->kind()) {
      case c10::TypeKind::TensorType:
      case c10::TypeKind::IntType:
      case c10::TypeKind::SymIntType:
      case c10::TypeKind::FloatType:
      case c10::TypeKind::BoolType:
      case c10::TypeKind::NumberType:
        break;
      default:
        state->fragile.push_back(i);
    }
  }
  return state;
}

void KeptGenerator::keep(const SplitState& state, const c10::IValue* arguments) {
  if constexpr (kWithCuda)
    if (on_cuda() && cuda_capturing()) return;
  const bool given = state.generator != UINT32_MAX && !arguments[state.generator].isNone();
  const c10::Device device = on_cuda() ? c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(cuda_device)) : c10::kCPU;
  generator_ = given ? arguments[state.generator].toGenerator() : at::globalContext().defaultGenerator(device);
  const std::lock_guard<std::mutex> lock(generator_.mutex());
  if (generator_.device().is_cuda()) offset_ = generator_.unsafeGetGeneratorImpl()->get_offset();
  else before_ = generator_.clone();
}

void KeptGenerator::restore() const {
  if (!generator_.defined()) return;
  at::Generator generator = generator_;
  const c10::InferenceMode ordinary(false);  // the state is a tensor
  const ModeGuard plain(kPlain);
  const at::Tensor state = before_.defined() ? before_.get_state() : at::Tensor();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  if (before_.defined()) generator.set_state(state);
  else generator.unsafeGetGeneratorImpl()->set_offset(offset_);
}

Way remembered_way(const OperatorInfo& info, const torch::jit::Stack& stack) {
  const uint64_t key = hash_of(stack, info.access.size());
  SplitState& state = *info.split;
  const std::lock_guard<std::mutex> lock(state.mutex);
  const auto found = state.ways.find(key);
  if (must_run_whole(state)) return Way::kWhole;
  if (found != state.ways.end()) return found->second;
  return state.chosen && dividing.empty() ? Way::kParts : Way::kWhole;
}

void run_in_way(Way way, const c10::OperatorHandle& op, const OperatorInfo& info, c10::DispatchKeySet keys,
                torch::jit::Stack* stack) {
  Attempt(op, info, keys, stack).run(way, nullptr);
}

void recover(const c10::OperatorHandle& op, const OperatorInfo& info, c10::DispatchKeySet keys,
             torch::jit::Stack* stack, bool began, const c10::OutOfMemoryError& error) {
  const bool undivided = in_mode(kUndivided) && !ooc_core_in_function(core);
  const size_t count = info.access.size();
  const bool spoiled = began && spoils(*info.split, stack->data() + (stack->size() - count), count);
  if ((!undivided && must_run_whole(*info.split)) || spoiled) {
    report_out_of_memory();
    throw;
  }
  Attempt attempt(op, info, keys, stack);
  if (undivided) attempt.run_undivided(error);
  else attempt.run(Way::kRanges, &error);
}

void cannot_split(std::string reason, bool inexact, bool raised) {
  refusal = {.is = true, .inexact = inexact, .raised = raised, .reason = std::move(reason)};
}

bool whole_failed() { return tried_whole; }
bool host_failed() { return tried_host; }

void run_whole() { refusal = {.is = true, .whole = true, .reason = "it is faster whole"}; }

void run_on_host() { refusal = {.is = true, .host = true, .reason = "it is not known yet whether parts give the same bits"}; }

void choose_ways(SplitState& state) {
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.ways.clear();
  state.chosen = state.any = any_remembered = true;
}

}  // namespace ooc_torch
