"""Compiled programs on the disk, for the processes that test and for later runs of the suite. Sets nothing when it is
imported."""
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import tempfile
import types
import zlib
from pathlib import Path

# Compiled programs, for both workers and for later runs. An entry's name is a hash of the program with its source
# lines, which tests read, and those of its callers, of versions and flags; a damaged one is compiled again. Programs of
# a CPU are for its instructions alone. Tests that kill what compiles have directories of their own.
CPUINFO = Path("/proc/cpuinfo")
CPU = [line for line in CPUINFO.read_text().splitlines()
       if line.startswith(("model name", "flags", "Features"))][:2] if CPUINFO.exists() else platform.processor()
PROGRAMS = (Path(__file__).resolve().parent.parent / ".pytest_cache" / "programs"
            / f"{zlib.crc32(repr(CPU).encode()):08x}")
PROGRAMS_BYTES = 2 << 30     # the oldest go first
GPU_PROGRAMS = PROGRAMS.parent / "gpu"
COMPILERS = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc",
             "nvidia-nvvm", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")


@contextlib.contextmanager
def programs_in(place: str, **more):
    """Keep compiled programs in another directory, with other settings of jax."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache
    settings = {"jax_compilation_cache_dir": place} | more
    before = {name: getattr(jax.config, name) for name in settings}

    def use(values):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    use(settings)
    try:
        yield
    finally:
        use(before)


def trim(place: Path, most_bytes: int) -> None:
    """Remove the oldest entries beyond `most_bytes`."""
    kept = 0
    for path in sorted(place.glob("*-cache"), key=lambda path: -path.stat().st_mtime):
        kept += path.stat().st_size
        if kept > most_bytes:
            path.unlink(missing_ok=True)


# ---- programs for GPUs that are not there: jax cannot load them again, and tests read only their text and sizes --------

# loc(#loc1), loc("scope"(#loc1)), loc(callsite(#loc1 at #loc2)), loc("file.py":1:2 to :3)
LOCATION = re.compile(r'\bloc\((?:(#loc\d*)|"([^"]*)"\((?:[^()]|\([^()]*\))*\)|[^()]*(?:\([^()]*\))?)\)')


class KeptProgram:
    """What tests read of a program compiled for GPUs; asked for more, it is compiled. shards: the shapes of its arguments
    on a device."""

    def __init__(self, compile, tree, text: str, sizes: dict[str, int], shards: list[list[int]]):
        self._compile, self._tree, self._text, self._shards = compile, tree, text, shards
        self._sizes = types.SimpleNamespace(**sizes)

    def __getattr__(self, name: str):
        return getattr(self._compile(), name)

    def as_text(self) -> str:
        return self._text

    def memory_analysis(self):
        return self._sizes

    @property
    def input_shardings(self):
        import jax
        return jax.tree.unflatten(self._tree, [types.SimpleNamespace(shard_shape=lambda shape, of=shard: tuple(of))
                                               for shard in self._shards])


@contextlib.contextmanager
def gpu_programs_in(place: Path):
    """Compile each program for GPUs once, and keep its text and sizes in `place`. Records that are missing, damaged or of
    another program are written anew. Programs of CPUs, and those that XLA is asked to dump, are left to jax."""
    import jax
    compile_lowered = jax.stages.Lowered.compile

    def compile_or_read(lowered, compiler_options=None, **more):
        devices = list(lowered._lowering._device_list or ())
        options = compiler_options or {}
        if more or not devices or devices[0].platform == "cpu" or any("dump" in name for name in options):
            return compile_lowered(lowered, compiler_options, **more)
        path = place / f"{key_of(lowered, options, devices)}-cache"

        @functools.cache
        def compile():
            with programs_in(None):         # jax's cache would keep what it cannot load
                return compile_lowered(lowered, compiler_options)
        if (kept := read_record(path)) is None:
            kept = record_of(lowered, compile())
            write_record(path, kept)
        return KeptProgram(compile, lowered.in_tree, **kept)
    jax.stages.Lowered.compile = compile_or_read
    try:
        yield
    finally:
        jax.stages.Lowered.compile = compile_lowered


def key_of(lowered, options: dict, devices: list) -> str:
    """A hash of all that XLA compiles and is told: the program with the scopes of its instructions, which tests read too,
    options, flags, devices and versions; of places in files the names of files alone, by which costs are told apart."""
    from meshtrain.cost.program import compile
    from meshtrain import hardware
    text = lowered.as_text(debug_info=True)
    files = set(re.findall(r'^#loc\d* = loc\("[^"]*/(meshtrain/[^"]*)":', text, re.MULTILINE))
    lines = set(re.findall(r'^(#loc\d*) = loc\("[^"]*":\d', text, re.MULTILINE))
    scopes = {number: name for number, name, inner in re.findall(
        r'^(#loc\d*) = loc\("(.*?)"(?:\((#loc\d*)\))?\)$', text, re.MULTILINE) if inner not in lines}
    body = LOCATION.sub(lambda found: scopes.get(found[1], found[2] or ""),
                        "\n".join(line for line in text.splitlines() if not line.startswith("#loc")))
    kind = hardware.from_device_kind(devices[0].device_kind)
    told = [body, sorted(files), sorted(options.items()), os.environ.get("XLA_FLAGS", ""),
            [(one.id, one.device_kind) for one in devices], compile.target_spec(kind.name), versions()]
    return hashlib.sha256(json.dumps(told, default=str).encode()).hexdigest()


@functools.cache
def versions() -> dict[str, str]:
    found = {}
    for name in COMPILERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def record_of(lowered, compiled) -> dict:
    import jax
    sizes = compiled.memory_analysis()
    arguments, structure = jax.tree.flatten(lowered.args_info)
    placed = zip(arguments, structure.flatten_up_to(compiled.input_shardings), strict=True)     # None: not used
    return {"text": compiled.as_text(), "shards": [one and one.shard_shape(argument.shape) for argument, one in placed],
            "sizes": {name: value for name in dir(sizes) if name.endswith("_in_bytes")
                      and isinstance(value := getattr(sizes, name), int)}}


def read_record(path: Path) -> dict | None:
    with contextlib.suppress(OSError, ValueError, zlib.error):
        record = json.loads(zlib.decompress(path.read_bytes()))     # zlib ends with a checksum
        path.touch()                                                # the oldest are removed first
        return record
    return None


def write_record(path: Path, record: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(zlib.compress(json.dumps(record).encode()))
    os.replace(file.name, path)
