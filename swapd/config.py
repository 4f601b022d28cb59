"""Config: what the user asked for, read from keyword arguments, then the environment, then the defaults.

    config = Config.from_environment(budget="8GiB")     # OOC_BUDGET is not looked at, all other variables are
    config.resolve_budget(total_bytes, free_bytes)      # a share of the device becomes bytes once the device is known
    os.environ.update(config.to_environment())          # for a child process

`settings.py` has the list of variables. A value that cannot be used raises a ConfigError that names the variable and
shows valid forms. A variable that starts with ``OOC_`` but is no setting causes a ConfigWarning with the nearest name.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import shutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from swapd.host_limits import available_host_bytes, largest_host_bytes
from swapd.link import Link
from swapd.settings import PREFIX, REMOVED_SETTINGS, SETTINGS, Setting
from swapd.units import MIB, Amount, exact_bytes, format_bytes

if TYPE_CHECKING:
    import ssl

DEFAULT_BUDGET_FRACTION = 0.9  # of free device memory
DEFAULT_HOST_FRACTION = 0.8  # of the host memory that this process may still take
DEFAULT_DISK_FRACTION = 0.8  # of what is free in the folder
LARGE_BUDGET_BYTES = 1 << 30  # with so much, chunks are larger where the device has them in steps of 2 MiB, as GPUs do
FEWEST_CHUNKS = 64  # that a budget should hold: chunks of the default size are made smaller until it does
FOREIGN_PREFIXES = ("OOC_TEST_",)  # of variables that the project's own tests read

_BY_NAME = {setting.name: setting for setting in SETTINGS}


class ConfigError(ValueError):
    """A setting has a value that cannot be used; the message names it and shows valid forms."""


class ConfigWarning(UserWarning):
    """A variable looks like one of ours and is not."""


@dataclass(frozen=True)
class Config:
    """One field per setting of `settings.SETTINGS`; None where the default depends on the machine."""

    alloc: Literal["off", "auto", "cuda", "cpu"] = "off"
    budget: Amount | None = None
    host_budget: Amount | None = None
    disk: Path | None = None
    disk_budget: Amount | None = None
    chunk_size: int | None = None  # bytes; `resolve_chunks` says what None means here and in `small_limit`
    small_limit: int | None = None
    policy: str = "auto"
    planning: Literal["background", "blocking"] = "background"
    recompute: Literal["off", "exact"] = "exact"
    window: int | None = None  # bytes; None if the policy chooses it
    split: Literal["off", "exact", "allow", "fast"] = "exact"
    workspace: int | None = None  # bytes, for each convolution
    workspace_total: int | None = None  # bytes, for all of them together
    micro_batches: Literal["powerOfTwo", "all"] = "powerOfTwo"
    split_store: Path | None = None
    summary: Path | None = None
    progress: Path | None = None
    trace: Path | None = None
    metrics_port: int | None = None  # 0 for any free port
    metrics_address: str = "127.0.0.1"
    metrics_cert: Path | None = None
    metrics_key: Path | None = None
    metrics_file: Path | None = None
    metrics_interval: float = 15.0  # seconds
    metrics_push: str | None = None
    metrics_job: str = "ooc"
    wait_limit: float = 1800.0  # seconds
    strict: bool = False
    safe: bool = False
    timeline: Path | None = None
    report: Path | None = None
    status: bool = False
    nvtx: str | None = None  # the name of a library, or "1" to look for one
    emulated_memory: int | None = None
    emulated_bandwidth: Link | None = None
    emulated_granularity: int | None = None
    emulated_faults: str | None = None

    @property
    def enabled(self) -> bool:
        """Whether the allocator is wanted at all."""
        return self.alloc != "off"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, **overrides: Any) -> Config:
        """Reads settings: `overrides` that are not None come before `environment` (by default this process's).

        An override is a text as the variable would have, or the value itself. An empty variable counts as not set.

        Raises:
            ConfigError: a value cannot be used, or a setting does nothing without another one.
            TypeError: the name of an override is not that of a setting.
        """
        environment = os.environ if environment is None else environment
        for name in overrides:
            if name not in _BY_NAME:
                raise TypeError(f"{name}= is no setting{_instead(name, _BY_NAME)}")
        for message in unknown_variables(environment):
            warnings.warn(message, ConfigWarning, stacklevel=2)
        values = {}
        for setting in SETTINGS:
            override = overrides.get(setting.name)
            text = environment.get(setting.variable, "").strip()
            if override is not None:
                values[setting.name] = _parse(setting, override, f"{setting.name}=")
            elif text:
                values[setting.name] = _parse(setting, text, f"{setting.variable}=")
        config = cls(**values)
        _check_alone(config)
        return config

    def to_environment(self) -> dict[str, str]:
        """The variables that give this configuration in another process; settings at their default are left out."""
        return {
            _BY_NAME[field.name].variable: _BY_NAME[field.name].text(value)
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }

    def resolve_budget(self, total_bytes: int, free_bytes: int, others_bytes: int = 0, ranks: int = 1) -> int:
        """Budget in bytes on a device of `total_bytes`, of which `free_bytes` are free now.

        By default a tenth of what is free is left, and `others_bytes` at least, but not more than half. A share, and
        the default, are for all `ranks` that use the device together; bytes are for each.

        Raises:
            ConfigError: the budget is more than the device has.
        """
        if self.budget is None:
            most = max(free_bytes - ranks * others_bytes, free_bytes // 2)
            budget = min(int(free_bytes * DEFAULT_BUDGET_FRACTION), most) // ranks
        else:
            budget = self.budget.resolve(total_bytes) // (ranks if self.budget.fraction is not None else 1)
        if budget > total_bytes:
            raise ConfigError(
                f"OOC_BUDGET={self.budget} is more than the device has, {exact_bytes(total_bytes)} "
                f"({format_bytes(total_bytes)}); give at most that, or a share such as 60%"
            )
        return budget

    def resolve_emulated_memory(
        self, available_bytes: int | None = None, largest_bytes: int | None = None
    ) -> int | None:
        """Returns the emulated device's bytes for a budget in bytes; None where the driver's default is right.

        The default is a share of what is free now. A budget may be more, as far as the machine, or this process's
        control group, has so much. The arguments are those of `resolve_host_budget`.
        """
        wanted = self.budget.bytes if self.budget is not None else None
        largest = largest_host_bytes() if largest_bytes is None else largest_bytes
        if self.emulated_memory is not None or wanted is None or wanted > largest:
            return None
        available = available_host_bytes() if available_bytes is None else available_bytes
        return -(-max(wanted, int(DEFAULT_HOST_FRACTION * available)) // MIB) * MIB

    def resolve_chunks(self, budget_bytes: int, granularity_bytes: int) -> tuple[int, int]:
        """Returns the bytes of a chunk and of the largest small allocation.

        A chunk has 2 MiB unless its size is given; 4 MiB on a GPU with a large budget, because mapping a chunk
        costs the same whatever its size (docs/decisions/0007-chunks-on-gpus.md). It has less where fewer than 64 such
        chunks would be the budget and the device allows smaller ones, because with few chunks everything waits for
        everything. The largest small allocation is half a chunk unless it is given, or 1 MiB where the size of a
        chunk is given.

        Args:
            budget_bytes: the device memory that the program may use.
            granularity_bytes: the device's chunks are multiples of this.

        Raises:
            ConfigError: the budget is less than a chunk, or than the largest small allocation.
        """
        default = 4 * MIB if granularity_bytes == 2 * MIB and budget_bytes >= LARGE_BUDGET_BYTES else 2 * MIB
        chunk = -(-(self.chunk_size or default) // granularity_bytes) * granularity_bytes
        while self.chunk_size is None and chunk > granularity_bytes and budget_bytes < FEWEST_CHUNKS * chunk:
            chunk //= 2
        if budget_bytes < chunk:
            raise ConfigError(
                f"OOC_BUDGET={self.budget or '90% of free device memory'} is {budget_bytes} bytes, less than one chunk "
                f"(OOC_CHUNK_SIZE={exact_bytes(chunk)}); give a larger budget or smaller chunks"
            )
        if self.small_limit is not None and self.small_limit > budget_bytes:
            raise ConfigError(
                f"OOC_SMALL_LIMIT={exact_bytes(self.small_limit)} is more than the budget of {budget_bytes} bytes "
                f"(OOC_BUDGET): nothing would ever be swapped; give less, such as {exact_bytes(max(chunk // 2, 1))}"
            )
        small = MIB if self.chunk_size is not None else chunk // 2
        return chunk, self.small_limit if self.small_limit is not None else small

    def resolve_host_budget(self, available_bytes: int | None = None, largest_bytes: int | None = None) -> int:
        """Returns the host bytes for swapped data.

        Args:
            available_bytes: what this process may still take; None asks the machine.
            largest_bytes: what this process could take if nobody else took any; None asks the machine.

        Raises:
            ConfigError: the budget is more than the machine, or this process's control group, has.
        """
        available = available_host_bytes() if available_bytes is None else available_bytes
        budget = (self.host_budget or Amount(fraction=DEFAULT_HOST_FRACTION)).resolve(available)
        largest = largest_host_bytes() if largest_bytes is None else largest_bytes
        if self.host_budget is not None and budget > largest:
            raise ConfigError(
                f"OOC_HOST_BUDGET={exact_bytes(budget)} is more than the {format_bytes(largest)} of host memory that "
                f"this process may have ({format_bytes(available)} are free now); give at most "
                f"{exact_bytes(largest // MIB * MIB)}, or a share of what is free such as 80%"
            )
        return budget

    def resolve_disk_budget(self) -> int:
        """Returns the bytes of the disk for swapped data: at most what is free in the folder; 0 without a disk.

        Raises:
            ConfigError: the folder is none that this user may write to, or has less free space than the budget.
        """
        if self.disk is None:
            return 0
        if not self.disk.is_dir() or not os.access(self.disk, os.W_OK | os.X_OK):
            raise ConfigError(f"OOC_DISK={self.disk} is no folder that this user may write to: make it")
        free = shutil.disk_usage(self.disk).free
        budget = (self.disk_budget or Amount(fraction=DEFAULT_DISK_FRACTION)).resolve(free)
        if budget > free:
            raise ConfigError(
                f"OOC_DISK_BUDGET={self.disk_budget} is more than the {format_bytes(free)} that are free in "
                f"OOC_DISK={self.disk}; give at most {exact_bytes(free // MIB * MIB)}, or a share of it such as 80%"
            )
        return budget


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that starts with our prefix but is no setting."""
    known = [setting.variable for setting in SETTINGS]
    return [
        f"{name} is set but is no variable of ooc-alloc{_instead(name, known)}"
        for name in sorted(environment)
        if name.startswith(PREFIX) and name not in known and not name.startswith(FOREIGN_PREFIXES)
    ]


_USELESS_ALONE = (  # a setting, the setting without which it does nothing, and an example value for the latter
    ("disk_budget", "disk", "/scratch"),
    ("metrics_address", "metrics_port", "9835"),
    ("metrics_cert", "metrics_port", "9835"),
    ("metrics_key", "metrics_cert", "cert.pem"),
    ("metrics_interval", "metrics_file", "ooc.prom"),
    ("metrics_job", "metrics_push", "http://gateway.example:9091"),
)


def _check_alone(config: Config) -> None:
    """Raises ConfigError if a setting does nothing without another one, or the certificate for metrics is unusable."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name, needs, example in _USELESS_ALONE:
        if getattr(config, name) != defaults[name] and getattr(config, needs) is None:
            one, other = _BY_NAME[name], _BY_NAME[needs]
            raise ConfigError(
                f"{one.variable}={one.text(getattr(config, name))} does nothing without {other.variable}: set that too "
                f"({other.variable}={example}), or leave it out"
            )
    for name in ("workspace", "workspace_total", "micro_batches"):
        if getattr(config, name) != defaults[name] and config.split != "fast":
            one = _BY_NAME[name]
            raise ConfigError(
                f"{one.variable}={one.text(getattr(config, name))} does nothing without OOC_SPLIT=fast: set that too, "
                "or leave it out"
            )
    if config.metrics_cert is not None:
        server_tls(config.metrics_cert, config.metrics_key)


def server_tls(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """A TLS context for a server. Raises ConfigError if the files cannot be read or are no certificate and its key."""
    import ssl

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # An empty password keeps OpenSSL from asking for one at the terminal, where nobody may sit.
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except (OSError, ValueError) as error:
        also = f", OOC_METRICS_KEY={key}" if key is not None else ""
        raise ConfigError(
            f"OOC_METRICS_CERT={certificate}{also} cannot be used: {error}; give a certificate and its key as PEM "
            "files, the key without a password"
        ) from None
    return context


def _parse(setting: Setting, value: Any, source: str) -> Any:
    try:
        return setting.parse(value)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{source}{error}") from None


def _instead(name: str, known: Iterable[str]) -> str:
    """Returns the end of a sentence about a name that is no setting: what the user can do about it."""
    removed = REMOVED_SETTINGS.get(name.removeprefix(PREFIX).lower())
    if removed is not None:
        return f" any more: {removed}"
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {nearest[0]}?" if nearest else ""
