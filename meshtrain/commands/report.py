"""Reports a run's progress and speed, compared with predictions; or compares several runs.

Reads the run directory, during the run or after it, and writes nothing there. Needs no GPU.
Exit codes: 0 · 2 a mistake in the settings · 75 stopped on request.
"""
from __future__ import annotations

import json
import time

from meshtrain import config
from meshtrain.inspection import compared, measured
from meshtrain.journal import goodput, rows
from meshtrain.pages import compared as compared_pages, measured as pages, skin
from meshtrain.run import command, say
from meshtrain.units import amount, duration

MOST_RUNS = 8   # runs in one comparison; a page has as many colours
TRIES = 8       # number of attempts that are listed, the newest ones
COMMAND = config.Command("meshtrain.report", {
    "json": config.Option("print only JSON, with everything that the page shows"),
    "html": config.Option("also write an HTML page: one file without external resources", "FILE", "report.html"),
}, "RUN_DIR [RUN_DIR ...]", (1, MOST_RUNS), keys=False)


@command.entry(COMMAND, __doc__)
def main(asked: config.Arguments) -> None:
    html = asked["html"]
    with config.user_errors():
        if html:
            skin.check_free("--html", html)
        several = len(asked.names) > 1
        data = compared.of(asked.names) if several else _with_a_known_price(measured.of(*asked.names))
        if html:
            skin.write("--html", html, compared_pages.page(data, compared.verdict(data), compared.numbers(data))
                       if several else pages.page(data))
    if not several and data["no_rows"]:
        say.err(f"{data['no_rows']:,} {'sampled ' * bool(data['sampled'])}lines of {data['dir']}/{rows.NAME} are not "
                f"metrics rows and are ignored")
    say.answer(json.dumps(data) if asked["json"] else compared.text(data) if several else summary(data))
    if html:
        say.err(f"written: {html}")


def _with_a_known_price(data: dict) -> dict:
    """Return the data without a predicted cost of another version of meshtrain, whose entries may have other names."""
    try:
        pages.page(data)
        return data
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        if data["priced"] is None:
            raise
    say.err(f"note: {data['dir']}/{measured.COST} was written by another version of meshtrain and is left out; the "
            f"next start of train writes it again")
    return data | {"priced": None}


def summary(data: dict) -> str:
    """Return a few lines of text about a run. data: from `measured.of`."""
    loss, speed = data["loss"], data["speed"]
    lines = [f"{data['name']}: step {data['step']:,} of {data['steps']:,}, {data['tokens']:,} tokens; {data['state']}"]
    if loss["last"] is not None:
        words = [f"loss {loss['first']:.4f} at first", f"{loss['last']:.4f} now"]
        if loss["validation"] is not None:
            words += [f"validation {loss['validation']:.4f} after step {loss['validation_step']:,}"]
        lines += [", ".join(words) + (f"; {amount(data['skipped'], 'step')} skipped" if data["skipped"] else "")]
    if speed["tokens_per_s"]:
        mfu = f", MFU {speed['mfu']:.1%} ({pages.against_price(data, 'mfu')})" if speed["mfu"] else ""
        lines += [f"{speed['tokens_per_s']:,.0f} tokens/s ({pages.against_price(data, 'tokens_per_s')}){mfu}"]
    if drawn := pages.describe_sample(data):
        lines += [drawn.strip()]
    if (loads := data["experts"]) and None not in loads["max"][-1]:
        busiest, idlest = max(loads["max"][-1]), min(loads["min"][-1])
        layers = loads["layers"][loads["max"][-1].index(busiest)], loads["layers"][loads["min"][-1].index(idlest)]
        lines += [f"experts: the busiest has {busiest:.2f} × the mean (layer {layers[0]}), the idlest {idlest:.2f} × "
                  f"(layer {layers[1]}), entropy {min(loads['entropy'][-1]):.3f} or more"]
    if data["goodput"] is not None:
        lines += [goodput.describe(data["time_s"])]
    elif parts := {name: spent_s for name, spent_s in data["time_s"].items() if spent_s > 0}:
        total = sum(parts.values())
        lines += ["time: " + ", ".join(f"{name} {duration(spent_s)} ({spent_s / total:.1%})"
                                       for name, spent_s in parts.items())]
    if len(data["starts"]) > 1:
        lines += [f"{amount(len(data['starts']), 'start')}; "
                  f"{amount(sum(start['steps_again'] for start in data['starts']), 'step')} taken again"]
    lines += [_of_try(data, number)
              for number in range(max(1, len(data["starts"]) - TRIES + 1), len(data["starts"]) + 1)]
    return "\n".join(map(say.escape, lines))


def _of_try(data: dict, number: int) -> str:
    start, last = data["starts"][number - 1], number == len(data["starts"])
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start["began"]))
    again = f", {amount(start['steps_again'], 'step')} again" if start["steps_again"] else ""
    clock = f"; the wall clock was adjusted by {start['clock_s']:+,.0f} s meanwhile" if start["clock_s"] else ""
    return (f"start {number}: {began}, {start['cause'] or 'after step ' + format(start['from_step'], ',')}{again}; to "
            f"step {start['to_step'] or 0:,} in {duration(start['run_s'])}: "
            f"{start['how'] or (data['state'] if last else goodput.UNKNOWN)}{clock}")
