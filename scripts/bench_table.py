#!/usr/bin/env python3
"""bench_table.py TARGET STAMP: a table of what `cargo bench` has measured since STAMP was touched."""

import json
import os
import pathlib
import sys

target = pathlib.Path(sys.argv[1])
since = pathlib.Path(sys.argv[2]).stat().st_mtime

# `dynamo-1`: its index has one thread, as in its own benchmark; `dynamo`: four, its default.
# `alone`, `shared`: a request of a thread without other threads, and with them.
ORDER = ["native", "wasm", "dynamo", "dynamo-1", "alone", "shared"]
RATIOS = [(f"{who} / native", who, "native") for who in ORDER[1:4]] + [("shared / alone", "shared", "alone")]


def read():
    """{name: {who: {workers: (nanoseconds, half the width of its interval)}}}, in the order measured."""
    files = [f for f in target.glob("criterion/**/new/estimates.json") if f.stat().st_mtime >= since]
    found = {}
    for file in sorted(files, key=lambda f: f.stat().st_mtime):
        about = json.loads((file.parent / "benchmark.json").read_text())
        median = json.loads(file.read_text())["median"]
        interval = median["confidence_interval"]
        width = (interval["upper_bound"] - interval["lower_bound"]) / 2
        whose = found.setdefault(about["group_id"], {}).setdefault(about["function_id"], {})
        whose[int(about["value_str"])] = (median["point_estimate"], width)
    return found


def microseconds(measured):
    return f"{measured[0] / 1000:.2f} µs" if measured else ""


def ratio(measured, other):
    return f"{measured[0] / other[0]:.2f}" if measured and other else ""


def line(label, cells):
    print(f"  {label:<18}" + "".join(f"{cell:>12}" for cell in cells))


def show(name, whose):
    workers = sorted({count for times in whose.values() for count in times})
    print(f"\n{name}")
    line("workers", [f"{count:,}" for count in workers])
    for who in ORDER:
        if who in whose:
            line(who, [microseconds(whose[who].get(count)) for count in workers])
    for label, who, other in RATIOS:
        if who in whose and other in whose:
            line(label, [ratio(whose[who].get(count), whose[other].get(count)) for count in workers])


found = read()
if not found:
    sys.exit("nothing was measured")
print("The median of the time that it takes on a CPU: one routing decision, and what threads that share do beside.")
for name, whose in found.items():
    show(name, whose)
widest = max(width / median for whose in found.values() for times in whose.values() for median, width in times.values())
load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
print(f"\nwidest 95 % interval of a median: ± {100 * widest:.0f} %; load of the last 1, 5, 15 minutes: {load}")
