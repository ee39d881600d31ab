"""Starts the jax backend. Only this module sets XLA flags, environment variables and jax's settings; tables list them.
"""
from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib.metadata
import importlib.util
import os
import re
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

import jax

from meshtrain import flags as xla_flags, hardware, jax_private, known_bad
from meshtrain.cluster import agree, find, gpus, meet, numa, programs, watch
from meshtrain.config import ConfigError, Run, user_errors
from meshtrain.names import AXES, PRNG
from meshtrain.run import say
from meshtrain.units import amount

KEPT_PROGRAM_BYTES = 8 << 30     # size limit of run.compilation_cache
MOST_SIMULATED = 1024
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
# A flag as XLA parses it, --name="a value" or up to the next space; or a comment.
FLAG = re.compile(r"""-[\w-]*=("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|-\S*|#[^\n]*""", re.ASCII | re.DOTALL)
MOST_OF_FLAGS = 1 << 20     # most characters read from a file of flags
MOST_OF_DIR = 200       # characters of run.dir that processes compare to check that they belong to one run


@dataclasses.dataclass(frozen=True)
class Default:
    """An environment variable that a process sets before jax starts, unless the user has set it. If the name begins
    with --, it is a flag in XLA_FLAGS."""
    name: str
    value: str
    why: str


# Options of compiled programs are in `flags`.
ON_GPUS = (
    Default(hardware.MEMORY_VARIABLES[0], str(hardware.MEMORY_SHARE),
            "share of a GPU's memory that a run uses; jax's default is 0.75"),
    Default("NCCL_DEBUG", "WARN", "NCCL prints the reason of a failure; by default it prints nothing"),
    Default("--xla_gpu_execution_terminate_timeout", "30m",
            "ends a process whose GPU program is stuck, e.g. in a collective whose peer hangs; by default such a "
            "process never ends"),
    Default("--xla_gpu_nccl_termination_timeout_seconds", "1800",
            "ends a process if not all processes join the setup of a group of GPUs"),
)
# Fixed in jax 0.12: https://github.com/jax-ml/jax/issues/39257 and 39103. YNNPACK stays on for single products, which
# are correct up to 7 dimensions: with XLA's own kernels the bits of a row depend on the other rows.
ON_CPUS = (
    Default("--xla_cpu_experimental_ynn_fusion_type", "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
            "sums of products that YNNPACK fuses are wrong, or crash, in 7 dimensions and more on some CPUs"),
) if jax.__version_info__ < (0, 12) else ()
SIMULATED = (
    Default("--xla_cpu_enable_concurrency_optimized_scheduler", "false",
            "XLA's default scheduler deadlocks programs with independent collectives (2 of 4 ZeRO-3 steps did)"),
)

# Without LLVM's optimizations and the newer fusion emitters, programs compile in a fifth of the time and run slower.
# Partitioning and memory plans stay the same. Later versions of XLA have only the newer emitters.
COMPILED_CHEAPLY = (
    Default("--xla_backend_optimization_level", "0", "a program of three steps takes most of its time to compile"),
    Default("--xla_cpu_use_fusion_emitters", "false", "the newer emitters take longer"),
)


@dataclasses.dataclass(frozen=True)
class JaxSetting:
    """A global setting of jax that a run forces to this value, even if the environment sets another."""
    name: str
    value: str | bool | int | None
    why: str


GUARDED, CHECKED = "a run moves small arrays itself", "a step that is not finite is skipped and reported anyway"
# Settings that change numbers or break tracing, at jax's defaults. The user may change other settings that change a
# program (levels of optimization); they must be equal in all processes.
OF_JAX = (
    JaxSetting("jax_default_prng_impl", PRNG, "used by initialization; the bits of `rbg` depend on the layout"),
    JaxSetting("jax_threefry_partitionable", True, "makes the bits of threefry independent of the layout"),
    JaxSetting("jax_random_seed_offset", 0, "another offset would be added to `run.seed`"),
    JaxSetting("jax_default_matmul_precision", None, "each product sets its own precision"),
    JaxSetting("jax_allow_f16_reductions", True, "sums that need float32 request it"),
    JaxSetting("jax_enable_x64", False, "dtypes are those of the run file"),
    JaxSetting("jax_numpy_dtype_promotion", "standard", "`strict` forbids products of two dtypes"),
    JaxSetting("jax_numpy_rank_promotion", "allow", "`raise` forbids broadcasting"),
    JaxSetting("jax_use_shardy_partitioner", True, "layouts are tested only with Shardy"),
    JaxSetting("jax_scan3", False, "experimental: makes the gradients of a step NaN"),
    JaxSetting("jax_remat3", False, "experimental"),
    JaxSetting("jax_custom_jvp3", False, "experimental"),
    JaxSetting("jax_custom_vjp3", False, "experimental: prevents tracing a step"),
    JaxSetting("jax_disable_jit", False, "programs are compiled before they run"),
    JaxSetting("jax_no_tracing", False, "programs are traced before they run"),
    JaxSetting("jax_no_execution", False, "with `True` a run would compute nothing"),
    JaxSetting("jax_check_tracer_leaks", False, "makes `generate` fail"),
    JaxSetting("jax_debug_nans", False, f"NaN marks layers without experts; {CHECKED}"),
    JaxSetting("jax_debug_infs", False, f"infinity masks scores; {CHECKED}"),
    JaxSetting("jax_error_checking_behavior_nan", "ignore", CHECKED),
    JaxSetting("jax_error_checking_behavior_divide", "ignore", CHECKED),
    JaxSetting("jax_error_checking_behavior_oob", "ignore", "other values prevent compilation ahead of time"),
    JaxSetting("jax_transfer_guard", None, GUARDED),
    JaxSetting("jax_transfer_guard_host_to_device", None, GUARDED),
    JaxSetting("jax_transfer_guard_device_to_device", None, GUARDED),
    JaxSetting("jax_transfer_guard_device_to_host", None, GUARDED),
)
# jax's settings that may differ between processes: directories, addresses, logging.
_OF_A_HOST = re.compile("cache|visible_devices|address|dump|log|traceback|debug_info|source|platform|num_cpu_devices"
                        "|timeout|pprint|mtls|pjrt|topology|profil")


def memory_bytes(devices: Sequence[jax.Device]) -> int:
    """Return the memory in bytes of these devices of this process; for CPU devices, the memory of the machine."""
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in devices]
    return sum(limits) if all(limits) else machine_bytes()


def machine_bytes() -> int:
    """Return the memory of this machine in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def start(run: Run, cluster: find.Cluster | None = None, cheaply: bool = False) -> Sequence[jax.Device]:
    """Start the jax backend. Return the devices of all processes of the run.

    If mesh.simulated_devices > 0, the devices are that many CPU devices over all processes. cheaply: whether their
    programs are compiled with COMPILED_CHEAPLY. Raises: ConfigError if a backend already runs with other devices, the
    simulated devices cannot be divided evenly among the processes, jax's settings differ between processes, or an
    installed version is known to compute wrong numbers; PeerError, which names the process, if a process does not join.
    """
    overruled = own_settings(os.environ)
    _keep_programs(run.run.compilation_cache, trims=cluster is None or cluster.index == 0)
    total = run.mesh.simulated_devices
    num_processes = cluster.count if cluster else 1
    if total % num_processes:
        raise ConfigError(f"mesh.simulated_devices={total} is the total over all processes and cannot be divided "
                          f"evenly among {num_processes}; use a multiple of {num_processes}")
    count = total // num_processes
    if not count and not gpus_expected():
        _set(os.environ, ON_CPUS)
    if count:
        overruled += _set_simulated(count, cheaply)
    elif gpus_expected():
        for line in known_bad.check(known_bad.facts_of(run, num_processes)):
            if not cluster or cluster.index == 0:
                say.err(f"warning: {line}")
        prepare_gpus(os.environ)
        # bound before the devices start, so that the driver's threads and pinned memory are on the same NUMA node
        if cluster and (line := numa.bind(cluster.local_devices, os.environ)) and cluster.index == 0:
            say.out(line)
    else:
        # Otherwise an installed CUDA plugin tries to start, prints a page of warnings, and falls back to the CPU.
        jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")
    refuse_unknown_flags(os.environ)
    if cluster:
        here = dataclasses.replace(cluster, token=f"run.dir={run.run.dir[-MOST_OF_DIR:]} {cluster.token}".rstrip())
        with watch.phase("meeting the other processes", watch.UNLIMITED):       # meet.start has its own timeout
            meet.start(here, run.distributed.timeout_s, run.distributed.heartbeat_timeout_s)
    with watch.phase("starting the devices", "start"), say.without_noise():     # a driver may hang
        devices = jax.devices()
    if cluster and devices[0].platform != "cpu":
        taken = agree.exchange([socket.gethostname(), jax.local_device_count(), len(gpus.visible(os.environ))])
        if jax.process_index() == 0:
            say.out(gpus.shares(taken))
    if not all(agree.exchange(bool(jax.config.jax_compilation_cache_dir))):     # all or none: they compile together
        jax.config.update("jax_compilation_cache_dir", None)
    compare_settings(overruled)
    if total and len(devices) != total:
        raise ConfigError(f"mesh.simulated_devices={total}, but {_other_devices(total)}")
    return devices


def simulate(devices: int) -> None:
    """Simulate this number of CPU devices in this process. Call it in the first line of a notebook, before jax starts.

    Raises: ConfigError if jax already runs with other devices; then restart the kernel.

    >>> mt.simulate(8)
    """
    if isinstance(devices, bool) or not isinstance(devices, int) or not 1 <= devices <= MOST_SIMULATED:
        raise ConfigError(f"simulate({devices!r}) takes a whole number of devices from 1 to {MOST_SIMULATED}, e.g. 8")
    if not jax_private.backends_are_initialized():
        for line in _set_simulated(devices, cheaply=True):
            say.err(f"warning: {line}")
        refuse_unknown_flags(os.environ)
    with say.without_noise():
        started = jax.devices()
    if started[0].platform != "cpu" or len(started) != devices:
        raise ConfigError(f"simulate({devices}): {_other_devices(devices)}")


def num_simulated() -> int:
    """Return the number of CPU devices that jax simulates in this process, or will simulate by XLA_FLAGS; otherwise 8.
    """
    if jax_private.backends_are_initialized() and jax.default_backend() == "cpu" and jax.device_count() > 1:
        return jax.device_count()
    given = dict(flag.partition("=")[::2] for flag in flags_in(os.environ))
    count = given.get(DEVICE_COUNT_FLAG, "")
    return int(count) if count.isdecimal() else 8


def _other_devices(count: int) -> str:
    here = jax.device_count()
    return (f"this process already runs jax with {amount(here, 'device')}; start a new process (in a notebook: restart "
            f"the kernel) and begin with:\n    import meshtrain as mt\n    mt.simulate({count})")


def _set_simulated(count: int, cheaply: bool) -> list[str]:
    """Set flags and settings for `count` simulated devices of this process. cheaply: see `start`. Return lines about
    settings of the environment that are ignored."""
    overruled = []
    known = xla_flags.find_known([setting.name for setting in COMPILED_CHEAPLY]) if cheaply else ()
    _set(os.environ, [*ON_CPUS, *SIMULATED, *(setting for setting in COMPILED_CHEAPLY if setting.name in known)])
    others = [flag for flag in flags_in(os.environ) if flag.partition("=")[0] != DEVICE_COUNT_FLAG]
    os.environ["XLA_FLAGS"] = " ".join([*others, f"{DEVICE_COUNT_FLAG}={count}"])
    counted = jax.config.jax_num_cpu_devices
    if counted not in (-1, count) and not jax_private.backends_are_initialized():
        overruled.append(f"jax_num_cpu_devices={counted} (JAX_NUM_CPU_DEVICES) is ignored: this process simulates "
                         f"{count} devices")
        jax.config.update("jax_num_cpu_devices", -1)        # else it overrides the flag
    # A collective that waits for its peers blocks a thread of the CPU client's pool, and a device may have several
    # collectives at a time. With one thread per device (the default) all threads may wait for one that cannot start.
    os.environ.setdefault("NPROC", str(max(4 * count, os.cpu_count() or 1)))
    jax.config.update("jax_platforms", "cpu")
    return overruled


def own_settings(environ: Mapping[str, str]) -> list[str]:
    """Set jax's settings to those of OF_JAX. Return a line for each setting that the environment had set to another
    value.

    Raises: ConfigError with the settings that code of this process has changed, by jax.config.update or a context:
    that code may need them.
    """
    overruled, refused = [], []
    for setting in OF_JAX:
        if setting.name not in jax.config.values or _format_setting(setting.name) == _plain(setting.value):
            continue        # unknown, or set
        given, variable = f"{setting.name}={_format_setting(setting.name)}", setting.name.upper()
        if variable in environ:
            jax.config.update(setting.name, setting.value)
            overruled.append(f"{variable}={environ[variable]} is ignored: a run needs "
                             f"{setting.name}={_plain(setting.value)} ({setting.why})")
        if _format_setting(setting.name) != _plain(setting.value):
            refused.append(f"{given} was set in this process, but a run needs {_plain(setting.value)} ({setting.why}); "
                           f'reset it with jax.config.update("{setting.name}", {setting.value!r}), and set it only '
                           f"around your own code")
    if refused:
        raise ConfigError(*refused)
    return overruled


def own_settings_told(environ: Mapping[str, str]) -> None:
    """Call `own_settings` in a single process, and print its lines as warnings."""
    for line in own_settings(environ):
        say.err(f"warning: {line}")


def compare_settings(overruled: Sequence[str]) -> None:
    """Print in which processes settings of the environment were ignored. Raises: ConfigError, in all processes, if
    jax's settings differ between processes, because they would compile different programs."""
    told: dict[str, list[int]] = {}
    for index, lines in enumerate(agree.exchange(list(overruled))):
        for line in lines:
            told.setdefault(line, []).append(index)
    for line, indices in told.items() if jax.process_index() == 0 else ():
        say.err(f"warning: {f'{meet.name_processes(indices)}: ' if len(indices) < jax.process_count() else ''}{line}")
    agree.same_everywhere("jax's settings", "\n".join(_settings(os.environ)))


def _settings(environ: Mapping[str, str]) -> list[str]:
    """Return the settings that must be the same in all processes: versions, jax's settings, and XLA flags without
    paths."""
    given = [flag for flag in environ.get("XLA_FLAGS", "").split() if "/" not in flag and DEVICE_COUNT_FLAG not in flag]
    return [*(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib")),
            *(f"{name}={_format_setting(name)}" for name in sorted(jax.config.values) if not _OF_A_HOST.search(name)),
            *(f"XLA_FLAGS {flag}" for flag in given)]


def _format_setting(name: str) -> str:
    """Return the value of a setting of jax in this thread, as text."""
    return _plain(getattr(jax.config, name, jax.config.values[name]))


def _plain(value) -> str:
    return str(getattr(value, "name", value)).lower() if isinstance(value, (str, enum.Enum)) else str(value)


def _keep_programs(directory: str, trims: bool) -> None:
    """Set the directory of the compilation cache. trims: whether to remove the least recently used programs beyond
    KEPT_PROGRAM_BYTES.

    JAX_COMPILATION_CACHE_MAX_SIZE, if set, replaces this limit. By default the variable is not set. If it is set, jax
    takes a lock per program, for which thousands of processes on one NFS would wait, and jax fails in a directory that
    was created without the limit.
    """
    place = Path(os.path.expanduser(directory))
    if not directory or str(place).startswith("~"):     # no home directory, e.g. a container user without a name
        return
    with contextlib.suppress(OSError):      # jax reports a directory that cannot be created
        if reason := programs.distrust(place):
            say.err(f"warning: run.compilation_cache={directory} {reason}: it is not used to store or load compiled "
                    f"programs; give a directory that only you may write")
            return
    jax.config.update("jax_compilation_cache_dir", str(place))
    if not trims or jax.config.jax_compilation_cache_max_size != -1:
        return
    with contextlib.suppress(OSError):      # missing, or another process removes the same programs
        entries = sorted(((max(entry.stat().st_atime, entry.stat().st_mtime), entry.stat().st_size, entry.path)
                          for entry in os.scandir(place) if entry.name.endswith("-cache")), reverse=True)
        kept = 0
        for _, size, path in entries:
            kept += size
            if kept > KEPT_PROGRAM_BYTES:
                os.unlink(path)


def prepare_gpus(environ: MutableMapping[str, str]) -> None:
    """Set the flags and variables of ON_GPUS that the user has not set. Flags that this XLA does not know are left out,
    because XLA aborts at unknown flags.

    Raises: ConfigError for an invalid memory share.
    """
    with user_errors():
        hardware.memory_share(environ)
    known = xla_flags.find_known([setting.name for setting in ON_GPUS if setting.name.startswith("--")])
    _set(environ, [setting for setting in ON_GPUS if setting.name in known or not setting.name.startswith("--")])


def refuse_unknown_flags(environ: Mapping[str, str]) -> None:
    """Check XLA_FLAGS. Raises: ConfigError that names the flags at which this version of XLA would abort."""
    ours = {DEVICE_COUNT_FLAG, *(setting.name for setting in (*ON_GPUS, *ON_CPUS, *SIMULATED, *COMPILED_CHEAPLY))}
    given = sorted({flag.partition("=")[0] for flag in flags_in(environ)} - ours)
    libraries = [library for library in xla_flags.xla_libraries()
                 if gpus_expected() or library.name == xla_flags.JAXLIB]
    unknown = sorted(set(given) - xla_flags.find_known(given, libraries)) if libraries else []
    if unknown:
        here = f"the XLA of jaxlib {importlib.metadata.version('jaxlib')}"
        raise ConfigError(f"XLA_FLAGS has {', '.join(unknown)}, which {here} does not know and would abort at; "
                          f"remove it, or install a jaxlib that knows it")


def own_flags(environ: MutableMapping[str, str]) -> None:
    """If XLA_FLAGS names a file of flags, replace it by these flags. Used where no device starts, e.g. to compile for
    GPUs that the machine does not have. Raises: as `flags_in` and `refuse_unknown_flags`."""
    if environ.get("XLA_FLAGS"):
        _set(environ, ())
        refuse_unknown_flags(environ)


def flags_in(environ: Mapping[str, str]) -> list[str]:
    """Return the flags of XLA_FLAGS, or of the file that it names. XLA itself reads such a file only if XLA_FLAGS has
    nothing else, and stops at a comment (#).

    Raises: ConfigError if the file cannot be read, or at a word that is not a flag: XLA would silently ignore it and
    everything after it.
    """
    given = text = environ.get("XLA_FLAGS", "").strip()
    flags, in_file = [], bool(text) and not text.startswith("-")
    if in_file:
        try:
            with open(given, encoding="utf-8") as file:
                text = file.read(MOST_OF_FLAGS).strip()
        except (OSError, ValueError) as error:      # not UTF-8, or a null byte in the name
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(f"XLA_FLAGS={given[:200]} is neither flags nor a readable file of flags: {why}; "
                              f"give flags, --name=value, or the path of a file of flags") from None
    while match := FLAG.match(text):
        if text[0] == "-":
            flags.append(match[0])
        elif not in_file:
            break
        text = text[match.end():].lstrip()
    if text:
        where = f"XLA_FLAGS={given[:200]}" if in_file else "XLA_FLAGS"
        raise ConfigError(f"{where} has {text.split()[0][:100]}, which is not a flag: XLA would ignore it and "
                          f"everything after it. Write --name=value, with quotes around a value that has spaces")
    return flags


def _set(environ: MutableMapping[str, str], settings: Sequence[Default]) -> None:
    flags = flags_in(environ)
    given = {flag.partition("=")[0] for flag in flags}
    flags += [f"{setting.name}={setting.value}" for setting in settings
              if setting.name.startswith("--") and setting.name not in given]
    environ["XLA_FLAGS"] = " ".join(flags)
    for setting in settings:
        names = hardware.MEMORY_VARIABLES if setting.name in hardware.MEMORY_VARIABLES else (setting.name,)
        if not setting.name.startswith("--") and not any(environ.get(name) for name in names):
            environ[setting.name] = setting.value


def gpus_expected() -> bool:
    """Return whether jax will find GPUs, without starting it: there are a plugin and a device node, and no environment
    variable forbids GPUs."""
    if os.environ.get("JAX_PLATFORMS", "cuda") not in ("", "cuda", "gpu", "cuda,cpu", "rocm"):
        return False
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return False
    plugin = any(importlib.util.find_spec(f"jax_{name}") for name in
                 ("cuda12_plugin", "cuda13_plugin", "rocm60_plugin", "rocm7_plugin"))
    return bool(plugin) and any(os.path.exists(node) for node in ("/dev/nvidiactl", "/dev/kfd"))


def on_gpus(run: Run, num_gpus: int) -> Run:
    """Return the quickstart's run on GPUs. The axis fsdp gets as many GPUs as divide the model's width and the batch.
    Raises: ConfigError if several processes would have unused GPUs."""
    sequences = run.data.global_batch // run.training.microbatches
    n = max(n for n in range(1, num_gpus + 1) if run.model.embed_dim % n == 0 and sequences % n == 0)
    if n < num_gpus and jax.process_count() > 1:
        raise ConfigError(f"{num_gpus} GPUs in {jax.process_count()} processes: only {n} of them divide "
                          f"model.embed_dim={run.model.embed_dim} and the batch of {sequences}; start fewer processes, "
                          f"or give a mesh")
    return run.replace(mesh=dict.fromkeys(AXES, 1) | {"fsdp": n, "simulated_devices": 0})
