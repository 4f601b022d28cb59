"""The command line: flags become variables, a program's end is our end, user errors have no traceback."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from swapd.cli import cli, main
from swapd.cli.output import console
from swapd.cli.summary import summary_table
from swapd.devices.profile import Profile, load_profile, profile_path
from swapd.planning.plan import Plan
from swapd.settings import SETTINGS
from swapd.trace.trace import READ, WRITE, Machine, Trace
from swapd.units import MIB

SHOW = """
import json, os, sys
ours = {name: value for name, value in os.environ.items() if name.startswith(("OOC_", "TORCH_DEVICE"))}
print(json.dumps({"variables": ours, "arguments": sys.argv[1:]}))
"""
SUMMARIZE = """
import json, os, sys
summary = {"device": "emulated", "budget_bytes": 1 << 20, "live_peak_bytes": 3 << 20, "step_seconds": [0.5, 0.25],
           "stall_seconds": 0.25, "divergence_count": 2, "min_budget_bytes": 2 << 20, "policy": "[auto]"}
json.dump(summary, open(os.environ["OOC_SUMMARY"], "w"))
print("the program's own words")
sys.exit(int(sys.argv[1]))
"""
WAIT = """
import signal, sys, time
def on_signal(number, frame):
    print("got", number, flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, on_signal)
signal.signal(signal.SIGINT, on_signal)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def program(tmp_path: Path) -> Any:
    def write(text: str, name: str = "program.py") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def shown(text: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(text.splitlines()[0])
    return result


def start(*arguments: str, **variables: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "swapd.cli", *arguments],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


# help


def test_every_command_and_option_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    context = click.Context(cli)
    names = cli.list_commands(context)
    assert names == "run record plan simulate compare split report top metrics probe doctor".split()
    for name in names:
        assert name in overview
        command = cli.get_command(context, name)
        assert command is not None
        assert command.help
        assert main([name, "--help"]) == 0
        assert "Usage: swapd " + name in capsys.readouterr().out
        for parameter in command.params:
            assert not isinstance(parameter, click.Option) or parameter.help, f"{name} {parameter.name}"


def test_every_setting_is_a_flag_of_run(capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for setting in SETTINGS:
        assert f"{setting.flag} {setting.metavar}" in text
        assert f"({setting.variable})" in text


def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Usage: swapd" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("importlib.metadata").version("ooc-alloc")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("swapd, version 0.")


# run


def test_flags_and_variables_reach_the_program(
    program: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOC_BUDGET", "1GiB")
    monkeypatch.setenv("OOC_CHUNK_SIZE", "4MiB")
    monkeypatch.setenv("OOC_POLICY", "idle")
    path = program(SHOW)
    assert main(["run", "--budget", "60%", "--policy", "auto", "--strict=1", path, "--budget", "2", "--quiet"]) == 0
    seen = shown(capfd.readouterr().out)
    assert seen["arguments"] == ["--budget", "2", "--quiet"]
    summary = seen["variables"].pop("OOC_SUMMARY")
    assert Path(summary).is_absolute()
    assert not Path(summary).parent.exists()  # it was temporary
    assert seen["variables"] == {
        "OOC_ALLOC": "auto",
        "OOC_BUDGET": "60%",
        "OOC_CHUNK_SIZE": "4MiB",
        "OOC_PLANNING": "blocking",  # as in all tests
        "OOC_STRICT": "1",
    }  # policy is back at its default, and so is not set


def test_off_is_respected(program: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["run", "--alloc", "0", program(SHOW)]) == 0
    assert "OOC_ALLOC" not in shown(capfd.readouterr().out)["variables"]
    monkeypatch.setenv("OOC_ALLOC", "emulated")
    assert main(["run", program(SHOW)]) == 0
    assert shown(capfd.readouterr().out)["variables"]["OOC_ALLOC"] == "cpu"


@pytest.mark.parametrize("flags", [[], ["--budget", "1GiB"], ["--budget=1GiB"], ["-q"]])
def test_modules(program: Any, flags: list[str], tmp_path: Path) -> None:
    program(SHOW, "shower.py")
    process = start("run", *flags, "-m", "shower", "--json", "x", "-m", "y", "--budget", PYTHONPATH=str(tmp_path))
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert shown(out)["arguments"] == ["--json", "x", "-m", "y", "--budget"]


def test_autoload_is_switched_on(
    program: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert main(["run", program(SHOW)]) == 0
    out, err = capfd.readouterr()
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in shown(out)["variables"]
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in err


@pytest.mark.parametrize("status", [0, 3])
def test_the_summary_is_shown_and_the_status_passed_on(
    program: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path, status: int
) -> None:
    kept = tmp_path / "kept.json"
    assert main(["run", "--json", str(kept), program(SUMMARIZE), str(status)]) == status
    out, err = capfd.readouterr()
    assert out == "the program's own words\n"
    text = " ".join(err.split())
    assert "live peak 3.00 MiB, 3.00 times the budget of 1.00 MiB" in text
    assert "the program left its recorded sequence 2 times" in text
    assert "policy [auto]" in text
    assert "250 ms, 33.3% of the steps" in text
    assert json.loads(kept.read_text())["live_peak_bytes"] == 3 * MIB


def test_json_has_standard_output_for_itself(program: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--json", "-", "-q", program(SUMMARIZE), "0"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["device"] == "emulated"
    assert err == "the program's own words\n"


def test_quiet_shows_nothing(program: Any) -> None:
    process = start("run", "--quiet", "--summary", os.devnull, program(SUMMARIZE), "4")
    assert process.communicate(timeout=60) == ("the program's own words\n", "")
    assert process.returncode == 4


def test_a_program_without_a_summary_is_said(program: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("{}")
    assert main(["run", "--summary", str(old), program("raise SystemExit(9)")]) == 9
    assert "the program left no summary" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_go_to_the_program(program: Any, number: signal.Signals) -> None:
    process = start("run", program(WAIT))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert out == f"got {int(number)}\n"
    assert process.returncode == 7


def test_a_program_that_is_killed(program: Any) -> None:
    process = start("run", program("import os; os.kill(os.getpid(), 9)"))
    process.communicate(timeout=60)
    assert process.returncode == 128 + 9


def test_a_summary_that_lacks_everything_can_be_shown() -> None:
    assert summary_table({}).row_count > 3


def test_a_summary_shows_the_disk_in_the_place_of_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    peaks = {"host_peak_bytes": 3 * MIB, "disk_peak_bytes": 5 * MIB, "peak_rss_bytes": 300 * MIB}
    moved = {"disk_written_bytes": 7 * MIB, "disk_read_bytes": 9 * MIB}
    console().print(summary_table({**peaks, **moved, "disk_budget_bytes": 64 * MIB, "disk_failure_count": 2}))
    text = " ".join(capsys.readouterr().out.split())
    assert "disk peak 5.00 MiB, process peak 300 MiB" in text and "host peak" not in text
    assert "5.00 MiB of 64.0 MiB taken; written 7.00 MiB, read 9.00 MiB" in text
    assert "2 reads or writes of the disk failed" in text
    console().print(summary_table({**peaks, "disk_budget_bytes": 0, "disk_failure_count": 0}))
    text = " ".join(capsys.readouterr().out.split())
    assert "host peak 3.00 MiB, process peak 300 MiB" in text and "disk" not in text


# user errors


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["run"], 2, "Missing argument"),
        (["run", "nowhere.py"], 2, "there is no file 'nowhere.py'; to run a module, write -m nowhere.py"),
        (["run", "-m"], 2, "-m needs the name of a module"),
        (["run", "--budget", "8Gb!", __file__], 2, "--budget='8Gb!' has the unknown unit 'gb!'"),
        (["run", "--budgte", "8GiB", __file__], 2, "--budgte"),
        (["record", __file__], 2, "Missing option '--output'"),
        (["plan", "nowhere.trace", "--budget", "1GiB"], 2, "nowhere.trace"),
        (["plan", __file__, "--budget", "1GiB"], 1, "not a trace"),
        (["plan", __file__, "--budget", "much"], 2, "does not start with a number"),
        (["plan", __file__], 2, "Missing option '--budget'"),
        (["probe", "--alloc", "moon"], 2, "is no device"),
        (
            ["probe", "--disk", "/nowhere"],
            1,
            "no file can be made in /nowhere: No such file or directory; give a folder",
        ),
        (["probe", "--disk", "/tmp", "--chunk-size", "2MiB"], 2, "--chunk-size is about a device"),
        (["fly"], 2, "No such command 'fly'"),
    ],
)
def test_errors(capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, text: str) -> None:
    assert main(arguments) == status
    out, err = capsys.readouterr()
    assert text in " ".join(err.split())
    assert "Traceback" not in err
    assert out == ""


def test_a_wrong_variable_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOC_BUDGET", "8Gb!")
    assert main(["run", __file__]) == 1
    assert "OOC_BUDGET='8Gb!' has the unknown unit 'gb!'; use for example 8GiB" in capsys.readouterr().err


def test_an_unknown_variable_is_a_warning(
    program: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOC_BUDGTE", "8GiB")
    assert main(["run", program("pass")]) == 0
    assert (
        "warning: OOC_BUDGTE is set but is no variable of ooc-alloc; did you mean OOC_BUDGET?" in capfd.readouterr().err
    )


# record and plan

CHUNK = 2 * MIB


def small_trace(machine: Machine | None = None) -> Trace:
    """Eight functions that each write a variable of 8 MiB and, in reverse order, read it: a network's two passes."""
    count = 8
    n = 2 * count
    functions = range(n)
    variables = [i if i < count else n - 1 - i for i in functions]
    return Trace(
        function_names=tuple(f"f{i}" for i in functions),
        function_start=np.arange(n) * 0.01,
        function_seconds=np.full(n, 0.01),
        variable_bytes=np.full(count, 4 * CHUNK),
        born=np.arange(count, dtype=np.int32),
        died=np.array([n - 1 - i for i in range(count)], dtype=np.int32),
        previous=np.full(count, -1, dtype=np.int32),
        use_offsets=np.arange(n + 1),
        use_variables=np.array(variables, dtype=np.int32),
        use_flags=np.array([WRITE] * count + [READ] * count, dtype=np.uint8),
        fingerprint=0xABC,
        chunk_bytes=CHUNK,
        machine=machine,
    )


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.trace"
    small_trace().save(path)
    return path


def test_record(program: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path, trace: Path) -> None:
    target = tmp_path / "out.trace"
    text = f"import os, shutil; print('hello'); shutil.copy({str(trace)!r}, os.environ['OOC_TRACE'])"
    assert main(["record", "-o", str(target), "--json", program(text)]) == 0
    out, err = capfd.readouterr()
    facts = json.loads(out)
    assert err == "hello\n"
    assert (facts["functions"], facts["variables"], facts["fit_budget_bytes"]) == (16, 8, 64 * MIB)
    assert facts["fingerprint"] == "0000000000000abc"
    assert main(["record", "-o", str(target), program(text)]) == 0
    assert "64.0 MiB" in capfd.readouterr().out


def test_record_without_a_trace(program: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "out.trace"
    target.write_text("of an earlier run")
    assert main(["record", "-o", str(target), program("pass")]) == 1
    assert "no trace was written" in capfd.readouterr().err
    assert not target.exists()
    assert main(["record", "-o", str(target), program("raise SystemExit(5)")]) == 5


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", "--json", *arguments]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def test_plan(capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    facts = plan_json(capsys, str(trace), "--budget", "32MiB", "--bandwidth", "1GiB/s", "-o", str(target))
    assert facts["fit_budget_bytes"] == 64 * MIB
    assert facts["min_budget_bytes"] == 4 * CHUNK
    assert facts["out_bytes_per_second"] == facts["in_bytes_per_second"] == 1 << 30
    assert facts["compute_seconds"] == pytest.approx(0.16)
    assert facts["out_bytes"] >= 32 * MIB
    assert facts["in_bytes"] >= 32 * MIB
    assert facts["bound_seconds"] <= facts["predicted_seconds"] <= facts["demand_mode_seconds"]
    plan = Plan.load(target)
    assert (len(plan.outs), len(plan.ins)) == (facts["planned_outs"], facts["planned_ins"])
    assert plan.fingerprint == 0xABC


def test_a_percentage_is_of_what_is_needed_in_core(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    assert plan_json(capsys, str(trace), "--budget", "25%")["budget_bytes"] == 16 * MIB


def test_a_slower_link_takes_longer(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    times = [
        plan_json(capsys, str(trace), "--budget", "32MiB", "--bandwidth", speed)["predicted_seconds"]
        for speed in ("10GiB/s", "h2d=10GiB/s,d2h=200MiB/s", "100MiB/s")
    ]
    assert times[0] < times[1] < times[2]


def test_plan_for_people(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    assert main(["plan", str(trace), "--budget", "32MiB", "--policy", "window", "--window", "16MiB"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in ("window 16.0 MiB", "64.0 MiB, 2.00 times the budget", "as simulated", "demand mode", "bound 160 ms"):
        assert words in text
    assert main(["plan", str(trace), "--budget", "64MiB"]) == 0
    assert "everything fits" in capsys.readouterr().out


def test_a_budget_too_small_for_one_function(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    assert main(["plan", str(trace), "--budget", "4MiB"]) == 1
    err = capsys.readouterr().err
    assert "needs 8.00 MiB at once, the budget is 4.00 MiB; --budget 8MiB would do" in err


def test_a_plan_with_a_measured_link(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = [str(trace), "--budget", "32MiB", "--device", "emulated"]
    assert main(["plan", *arguments]) == 1
    assert "run `swapd probe`" in capsys.readouterr().err
    process = start("probe", "--alloc", "emulated", "--emulated-memory", "256MiB", "--quick", "--json")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    probed = json.loads(out)
    assert probed.pop("path") == str(profile_path("emulated"))
    profile = load_profile("emulated")
    assert profile == Profile.from_json(json.dumps({"format": "ooc-machine", "version": 1, **probed}))
    assert profile is not None
    facts = plan_json(capsys, *arguments)
    assert facts["out_bytes_per_second"] == profile.machine().out_bytes_per_second
    assert main(["plan", *arguments, "--bandwidth", "1GiB/s"]) == 2
    assert "contradict" in capsys.readouterr().err


def test_output_that_cannot_be_written(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    assert main(["plan", str(trace), "--budget", "32MiB", "-o", "/nowhere/plan.json"]) == 1
    assert "cannot write /nowhere/plan.json" in capsys.readouterr().err


# probe


def test_probe_for_people(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    process = start("probe", "--quick", "--no-save", "--alloc", "emulated", "--emulated-bandwidth", "100MiB/s")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert "The device is emulated" in out
    assert "h2d=100MiB/s,d2h=100MiB/s" in out
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_is_not_there_is_an_error_with_the_drivers_words() -> None:
    process = start("probe", "--no-save", "--alloc", "emulated", "--emulated-memory", "5000TiB")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert "OOC_EMULATED_MEMORY" in err
    assert "Traceback" not in err


def test_a_reader_that_has_enough_is_no_error(trace: Path) -> None:
    process = start("plan", str(trace), "--budget", "32MiB", "--json")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
    process.wait(timeout=60)
