"""What is said of a run when it is over, in a process outside of its control group: the digest and the machine.

python -m benchmarks.disk.after [STATE.pt]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks import machine
from benchmarks.runs import digest_of

if __name__ == "__main__":
    digest = {"digest": digest_of(Path(sys.argv[1]))} if len(sys.argv) > 1 else {}
    print(json.dumps(digest | {"machine": machine.describe()}))
