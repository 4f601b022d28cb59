// A core whose daemon has no threads: tests tick it by hand, so that its order is theirs.
#pragma once

#include "core_fixture.h"

namespace ooc::testing {

struct OutMove {
  int32_t variable, first, count, after_function;
};
struct InMove {
  int32_t variable, first, count, after_function, after_outs, before_function;
};

template <class Base>
struct WithDaemon : Base {
  using Base::core;
  explicit WithDaemon(const Limits& limits, bool threads = false) : Base(limits), daemon(core, threads) {}
  ~WithDaemon() {
    settle();
    daemon.stop();
  }

  ooc_iteration boundary() {
    ooc_iteration ended{};
    EXPECT_EQ(core.boundary(&ended), OOC_OK);
    return ended;
  }

  bool install(uint64_t fingerprint, const std::vector<OutMove>& outs, const std::vector<InMove>& ins,
               const std::vector<OutMove>& write_backs = {}, const std::vector<OutMove>& downs = {},
               const std::vector<OutMove>& ups = {}, bool exclusive = false) {
    std::vector<int32_t> d[4], u[4];
    std::vector<int32_t> o[4], i[6], b[4];
    auto columns = [](const std::vector<OutMove>& moves, std::vector<int32_t>* to) {
      for (const OutMove& m : moves) {
        const int32_t fields[] = {m.variable, m.first, m.count, m.after_function};
        for (int f = 0; f < 4; ++f) to[f].push_back(fields[f]);
      }
    };
    columns(outs, o);
    columns(write_backs, b);
    columns(downs, d);
    columns(ups, u);
    for (const InMove& m : ins) {
      const int32_t fields[] = {m.variable, m.first, m.count, m.after_function, m.after_outs, m.before_function};
      for (int f = 0; f < 6; ++f) i[f].push_back(fields[f]);
    }
    const ooc_plan plan{fingerprint,   static_cast<uint32_t>(outs.size()), static_cast<uint32_t>(ins.size()),
                        static_cast<uint32_t>(write_backs.size()),
                        o[0].data(),   o[1].data(), o[2].data(), o[3].data(),
                        i[0].data(),   i[1].data(), i[2].data(), i[3].data(), i[4].data(), i[5].data(),
                        b[0].data(),   b[1].data(), b[2].data(), b[3].data(),
                        static_cast<uint32_t>(downs.size()), static_cast<uint32_t>(ups.size()), exclusive,
                        d[0].data(),   d[3].data(), u[0].data(), u[3].data()};
    return daemon.install(plan);
  }

  bool tick_out() {
    Lock lock(core.mutex());
    return daemon.tick_out(lock);
  }
  bool tick_in() {
    Lock lock(core.mutex());
    return daemon.tick_in(lock);
  }
  // Everything that the plan lets happen now. Returns the number of ticks that did something.
  int settle() {
    int ticks = 0;
    for (bool any = true; any;) {
      any = false;
      while (tick_out()) any = true, ++ticks;
      while (tick_in()) any = true, ++ticks;
    }
    return ticks;
  }

  Daemon daemon;
};
using DaemonTest = WithDaemon<CoreTest>;

}  // namespace ooc::testing
