// A device whose work does not end: a wait for it ended at its limit (ooc_config.wait_limit_seconds), or the driver would
// not say whether the work is over.
//
// What was under way may still write where it was told to, so nothing that it touches is used for anything else: its
// transfers stay unsettled, and no new ones begin. Variables that are on the device can be used where functions run on the
// host; everything else is refused, with the reason. Should the device turn out to have done its work after all, the
// transfers count as failed (the variable is where it was) and all goes on.
#include <chrono>
#include <thread>

#include "core.h"

namespace ooc {

void Core::abandon(const Transfer& transfer) { abandoned_.push_back(transfer); }

bool Core::device_lost(Lock& lock) {
  // What was under way when it was lost may need a little longer.
  constexpr int kAttempts = 30;
  const auto over = [this] { return order_ ? order_->all_over() : device_.idle(); };
  for (int attempt = 0; attempt < kAttempts && device_.lost() && !over(); ++attempt) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    lock.lock();
  }
  if (!device_.lost()) return false;
  if (!over()) return true;
  device_.found();
  const std::vector<Transfer> late = std::move(abandoned_);
  abandoned_.clear();
  for (const Transfer& transfer : late) {
    if (transfer.event != nullptr) device_.recycle(transfer.event);
    end_transition(transfer, false);
  }
  return false;
}

std::string Core::describe_loss() const {
  return "the device is lost: " + device_.loss() +
         ". Variables are safe where they are, and nothing is moved any more. Save what can still be used, and restart the "
         "process; if the device is only slow, raise OOC_WAIT_LIMIT";
}

}  // namespace ooc
