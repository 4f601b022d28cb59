"""Config: keyword arguments over environment over defaults, errors that name the variable, round trips."""

import dataclasses
import math
import shutil
from pathlib import Path

import pytest

from swapd.config import Config, ConfigError, ConfigWarning, unknown_variables
from swapd.host_limits import available_host_bytes, cgroup_memory, largest_host_bytes
from swapd.link import Link
from swapd.policies import PUBLISHED
from swapd.policies import available as available_policies
from swapd.session import limits_of
from swapd.settings import POLICIES, SETTINGS, document
from swapd.units import GIB, KIB, MIB, Amount

CERTIFICATE = Path(__file__).with_name("tls") / "certificate.pem"
KEY = CERTIFICATE.with_name("key.pem")


def test_defaults() -> None:
    config = Config.from_environment({})
    assert config == Config()
    assert not config.enabled
    assert (config.chunk_size, config.small_limit, config.policy, config.window) == (None, None, "auto", None)
    assert config.to_environment() == {}


def test_settings_and_fields_are_the_same_list() -> None:
    assert [setting.name for setting in SETTINGS] == [field.name for field in dataclasses.fields(Config)]
    assert [setting.variable for setting in SETTINGS][:3] == ["OOC_ALLOC", "OOC_BUDGET", "OOC_HOST_BUDGET"]
    assert SETTINGS[2].flag == "--host-budget"


def test_keywords_win_over_the_environment() -> None:
    environment = {"OOC_BUDGET": "8GiB", "OOC_CHUNK_SIZE": "4MiB", "OOC_WINDOW": "1GiB", "PATH": "/bin"}
    config = Config.from_environment(environment, budget="60%", policy=None, window="auto")
    assert config.budget == Amount(fraction=0.6)
    assert config.chunk_size == 4 * MIB
    assert config.window is None


def test_every_setting_is_read_and_written_back() -> None:
    environment = {
        "OOC_ALLOC": "cpu",
        "OOC_BUDGET": "8GiB",
        "OOC_HOST_BUDGET": "50%",
        "OOC_DISK": "/x/scratch",
        "OOC_DISK_BUDGET": "2TiB",
        "OOC_CHUNK_SIZE": "128KiB",
        "OOC_SMALL_LIMIT": "64KiB",
        "OOC_POLICY": "window",
        "OOC_PLANNING": "blocking",
        "OOC_RECOMPUTE": "off",
        "OOC_WINDOW": "300MiB",
        "OOC_SPLIT": "fast",
        "OOC_WORKSPACE": "64MiB",
        "OOC_WORKSPACE_TOTAL": "1GiB",
        "OOC_MICRO_BATCHES": "all",
        "OOC_SPLIT_STORE": "/x/store.sqlite",
        "OOC_SUMMARY": "/x/s.json",
        "OOC_PROGRESS": "/x/p",
        "OOC_TRACE": "/x/t",
        "OOC_TIMELINE": "/x/t.json.gz",
        "OOC_REPORT": "/x/r.html",
        "OOC_STATUS": "1",
        "OOC_NVTX": "/x/libnvtx.so",
        "OOC_METRICS_PORT": "9835",
        "OOC_METRICS_ADDRESS": "0.0.0.0",
        "OOC_METRICS_CERT": str(CERTIFICATE),
        "OOC_METRICS_KEY": str(KEY),
        "OOC_METRICS_FILE": "/x/ooc.prom",
        "OOC_METRICS_INTERVAL": "2.5s",
        "OOC_METRICS_PUSH": "http://gateway.example:9091",
        "OOC_METRICS_JOB": "night",
        "OOC_STRICT": "1",
        "OOC_SAFE": "1",
        "OOC_WAIT_LIMIT": "90.0s",
        "OOC_EMULATED_MEMORY": "16GiB",
        "OOC_EMULATED_BANDWIDTH": "h2d=8GiB/s,d2h=1234567B/s,h2d_latency=20000ns",
        "OOC_EMULATED_GRANULARITY": "2MiB",
        "OOC_EMULATED_FAULTS": "cuMemMap:every=50,error=2",
    }
    assert set(environment) == {setting.variable for setting in SETTINGS}
    config = Config.from_environment(environment)
    assert config.to_environment() == environment
    assert config.emulated_bandwidth == Link(8.0 * GIB, 1234567.0, 20e-6, 0.0)
    assert (config.metrics_port, config.strict, config.summary) == (9835, True, Path("/x/s.json"))


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("1", "auto"), ("auto", "auto"), ("CUDA", "cuda"), ("cpu", "cpu"), ("emulated", "cpu"), ("0", "off"),
        ("off", "off"),
    ],
)  # fmt: skip
def test_devices(text: str, mode: str) -> None:
    assert Config.from_environment({"OOC_ALLOC": text}).alloc == mode


@pytest.mark.parametrize(("text", "mode"), [("off", "off"), ("0", "off"), ("EXACT", "exact"), ("allow", "allow")])
def test_ways_to_split(text: str, mode: str) -> None:
    assert Config.from_environment({"OOC_SPLIT": text}).split == mode
    assert Config.from_environment({}).split == "exact" and Config.from_environment({}, split=False).split == "off"
    assert Config.from_environment({}, recompute=False).recompute == "off"


def test_no_way_to_split() -> None:
    with pytest.raises(ConfigError, match=r"OOC_SPLIT=.*1.* is no way to split.*exact"):
        Config.from_environment({"OOC_SPLIT": "1"})
    with pytest.raises(ConfigError, match=r"OOC_RECOMPUTE=.*allow.* is no way to recompute.*off or exact"):
        Config.from_environment({"OOC_RECOMPUTE": "allow"})


def test_values_instead_of_texts() -> None:
    config = Config.from_environment({}, alloc=True, budget=GIB, strict=False, metrics_port=80, emulated_bandwidth=1e9)
    assert (config.alloc, config.budget, config.strict, config.metrics_port) == ("auto", Amount(bytes=GIB), False, 80)
    assert config.emulated_bandwidth == Link(1e9, 1e9)


def test_links() -> None:
    def link(text: str) -> Link | None:
        return Config.from_environment({"OOC_EMULATED_BANDWIDTH": text}).emulated_bandwidth

    assert link("10GiB/s") == Link(10.0 * GIB, 10.0 * GIB)
    assert link("h2d=8GiB/s, d2h=6GiB/s, latency=20us") == Link(8.0 * GIB, 6.0 * GIB, 20e-6, 20e-6)
    assert link("h2d=1GiB/s") == Link(1.0 * GIB, math.inf)
    assert link("1GiB/s,d2h_latency=1ms") == Link(1.0 * GIB, 1.0 * GIB, 0.0, 1e-3)
    assert link("unlimited") == Link()
    for text in ("h2d=8GiB/s,d2h=6GiB/s,latency=20us", "unlimited", "999MB/s"):
        assert link(str(link(text))) == link(text)


@pytest.mark.parametrize(
    ("variable", "text", "hint"),
    [
        ("OOC_BUDGET", "8Gb!", "8GiB"),
        ("OOC_HOST_BUDGET", "150%", "60%"),
        ("OOC_CHUNK_SIZE", "2MiBs", "8GiB"),
        ("OOC_SMALL_LIMIT", "-1", "65536"),
        ("OOC_ALLOC", "gpu", "cuda"),
        ("OOC_POLICY", "best", "idle"),
        ("OOC_WINDOW", "wide", "auto"),
        ("OOC_METRICS_PORT", "65536", "9835"),
        ("OOC_METRICS_PORT", "-1", "off"),
        ("OOC_METRICS_ADDRESS", "localhost", "127.0.0.1"),
        ("OOC_METRICS_INTERVAL", "1ms", "15s"),
        ("OOC_METRICS_PUSH", "gateway:9091", "http://"),
        ("OOC_METRICS_PUSH", "http://gateway:99999", "http://"),
        ("OOC_METRICS_JOB", "a/b", "training"),
        ("OOC_STRICT", "maybe", "1 or 0"),
        ("OOC_EMULATED_MEMORY", "lots", "8GiB"),
        ("OOC_EMULATED_BANDWIDTH", "4", "10GiB/s"),
        ("OOC_EMULATED_BANDWIDTH", "up=4GiB/s", "h2d="),
        ("OOC_EMULATED_BANDWIDTH", "=4GiB/s", "h2d="),
        ("OOC_EMULATED_BANDWIDTH", "h2d=4GiB/s,slow_latency=1us", "h2d="),
        ("OOC_EMULATED_BANDWIDTH", "12B/s", "1KiB/s"),
        ("OOC_EMULATED_GRANULARITY", "big", "8GiB"),
    ],
)
def test_errors_name_the_variable_the_value_and_a_valid_form(variable: str, text: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_environment({variable: text})
    message = str(caught.value)
    assert message.startswith(f"{variable}=")
    assert hint in message
    assert text in message or text.split("=")[-1] in message


def test_errors_of_keywords_name_the_keyword() -> None:
    with pytest.raises(ConfigError, match=r"^budget='8Gb!' "):
        Config.from_environment({"OOC_BUDGET": "1GiB"}, budget="8Gb!")
    with pytest.raises(TypeError, match=r"budgt= is no setting; did you mean budget\?"):
        Config.from_environment({}, budgt="8GiB")


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({"OOC_METRICS_ADDRESS": "0.0.0.0"}, "OOC_METRICS_PORT"),
        ({"OOC_METRICS_CERT": str(CERTIFICATE)}, "OOC_METRICS_PORT"),
        ({"OOC_METRICS_KEY": str(KEY), "OOC_METRICS_PORT": "1"}, "OOC_METRICS_CERT"),
        ({"OOC_METRICS_INTERVAL": "1s", "OOC_METRICS_PORT": "1"}, "OOC_METRICS_FILE"),
        ({"OOC_METRICS_JOB": "night"}, "OOC_METRICS_PUSH"),
        ({"OOC_DISK_BUDGET": "1GiB"}, "OOC_DISK"),
    ],
)
def test_a_setting_that_does_nothing_without_another_is_refused(variables: dict[str, str], missing: str) -> None:
    with pytest.raises(ConfigError, match=rf"{next(iter(variables))}=.* does nothing without {missing}: set that too"):
        Config.from_environment(variables)


def test_metrics_settings() -> None:
    assert Config.from_environment({}).metrics_port is None
    assert Config.from_environment({"OOC_METRICS_PORT": "off"}).metrics_port is None
    assert Config.from_environment({"OOC_METRICS_PORT": "0"}).metrics_port == 0  # any free one
    assert Config.from_environment({"OOC_METRICS_PORT": "0"}).to_environment() == {"OOC_METRICS_PORT": "0"}
    assert Config.from_environment({}, metrics_port=80, metrics_address="::").metrics_address == "::"


@pytest.mark.parametrize(
    ("certificate", "key"),
    [("absent.pem", None), ("key.pem", "key.pem"), ("README.md", None), ("certificate.pem", None)],
)
def test_what_is_no_certificate_and_its_key_is_refused(certificate: str, key: str | None) -> None:
    names = {"OOC_METRICS_CERT": certificate, "OOC_METRICS_KEY": key}
    variables = {name: str(CERTIFICATE.with_name(file)) for name, file in names.items() if file is not None}
    with pytest.raises(ConfigError, match=rf"^OOC_METRICS_CERT=.*{certificate}.* cannot be used.*PEM"):
        Config.from_environment({"OOC_METRICS_PORT": "1", **variables})


def test_unknown_variables_warn_with_the_nearest_name() -> None:
    with pytest.warns(ConfigWarning, match=r"OOC_BUDGT is set .*; did you mean OOC_BUDGET\?"):
        Config.from_environment({"OOC_BUDGT": "8GiB"})
    assert unknown_variables({"OOC_TEST_DRIVER": "x", "OOC_BUDGET": "1", "OOCX": "1", "PATH": ""}) == []
    assert unknown_variables({"OOC_QQQQQQQ": "x"}) == ["OOC_QQQQQQQ is set but is no variable of ooc-alloc"]


def test_a_setting_that_was_removed_is_named_as_such() -> None:
    with pytest.warns(ConfigWarning, match=r"OOC_HOST_BACKED is .* no variable of ooc-alloc any more: .* unset"):
        Config.from_environment({"OOC_HOST_BACKED": "1"})
    with pytest.raises(TypeError, match=r"host_backed= is no setting any more: .* announce every access"):
        Config.from_environment({}, host_backed=True)


def test_policies_are_those_of_the_planner() -> None:
    assert set(POLICIES) == {*available_policies(), "demand"} - {*PUBLISHED} | {"mmcnn"}
    assert Config.from_environment({"OOC_POLICY": "None"}).policy == "demand"


def test_budget() -> None:
    assert Config().resolve_budget(16 * GIB, 10 * GIB) == 9 * GIB
    assert Config().resolve_budget(16 * GIB, 10 * GIB, others_bytes=2 * GIB) == 8 * GIB
    assert Config().resolve_budget(80 * GIB, 80 * GIB, others_bytes=2 * GIB) == 72 * GIB
    assert Config().resolve_budget(4 * GIB, 3 * GIB, others_bytes=2 * GIB) == 3 * GIB // 2
    assert Config(budget=Amount(fraction=0.5)).resolve_budget(16 * GIB, 10 * GIB, 9 * GIB) == 8 * GIB
    assert Config(budget=Amount(bytes=3 * GIB)).resolve_budget(16 * GIB, GIB) == 3 * GIB
    assert Config().resolve_budget(16 * GIB, 10 * GIB, others_bytes=2 * GIB, ranks=2) == 3 * GIB
    assert Config(budget=Amount(fraction=0.5)).resolve_budget(16 * GIB, 10 * GIB, ranks=4) == 2 * GIB
    assert Config(budget=Amount(bytes=3 * GIB)).resolve_budget(16 * GIB, GIB, ranks=4) == 3 * GIB
    with pytest.raises(ConfigError, match=r"OOC_BUDGET=17GiB is more than the device has, 16GiB"):
        Config(budget=Amount(bytes=17 * GIB)).resolve_budget(16 * GIB, 16 * GIB)


@pytest.mark.parametrize(
    ("config", "granularity", "message"),
    [
        (Config(budget=Amount(bytes=64 * KIB)), 2 * MIB, r"OOC_BUDGET=64KiB is 65536 bytes.* \(OOC_CHUNK_SIZE=2MiB\)"),
        (Config(budget=Amount(bytes=64 * KIB), chunk_size=MIB), KIB, r"less than one chunk \(OOC_CHUNK_SIZE=1MiB\)"),
        (Config(budget=Amount(bytes=64 * KIB), chunk_size=KIB), 128 * KIB, r"one chunk \(OOC_CHUNK_SIZE=128KiB\)"),
        (Config(budget=Amount(bytes=64 * KIB), chunk_size=KIB, small_limit=MIB), KIB, r"OOC_SMALL_LIMIT=1MiB is more"),
        (Config(), 128 * KIB, r"OOC_BUDGET=90% of free device memory is 65536 bytes.* \(OOC_CHUNK_SIZE=128KiB\)"),
    ],
)
def test_a_budget_of_less_than_a_chunk(config: Config, granularity: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.resolve_chunks(64 * KIB, granularity)


def test_host_budget() -> None:
    assert Config().resolve_host_budget(10 * GIB) == 8 * GIB
    assert Config(host_budget=Amount(fraction=0.25)).resolve_host_budget(8 * GIB) == 2 * GIB
    assert Config(host_budget=Amount(bytes=5)).resolve_host_budget(8 * GIB) == 5
    available = available_host_bytes()
    assert 0.5 * available < Config().resolve_host_budget() < 1.1 * available


def test_a_host_budget_that_the_machine_cannot_hold_is_refused() -> None:
    most = Config(host_budget=Amount(bytes=16 * GIB))
    assert most.resolve_host_budget(2 * GIB, 16 * GIB) == 16 * GIB  # what is free now changes
    with pytest.raises(ConfigError) as caught:
        Config(host_budget=Amount(bytes=100 << 40)).resolve_host_budget(2 * GIB, 16 * GIB)
    for words in ("OOC_HOST_BUDGET=100TiB", "16.0 GiB", "2.00 GiB are free", "at most 16GiB", "80%"):
        assert words in str(caught.value), caught.value
    with pytest.raises(ConfigError, match=r"^OOC_HOST_BUDGET=100TiB is more"):
        Config.from_environment({"OOC_HOST_BUDGET": "100TiB"}).resolve_host_budget()
    assert Config.from_environment({"OOC_HOST_BUDGET": "100%"}).resolve_host_budget(2 * GIB, 16 * GIB) == 2 * GIB


def test_the_emulated_device_is_as_large_as_a_budget_in_bytes() -> None:
    def memory(budget: Amount | None, **settings: int) -> int | None:
        return Config(budget=budget, **settings).resolve_emulated_memory(4 * GIB, 8 * GIB)

    assert memory(Amount(bytes=6 * GIB)) == 6 * GIB  # more than is free now
    assert memory(Amount(bytes=6 * GIB + 1)) == 6 * GIB + MIB
    assert memory(Amount(bytes=GIB)) == -(-int(0.8 * 4 * GIB) // MIB) * MIB
    for unknown in (None, Amount(fraction=0.5), Amount(bytes=9 * GIB)):  # the driver's default; the last one is refused
        assert memory(unknown) is None
    assert memory(Amount(bytes=6 * GIB), emulated_memory=GIB) is None


def test_disk_budget(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    assert Config().resolve_disk_budget() == 0
    assert Config(disk=tmp_path).resolve_disk_budget() == pytest.approx(0.8 * free, rel=0.05)
    assert Config(disk=tmp_path, disk_budget=Amount(bytes=5)).resolve_disk_budget() == 5
    with pytest.raises(ConfigError, match=r"OOC_DISK_BUDGET=100TiB is more than the .* free in OOC_DISK="):
        Config(disk=tmp_path, disk_budget=Amount(bytes=100 << 40)).resolve_disk_budget()
    for folder in (tmp_path / "absent", CERTIFICATE):
        with pytest.raises(ConfigError, match=f"OOC_DISK={folder} is no folder that this user may write to"):
            Config(disk=folder).resolve_disk_budget()


@pytest.mark.parametrize(
    "others", [{}, {"host_budget": "1GiB"}, {"emulated_bandwidth": "10GiB/s"}], ids=["alone", "host", "link"]
)
def test_a_disk_alone_or_below_host_memory(
    tmp_path: Path, others: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OOC_EMULATED_BANDWIDTH", raising=False)  # `limits_of` sets it
    limits = limits_of(Config.from_environment({}, alloc="cpu", disk=tmp_path, budget="64MiB", **others))
    assert limits.disk_budget_bytes > 0
    assert (limits.host_budget_bytes > 0) == bool(others)


def machine(root: Path, cgroup: str, files: dict[str, str], available_kib: int = 8 << 20) -> Path:
    """A folder that looks like `/` to `host_limits`."""
    meminfo = f"MemTotal: {16 << 20} kB\nMemAvailable:   {available_kib} kB\nHugePages_Total: 0\n"
    for name, text in {"proc/meminfo": meminfo, "proc/self/cgroup": cgroup, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_host_memory_without_a_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/user\n", {"sys/fs/cgroup/user/memory.max": "max\n"})
    assert cgroup_memory(root) is None
    assert available_host_bytes(root) == 8 * GIB
    assert largest_host_bytes(root) == 16 * GIB


def test_cgroup_version_2_with_the_tightest_ancestor(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/a/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/a/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        "sys/fs/cgroup/a/b/memory.max": f"{3 * GIB}\n",
        "sys/fs/cgroup/a/b/memory.current": "0\n",
    }
    root = machine(tmp_path, "0::/a/b\n", files)
    group = cgroup_memory(root)
    assert group is not None
    assert (group.limit_bytes, group.used_bytes, group.path) == (4 * GIB, 2 * GIB, "/sys/fs/cgroup/a")
    assert available_host_bytes(root) == 2 * GIB
    assert largest_host_bytes(root) == 3 * GIB


def test_cgroup_version_1(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/x/memory.usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    root = machine(tmp_path, "5:cpu:/x\n4:cpuset,memory:/x\n0::/\n", files)
    assert available_host_bytes(root) == GIB


def test_a_container_sees_its_group_as_the_root(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": f"{GIB}\n", "sys/fs/cgroup/memory.current": f"{2 * GIB}\n"}
    root = machine(tmp_path, "0::/docker/0123\n", files)
    assert available_host_bytes(root) == 0
    assert available_host_bytes(machine(tmp_path / "v1", "4:memory:/docker/0\n", {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n"})) == GIB  # fmt: skip


def test_the_kernel_may_have_less_than_the_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/\n", {"sys/fs/cgroup/memory.max": f"{64 * GIB}\n"}, available_kib=1 << 20)
    assert available_host_bytes(root) == GIB


@pytest.mark.parametrize(
    ("settings", "budget", "granularity", "chunk", "small"),
    [
        ({}, 128 * MIB, 64 * KIB, 2 * MIB, MIB),
        ({}, 128 * MIB - 1, 64 * KIB, MIB, MIB // 2),
        ({}, 5_000_000, 64 * KIB, 64 * KIB, 32 * KIB),
        ({}, 5_000_000, 16 * KIB, 64 * KIB, 32 * KIB),  # 76 chunks
        ({}, 1_000_000, 16 * KIB, 16 * KIB, 8 * KIB),
        ({}, 5_000_000, 2 * MIB, 2 * MIB, MIB),  # a GPU's
        ({}, GIB - 1, 2 * MIB, 2 * MIB, MIB),
        ({}, GIB, 2 * MIB, 4 * MIB, 2 * MIB),  # which is larger
        ({}, 8 * GIB, 64 * KIB, 2 * MIB, MIB),
        ({"chunk_size": "2MiB"}, 8 * GIB, 2 * MIB, 2 * MIB, MIB),
        ({"small_limit": "4KiB"}, 5_000_000, 64 * KIB, 64 * KIB, 4 * KIB),
        ({"chunk_size": "256KiB"}, 5_000_000, 64 * KIB, 256 * KIB, MIB),
        ({"chunk_size": "2MiB", "small_limit": "1KiB"}, 5_000_000, 64 * KIB, 2 * MIB, KIB),
    ],
)
def test_the_size_of_chunks_goes_by_the_budget_and_the_device(
    settings: dict[str, str], budget: int, granularity: int, chunk: int, small: int
) -> None:
    assert Config.from_environment({}, **settings).resolve_chunks(budget, granularity) == (chunk, small)


def test_the_page_of_settings_is_made_from_them() -> None:
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == document(), "python -m swapd.settings > docs/settings.md"
    assert all(f"| `{setting.variable}` |" in page for setting in SETTINGS) and len(SETTINGS) > 20
