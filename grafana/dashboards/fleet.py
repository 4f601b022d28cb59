"""Fleet: every host, rank and GPU side by side. NVIDIA's DCGM exporter, where it runs, adds the GPU's own view."""

from __future__ import annotations

from grafana.frame import Row, choice, dashboard
from grafana.metrics import rate, series
from grafana.panels import Column, Query, Steps, figure, rows_by, time_series

TIMES = "suffix: ×"
WHO = "{{instance}} rank {{rank}}"
KEY = ("job", "instance", "rank")
BY = f"by ({', '.join(KEY)})"
WAITING = f"clamp_max(sum {BY} ({rate('ooc_stall_seconds_total')}), 0.99)"
# The steps of ranks that work together take equally long. A rank that takes longer holds up the others.
LAST = series("ooc_last_step_seconds")
BEHIND = f"max {BY} ({LAST}) / on (job) group_left () (quantile by (job) (0.5, {LAST}))"


def by_host(expression: str) -> str:
    """An expression that sums over the processes of each host. An instance is host:port."""
    return f'sum by (host) (label_replace({expression}, "host", "$1", "instance", "(.*):[0-9]+"))'


def _all() -> Row:
    used = f"max by (job, instance, rank) ({series('ooc_device_peak_bytes')} / {series('ooc_budget_bytes')})"
    return Row(
        "All processes",
        [
            rows_by(
                "Processes",
                "One line for each process. Needed, peak: memory over the budget. Slower than in-core is an estimate.",
                KEY,
                Column("Device", f"max by (job, instance, rank, device) ({series('ooc_device_info')})", label="device"),
                Column("Policy", f"max by (job, instance, rank, policy) ({series('ooc_policy_info')})", label="policy"),
                Column("Last step", f"max {BY} ({series('ooc_last_step_seconds')})", decimals=2),
                Column("Over bound", f"max {BY} ({series('ooc_step_over_bound_ratio')})", unit=TIMES, decimals=2),
                Column("Slower", f"1 / (1 - {WAITING})", unit=TIMES, decimals=2),
                Column("Waiting", WAITING, unit="percentunit", decimals=1),
                Column("Needed", f"max {BY} ({series('ooc_oversubscription_ratio')})", unit=TIMES, decimals=2),
                Column("Peak", used, unit="percentunit", decimals=1),
                Column("Host used", f"max {BY} ({series('ooc_host_bytes', state='used')})"),
                Column("Running for", f"max {BY} (time() - {series('ooc_start_time_seconds')})", unit="s", decimals=0),
            ),
            figure(
                "Processes",
                "That are scraped and chosen.",
                Query(f"count({series('ooc_budget_bytes')})"),
                "short",
                size=(6, 5),
            ),
            figure(
                "Slowest rank / median",
                "Of the last step, in its job.",
                Query(f"max({BEHIND})"),
                TIMES,
                Steps(((1.15, "yellow"), (1.3, "red"))),
                2,
                size=(6, 5),
            ),
            figure(
                "Budget", "Of all processes chosen together.", Query(f"sum({series('ooc_budget_bytes')})"), size=(6, 5)
            ),
            figure(
                "Steps a second",
                "Of all processes chosen together.",
                Query(f"sum({rate('ooc_step_seconds_count')})"),
                "short",
                decimals=2,
                size=(6, 5),
            ),
        ],
    )


def _ranks() -> Row:
    return Row(
        "By rank",
        [
            time_series("Step time", "The last step.", Query(f"max {BY} ({series('ooc_last_step_seconds')})", WHO)),
            time_series("Waiting", "Share of the clock.", Query(WAITING, WHO), unit="percentunit", most=1),
            time_series(
                "Device memory over the budget",
                "What is held, whatever for.",
                Query(
                    f"sum {BY} ({series('ooc_device_bytes')}) / on ({', '.join(KEY)}) {series('ooc_budget_bytes')}", WHO
                ),
                unit="percentunit",
                soft_most=1,
            ),
            time_series(
                "Behind the median rank",
                "Last step over the median of the job's ranks.",
                Query(BEHIND, WHO),
                unit=TIMES,
                soft_most=1.5,
            ),
        ],
    )


def _hosts() -> Row:
    return Row(
        "By host",
        [
            time_series(
                "Host memory for swapped data",
                "Of all the host's processes together.",
                Query(by_host(series("ooc_host_bytes", state="used")), "{{host}}"),
                unit="bytes",
                stacked=True,
                size=(8, 8),
            ),
            time_series(
                "Copied in",
                "Of all the host's processes together: they may share a link.",
                Query(by_host(rate("ooc_swap_bytes_total", direction="in")), "{{host}}"),
                size=(8, 8),
            ),
            time_series(
                "Copied out",
                "Of all the host's processes together.",
                Query(by_host(rate("ooc_swap_bytes_total", direction="out")), "{{host}}"),
                size=(8, 8),
            ),
        ],
    )


# Names of dcgm-exporter's default counters; they are NVIDIA's, not in our catalogue.
DCGM_HOST = 'Hostname=~"$gpu_host"'
GPU = "{{Hostname}} GPU {{gpu}}"


def _gpus() -> Row:
    def panel(title: str, name: str, unit: str, says: str, factor: str = "", most: float | None = None) -> object:
        made = time_series(
            title,
            f"{says}\n\n`{name}` of NVIDIA's dcgm-exporter.",
            Query(f"{name}{{{DCGM_HOST}}}{factor}", GPU),
            unit=unit,
            most=most,
            size=(8, 8),
        )
        return made.no_value("no dcgm-exporter is scraped")

    return Row(
        "GPUs, where a dcgm-exporter is scraped",
        [
            panel(
                "Utilisation",
                "DCGM_FI_DEV_GPU_UTIL",
                "percent",
                "Low while the links are busy: it waits for data.",
                most=100,
            ),
            panel(
                "Copy engines",
                "DCGM_FI_DEV_MEM_COPY_UTIL",
                "percent",
                "How busy the GPU's memory interface is.",
                most=100,
            ),
            panel(
                "Memory used",
                "DCGM_FI_DEV_FB_USED",
                "bytes",
                "Of all programs; more than our budgets: another one.",
                " * 1048576",
            ),
            panel("Power", "DCGM_FI_DEV_POWER_USAGE", "watt", "A GPU that waits for data draws less."),
            panel("Temperature", "DCGM_FI_DEV_GPU_TEMP", "celsius", "A hot GPU is slowed down."),
            panel(
                "Last error (XID)",
                "DCGM_FI_DEV_XID_ERRORS",
                "short",
                "0 is none; NVIDIA's documentation lists the numbers.",
            ),
        ],
        collapsed=True,
    )


def make() -> str:
    """The dashboard's JSON."""
    says = "Every host, rank and GPU side by side."
    hosts = choice("gpu_host", "GPU host", "label_values(DCGM_FI_DEV_GPU_UTIL, Hostname)", "As dcgm-exporter names it.")
    rows = [_all(), _ranks(), _hosts(), _gpus()]
    return dashboard("Out-of-core: fleet", "ooc-fleet", says, rows, [hosts])
