"""Compiled programs on the disk, for the processes that test and for later runs of the suite. Sets nothing when it is
imported."""
import contextlib
import platform
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
