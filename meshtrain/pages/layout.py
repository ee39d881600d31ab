"""The page of `inspect --html`: a run's model, memory, communication and step time, made from the JSON output."""
from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence

from meshtrain.pages import kernels, pictures, skin
from meshtrain.pages.pictures import Bar
from meshtrain.pages.skin import Cell, Column, PageSection, Tile, number, of_bytes, of_count, of_seconds, of_share
from meshtrain.units import amount, many, operations, seconds, size

# Part of the memory → (name in the bar, name in the table).
MEMORY = {"arguments": ("arguments", "arguments of the function"),
          "outputs": ("outputs", "outputs that reuse no argument"),
          "temporaries": ("temporaries", "activations and other temporaries"),
          "params": ("weights", "weights, as they are stored"), "grads": ("gradients", "gradient accumulators"),
          "optimizer": ("optimizer", "optimizer state"), "activations": ("activations", "activations and temporaries"),
          "teacher": ("teacher", "teacher: weights and forward"),
          "host": ("", "on the host"), "loop_weights": ("", "weights in the pipeline's loop"),
          "loop_grads": ("", "gradients in the pipeline's loop")}
STACKED = ("params", "grads", "optimizer", "activations", "teacher")
OF_A_FUNCTION = ("arguments", "outputs", "temporaries")
LEAST_SHARE = 0.002         # parts of a bar with a smaller share are not drawn
SHARES = ("matmul", "attention", "elementwise", "optimizer", "communication", "contention", "host",
          "recurrence")


def page(data: dict) -> str:
    """Return the page as HTML. data: the dict of `inspect --json`."""
    wrong = [f"THIS PROGRAM WOULD COMPUTE WRONG NUMBERS, and train refuses it: a permute leaves devices with zeros: "
             f"{permute}" for permute in data["broken_permutes"]]
    top = skin.tiles(tiles(data)) + skin.bullets([*wrong, *data["warnings"]], "warn")
    head = skin.Head("what a run costs", data["run"]["name"], verdict(data), lead(data), top)
    return skin.document(head, sections(data), data)


def verdict(data: dict) -> str:
    """Return a sentence: whether the step may run, whether it fits, and how fast it is."""
    if data["broken_permutes"]:
        return "This program would compute wrong numbers, and train refuses it."
    held, usable, line = data["memory_bytes"]["compiled"]["total"], data["memory_bytes"]["usable"], data["roofline"]
    if usable is None:
        fits = f"The step compiles and takes {size(held)} on each of {amount(data['mesh']['num_devices'], 'device')}"
    elif held <= usable:
        fits = f"It fits: {size(held)} of the {size(usable)} that a GPU has to use"
    else:
        fits = f"It does not fit: {size(held)}, and a GPU has {size(usable)} to use"
    if not line:
        return f"{fits}. Its time is unknown without a GPU of known speed."
    slow, share = max(_shares(line), key=lambda row: row[2])[1:]
    return (f"{fits}. By the roofline a step takes {seconds(line['step_time_s'])}, {line['mfu']:.1%} of the peak "
            f"(MFU); {share:.0%} of it is {slow}.")


def sections(data: dict) -> list[PageSection]:
    """Return the sections of the page. Sections that do not apply to this run have no body."""
    return [PageSection("mesh", "The mesh on its hosts", mesh(data["mesh"])),
            PageSection("memory", "Memory of a device", memory(data)),
            PageSection("traffic", "Communication", traffic(data)),
            PageSection("schedule", "The pipeline's schedule", schedule(data)),
            PageSection("time", "Where the time goes", time(data)),
            PageSection("differences", "Formulas against the compiler" if data["differences"] else "Matmuls",
                        differences(data)),
            PageSection("parameters", "Parameters", params(data)),
            PageSection("notes", "Notes", skin.bullets(data["notes"]))]


def lead(data: dict) -> str:
    run, mesh = data["run"], data["mesh"]
    float8 = " with float8 matmuls" if run["matmul_dtype"] == "float8" else ""
    simulated = " (simulated)" if mesh["simulated"] else ""
    return (f"{many(run['num_params'])} parameters in {amount(run['num_layers'], 'layer')} on "
            f"{mesh['num_devices']:,} × {mesh['gpu'] or mesh['device']}{simulated}: "
            f"{pictures.mesh_words(mesh)}, {run['rules']}, remat {run['remat']}, "
            f"{run['compute_dtype']}{float8}, {run['optimizer']}.")


def tiles(data: dict) -> list[Tile]:
    run, held, line = data["run"], data["memory_bytes"]["compiled"], data["roofline"]
    usable = data["memory_bytes"]["usable"]
    in_parts = amount(run["microbatches"], "microbatch")
    fits = usable is None or held["total"] <= usable
    verdict = ("as compiled" if usable is None else
               f"of {size(usable)} usable: {'it fits' if fits else 'IT DOES NOT FIT'}")
    rows = [Tile("parameters", many(run["num_params"]), f"{run['num_params']:,}"),
            Tile("tokens a step", f"{run['tokens_per_step']:,}",
                 f"{run['global_batch']:,} × {run['seq_len']:,} in {in_parts}"),
            Tile("memory of a device", size(held["total"]), verdict, "" if fits else "warn")]
    if line:
        rows += [Tile("a step, by the roofline", seconds(line["step_time_s"]), "nothing measured"),
                 Tile("tokens/s a GPU", f"{line['tokens_per_s'] / line['num_gpus']:,.0f}",
                      f"{line['tokens_per_s']:,.0f} in all"),
                 Tile("MFU", f"{line['mfu']:.1%}", f"of the {line['mfu_dtype']} peak")]
    return rows


# ---- the mesh --------------------------------------------------------------------------------------------------------


def mesh(data: dict) -> str:
    """Return the section of the mesh as HTML. data: the entry "mesh" of the JSON."""
    order = ", ".join(axis for axis in data["placement"] if data["sizes"][axis] > 1)
    caption = ("Each column is a device, each row a mesh axis, each number the device's coordinate on it. Devices are "
               f"assigned in the order of the axes (mesh.placement of a run file), slowest link first: {order}. An "
               f"axis whose numbers change within a host uses the links of the host.")
    if data["simulated"]:
        caption += " These devices are simulated on one machine; they are drawn as if on hosts of eight GPUs."
    elif data["gpus_per_link_domain"] > data["gpus_per_host"]:
        caption += (f" NVLink reaches {data['gpus_per_link_domain']} GPUs, "
                    f"{data['gpus_per_link_domain'] // data['gpus_per_host']} hosts.")
    columns = [Column("axis"), Column("size", "n"), Column("devices in a link domain", "n"),
               Column("links of its collectives")]
    rows = [(axis, of_count(link["size"]), of_count(link["inside"]), over(data, axis))
            for axis, link in data["links"].items()]
    drawn = skin.figure(functools.partial(pictures.mesh, data), caption) if len(data["links"]) > 1 else ""
    alone = skin.paragraph(f"{pictures.mesh_words(data)}: the devices are on this axis in their order.", "small") if (
        len(data["links"]) == 1) else ""
    return drawn + alone + skin.table(columns, rows, "axes")


def over(mesh: dict, axes: str) -> str:
    """Return the links that a group over mesh axes ("fsdp", "data+fsdp") uses, as text; "" if unknown (part of an
    axis)."""
    links = [mesh["links"].get(axis) for axis in axes.split("+")]
    if not all(links):
        return ""
    cards = math.prod(link["inside"] for link in links)
    hosts = math.prod(link["size"] for link in links) // cards
    if hosts == 1:
        return "this machine's memory" if mesh["simulated"] else "NVLink" if mesh["gpu"] else "links of a host"
    return f"network: {amount(hosts, 'host')}, {amount(cards, 'card')} each"


# ---- memory and traffic ----------------------------------------------------------------------------------------------


def memory(data: dict) -> str:
    held, bars = data["memory_bytes"], memory_bars(data)
    compiled, formula = held["compiled"], held["formula"] or {}
    key = skin.key(sorted({(color, name, "") for bar in bars for color, name, _ in bar.parts}))
    names = [name for name in dict.fromkeys([*compiled, *formula]) if name != "total"]

    def cells(name: str) -> list[Cell]:
        return [of_bytes(part.get(name)) for part in (compiled, formula)[:len(bars)]]
    table = skin.table([Column("on a device"), *(Column(bar.label, "n") for bar in bars)],
                       [(MEMORY.get(name, ("", name))[1], *cells(name)) for name in names], "memory-parts",
                       total=("total", *cells("total")))
    again = data["recomputed_by_xla"]
    note = skin.paragraph(f"XLA recomputes {again} values because the step is close to its memory limit.",
                          "warn")
    return skin.figure(lambda width: memory_drawing(data, width=width), key=key) + (note if again else "") + table


def memory_bars(data: dict) -> list[Bar]:
    held = data["memory_bytes"]
    bars = [Bar("as compiled", stack(held["compiled"]))]
    if formula := held["formula"]:
        bars.append(Bar("by formulas" if formula.get("total") else "by the rules", stack(formula)))
    return bars


def memory_drawing(data: dict, legend: bool = False, width: int = skin.WIDTH) -> str:
    usable, hbm = data["memory_bytes"]["usable"], data["mesh"]["hbm_bytes"]
    marks = [(usable, f"usable {size(usable)}"), (hbm, f"HBM {size(hbm)}")] if hbm else []
    return pictures.bars(memory_bars(data), size, "memory of a device", marks, legend=legend, width=width)


def stack(held: dict) -> list[tuple[int, str, float]]:
    """Return the parts of a device's memory as (colour, name, bytes). What remains of the total is batches and scalars.
    For a pipeline, the gradients are those in its loop, which are at least as large as the others."""
    parts = held | ({"grads": held["loop_grads"]} if held.get("loop_grads") else {})
    names = OF_A_FUNCTION if OF_A_FUNCTION[0] in held else STACKED
    known = [(k, MEMORY[part][0], parts[part]) for k, part in enumerate(names) if parts.get(part)]
    rest = (held.get("total") or 0) - sum(value for *_, value in known)
    return [*known, (len(STACKED), "other arguments", rest)] if rest > LEAST_SHARE * (held.get("total") or 0) else known


def traffic(data: dict) -> str:
    rows, mesh, formula = data["collectives"]["compiled"], data["mesh"], data["collectives"]["formula"] or []
    if not rows and not formula:
        return skin.paragraph("The compiled step has no collectives.") if mesh["num_devices"] > 1 else ""
    color, compiled = _colors(data), _by_axes(rows)
    key = skin.key((color[kind], kind, size(sum(sent.get(kind, 0) for sent in compiled.values()))) for kind in color)
    drawn = skin.figure(lambda width: traffic_drawing(data, width=width), "Bytes that one device sends in a step (ring "
                        "algorithms), by the mesh axes of a group and the links between its members.", key)
    return drawn + _collectives(data)


def traffic_drawing(data: dict, legend: bool = False, width: int = skin.WIDTH) -> str:
    """Return the drawing of the traffic. data: has at least one collective."""
    compiled, priced = (_by_axes(data["collectives"][which] or []) for which in ("compiled", "formula"))
    color = _colors(data)

    def stacked(sent: Mapping[str, int]) -> list[tuple[int, str, float]]:
        return [(color[kind], kind, count) for kind, count in sent.items()]
    bars = []
    for axes in sorted(compiled | priced, key=lambda axes: -sum(compiled.get(axes, {}).values())):
        bars.append(Bar(axes.replace("+", " × "), stacked(compiled.get(axes, {})),
                        over(data["mesh"], axes).removeprefix("network: ")))
        if axes in priced:
            bars.append(Bar("by formulas", stacked(priced[axes])))
    return pictures.bars(bars, size, "bytes that a device sends in a step", legend=legend, width=width)


def _colors(data: dict) -> dict[str, int]:
    rows = [*data["collectives"]["compiled"], *(data["collectives"]["formula"] or [])]
    return {kind: k % pictures.COLORS for k, kind in enumerate(dict.fromkeys(row["kind"] for row in rows))}


def _by_axes(rows: Sequence[dict]) -> dict[str, dict[str, int]]:
    """Return mesh axes → kind → bytes."""
    by_axes: dict[str, dict[str, int]] = {}
    for row in rows:
        sent = by_axes.setdefault("+".join(row["axes"]), {})
        sent[row["kind"]] = sent.get(row["kind"], 0) + row["bytes"]
    return by_axes


def _collectives(data: dict) -> str:
    """Return a table with a row for each kind, axes and dtype, by formulas and compiled."""
    rows, mesh, formula = data["collectives"]["compiled"], data["mesh"], data["collectives"]["formula"] or []
    named = kernels.weights(data.get("parameters", ()))

    def at(row: dict) -> tuple[str, tuple[str, ...], str]:
        return row["kind"], tuple(row["axes"]), row["dtype"]
    compiled, priced = {at(row): row for row in rows}, {at(row): row for row in formula}

    def sent(rows: Mapping, key: tuple) -> Cell:
        return of_bytes(rows[key]["bytes"] if key in rows else None)
    columns = [Column("collective", "keep"), Column("axes", "keep"), Column("dtype"), Column("count", "n"),
               Column("sent by a device", "n"), *([Column("by formulas", "n")] if formula else []),
               Column("over", "some"), Column("line", "keep"), Column("from", "some")]

    def source(row: dict | None) -> Cell | str:
        return Cell(kernels.describe(row, named), title=row["source"]) if row and row["source"] else ""

    cells = [(kind, " × ".join(axes), dtype, of_count(compiled.get(key, {}).get("count")), sent(compiled, key),
              *([sent(priced, key)] if formula else []), over(mesh, "+".join(axes)),
              compiled.get(key, {}).get("line", ""), source(compiled.get(key)))
             for key in dict.fromkeys([*compiled, *priced]) for kind, axes, dtype in [key]]
    return skin.table(columns, cells, "collectives", search="collective, axis or operation")


def differences(data: dict) -> str:
    """Return the differences between the compiled step and the formulas, as HTML."""
    flops = data["matmul_flops"]
    if not flops["compiled"]:
        return skin.bullets(data["differences"])
    by_formulas = "" if flops["formula"] is None else f", {operations(flops['formula'])} by formulas"
    said = skin.paragraph(f"A device computes {operations(flops['compiled'])} of matmuls in a step{by_formulas}.")
    return said + skin.bullets(data["differences"])


# ---- time ------------------------------------------------------------------------------------------------------------


def schedule(data: dict) -> str:
    chosen = data["schedule"]
    if not chosen:
        return ""
    chunks = f" in {chosen['num_chunks']} chunks (later ones lighter)" if chosen["num_chunks"] > 1 else ""
    held = f" ({size(chosen['memory_bytes'])})" if chosen["memory_bytes"] is not None else ""
    caption = (f"{chosen['name']}: {chosen['num_stages']} stages{chunks}, {chosen['num_microbatches']} microbatches. "
               f"Bubble {chosen['bubble']:.1%} of the step in model time; at most the activations of "
               f"{chosen['peak_live']:g} microbatches on a stage{held}.")
    return skin.figure(lambda width: pictures.schedule(chosen, width=width), caption,
                       skin.key((color, name, "") for color, name in pictures.kinds(chosen).values()))


def time(data: dict) -> str:
    line = data["roofline"]
    if not line:
        return ""
    percent, shares = "{:.1%}".format, _shares(line)
    caption = (f"{seconds(line['step_time_s'])} a step: {seconds(line['compute_s'])} of kernels and "
               f"{seconds(line['exposed_s'])} of waiting for links; {seconds(line['hidden_s'])} of collectives overlap "
               f"with kernels, and {seconds(line['free_matmul_s'])} of matmuls overlap with no collective.")
    drawn = skin.figure(lambda width: time_drawing(line, width=width), caption,
                        skin.key((k, name, percent(share)) for k, name, share in shares))
    return (drawn + _draw_exposed(line) + "<h3>Kernels, costliest first</h3>"
            + _kernels(line, data.get("parameters", ()))
            + skin.bullets(f"warning: counted once, its length is unknown: loop {name}"
                           for name in line["unknown_loops"])
            + skin.bullets(f"warning: the FLOPs of {name} are unknown, so only its bytes are counted"
                           for name in line["uncounted"])
            + skin.paragraph("Nothing is measured: times follow from assumed shares of hardware peaks.", "small")
            + skin.assumptions(line["assumed"], line.get("reasons", {})))


def _shares(line: dict) -> list[tuple[int, str, float]]:
    shares = line["share"] | line["other"]
    return [(k, name, shares[name]) for k, name in enumerate(SHARES) if name in shares]


def time_drawing(line: dict, legend: bool = False, width: int = skin.WIDTH) -> str:
    """Return the drawing of a step's shares. line: a roofline."""
    bar = Bar("of the step", [share for share in _shares(line) if share[2] > 0], seconds(line["step_time_s"]))
    return pictures.bars([bar], "{:.1%}".format, "shares of the step", most=1.0, legend=legend, width=width)


def _draw_exposed(line: dict) -> str:
    columns = [Column("collective", "keep"), Column("axes", "keep"), Column("runs", "n"), Column("sent", "n"),
               Column("time", "n"), Column("exposed", "n"), Column("hidden under", "long")]

    def hidden_under(row: dict) -> str:
        longest = sorted(row["hidden_under"].items(), key=lambda pair: -pair[1])
        return ", ".join(f"{part} {seconds(s)}" for part, s in longest if s >= 5e-4)
    rows = [(row["kind"], " × ".join(row["axes"]), of_count(row["runs"]), of_bytes(row["sent_bytes"]),
             of_seconds(row["seconds"]), of_seconds(row["exposed_s"]), hidden_under(row)) for row in line["traffic"]]
    return "<h3>Collectives, and what they overlap with</h3>" + skin.table(columns, rows, "exposed") if rows else ""


def _kernels(line: dict, parameters: Sequence[dict]) -> str:
    columns = [Column("kernel", "some"), Column("part"), Column("runs", "n"), Column("time", "n"),
               Column("of step", "n"), Column("bound", "keep"), Column("computes", "n"), Column("HBM", "n"),
               Column("line", "keep")]
    named = kernels.weights(parameters)
    rows = [(Cell(kernels.describe(row, named), title=f"{row['source']} ({row['name']})"), row["part"],
             of_count(row["count"]), of_seconds(row["time_s"]), of_share(row["time_s"] / line["step_time_s"]),
             row["bound"], number(operations, row["flops"]) if row["flops"] else Cell("–", 0), of_bytes(row["bytes"]),
             row["line"])
            for row in line["kernels"]]
    return skin.table(columns, rows, "kernels", search="kernel, part or line", brief=True) + skin.paragraph(
        "Point at a kernel to see its path in JAX and its name in a profile.", "small")


# ---- parameters ------------------------------------------------------------------------------------------------------


def params(data: dict) -> str:
    def split(dims: Iterable[Sequence[str]]) -> str:
        return "(" + ", ".join("+".join(axes) or "·" for axes in dims) + ")"

    def elements(count: int) -> Cell:
        return Cell(many(count), count)
    columns = [Column("parameter", "keep code"), Column("shape", "keep"), Column("logical axes", "some"),
               Column("dtype"), Column("size", "n"), Column("read, by [params]", "some"),
               Column("stored, by [optimizer]", "some"),
               Column("stored bytes", "n"), Column("gradient", "n")]
    rows = [(row["name"], " × ".join(f"{n:,}" for n in row["shape"]), " ".join(axis or "·" for axis in row["axes"]),
             row["dtype"], elements(row["size"]), split(row["read"]), split(row["stored"]),
             of_bytes(row["stored_bytes"]), of_bytes(row["grads_bytes"])) for row in data["parameters"]]
    in_all = {name: sum(row[name] for row in data["parameters"]) for name in ("size", "stored_bytes", "grads_bytes")}
    total = ("in all, on a device", "", "", "", elements(in_all["size"]), "", "", of_bytes(in_all["stored_bytes"]),
             of_bytes(in_all["grads_bytes"]))
    rules = f"<h3>{skin.esc(data['run']['rules'])}</h3><pre>{skin.esc(data['run']['rules_text'].strip())}</pre>"
    return skin.table(columns, rows, "parameter-table", search="name, axis or mesh axis of a parameter",
                      total=total) + rules
