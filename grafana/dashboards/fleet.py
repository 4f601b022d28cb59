"""Fleet: every host, rank and GPU side by side. NVIDIA's DCGM exporter, where it runs, adds the GPU's own view."""

from __future__ import annotations

from grafana.frame import Row, choice, dashboard
from grafana.metrics import rate, series
from grafana.panels import TIMES, Column, figure, rows_by, time_series

WHO = "{{instance}} rank {{rank}}"
KEY = ("job", "instance", "rank")
BY = f"by ({', '.join(KEY)})"
BUDGET = series("ooc_budget_bytes")
WAITING = f"clamp_max(sum {BY} ({rate('ooc_stall_seconds_total')}), 0.99)"
# The steps of ranks that work together take equally long. A rank that takes longer holds up the others.
LAST = series("ooc_last_step_seconds")
BEHIND = f"max {BY} ({LAST}) / on (job) group_left () (quantile by (job) (0.5, {LAST}))"

PROCESSES = Row(
    "All processes",
    [
        rows_by(
            "Processes",
            "One line for each process. Live peak, peak: memory over the budget. Slower than in-core is an estimate.",
            KEY,
            Column("Device", f"max by (job, instance, rank, device) ({series('ooc_device_info')})", label="device"),
            Column("Policy", f"max by (job, instance, rank, policy) ({series('ooc_policy_info')})", label="policy"),
            Column("Last step", f"max {BY} ({LAST})", decimals=2),
            Column("Over bound", f"max {BY} ({series('ooc_step_over_bound_ratio')})", unit=TIMES, decimals=2),
            Column("Slower", f"1 / (1 - {WAITING})", unit=TIMES, decimals=2),
            Column("Waiting", WAITING, unit="percentunit", decimals=1),
            Column("Live peak", f"max {BY} ({series('ooc_oversubscription_ratio')})", unit=TIMES, decimals=2),
            Column("Peak", f"max {BY} ({series('ooc_device_peak_bytes')} / {BUDGET})", unit="percentunit", decimals=1),
            Column("Host used", f"max {BY} ({series('ooc_host_bytes', state='used')})"),
            Column("Disk used", f"max {BY} ({series('ooc_disk_bytes', state='used')})"),
            Column("Running for", f"max {BY} (time() - {series('ooc_start_time_seconds')})", unit="s", decimals=0),
        ),
    ],
    [
        figure("Processes", "That are scraped and chosen.", f"count({BUDGET})", "short"),
        figure(
            "Slowest rank / median",
            "Of the last step, in its job.",
            f"max({BEHIND})",
            TIMES,
            {1.15: "yellow", 1.3: "red"},
            2,
        ),
        figure("Budget", "Of all processes chosen together.", f"sum({BUDGET})"),
        figure(
            "Steps a second",
            "Of all processes chosen together.",
            f"sum({rate('ooc_step_seconds_count')})",
            "short",
            decimals=2,
        ),
    ],
)

RANKS = Row(
    "By rank",
    [
        time_series("Step time", "The last step.", {WHO: f"max {BY} ({LAST})"}),
        time_series("Waiting", "Share of the clock.", {WHO: WAITING}, unit="percentunit", most=1),
    ],
    [
        time_series(
            "Device memory over the budget",
            "What is held, whatever for.",
            {WHO: f"sum {BY} ({series('ooc_device_bytes')}) / on ({', '.join(KEY)}) {BUDGET}"},
            unit="percentunit",
            soft_most=1,
        ),
        time_series(
            "Behind the median rank",
            "Last step over the median of the job's ranks.",
            {WHO: BEHIND},
            unit=TIMES,
            soft_most=1.5,
        ),
    ],
)


def _by_host(expression: str) -> dict[str, str]:
    """A query that sums over the processes of each host. An instance is host:port."""
    host = f'label_replace({expression}, "host", "$1", "instance", "(.*):[0-9]+")'
    return {"{{host}}": f"sum by (host) ({host})"}


HOSTS = Row(
    "By host",
    [
        time_series(
            "Host memory for swapped data",
            "Of all the host's processes together.",
            _by_host(series("ooc_host_bytes", state="used")),
            unit="bytes",
            stacked=True,
        ),
        time_series(
            "Disk space for swapped data",
            "Of all the host's processes together: they may share a folder.",
            _by_host(series("ooc_disk_bytes", state="used")),
            unit="bytes",
            stacked=True,
        ),
    ],
    [
        time_series(
            "Copied in",
            "Of all the host's processes together: they may share a link.",
            _by_host(rate("ooc_swap_bytes_total", direction="in")),
        ),
        time_series(
            "Copied out",
            "Of all the host's processes together.",
            _by_host(rate("ooc_swap_bytes_total", direction="out")),
        ),
    ],
)


def _gpu(title: str, says: str, name: str, unit: str, factor: str = "", most: float | None = None) -> object:
    """A panel of one of dcgm-exporter's default counters, whose names are NVIDIA's and not in our catalogue."""
    describes = f"{says}\n\n`{name}` of NVIDIA's dcgm-exporter."
    queries = {"{{Hostname}} GPU {{gpu}}": f'{name}{{Hostname=~"$gpu_host"}}{factor}'}
    return time_series(title, describes, queries, unit=unit, most=most).no_value("no dcgm-exporter is scraped")


IN_BYTES = " * 1048576"
GPUS = Row(
    "GPUs, where a dcgm-exporter is scraped",
    [
        _gpu(
            "Utilisation",
            "Low while the links are busy: it waits for data.",
            "DCGM_FI_DEV_GPU_UTIL",
            "percent",
            most=100,
        ),
        _gpu(
            "Copy engines",
            "How busy the GPU's memory interface is.",
            "DCGM_FI_DEV_MEM_COPY_UTIL",
            "percent",
            most=100,
        ),
        _gpu(
            "Memory used",
            "Of all programs; more than our budgets: another one.",
            "DCGM_FI_DEV_FB_USED",
            "bytes",
            IN_BYTES,
        ),
    ],
    [
        _gpu("Power", "A GPU that waits for data draws less.", "DCGM_FI_DEV_POWER_USAGE", "watt"),
        _gpu("Temperature", "A hot GPU is slowed down.", "DCGM_FI_DEV_GPU_TEMP", "celsius"),
        _gpu(
            "Last error (XID)",
            "0 is none; NVIDIA's documentation lists the numbers.",
            "DCGM_FI_DEV_XID_ERRORS",
            "short",
        ),
    ],
    collapsed=True,
)

DASHBOARD = dashboard(
    "Out-of-core: fleet",
    "ooc-fleet",
    "Every host, rank and GPU side by side.",
    PROCESSES,
    RANKS,
    HOSTS,
    GPUS,
    more=[
        choice("gpu_host", "GPU host", "label_values(DCGM_FI_DEV_GPU_UTIL, Hostname)", "As dcgm-exporter names it."),
    ],
)
