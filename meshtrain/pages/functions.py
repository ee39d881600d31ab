"""The page of a function of another project: its memory, communication and time, made from the JSON of `mt.inspect`."""
from __future__ import annotations

from meshtrain.pages import layout, pictures, skin
from meshtrain.pages.skin import Column, PageSection, Tile, of_bytes
from meshtrain.units import operations, seconds, size


def page(data: dict) -> str:
    """Return the page as HTML. data: the JSON of the function."""
    mesh, simulated = data["mesh"], " (simulated)" if data["mesh"]["simulated"] else ""
    lead = f"On {mesh['num_devices']:,} × {mesh['gpu'] or mesh['device']}{simulated}: {pictures.mesh_words(mesh)}."
    top = skin.tiles(tiles(data)) + skin.bullets(data["warnings"], "warn")
    head = skin.Head("what a function costs", data["function"]["name"], verdict(data), lead, top)
    return skin.document(head, [
        PageSection("mesh", "The mesh on its hosts", layout.mesh(mesh)),
        PageSection("memory", "Memory of a device", layout.memory(data)),
        PageSection("traffic", "Communication", layout.traffic(data)),
        PageSection("time", "Where the time goes", layout.time(data)),
        PageSection("matmuls", "Matmuls", matmuls(data)),
        PageSection("arguments", "Arguments", arguments(data)),
        PageSection("notes", "Notes", skin.bullets(data["notes"]))], data)


def verdict(data: dict) -> str:
    """Return a sentence: whether the program is right, whether it fits, and how fast it is."""
    if data["broken_permutes"]:
        return "This program computes wrong numbers: a permute leaves devices with zeros."
    held, usable, line = data["memory_bytes"]["compiled"]["total"], data["memory_bytes"]["usable"], data["roofline"]
    fits = (f"It takes {size(held)} on each device" if usable is None else
            f"It fits: {size(held)} of the {size(usable)} that a GPU has to use" if held <= usable else
            f"It does not fit: {size(held)}, and a GPU has {size(usable)} to use")
    return f"{fits}. By the roofline it takes {seconds(line['step_time_s'])}." if line else (
        f"{fits}. Its time is unknown without a GPU of known speed.")


def tiles(data: dict) -> list[Tile]:
    held, flops, line = data["memory_bytes"], data["matmul_flops"], data["roofline"]
    total, usable = held["compiled"]["total"], held["usable"]
    fits = usable is None or total <= usable
    words = "as compiled" if usable is None else f"of {size(usable)} usable: {'it fits' if fits else 'IT DOES NOT FIT'}"
    rows = [Tile("memory of a device", size(total), words, "" if fits else "warn")]
    if flops["repeated"] is not None:
        rows += [Tile("matmuls computed", f"{flops['repeated']:.2f} times", f"of {operations(flops['traced'])}",
                      "warn" if flops["repeats"] else "")]
    if line:
        rows += [Tile("a step, by the roofline", seconds(line["step_time_s"]), "nothing measured"),
                 Tile("MFU", f"{line['mfu']:.1%}", f"of the {line['mfu_dtype']} peak")]
    return rows


def matmuls(data: dict) -> str:
    flops = data["matmul_flops"]
    if not flops["compiled"]:
        return ""
    rows = [(row["line"], f"{row['times']:.3g} times", " or ".join(" × ".join(group) for group in row["axes"]))
            for row in flops["repeats"]]
    table = skin.table([Column("line", "keep"), Column("computed", "keep"), Column("not split over", "keep")], rows,
                       "repeats") if rows else ""
    return skin.paragraph(f"A device computes {operations(flops['compiled'])} of matmuls in a step; the function has "
                          f"{operations(flops['traced'])}.") + table


def arguments(data: dict) -> str:
    columns = [Column("argument", "keep code"), Column("shape", "keep"), Column("dtype"), Column("bytes", "n"),
               Column("copies on all devices", "n"), Column("not split over", "some"), Column("donated")]
    rows = [(row["name"], " × ".join(f"{n:,}" for n in row["shape"]) or "scalar", row["dtype"], of_bytes(row["bytes"]),
             skin.number("{:g}".format, row["copies"]), ", ".join(row["whole_on"]), "yes" if row["donated"] else "")
            for row in data["arguments"]]
    return skin.table(columns, rows, "argument-table", search="name, shape or mesh axis of an argument") if rows else ""
