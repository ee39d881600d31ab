"""Starts the jax backend. The only place that sets XLA flags, environment variables and jax's settings, by tables."""
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

from meshtrain import flags as xla_flags
from meshtrain import hardware, jax_private, known_bad
from meshtrain.cluster import agree, find, gpus, meet, numa, programs, watch
from meshtrain.config import ConfigError, Run, user_errors
from meshtrain.names import AXES, PRNG
from meshtrain.run import say
from meshtrain.units import counted

KEPT_PROGRAM_BYTES = 8 << 30     # of run.compilation_cache
MOST_SIMULATED = 1024
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
# A flag as XLA reads it, --name="a value" or up to the next space; or a comment.
FLAG = re.compile(r"""-[\w-]*=("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|-\S*|#[^\n]*""", re.ASCII | re.DOTALL)
MOST_OF_FLAGS = 1 << 20     # characters of a file of flags
MOST_OF_DIR = 200       # characters of run.dir, by which processes of one run know each other


@dataclasses.dataclass(frozen=True)
class Setting:
    """An environment variable that a process sets before jax starts, unless the user has; with -- before it,
    a flag in XLA_FLAGS."""
    name: str
    value: str
    why: str


# What the compiled programs are given is elsewhere: `flags` has those options.
ON_GPUS = (
    Setting(hardware.MEMORY_VARIABLES[0], str(hardware.MEMORY_SHARE),
            "share of a GPU's memory that a run uses; jax's default is 0.75"),
    Setting("NCCL_DEBUG", "WARN", "NCCL prints the reason of a failure; by default it prints nothing"),
    Setting("--xla_gpu_execution_terminate_timeout", "30m",
            "ends a process whose GPU program is stuck, e.g. in a collective whose peer hangs; by default it never "
            "ends"),
    Setting("--xla_gpu_nccl_termination_timeout_seconds", "1800",
            "ends a process if not all processes join the setup of a group of GPUs"),
)
# Fixed in jax 0.12: https://github.com/jax-ml/jax/issues/39257 and 39103. YNNPACK keeps single products, right up
# to 7 dimensions: with XLA's own kernels the bits of a row depend on the other rows.
ON_CPUS = (
    Setting("--xla_cpu_experimental_ynn_fusion_type", "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
            "sums of products that YNNPACK fuses are wrong, or crash, in 7 dimensions and more on some CPUs"),
) if jax.__version_info__ < (0, 12) else ()
SIMULATED = (
    Setting("--xla_cpu_enable_concurrency_optimized_scheduler", "false",
            "XLA's default scheduler deadlocks programs with independent collectives (2 of 4 ZeRO-3 steps did)"),
)

# Without LLVM's optimizations and the newer fusion emitters programs compile in a fifth of the time and run slower;
# partitioning and memory plans stay as they are. Later versions of XLA have those emitters alone.
COMPILED_CHEAPLY = (
    Setting("--xla_backend_optimization_level", "0", "a program that runs three steps takes its time to compile"),
    Setting("--xla_cpu_use_fusion_emitters", "false", "the newer emitters take longer"),
)


@dataclasses.dataclass(frozen=True)
class JaxSetting:
    """A global setting of jax that a run owns: it has this value whatever the environment says."""
    name: str
    value: str | bool | int | None
    why: str


GUARDED, CHECKED = "a run moves small arrays itself", "a step that is not finite is skipped and reported anyway"
# jax's own defaults of what changes numbers or ends a trace. What else changes a program (levels of optimization) is
# the user's, and compared between processes.
OF_JAX = (
    JaxSetting("jax_default_prng_impl", PRNG, "used by initialization; the bits of `rbg` depend on the layout"),
    JaxSetting("jax_threefry_partitionable", True, "makes its bits independent of the layout"),
    JaxSetting("jax_random_seed_offset", 0, "would be added to `run.seed`"),
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
    JaxSetting("jax_no_tracing", False, "as above"),
    JaxSetting("jax_no_execution", False, "a run would compute nothing"),
    JaxSetting("jax_check_tracer_leaks", False, "makes `generate` fail"),
    JaxSetting("jax_debug_nans", False, f"NaN marks layers without experts; {CHECKED}"),
    JaxSetting("jax_debug_infs", False, f"infinity masks scores; {CHECKED}"),
    JaxSetting("jax_error_checking_behavior_nan", "ignore", CHECKED),
    JaxSetting("jax_error_checking_behavior_divide", "ignore", CHECKED),
    JaxSetting("jax_error_checking_behavior_oob", "ignore", "its programs cannot be compiled ahead of time"),
    JaxSetting("jax_transfer_guard", None, GUARDED),
    JaxSetting("jax_transfer_guard_host_to_device", None, GUARDED),
    JaxSetting("jax_transfer_guard_device_to_device", None, GUARDED),
    JaxSetting("jax_transfer_guard_device_to_host", None, GUARDED),
)
# jax's settings that may differ between processes: places, addresses and what is logged.
_OF_A_HOST = re.compile("cache|visible_devices|address|dump|log|traceback|debug_info|source|platform|num_cpu_devices"
                        "|timeout|pprint|mtls|pjrt|topology|profil")


def memory_bytes(found: Sequence[jax.Device]) -> int:
    """Memory available to these devices of this process; simulated CPU devices share the machine's."""
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in found]
    return sum(limits) if all(limits) else machine_bytes()


def machine_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def start(run: Run, cluster: find.Cluster | None = None, cheaply: bool = False) -> Sequence[jax.Device]:
    """The devices of all processes of the run; starts the jax backend. simulated_devices > 0 means that many CPU
    devices. cheaply: their programs are compiled by COMPILED_CHEAPLY.

    Raises: ConfigError where a backend is already up with other devices, the processes cannot share them out or have
    other settings of jax, or what is installed is known to compute wrong numbers;
    PeerError that names a process that does not come.
    """
    overruled = own_settings(os.environ)
    _keep_programs(run.run.compilation_cache, trims=cluster is None or cluster.index == 0)
    total = run.mesh.simulated_devices
    num_processes = cluster.count if cluster else 1
    if total % num_processes:
        raise ConfigError(f"mesh.simulated_devices={total} is the total over all processes and cannot be shared out "
                          f"among {num_processes}; use a multiple of {num_processes}")
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
        # before the devices start: the threads and pinned memory of a driver are then there as well
        if cluster and (line := numa.bind(cluster.local_devices, os.environ)) and cluster.index == 0:
            say.out(line)
    else:
        # Without this an installed CUDA plugin tries to start, fails with a page of warnings, and ends on the CPU.
        jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")
    refuse_unknown_flags(os.environ)
    if cluster:
        here = dataclasses.replace(cluster, token=f"run.dir={run.run.dir[-MOST_OF_DIR:]} {cluster.token}".rstrip())
        with watch.phase("meeting the other processes", watch.UNLIMITED):       # it keeps the time by itself
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


def simulate(count: int) -> None:
    """Start jax in this process with `count` simulated CPU devices, as a run on them does. Raises: ConfigError where
    jax has already started with others."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_SIMULATED:
        raise ConfigError(f"simulate({count!r}) takes a whole number of devices from 1 to {MOST_SIMULATED}, e.g. 8")
    if not jax_private.backends_are_initialized():
        for line in _set_simulated(count, cheaply=True):
            say.err(f"warning: {line}")
        refuse_unknown_flags(os.environ)
    with say.without_noise():
        found = jax.devices()
    if found[0].platform != "cpu" or len(found) != count:
        raise ConfigError(f"simulate({count}): {_other_devices(count)}")


def num_simulated() -> int:
    """The number of CPU devices that jax simulates in this process, or will by XLA_FLAGS; 8 where neither says."""
    if jax_private.backends_are_initialized() and jax.default_backend() == "cpu" and jax.device_count() > 1:
        return jax.device_count()
    given = dict(flag.partition("=")[::2] for flag in flags_in(os.environ))
    count = given.get(DEVICE_COUNT_FLAG, "")
    return int(count) if count.isdecimal() else 8


def _other_devices(count: int) -> str:
    found = jax.device_count()
    return (f"this process already runs jax with {counted(found, 'device')}; start a new process, in a "
            f"notebook by restarting the kernel, and begin with:\n    import meshtrain as mt\n    mt.simulate({count})")


def _set_simulated(count: int, cheaply: bool) -> list[str]:
    """Set flags and settings for `count` simulated devices of this process. cheaply: as of `start`. Returns a line for
    a setting of the environment that is not taken."""
    overruled = []
    known = xla_flags.known_flags([one.name for one in COMPILED_CHEAPLY]) if cheaply else ()
    _set(os.environ, [*ON_CPUS, *SIMULATED, *(one for one in COMPILED_CHEAPLY if one.name in known)])
    others = [flag for flag in flags_in(os.environ) if flag.partition("=")[0] != DEVICE_COUNT_FLAG]
    os.environ["XLA_FLAGS"] = " ".join([*others, f"{DEVICE_COUNT_FLAG}={count}"])
    counted = jax.config.jax_num_cpu_devices
    if counted not in (-1, count) and not jax_private.backends_are_initialized():
        overruled.append(f"jax_num_cpu_devices={counted} (JAX_NUM_CPU_DEVICES) is not taken: this process simulates "
                         f"{count} devices")
        jax.config.update("jax_num_cpu_devices", -1)        # else it wins over the flag
    # A collective that waits for its peers blocks a thread of the CPU client's pool, and a device may have several
    # under way: with one thread a device (the default) all of them can end up waiting for one that cannot start.
    os.environ.setdefault("NPROC", str(max(4 * count, os.cpu_count() or 1)))
    jax.config.update("jax_platforms", "cpu")
    return overruled


def own_settings(environ: Mapping[str, str]) -> list[str]:
    """Give jax the settings of OF_JAX; return a line for each of which the environment said otherwise.

    Raises: ConfigError that names those which this process itself has set, by jax.config.update or a context: other
    code of the process may need them.
    """
    overruled, refused = [], []
    for one in OF_JAX:
        if one.name not in jax.config.values or _shown(one.name) == _plain(one.value):      # or of another jax
            continue
        given, variable = f"{one.name}={_shown(one.name)}", one.name.upper()
        if variable in environ:
            jax.config.update(one.name, one.value)
            overruled.append(f"{variable}={environ[variable]} is ignored: a run needs {one.name}={_plain(one.value)} "
                             f"({one.why})")
        if _shown(one.name) != _plain(one.value):
            refused.append(f"{given} was set in this process, but a run needs {_plain(one.value)} ({one.why}); "
                           f'take it back by jax.config.update("{one.name}", {one.value!r}), and set it around code '
                           f"of your own alone")
    if refused:
        raise ConfigError(*refused)
    return overruled


def own_settings_told(environ: Mapping[str, str]) -> None:
    """`own_settings` of a single process."""
    for line in own_settings(environ):
        say.err(f"warning: {line}")


def compare_settings(overruled: Sequence[str]) -> None:
    """Tell in which processes the environment was overruled. Raises: ConfigError, in all, where jax is set differently
    in some: they would compile different programs."""
    told: dict[str, list[int]] = {}
    for index, lines in enumerate(agree.exchange(list(overruled))):
        for line in lines:
            told.setdefault(line, []).append(index)
    for line, indices in told.items() if jax.process_index() == 0 else ():
        say.err(f"warning: {f'{meet.named(indices)}: ' if len(indices) < jax.process_count() else ''}{line}")
    agree.same_everywhere("what jax is set to", "\n".join(_settings(os.environ)))


def _settings(environ: Mapping[str, str]) -> list[str]:
    """The settings that must be the same in every process: versions, jax's settings, and XLA's flags other than
    paths."""
    given = [flag for flag in environ.get("XLA_FLAGS", "").split() if "/" not in flag and DEVICE_COUNT_FLAG not in flag]
    return [*(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib")),
            *(f"{name}={_shown(name)}" for name in sorted(jax.config.values) if not _OF_A_HOST.search(name)),
            *(f"XLA_FLAGS {flag}" for flag in given)]


def _shown(name: str) -> str:
    """A setting of jax as text, in force in this thread."""
    return _plain(getattr(jax.config, name, jax.config.values[name]))


def _plain(value) -> str:
    return str(getattr(value, "name", value)).lower() if isinstance(value, (str, enum.Enum)) else str(value)


def _keep_programs(directory: str, trims: bool) -> None:
    """Sets the compilation cache directory. trims: removes the least recently used programs beyond KEPT_PROGRAM_BYTES.

    JAX_COMPILATION_CACHE_MAX_SIZE, if set, replaces this limit. It is no default: it takes a lock per program, for
    which thousands of processes on one NFS wait, and fails in a directory that was begun without it.
    """
    place = Path(os.path.expanduser(directory))
    if not directory or str(place).startswith("~"):     # no home, in a container that runs as a number
        return
    with contextlib.suppress(OSError):      # it cannot be made: jax tells that
        if reason := programs.distrust(place):
            say.err(f"warning: run.compilation_cache={directory} {reason}: no compiled program is kept there or taken "
                    f"from there; name a directory that only you may write")
            return
    jax.config.update("jax_compilation_cache_dir", str(place))
    if not trims or jax.config.jax_compilation_cache_max_size != -1:
        return
    with contextlib.suppress(OSError):      # not there yet, or another process removes the same
        found = sorted(((max(entry.stat().st_atime, entry.stat().st_mtime), entry.stat().st_size, entry.path)
                        for entry in os.scandir(place) if entry.name.endswith("-cache")), reverse=True)
        kept = 0
        for _, size, path in found:
            kept += size
            if kept > KEPT_PROGRAM_BYTES:
                os.unlink(path)


def prepare_gpus(environ: MutableMapping[str, str]) -> None:
    """Sets the flags and variables of ON_GPUS that the user has not set; a flag only where XLA knows it, because it
    aborts at an unknown one.

    Raises: ConfigError for an invalid memory share.
    """
    with user_errors():
        hardware.memory_share(environ)
    known = xla_flags.known_flags([one.name for one in ON_GPUS if one.name.startswith("--")])
    _set(environ, [one for one in ON_GPUS if one.name in known or not one.name.startswith("--")])


def refuse_unknown_flags(environ: Mapping[str, str]) -> None:
    """Raises: ConfigError that names the flags in XLA_FLAGS at which this version of XLA would abort."""
    ours = {DEVICE_COUNT_FLAG, *(one.name for one in (*ON_GPUS, *ON_CPUS, *SIMULATED, *COMPILED_CHEAPLY))}
    given = sorted({flag.partition("=")[0] for flag in flags_in(environ)} - ours)
    libraries = [library for library in xla_flags.xla_libraries()
                 if gpus_expected() or library.name == xla_flags.JAXLIB]
    unknown = sorted(set(given) - xla_flags.known_flags(given, libraries)) if libraries else []
    if unknown:
        here = f"the XLA of jaxlib {importlib.metadata.version('jaxlib')}"
        raise ConfigError(f"XLA_FLAGS has {', '.join(unknown)}, which {here} does not know, and it aborts at that; "
                          f"take it out, or install the jaxlib that it is of")


def own_flags(environ: MutableMapping[str, str]) -> None:
    """Put flags in place of the file of them that XLA_FLAGS names, where no device is started, as for GPUs that are not
    here. Raises: as `flags_in` and `refuse_unknown_flags`."""
    if environ.get("XLA_FLAGS"):
        _set(environ, ())
        refuse_unknown_flags(environ)


def flags_in(environ: Mapping[str, str]) -> list[str]:
    """The flags of XLA_FLAGS, or of the file that it names in place of flags. XLA itself reads such a file only where
    XLA_FLAGS has nothing else, and takes a comment (#) for its end.

    Raises: ConfigError if the file cannot be read, or at a word that is no flag: XLA would ignore it and all that
    follows, in silence.
    """
    given = text = environ.get("XLA_FLAGS", "").strip()
    flags, in_file = [], bool(text) and not text.startswith("-")
    if in_file:
        try:
            with open(given, encoding="utf-8") as file:
                text = file.read(MOST_OF_FLAGS).strip()
        except (OSError, ValueError) as error:      # no UTF-8, or a null byte in the name
            why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
            raise ConfigError(f"XLA_FLAGS={given[:200]} is neither flags nor a file of flags that can be read: {why}; "
                              f"give flags, --name=value, or the path of a file of them") from None
    while found := FLAG.match(text):
        if text[0] == "-":
            flags.append(found[0])
        elif not in_file:
            break
        text = text[found.end():].lstrip()
    if text:
        where = f"XLA_FLAGS={given[:200]}" if in_file else "XLA_FLAGS"
        raise ConfigError(f"{where} has {text.split()[0][:100]}, which is not a flag: XLA would ignore it and all that "
                          f"follows. Write --name=value, with quotes around a value that has spaces")
    return flags


def _set(environ: MutableMapping[str, str], settings: Sequence[Setting]) -> None:
    flags = flags_in(environ)
    given = {flag.partition("=")[0] for flag in flags}
    flags += [f"{one.name}={one.value}" for one in settings if one.name.startswith("--") and one.name not in given]
    environ["XLA_FLAGS"] = " ".join(flags)
    for one in settings:
        names = hardware.MEMORY_VARIABLES if one.name in hardware.MEMORY_VARIABLES else (one.name,)
        if not one.name.startswith("--") and not any(environ.get(name) for name in names):
            environ[one.name] = one.value


def gpus_expected() -> bool:
    """Whether jax will find GPUs, without starting it: a plugin, a device node, and nothing that forbids it."""
    if os.environ.get("JAX_PLATFORMS", "cuda") not in ("", "cuda", "gpu", "cuda,cpu", "rocm"):
        return False
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return False
    plugin = any(importlib.util.find_spec(f"jax_{name}") for name in
                 ("cuda12_plugin", "cuda13_plugin", "rocm60_plugin", "rocm7_plugin"))
    return bool(plugin) and any(os.path.exists(node) for node in ("/dev/nvidiactl", "/dev/kfd"))


def on_gpus(run: Run, num_gpus: int) -> Run:
    """The quickstart on GPUs: all on fsdp, as many as divide the model's width and the batch."""
    sequences = run.data.global_batch // run.training.microbatches
    n = max(n for n in range(1, num_gpus + 1) if run.model.embed_dim % n == 0 and sequences % n == 0)
    if n < num_gpus and jax.process_count() > 1:
        raise ConfigError(f"{num_gpus} GPUs in {jax.process_count()} processes, and only {n} divide model.embed_dim="
                          f"{run.model.embed_dim} and the batch of {sequences}; start fewer processes, or give a mesh")
    sizes = {axis: 1 for axis in AXES} | {"fsdp": n, "simulated_devices": 0}
    return run.replaced(mesh=sizes)
