"""What each of several processes keeps of compiled programs: loaded where all have it, and the same to the bit."""
from checkpoints import run_processes

from meshtrain.cluster import programs

BODY = r"""
import hashlib, pathlib, shutil
from meshtrain.cluster import agree, programs
root = pathlib.Path(directory)
jax.config.update("jax_compilation_cache_dir", str(root / "cache"))
hits = []
jax.monitoring.register_event_listener(lambda event, **keys: event.endswith("/cache_hits") and hits.append(1))

def step(factor):
    def f(state):
        total = jax.lax.with_sharding_constraint(state["split"] @ state["split"].T, NamedSharding(mesh, P("b", "a")))
        return {"split": jax.numpy.tanh(total @ state["split"]) * factor, "rows": state["rows"] + total.sum()}
    return jax.jit(f, donate_argnums=0)

def compiled(factor, seed=0):
    hits.clear()
    with jax.set_mesh(mesh):
        arguments = {key: x for key, x in state(seed).items() if key != "whole"}
        program = programs.compile(step(factor).lower(arguments), {}, list(mesh.devices.flat))
        how = "loaded" if hits else "compiled"
        out = program(arguments)
    bits = b"".join(np.asarray(shard.data).tobytes() for key in sorted(out) for shard in out[key].addressable_shards)
    say(how, hashlib.sha256(bits).hexdigest()[:8],
        program.memory_analysis().argument_size_in_bytes, len(program.as_text()) > 100)

kept = lambda: sorted((root / "cache" / programs.FOLDER).glob(f"*-{index}"))
compiled(2.0)
compiled(2.0)
compiled(3.0)
agree.exchange(None)
say("files", len(kept()))
before = kept()
if index == 1:
    for path in before:
        (found,) = path.glob("*-cache")
        found.write_bytes(found.read_bytes()[:-1])
compiled(2.0)
compiled(2.0)
agree.exchange(None)
if index == 0:
    shutil.rmtree(root / "cache")
    (root / "cache").write_text("a file: nothing can be kept")
agree.exchange(None)
compiled(2.0)
say("shared", programs._is_shared(root), programs._is_shared(root / f"host{index}"))
"""


def test_a_program_is_loaded_where_every_process_has_its_own_and_computes_the_same_bits(tmp_path):
    for lines in run_processes(2, tmp_path, BODY):
        how, bits, *rest = zip(*(line.split() for line in lines if line.startswith(("compiled", "loaded"))))
        assert how == ("compiled", "loaded", "compiled", "compiled", "loaded", "compiled"), lines
        assert len({bits[i] for i in (0, 1, 3, 4, 5)}) == 1 and bits[2] != bits[0], lines
        assert len(set(rest[0])) == 1 and set(rest[1]) == {"True"}, lines
        assert "files 2" in lines and "shared True False" in lines, lines


def test_one_process_leaves_it_to_jax(monkeypatch):
    class Lowered:
        def compile(self, compiler_options):
            return compiler_options
    monkeypatch.setattr(programs, "_key", None)
    assert programs.compile(Lowered(), {"an": "option"}, []) == {"an": "option"}
