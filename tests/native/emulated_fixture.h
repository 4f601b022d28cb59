// The emulated driver's control interface, for its own tests.
#pragma once

#include <dlfcn.h>

#include "device_fixture.h"
#include "emulated_control.h"

namespace ooc::testing {

struct Control {
#define OOC_CONTROL_MEMBER(name) \
  decltype(&::ooc_emulated_##name) name = reinterpret_cast<decltype(name)>(dlsym(driver().handle, "ooc_emulated_" #name))
  OOC_CONTROL_MEMBER(get_config);
  OOC_CONTROL_MEMBER(set_config);
  OOC_CONTROL_MEMBER(error);
  OOC_CONTROL_MEMBER(get_stats);
  OOC_CONTROL_MEMBER(reset_stats);
  OOC_CONTROL_MEMBER(call_count);
  OOC_CONTROL_MEMBER(inject_faults);
  OOC_CONTROL_MEMBER(clear_faults);
  OOC_CONTROL_MEMBER(watch_sites);
  OOC_CONTROL_MEMBER(sites);
  OOC_CONTROL_MEMBER(access);
  OOC_CONTROL_MEMBER(physical_offset);
#undef OOC_CONTROL_MEMBER
};

inline const Control& control() {
  static const Control functions;
  return functions;
}

inline ooc_emulated_config get_config() {
  ooc_emulated_config config{};
  config.struct_bytes = sizeof(config);
  ASSERT_EQ(control().get_config(&config), 0);
  return config;
}

inline ooc_emulated_stats get_stats() {
  ooc_emulated_stats stats{};
  stats.struct_bytes = sizeof(stats);
  ASSERT_EQ(control().get_stats(&stats), 0);
  return stats;
}

// A configuration for one test; the one before comes back at its end.
class ConfigForTest {
 public:
  ConfigForTest() : config(get_config()), before_(config) {}
  ~ConfigForTest() { EXPECT_EQ(control().set_config(&before_), 0); }
  ConfigForTest(const ConfigForTest&) = delete;
  ConfigForTest& operator=(const ConfigForTest&) = delete;
  void apply() { ASSERT_EQ(control().set_config(&config), 0); }
  ooc_emulated_config config;

 private:
  ooc_emulated_config before_;
};

class FaultsForTest {
 public:
  explicit FaultsForTest(const std::string& rules) {
    if (control().inject_faults(rules.c_str()) != 0) fail(__FILE__, __LINE__, control().error());
  }
  ~FaultsForTest() { control().clear_faults(); }
  FaultsForTest(const FaultsForTest&) = delete;
  FaultsForTest& operator=(const FaultsForTest&) = delete;
};

template <typename T>
T* host_pointer(CUdeviceptr address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace ooc::testing
