"""A process that shows itself as one that trains would: a session on the emulated device, until it is killed."""

from __future__ import annotations

import sys
import time

from swapd.config import Config
from swapd.session import Session

MIB = 1 << 20


def main() -> None:
    session = Session(Config.from_environment())
    session.started()
    if "idle" in sys.argv:
        return
    core = session.core
    names = [core.function_id(name) for name in ("make", "\x1b[31mhostile")]
    addresses = []
    for _ in range(4):
        core.function_begin(names[0], [])
        addresses.append(core.malloc(MIB))
        core.function_end()
    for _ in range(3):  # more than the budget holds, so each iteration moves
        for address in addresses:
            core.function_begin(names[1], [(address, 3)])
            core.function_end()
        session.boundary()
    print("ready", flush=True)
    if "once" in sys.argv:
        session.stop()
        return
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main()
