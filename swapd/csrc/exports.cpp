// The part of the C interface (ooc_alloc.h) that the daemon has to do with: a core is made with its daemon, and
// destroyed with it.
#include "capi.h"
#include "daemon.h"

namespace ooc {
namespace {

struct ScheduledCore : ooc_core {
  explicit ScheduledCore(const ooc_config& config) : ooc_core(config), daemon(*this, config.run_daemon != 0) {}
  Daemon daemon;
};

Daemon& daemon_of(ooc_core* core) { return static_cast<ScheduledCore*>(core)->daemon; }

}  // namespace

void plain_pair_forgets(const ooc_core* core);

}  // namespace ooc

using ooc::daemon_of;
using ooc::gated;
using ooc::guarded;

ooc_core* ooc_core_create(const ooc_config* config) {
  return guarded([&]() -> ooc_core* {
    if (config == nullptr || config->struct_bytes != sizeof(ooc_config) || config->driver_library == nullptr)
      throw ooc::Failure(OOC_INVALID, "ooc_core_create: the configuration has another version");
    return new ooc::ScheduledCore(*config);
  });
}

void ooc_core_destroy(ooc_core* core) {
  if (core == nullptr) return;
  ooc::plain_pair_forgets(core);
  ooc_core_stop_daemon(core);
  if (core->forked()) return;  // in a child nothing of it may be called any more
  delete static_cast<ooc::ScheduledCore*>(core);
}

void ooc_core_stop_daemon(ooc_core* core) {
  guarded([&] { daemon_of(core).stop(); });
}

void ooc_core_settle(ooc_core* core) {
  guarded([&] { daemon_of(core).settle(); });
}

int ooc_core_boundary(ooc_core* core, ooc_iteration* ended) {
  return gated([&] {
    const int status = core->boundary(ended);
    ended->planned = daemon_of(core).has_plan(ended->fingerprint) ? 1 : 0;
    return status;
  });
}

int ooc_core_install_plan(ooc_core* core, const ooc_plan* plan) {
  return gated([&]() -> int {
    if (daemon_of(core).install(*plan)) return OOC_OK;
    return ooc::fail(OOC_INVALID,
                     "the plan does not belong to a trace that is kept, or names variables or functions beyond it");
  });
}

void ooc_core_forget_plans(ooc_core* core) {
  guarded([&] { daemon_of(core).forget(); });
}
