"""The benchmark of the disk tier without its runs: arithmetic, tables, what the kernel says, and what is put back.

The machine is a folder with the kernel's files in it, and needs no root. Nothing here is timed.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results
from benchmarks.disk import counting, needs, places, sizing, swap, tables
from benchmarks.disk.cases import ARMS, IN_CORE, MIB, OURS, SWAP, TUNED, WARM_UP, WORKLOADS, Case, Memory, cases_of
from benchmarks.disk.groups import MemoryGroup, NoGroup, fields, find_controller, hold_in_group
from benchmarks.disk.undo import NotPutBack, Undo, endings_unwind, set_value

MACHINE = {"processor": "abacus", "cores": 2, "memory_bytes": 8 << 30, "kernel": "6.1", "python": "3.11.7"}
MACHINE |= {"torch": "2.13.0", "load_average": [0.1, 0.1, 0.1]}
DISKS = {
    "as it is": {"read_bytes_per_second": 2e9, "write_bytes_per_second": 1e9, "held": None},
    "500 MB/s": {"read_bytes_per_second": 510e6, "write_bytes_per_second": 490e6, "held": 500_000_000},
}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def first_version(root: Path) -> Path:
    """A machine with control groups of version 1."""
    groups = root / "sys/fs/cgroup"
    write(groups / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    return groups


def second_version(root: Path, handed_down: str = "cpu\n") -> Path:
    groups = root / "sys/fs/cgroup"
    write(groups / "cgroup.controllers", "cpu io memory\n")
    write(groups / "cgroup.subtree_control", handed_down)
    return groups


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip()


# -- what is put back


def test_changes_are_taken_back_last_one_first(tmp_path: Path) -> None:
    order, note = tmp_path / "order", tmp_path / "note.sh"
    undo = Undo(note)
    with undo.part():
        undo.before(f"echo outer >> '{order}'")
        with undo.part():
            undo.before(f"echo first >> '{order}'")
            undo.before(f"echo second >> '{order}'")
        assert text_of(order).split() == ["second", "first"]
        assert text_of(note) == f"echo outer >> '{order}'"
    assert text_of(order).split() == ["second", "first", "outer"]
    assert not note.exists()


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_a_setting_is_as_it_was_however_the_work_ends(tmp_path: Path, ending: type[BaseException]) -> None:
    setting = write(tmp_path / "page-cluster", "3\n")
    undo = Undo(tmp_path / "note.sh")

    def work() -> None:
        with undo.part():
            set_value(undo, setting, "5")
            assert text_of(setting) == "5"
            raise ending

    with pytest.raises(ending):
        work()
    assert text_of(setting) == "3"


def test_a_setting_that_is_right_is_not_touched(tmp_path: Path) -> None:
    setting = write(tmp_path / "page-cluster", "3\n")
    undo = Undo(tmp_path / "note.sh")
    with undo.part():
        set_value(undo, setting, "3")
        assert not undo.note.exists()
    assert setting.read_text(encoding="utf-8") == "3\n"


def test_what_cannot_be_taken_back_stays_in_the_note_and_the_rest_is(tmp_path: Path) -> None:
    done, note = tmp_path / "done", tmp_path / "note.sh"
    undo = Undo(note)
    undo.before(f"touch '{done}'")
    undo.before("exit 7")
    with pytest.raises(NotPutBack, match="still to be done"):
        undo.back()
    assert done.exists()
    assert text_of(note) == "exit 7"
    with pytest.raises(NotPutBack, match=f"sh {note}"):
        Undo(note)


def test_a_killed_run_leaves_a_script_that_takes_everything_back(tmp_path: Path) -> None:
    setting, note = write(tmp_path / "swappiness", "60\n"), tmp_path / "note.sh"
    program = (
        "import os, pathlib, sys; from benchmarks.disk.undo import Undo, set_value\n"
        "undo = Undo(pathlib.Path(sys.argv[1]))\n"
        "set_value(undo, pathlib.Path(sys.argv[2]), '200')\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(note), str(setting)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert text_of(setting) == "200"
    subprocess.run(["sh", str(note)], check=True)
    assert text_of(setting) == "60"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_work_and_everything_is_put_back(tmp_path: Path, number: int) -> None:
    setting, note = write(tmp_path / "swappiness", "60\n"), tmp_path / "note.sh"
    program = (
        "import pathlib, sys, time; from benchmarks.disk.undo import Undo, endings_unwind, set_value\n"
        "undo = Undo(pathlib.Path(sys.argv[1]))\n"
        "with endings_unwind(), undo.part():\n"
        "    set_value(undo, pathlib.Path(sys.argv[2]), '200')\n"
        "    print('changed', flush=True)\n"
        "    time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(note), str(setting)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "changed\n"
        assert text_of(setting) == "200"
        child.send_signal(number)
        assert child.wait() != 0
    assert text_of(setting) == "60"
    assert not note.exists()


def test_signals_wait_until_everything_is_put_back(tmp_path: Path) -> None:
    done = tmp_path / "done"
    undo = Undo(tmp_path / "note.sh")
    undo.before(f"touch '{done}'")
    undo.before(f"kill -TERM {os.getpid()}")
    with pytest.raises(SystemExit) as ended, endings_unwind():
        undo.back()
    assert ended.value.code == 128 + signal.SIGTERM
    assert done.exists()


# -- control groups


def test_a_group_of_version_1(tmp_path: Path) -> None:
    groups = first_version(tmp_path)
    undo = Undo(tmp_path / "note.sh")
    group = MemoryGroup(undo, tmp_path)
    assert (group.version, group.path.parent) == (1, groups / "memory")
    group.limit(700_000_000)
    group.swappiness(200)
    assert text_of(group.path / "memory.limit_in_bytes") == "700000000"
    assert text_of(group.path / "memory.swappiness") == "200"
    group.limit(None)
    assert text_of(group.path / "memory.limit_in_bytes") == "-1"
    write(group.path / "memory.max_usage_in_bytes", "123456\n")
    write(group.path / "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    assert group.peak_bytes() == 123456 and not group.killed()
    write(group.path / "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert group.killed()


def test_a_group_of_version_2_puts_back_what_is_handed_down(tmp_path: Path) -> None:
    groups = second_version(tmp_path)
    swappiness = write(tmp_path / "proc/sys/vm/swappiness", "60\n")
    undo = Undo(tmp_path / "note.sh")
    group = MemoryGroup(undo, tmp_path)
    assert (group.version, group.path.parent) == (2, groups)
    assert text_of(groups / "cgroup.subtree_control") == "+memory"  # a request; the kernel has the list
    group.limit(None)
    group.swappiness(100)
    hold_in_group(undo, group, "254:0", 500_000_000)
    assert text_of(group.path / "memory.max") == "max" and text_of(swappiness) == "100"
    assert text_of(group.path / "io.max") == "254:0 rbps=500000000 wbps=500000000"
    for path in group.path.iterdir():
        path.unlink()  # as the kernel's own are when the group goes
    undo.back()
    assert not group.path.exists() and text_of(swappiness) == "60"
    assert text_of(groups / "cgroup.subtree_control") == "-memory"


def test_what_is_handed_down_already_stays_so(tmp_path: Path) -> None:
    groups = second_version(tmp_path, "cpu memory\n")
    undo = Undo(tmp_path / "note.sh")
    MemoryGroup(undo, tmp_path)
    undo.back()
    assert text_of(groups / "cgroup.subtree_control") == "cpu memory"


def test_without_a_controller_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(NoGroup, match="in a container"):
        find_controller(tmp_path)


def test_a_command_joins_its_group_before_it_begins(tmp_path: Path) -> None:
    first_version(tmp_path)
    group = MemoryGroup(Undo(tmp_path / "note.sh"), tmp_path)
    command = group.joining([sys.executable, "-c", "import os, sys; print(os.getpid(), sys.argv[1])", "an argument"])
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == f"{text_of(group.path / 'cgroup.procs')} an argument\n"


def test_processes_left_in_a_group_are_ended(tmp_path: Path) -> None:
    first_version(tmp_path)
    undo = Undo(tmp_path / "note.sh")
    group = MemoryGroup(undo, tmp_path)
    with subprocess.Popen(["sleep", "20"]) as child:
        write(group.path / "cgroup.procs", f"{child.pid}\n")
        ending = subprocess.Popen(["sh", str(undo.note)])
        assert child.wait() == -signal.SIGKILL
        (group.path / "cgroup.procs").unlink()  # the kernel's own, gone with the group
        assert ending.wait() == 0
    assert not group.path.exists()


def test_fields_of_the_kernels_files() -> None:
    assert fields("cache 12\nrss 0\n\n254:0 Read 5\nmax -1\n") == {"cache": 12, "rss": 0, "max": -1}


# -- swap


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`mkswap`, `swapon` and `swapoff` that only say that they were called; `swapon` fails where there is `refuse`."""
    folder = tmp_path / "tools"
    for name in ("mkswap", "swapon", "swapoff"):
        refusing = f"[ ! -e {tmp_path}/refuse ] || {{ echo no such luck >&2; exit 1; }}" if name == "swapon" else ""
        path = write(folder / name, f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/calls\n{refusing}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def machine_with_swap(root: Path) -> tuple[Path, Path]:
    """The files of the settings that a tuning changes: page-cluster, and whether the disk turns."""
    first_version(root)
    cluster = write(root / "proc/sys/vm/page-cluster", "3\n")
    turns = write(root / "sys/dev/block/254:0/queue/rotational", "1\n")
    return cluster, turns


def test_a_tuned_swap_file_is_made_and_everything_goes_back(tmp_path: Path, tools: Path) -> None:
    cluster, turns = machine_with_swap(tmp_path)
    undo = Undo(tmp_path / "note.sh")
    path = tmp_path / "swap"
    with undo.part():
        group = MemoryGroup(undo, tmp_path)
        tuning = swap.Tuning(page_cluster=5, swappiness=200, turns=False)
        swap.turn_on(undo, path, MIB, "254:0", tuning, group, tmp_path)
        assert path.stat().st_size == MIB and stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (text_of(cluster), text_of(turns)) == ("5", "0")
        assert text_of(group.path / "memory.swappiness") == "200"
        assert text_of(tmp_path / "calls").splitlines() == [f"mkswap {path}", f"swapon {path}"]
        assert f"swapoff '{path}'" in text_of(undo.note)
        (group.path / "memory.swappiness").unlink()
    assert not path.exists() and not group.path.exists() and not undo.note.exists()
    assert (text_of(cluster), text_of(turns)) == ("3", "1")


def test_swap_as_it_comes_changes_no_setting(tmp_path: Path, tools: Path) -> None:
    cluster, turns = machine_with_swap(tmp_path)
    undo = Undo(tmp_path / "note.sh")
    group = MemoryGroup(undo, tmp_path)
    swap.turn_on(undo, tmp_path / "swap", MIB, "254:0", swap.AS_IT_COMES, group, tmp_path)
    assert (text_of(cluster), text_of(turns)) == ("3", "1") and not list(group.path.iterdir())
    undo.back()


def test_swap_that_is_refused_leaves_nothing(tmp_path: Path, tools: Path) -> None:
    cluster, _ = machine_with_swap(tmp_path)
    (tmp_path / "refuse").touch()
    undo = Undo(tmp_path / "note.sh")
    group = MemoryGroup(undo, tmp_path)
    with pytest.raises(swap.NoSwap, match="no such luck"):
        swap.turn_on(undo, tmp_path / "swap", MIB, "254:0", swap.Tuning(page_cluster=8), group, tmp_path)
    undo.back()
    assert not (tmp_path / "swap").exists() and text_of(cluster) == "3"


def test_other_swap_is_named_and_the_best_tuning_is_the_fastest(tmp_path: Path) -> None:
    write(tmp_path / "proc/swaps", "Filename Type Size Used Priority\n/dev/sda2 partition 100 0 -2\n")
    assert swap.others(tmp_path) == ["/dev/sda2"]
    first, second = swap.CANDIDATES[:2]
    assert sizing.fastest([(first, 3.0), (second, 2.5)]) == second
    assert sizing.fastest([]) == swap.AS_IT_COMES
    assert swap.Tuning(5, 200, False).words() == "page-cluster 5, swappiness 200, rotational 0"
    assert swap.AS_IT_COMES.words() == "as it comes"


# -- what is needed


def test_what_is_missing_is_said_in_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "proc/swaps", "Filename Type\n/dev/sda2 partition\n")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found = "\n".join(needs.missing(tmp_path, 1 << 60, swaps=True, root=tmp_path))
    for words in ("run it with sudo", "no memory control group", "are needed", "swapoff -a"):
        assert words in found
    assert needs.missing(tmp_path / "none", 1, swaps=False, root=tmp_path)[-1].startswith(f"{tmp_path / 'none'} is not")


def test_nothing_is_missing_where_everything_is(tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first_version(tmp_path)
    write(tmp_path / "proc/swaps", "Filename Type\n")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "major", lambda number: 254)
    assert needs.missing(tmp_path, 1, swaps=True, root=tmp_path) == []


def test_an_arm_without_its_library_is_left_out_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = needs.arms_without_library(["swap", "dask", "disk_offload"])
    assert list(found) == ["dask", "disk_offload"] and "accelerate is not installed" in found["disk_offload"]


def test_without_throttling_no_disk_is_held(tmp_path: Path) -> None:
    undo = Undo(tmp_path / "note.sh")
    place = places.as_it_is(undo, tmp_path)
    with pytest.raises(places.CannotHold, match=r"blkio\.throttle"):
        places.held(undo, place, MIB, 500_000_000, tmp_path)
    undo.back()
    assert not place.folder.exists()


# -- what the kernel counts


def test_counters_of_the_kernel(tmp_path: Path) -> None:
    write(tmp_path / "sys/dev/block/254:0/stat", " 10 1 2048 5 20 2 4096 9 0 1 2 0 0 0 0 0 0\n")
    write(tmp_path / "proc/vmstat", "pgpgin 5\npswpin 3\npswpout 4\n")
    write(tmp_path / "proc/7/io", "rchar: 9\nwchar: 9\nread_bytes: 4096\nwrite_bytes: 8192\n")
    write(tmp_path / "proc/7/status", "Name:\tx\nVmHWM:\t   2048 kB\nVmRSS:\t   1024 kB\n")
    page = os.sysconf("SC_PAGE_SIZE")
    assert counting.disk_bytes("254:0", tmp_path) == {"read_bytes": 1 << 20, "written_bytes": 2 << 20}
    assert counting.swap_bytes(tmp_path) == {"swapped_in_bytes": 3 * page, "swapped_out_bytes": 4 * page}
    assert counting.process_bytes("7", tmp_path) == {"process_read_bytes": 4096, "process_written_bytes": 8192}
    assert counting.memory_bytes("7", tmp_path) == {"peak_rss_bytes": 2 << 20, "rss_bytes": 1 << 20}
    assert counting.process_bytes("8", tmp_path) == {}
    assert counting.difference({"a": 5, "b": 7}, {"a": 2, "b": 7}) == {"a": 3, "b": 0}


def test_settings_that_a_machine_has(tmp_path: Path) -> None:
    write(tmp_path / "proc/sys/vm/page-cluster", "3\n")
    write(tmp_path / "sys/dev/block/254:0/queue/rotational", "1\n")
    assert counting.settings("254:0", tmp_path) == {"page_cluster": "3", "rotational": "1"}


def test_a_peak_that_is_forgotten_begins_again() -> None:
    program = (
        "from benchmarks.disk import counting\n"
        "block = bytearray(b'x') * (64 << 20)\n"
        "del block\n"
        "before = counting.memory_bytes()['peak_rss_bytes']\n"
        "counting.forget_peak()\n"
        "print(before - counting.memory_bytes()['peak_rss_bytes'])"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    if said.strip() == "0":
        pytest.skip("this kernel does not let a process forget its peak")
    assert int(said) > 32 << 20


# -- cases and memory


def test_limits_are_the_base_and_a_share_of_the_live_peak() -> None:
    memory = Memory(live_bytes=1000 * MIB, base_bytes=300 * MIB, reserve_bytes=20 * MIB)
    assert memory.limit_bytes(2) == 800 * MIB and memory.limit_bytes(4) == 550 * MIB
    assert memory.budget_bytes(4) == 230 * MIB
    with pytest.raises(ValueError, match="nothing is left"):
        Memory(1000 * MIB, 300 * MIB, 260 * MIB).budget_bytes(4)


def test_a_round_has_every_arm_once_and_arms_without_disk_once_for_both() -> None:
    cases = [case.name for case in cases_of(WORKLOADS["gpt"], list(ARMS), [False, True], quick=False)]
    assert cases == [
        "gpt-in-core",
        *(f"gpt-{arm}-2x-as-it-is" for arm in ("ours", "swap", "swap-tuned", "checkpointing")),
        *(f"gpt-{arm}-2x-held" for arm in ("ours", "swap", "swap-tuned")),
        *(f"gpt-{arm}-4x-as-it-is" for arm in ("ours", "swap", "swap-tuned", "checkpointing")),
        *(f"gpt-{arm}-4x-held" for arm in ("ours", "swap", "swap-tuned")),
    ]
    held = [case.name for case in cases_of(WORKLOADS["gpt"], ["ours", "checkpointing"], [True], quick=True)]
    assert held == ["gpt-in-core", "gpt-ours-2x-held", "gpt-checkpointing-2x-as-it-is"]


# -- tables


def record(arm: str, seconds: list[float], *, turn: int = 0, disk: str = "as it is", **more: Any) -> dict[str, Any]:
    counted = {"read_bytes": 610e6, "written_bytes": 430e6, "major_faults": 7}
    counted |= {"process_read_bytes": 600e6, "process_written_bytes": 100e6, "swapped_out_bytes": 300e6}
    warm = [dict.fromkeys(counted, 0) | {"seconds": 99.0}] * WARM_UP
    made: dict[str, Any] = {
        "workload": "gpt",
        "arm": arm,
        "round": turn,
        "oversubscription": None if arm == IN_CORE else 2.0,
        "disk": disk,
        "limit_bytes": None if arm == IN_CORE else 800 * MIB,
        "machine": MACHINE,
        "threads": 2,
        "steps": warm + [{"seconds": value, **counted} for value in seconds],
        "group": {"peak_bytes": 800 * MIB},
        "peak_rss_bytes": 700 * MIB,
        "digest": "bits",
    }
    return made | more


def arm_figures(records: list[dict[str, Any]], in_core: list[dict[str, Any]]) -> dict[str, Any]:
    return tables.figures(records, tables.in_core_of(in_core), DISKS)


def test_ratios_are_within_a_round() -> None:
    in_core = [record(IN_CORE, [1.0]), record(IN_CORE, [2.0], turn=1)]
    found = arm_figures([record(SWAP, [3.0]), record(SWAP, [4.0], turn=1)], in_core)
    assert found["rounds"] == [3.0, 4.0] and found["ratio"] == 2.5
    assert found["step_seconds"] == 3.5 and found["identical"] and found["failed_rounds"] == 0


def test_the_bound_is_computation_or_the_slower_direction() -> None:
    ours = record(OURS, [1.3], disk="500 MB/s")
    assert tables.bound_seconds(ours, 1.0, DISKS) == pytest.approx(600e6 / 500e6)  # held, though 510 was measured
    assert tables.bound_seconds(ours, 1.25, DISKS) == 1.25
    assert tables.bound_seconds(record(OURS, [1.3]), 0.1, DISKS) == pytest.approx(0.4)  # written, on the disk as it is


def test_what_others_moved_is_not_the_arms() -> None:
    assert tables.moved(record(SWAP, [1.0])) == (600e6, 400e6, 40e6)
    step = record(SWAP, [1.0])["steps"][-1] | {"read_bytes": 5, "written_bytes": 7}
    assert tables.own_bytes(step) == (5, 7)  # written elsewhere, or not yet


def test_other_bits_and_failed_rounds_are_said() -> None:
    in_core = [record(IN_CORE, [1.0]), record(IN_CORE, [1.0], turn=1)]
    found = arm_figures([record(SWAP, [3.0], digest="others"), record(SWAP, [3.0], turn=1)], in_core)
    assert not found["identical"] and found["failed_rounds"] == 0
    found = arm_figures([record(SWAP, [3.0]), record(SWAP, [], turn=1, failed="no end")], in_core)
    assert found["identical"] and found["failed_rounds"] == 1
    assert arm_figures([record(SWAP, [], failed="no end")], in_core) == {"failed": "no end"}


@pytest.mark.parametrize(
    ("disk", "ours", "swapped", "words"),
    [
        ("as it is", 1.14, 5.0, "1.15 times in-core): reached; ours is 4.39 times as fast as swap"),
        ("as it is", 1.16, 5.0, "NOT reached"),
        ("500 MB/s", 1.37, 5.0, "faster than every arm): reached"),
        ("500 MB/s", 1.39, 5.0, "NOT reached"),  # the bound is 1.2 s
        ("500 MB/s", 1.37, 1.36, "NOT reached"),  # another arm is faster
    ],
)
def test_what_was_aimed_at(disk: str, ours: float, swapped: float, words: str) -> None:
    in_core = [record(IN_CORE, [1.0])]
    arms = {
        OURS: arm_figures([record(OURS, [ours], disk=disk)], in_core),
        SWAP: arm_figures([record(SWAP, [swapped], disk=disk)], in_core),
        TUNED: {"failed": "no end"},
    }
    assert words in tables.verdict(arms, disk == "500 MB/s")


def test_the_tables_of_raw_data(tmp_path: Path) -> None:
    assert "Nothing was measured yet" in tables.text(tmp_path)
    case = WORKLOADS["gpt"]
    kept = {
        Case(case, ARMS[IN_CORE]).name: record(IN_CORE, [1.0]),
        Case(case, ARMS[SWAP], 2.0).name: record(SWAP, [5.0]),
        Case(case, ARMS[SWAP], 2.0, held=True).name: record(SWAP, [1.0], disk="500 MB/s"),
        Case(case, ARMS["checkpointing"], 2.0).name: record("checkpointing", [], failed="it | does not fit"),
    }
    for name, made in kept.items():
        results.save(tmp_path, tables.NAME, name, made)
    results.save(tmp_path, tables.DISKS, "disks", DISKS)
    summary = {"peak_rss_bytes": 7 * MIB, "disk_peak_bytes": 8 * MIB, "disk_read_bytes": MIB, "disk_written_bytes": 0}
    ours = record(OURS, [1.1], budget_bytes=500 * MIB, summary=summary)
    ours["whole_run"] = {"read_bytes": 2 * MIB, "written_bytes": 3 * MIB}
    results.save(tmp_path, tables.NAME, Case(case, ARMS[OURS], 2.0).name, ours)
    steps = [{"seconds": value} for value in (9.0, 9.0, 4.0, 5.0, 6.0)]
    tried = {"workload": "gpt", "tuning": swap.Tuning(page_cluster=5).as_json(), "steps": steps}
    results.save(tmp_path, sizing.TUNING, "gpt-0", tried)
    text = tables.text(tmp_path)
    row = ["5.00 | 5.00 to 5.00 | 5.00 | 1.00 | 5.00", "572.2 | 381.5 | 38.1 | 7", "800.0 | 700.0 | yes"]
    assert f"| swap | {' | '.join(row)} |" in text
    assert text.count("| checkpointing | it / does not fit |") == 2  # it needs no disk: beside both
    assert "| gpt 2x swap | 610 | NO |" in text and "| gpt | page-cluster 5 | 5.00 |" in text
    assert text.index("disk as it is\n") < text.index("disk 500 MB/s\n") and text.count("Aim") == 1
    assert "| gpt 2x as it is round 0 | 800.0 | 500.0 | 7.0 | 8.0 | 1.0 | 2.0 | 0.0 | 3.0 |" in text


def test_a_run_of_few_steps_has_its_last_one() -> None:
    short = record(SWAP, []) | {"steps": [{"seconds": 3.0}, {"seconds": 2.0}]}
    assert tables.median(short) == 2.0
